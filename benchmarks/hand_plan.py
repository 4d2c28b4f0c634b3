"""Plans by hand for benchmarks/step.py: from counts of units, without the planner."""

from __future__ import annotations

import argparse

from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.vocab import Activations, Fidelity, Tier, Updater

_COUNTS = ("resident_units", "keep_units", "streamed_update_units", "nvme_states_units", "nvme_weights_units")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan by hand")
    group.add_argument("--resident-units", type=int, help="units with weights and states on the GPU")
    group.add_argument("--keep-units", type=int, help="units that keep their activations")
    group.add_argument(
        "--streamed-update-units",
        type=int,
        help="units off the GPU that the GPU updates, their states passing through it, spread evenly",
    )
    group.add_argument(
        "--activations",
        choices=("attention", "mlp", "matmuls", "keep"),
        default="keep",
        help="what --keep-units units save",
    )
    group.add_argument("--activations-cpu", type=int, help="of them, units that save in host memory")
    group.add_argument("--activations-nvme", type=int, help="of them, units after those that save on NVMe")
    group.add_argument("--saved-bits", type=int, choices=(4, 5, 6, 8, 16), default=16, help="bits of what they save")
    group.add_argument(
        "--boundary-bits",
        type=int,
        choices=(4, 5, 6, 8, 16),
        help="bits of the inputs of units that save matmuls or keep; default: --saved-bits",
    )
    group.add_argument(
        "--boundary",
        choices=("gpu", "cpu", "nvme", "dropped"),
        default="gpu",
        help="where inputs rest; dropped: two of three units that save nothing keep none, the others on the GPU",
    )
    group.add_argument("--weight-slots", type=int, default=3, help="staging buffers for weights")
    group.add_argument("--gradient-slots", type=int, default=2, help="staging buffers for gradients")
    group.add_argument("--state-slots", type=int, default=2, help="staging buffers for states")
    group.add_argument("--activation-slots", type=int, default=2, help="staging buffers for activations")
    group.add_argument(
        "--stem-states",
        choices=("cpu", "gpu", "streamed", "nvme"),
        default="cpu",
        help="where they rest; streamed: in host memory, updated by the GPU",
    )
    group.add_argument("--nvme-states-units", type=int, help="of the last units, those with states on NVMe")
    group.add_argument("--nvme-weights-units", type=int, help="of the last units, those with weights on NVMe")
    group.add_argument("--nvme-gradients", action="store_true", help="gradients rest where states are on NVMe")
    group.add_argument("--nvme-slots", type=int, default=3, help="staging buffers in host memory for NVMe")


def is_asked_for(arguments: argparse.Namespace) -> bool:
    return arguments.gradient_bits < 16 or any(getattr(arguments, count) is not None for count in _COUNTS)


def make(arguments: argparse.Namespace, model) -> PlacementPlan:
    """The plan that the arguments describe, for `model`."""
    found = discover(model)
    num_units = len(found.units)
    resident, keep = arguments.resident_units or 0, arguments.keep_units or 0
    off_gpu = range(resident, num_units)
    streamed = min(arguments.streamed_update_units or 0, len(off_gpu))
    # In every prefix of them the share is the same: worker and link get ahead together.
    streams = {p for i, p in enumerate(off_gpu) if (i + 1) * streamed // len(off_gpu) > i * streamed // len(off_gpu)}
    kinds = {
        "cpu": (Tier.CPU, Updater.CPU),
        "gpu": (Tier.GPU, Updater.GPU),
        "streamed": (Tier.CPU, Updater.GPU),
        "nvme": (Tier.NVME, Updater.CPU),
    }

    rests = Tier.GPU if arguments.boundary == "dropped" else Tier(arguments.boundary)

    def unit(
        name, weights: Tier, kind: str, activations=Activations.RECOMPUTE, saved=Tier.GPU, drops=False
    ) -> UnitPlan:
        states, updater = kinds[kind]
        saves = activations != Activations.RECOMPUTE
        boundary_bits = arguments.saved_bits if arguments.boundary_bits is None else arguments.boundary_bits
        return UnitPlan(
            name=name,
            weights=weights,
            states=states,
            updater=updater,
            gradients=Tier.NVME if states == Tier.NVME and arguments.nvme_gradients else None,
            state_bits=arguments.state_bits,
            gradient_bits=arguments.gradient_bits,
            activations=activations,
            boundary=None if drops else rests,
            saved=saved,
            saved_bits=arguments.saved_bits if saves else 16,
            boundary_bits=boundary_bits if activations in (Activations.MATMULS, Activations.KEEP) else 16,
            reason="by hand",
        )

    lossless = min(arguments.saved_bits, arguments.boundary_bits or 16, arguments.gradient_bits) == 16
    units = []
    for position, layer in enumerate(found.units):
        on_gpu = position < resident
        kind = "gpu" if on_gpu else "streamed" if position in streams else "cpu"
        from_end = num_units - position  # forward needs the last ones last
        if not on_gpu and from_end <= (arguments.nvme_states_units or 0):
            kind = "nvme"
        first_kept = num_units - keep
        activations = Activations(arguments.activations) if position >= first_kept else Activations.RECOMPUTE
        # The first ones wait the longest for their backward.
        in_host, on_disk = arguments.activations_cpu or 0, arguments.activations_nvme or 0
        saved = Tier.GPU
        if first_kept <= position < first_kept + in_host + on_disk:
            saved = Tier.CPU if position < first_kept + in_host else Tier.NVME
        weights = Tier.GPU if on_gpu else Tier.CPU
        if not on_gpu and from_end <= (arguments.nvme_weights_units or 0):
            weights = Tier.NVME
        drops = arguments.boundary == "dropped" and position < first_kept and position % 3 > 0
        units.append(unit(layer.name, weights, kind, activations, saved, drops))
    is_cuda = arguments.device == "cuda"
    stem_kind = arguments.stem_states if is_cuda or arguments.stem_states in ("streamed", "nvme") else "cpu"
    return PlacementPlan(
        units=tuple(units),
        stem=tuple(unit(part.name, Tier.GPU if is_cuda else Tier.CPU, stem_kind) for part in found.stem),
        weight_slots=arguments.weight_slots,
        gradient_slots=arguments.gradient_slots,
        state_slots=arguments.state_slots,
        activation_slots=arguments.activation_slots,
        nvme_slots=arguments.nvme_slots,
        fidelity=Fidelity.EXACT if lossless else Fidelity.COMPACT,
    )
