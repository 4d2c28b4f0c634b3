"""Why a unit rests where it does, in words that a plan carries."""

from __future__ import annotations

from dataclasses import replace

from lazytrain_plugin.plan.accounting import again_s, unit_bytes
from lazytrain_plugin.plan.formats import tensor_error
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import UnitPlan
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Activations, Tier, Updater


def explained_unit(problem: PlacementProblem, cost: UnitCost, unit: UnitPlan) -> UnitPlan:
    """A unit with its reason, and with the bits of its gradients, which are the same for all units that have any."""
    unit = _with_reason(problem, cost, unit)
    return replace(unit, gradient_bits=problem.gradient_bits) if cost.num_trainable else unit


def _with_reason(problem: PlacementProblem, cost: UnitCost, unit: UnitPlan) -> UnitPlan:
    rest = unit_bytes(cost, unit)
    update_ms = 1e3 * cost.cpu_update_s
    states = format_bytes(cost.state_bytes)
    if not problem.has_gpu:
        place = "no GPU: everything is in host memory"
    elif unit.weights == Tier.CPU and unit.streams_states:
        place = f"streamed, and so are its states: {update_ms:.0f} ms of CPU update spared for copies of {states}"
    elif unit.weights == Tier.GPU and unit.streams_states:
        place = f"weights on the GPU, states pass through it: {update_ms:.0f} ms of CPU update spared"
    elif Tier.NVME in (unit.weights, unit.states):
        what = ", its gradients among them," if unit.gradients == Tier.NVME else ""
        place = f"{format_bytes(rest['nvme'])}{what} rest on NVMe: host memory is worth more elsewhere"
    elif unit.weights == Tier.CPU:
        place = f"streamed: {format_bytes(cost.weight_bytes + cost.state_bytes)} of weights and states stay off the GPU"
    elif not cost.num_trainable:
        place = "frozen, on the GPU: no states"
    elif unit.updater == Updater.GPU:
        gpu_bytes = format_bytes(rest["gpu"] + cost.resident_gradient_bytes)
        place = f"on the GPU ({gpu_bytes}): spares its copies and {update_ms:.0f} ms of CPU update"
    else:
        place = f"states on the CPU: {states} of GPU memory are worth more elsewhere"
    return replace(unit, reason=place + _activation_reason(problem, cost, unit))


def _activation_reason(problem: PlacementProblem, cost: UnitCost, unit: UnitPlan) -> str:
    text = ""
    recompute_ms = 1e3 * cost.recompute_s(Activations.RECOMPUTE)
    saved_ms = recompute_ms - 1e3 * again_s(cost, unit)
    if cost.kept_bytes and unit.activations == Activations.RECOMPUTE:
        text = f"; recomputes ({recompute_ms:.0f} ms) instead of keeping {format_bytes(cost.kept_bytes)}"
    elif cost.kept_bytes:
        verb = "keeps" if unit.activations == Activations.KEEP else f"keeps {unit.activations.value}:"
        where = {Tier.GPU: "", Tier.CPU: " in host memory", Tier.NVME: " on NVMe"}[unit.saved]
        saved_bytes = format_bytes(cost.saved_bytes(unit.activations, unit.saved_bits))
        text = f"; {verb} {saved_bytes}{where} to save {saved_ms:.0f} ms of recompute"
        if unit.saved_bits < 16:
            exact_bytes = format_bytes(cost.saved_bytes(unit.activations, 16))
            error_percent = 100 * tensor_error("saved", unit.saved_bits, problem.gradient_errors)
            text += f" ({unit.saved_bits} bits instead of {exact_bytes}; gradients off by up to {error_percent:.1f} %)"
        if unit.boundary_bits < 16:
            error_percent = 100 * tensor_error("boundary", unit.boundary_bits, problem.gradient_errors)
            text += f"; its input in {unit.boundary_bits} bits ({error_percent:.1f} %)"
    input_bytes = format_bytes(cost.boundary_bytes_in(unit.boundary_bits))
    if unit.boundary is None:
        text += f"; its input ({input_bytes}) is not kept: the unit before runs once more"
    elif unit.boundary != Tier.GPU:
        text += f"; its input ({input_bytes}) waits {'on NVMe' if unit.boundary == Tier.NVME else 'in host memory'}"
    return text
