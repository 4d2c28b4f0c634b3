"""A plan as tables that a person reads: need and have per tier, where units rest, and why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lazytrain_plugin.plan.accounting import Ledger
from lazytrain_plugin.plan.launches import launch_remark
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import StepTimes
from lazytrain_plugin.profile.model import ModelProfile, TensorProfile
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Activations, Fidelity, Shard, Tier

TIER_NAMES = {"gpu": "GPU", "cpu": "host", "nvme": "NVMe"}
OUTSIDE_STEP_NAMES = {"checkpoint": "saving", "evaluation": "an evaluation"}


def explain_plan(
    plan: PlacementPlan,
    *,
    ledger: Ledger | None = None,
    have_bytes: dict[str, int] | None = None,
    times: StepTimes | None = None,
) -> Group:
    """One screen: memory per tier, units grouped where they are equal, and the step's time by part.

    Args:
        ledger: from `check_plan`; None: only the plan's own totals are shown.
        have_bytes: budget per tier; None: not shown.
        times: from `simulate`; None: only the plan's own step time is shown.
    """
    return Group(_summary(plan, times), _memory_table(plan, ledger, have_bytes), _unit_table(plan), _reasons(plan))


def explain_unit(plan: PlacementPlan, name: str, model: ModelProfile | None = None) -> Group:
    """Why one unit is where it is. `name` may be a tensor of it. Raises PlanMismatchError for an unknown name.

    Args:
        model: knows which small tensors make up `stem.rest`, and every tensor's shape.
    """
    unit, tensor = find_unit(plan, name, model)
    table = Table(show_header=False, box=None, pad_edge=False)
    if tensor is not None:
        sizes = f"{' x '.join(map(str, tensor.shape))} {tensor.dtype}, {format_bytes(tensor.flat_bytes)}"
        table.add_row("tensor", f"{tensor.name}: {sizes}" + ("" if tensor.trainable else ", frozen"))
    table.add_row("unit", unit.name)
    for label, value in _decisions(unit):
        table.add_row(label, value)
    return Group(table, Text(unit.reason))


def find_unit(
    plan: PlacementPlan, name: str, model: ModelProfile | None = None
) -> tuple[UnitPlan, TensorProfile | None]:
    """The unit of this name, or the one whose tensor has it (with the tensor, where `model` tells of it).

    Raises:
        PlanMismatchError: an unknown name.
    """
    for profile in (*model.units, *model.stem) if model is not None else ():
        for tensor in profile.tensors:
            if tensor.name == name:
                return plan.unit(profile.name), tensor
    matches = [unit for unit in (*plan.units, *plan.stem) if _names(unit, name)]
    return (max(matches, key=lambda match: len(match.name)) if matches else plan.unit(name)), None


def _names(unit: UnitPlan, name: str) -> bool:
    if name == unit.name or name.startswith(unit.name + "."):
        return True
    # A big tensor of the stem is a unit by itself, `stem.model.embed_tokens.weight`.
    return unit.name == f"stem.{name}" or unit.name.startswith(f"stem.{name}.")


def _decisions(unit: UnitPlan) -> list[tuple[str, str]]:
    saves = unit.activations.value
    if unit.activations != Activations.RECOMPUTE and unit.saved != Tier.GPU:
        saves += f" ({TIER_NAMES[unit.saved]})"
    saves += f", {unit.saved_bits} bit" if unit.saved_bits < 16 else ""
    waits = "computed again" if unit.boundary is None else TIER_NAMES[unit.boundary]
    waits += f", {unit.boundary_bits} bit" if unit.boundary_bits < 16 else ""
    return [
        ("weights", TIER_NAMES[unit.weights]),
        ("states", f"{TIER_NAMES[unit.states]}, {unit.state_bits} bit" + _gradient_bits(unit)),
        ("updated by", TIER_NAMES[unit.updater] + (", streamed" if unit.streams_states else "")),
        ("activations", saves),
        ("input", waits),
    ]


def _gradient_bits(unit: UnitPlan) -> str:
    bits = ", gradients 8 bit" if unit.gradient_bits == 8 else ""
    return bits + (", gradients on NVMe" if unit.gradients == Tier.NVME else "")


OF_LAYERS = ("activations", "input")
"""Decisions that stem units don't have."""


def _summary(plan: PlacementPlan, times: StepTimes | None) -> Text:
    # "optimizer.state_bits" overrides what the fidelity says.
    coded = plan.fidelity == Fidelity.EXACT and any(unit.state_bits == 8 for unit in (*plan.units, *plan.stem))
    but = " but for 8-bit optimizer states" if coded else ""
    text = f"fidelity {plan.fidelity}{but}, {plan.weight_slots} weight slots, {plan.gradient_slots} gradient slots"
    if plan.shard == Shard.JOB:
        text += f", states divided over all {plan.nodes * plan.local_ranks} ranks of the job"
    if plan.max_tokens is not None:
        text += f", micro-batches of up to {plan.max_tokens} tokens"
    if times is not None:
        text += (
            f"\nstep {times.step_s:.3f} s: forward {times.forward_s:.3f} s, backward {times.backward_s:.3f} s; "
            f"compute waits {max(0.0, times.step_s - times.compute_s):.3f} s ({_waiting_share(times):.0%})"
        )
        remark = launch_remark(times.launching_s, times.launch_waits_s, times.step_s)
        text += f"\n{remark}" if remark else ""
    elif plan.predicted_step_s is not None:
        text += f"\nstep {plan.predicted_step_s:.3f} s (predicted)"
    if plan.solver:
        gap = plan.solver.get("gap_frac")
        text += f"\nsolved by {plan.solver['name']}: {plan.solver['status']}"
        if gap is not None:
            text += f", at most {gap:.1%} above the best step time (limit {plan.solver['time_limit_s']:g} s)"
    return Text(text)


def _waiting_share(times: StepTimes) -> float:
    return max(0.0, 1 - times.compute_s / times.step_s) if times.step_s else 0.0


def _memory_table(plan: PlacementPlan, ledger: Ledger | None, have_bytes: dict[str, int] | None) -> Table:
    table = Table(title="memory at its fullest", title_justify="left")
    for column in ("tier", "need", "have", "what takes it"):
        table.add_column(column, justify="right" if column in ("need", "have") else "left")
    in_step = ledger.total_bytes() if ledger is not None else plan.predicted_bytes
    outside_step = ledger.outside_step if ledger is not None else plan.outside_step_bytes
    for tier in ("gpu", "cpu", "nvme"):
        step_bytes = in_step.get(tier, 0)
        outside = {moment: sizes.get(tier, 0) for moment, sizes in outside_step.items()}
        need_bytes = max(step_bytes, *outside.values(), 0)
        if not need_bytes:
            continue
        lines = sorted(getattr(ledger, tier).items(), key=lambda line: -line[1]) if ledger is not None else []
        if need_bytes > step_bytes:
            # The lines add up to the need: where a plan comes alone, the step is one.
            moment = max(outside, key=outside.__getitem__)
            lines = lines or [("a step", step_bytes)]
            lines.append((f"{OUTSIDE_STEP_NAMES.get(moment, moment)} beyond a step", need_bytes - step_bytes))
        table.add_row(
            TIER_NAMES[tier],
            format_bytes(need_bytes),
            format_bytes(have_bytes[tier]) if have_bytes and have_bytes.get(tier) else "-",
            ", ".join(f"{line} {format_bytes(num_bytes)}" for line, num_bytes in lines),
        )
    return table


def _unit_table(plan: PlacementPlan) -> Table:
    table = Table(title="units", title_justify="left")
    for column in ("units", "weights", "states", "updated by", "activations", "input"):
        table.add_column(column, overflow="fold")
    for group in _equal_runs(plan.units):
        table.add_row(_span(group), *(value for _, value in _decisions(group[0])))
    for unit in plan.stem:
        values = ["-" if label in OF_LAYERS else value for label, value in _decisions(unit)]
        table.add_row(unit.name, *values)
    return table


def _reasons(plan: PlacementPlan) -> Text:
    groups = [*_equal_runs(plan.units), *([unit] for unit in plan.stem)]
    return Text("\n".join(f"{_span(group)}: {group[0].reason}" for group in groups if group[0].reason))


def _equal_runs(units: Sequence[UnitPlan]) -> list[list[UnitPlan]]:
    """Neighbours with the same decisions and reason."""
    return [list(run) for _, run in groupby(units, key=lambda unit: (*_decisions(unit), unit.reason))]


def _span(group: Sequence[UnitPlan]) -> str:
    if len(group) == 1:
        return group[0].name
    return f"{group[0].name} .. {group[-1].name.rpartition('.')[2]} ({len(group)})"
