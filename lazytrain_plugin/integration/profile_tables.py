"""Profiles of machines and models as tables that a person reads."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile, UnitProfile
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Activations


def hardware_table(machine: HardwareProfile) -> Table:
    """Capacities and rates, two figures where a path is shared."""
    table = Table(title=f"{machine.name} ({machine.source})", title_justify="left")
    for column in ("", "alone", "while the rest is busy"):
        table.add_column(column, justify="right" if column else "left")
    rate = lambda per_s, unit, scale: f"{per_s / scale:.1f} {unit}" if per_s else "-"  # noqa: E731
    if machine.has_gpu:
        table.add_row("GPU memory free", format_bytes(machine.gpu_free_bytes), "")
    table.add_row("host memory free", format_bytes(machine.cpu_free_bytes), "")
    if machine.nvme_bytes:
        table.add_row("NVMe free", format_bytes(machine.nvme_bytes), "")
    table.add_row("matrix products", rate(machine.matmul_flop_per_s, "TFLOP/s", 1e12), "")
    table.add_row("a whole layer", rate(machine.layer_flop_per_s, "TFLOP/s", 1e12), "")
    if machine.has_gpu:
        for name, key in (("host to GPU", "h2d"), ("GPU to host", "d2h")):
            alone, shared = (getattr(machine, f"{key}_{kind}bytes_per_s") for kind in ("", "shared_"))
            table.add_row(name, rate(alone, "GB/s", 1e9), rate(shared, "GB/s", 1e9))
    if machine.launch_s:
        table.add_row("host launches an operator", f"{1e6 * machine.launch_s:.1f} us", "")
    table.add_row("host memory", rate(machine.host_memory_bytes_per_s, "GB/s", 1e9), "")
    for bits in (32, 8):
        alone, shared = (machine.cpu_update_parameters_per_s(bits, shared=shared) for shared in (False, True))
        name = f"CPU update, {bits}-bit states ({machine.cpu_threads} threads)"
        table.add_row(name, rate(alone, "G parameters/s", 1e9), rate(shared, "G parameters/s", 1e9))
    if machine.has_gpu:
        for bits in (32, 8):
            per_s = machine.gpu_update_parameters_per_s(bits)
            table.add_row(f"GPU update, {bits}-bit states", rate(per_s, "G parameters/s", 1e9), "")
    for name, per_s in zip(("4-bit codes made", "values made of them"), machine.coding_bytes_per_s, strict=True):
        table.add_row(name, rate(per_s, "GB/s", 1e9), "")
    if machine.nvme_read_bytes_per_s or machine.nvme_write_bytes_per_s:
        for name in ("read", "write"):
            alone, shared = (getattr(machine, f"nvme_{name}_{kind}bytes_per_s") for kind in ("", "shared_"))
            table.add_row(f"NVMe {name}", rate(alone, "GB/s", 1e9), rate(shared, "GB/s", 1e9) if shared else "")
    return table


def model_table(model: ModelProfile) -> Group:
    """Sizes and work per unit, equal neighbours together, and what each saving strategy keeps."""
    head = f"{model.name}: {model.num_parameters / 1e9:.2f} G parameters, {model.num_trainable / 1e9:.2f} G trained"
    if model.estimate:
        head += f"; activation bytes are an upper estimate ({model.estimate})"
    table = Table(title="units", title_justify="left")
    for column in ("units", "parameters", "weights", "MFLOP / token", "us / token, measured"):
        table.add_column(column, justify="left" if column == "units" else "right")
    groups = [list(group) for _, group in groupby(model.units, key=_alike)]
    for group in (*groups, *([unit] for unit in model.stem)):
        first = group[0]
        name = first.name if len(group) == 1 else f"{first.name} .. {group[-1].name.rpartition('.')[2]} ({len(group)})"
        times = (first.forward_s_per_token, first.backward_s_per_token)
        measured = " + ".join(f"{1e6 * seconds:.3f}" for seconds in times if seconds is not None)
        table.add_row(
            name,
            f"{first.num_parameters / 1e6:.2f} M",
            format_bytes(first.weight_bytes),
            f"{first.flop_per_token / 1e6:.1f}",
            measured or "-",
        )
    return Group(Text(head), table, *(_activations(group[0]) for group in groups))


def _activations(unit: UnitProfile) -> Table:
    title = f"what {unit.name} saves per token beside its input of {format_bytes(unit.boundary_bytes_per_token)}"
    table = Table(title=title, title_justify="left")
    for column in ("strategy", "saved", "forward that runs again"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    by_strategy = {strategy.activations: strategy for strategy in unit.strategies}
    if Activations.RECOMPUTE not in by_strategy:
        table.add_row("recompute", "0 B", "100%")
    for activations, strategy in by_strategy.items():
        saved = format_bytes(strategy.saved_bytes_per_token)
        table.add_row(activations.value, saved, f"{strategy.recompute_frac:.0%}")
    table.add_row("keep", format_bytes(unit.kept_bytes_per_token), "0%")
    for name, size in _by_size(unit.kept_bytes_per_token_by_class.items()):
        table.add_row(f"  of it {name}", format_bytes(size), "")
    return table


def _by_size(items: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(items, key=lambda item: -item[1])


def _alike(unit: UnitProfile) -> tuple:
    tensors = tuple((tensor.shape, tensor.dtype, tensor.trainable) for tensor in unit.tensors)
    return tensors, unit.kept_bytes_per_token, unit.flop_per_token, unit.forward_s_per_token
