"""Planned against measured: time and bytes per resource, time per kind of operation, waits and memory, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lazytrain_plugin.plan.measured import MeasuredStep, compare_kinds, compare_resources
from lazytrain_plugin.plan.simulate import Event, Resource
from lazytrain_plugin.plan.timeline import LANE_NAMES
from lazytrain_plugin.units import format_bytes


def planned_events(timeline: dict[str, Any]) -> tuple[Event, ...]:
    """The events of `build_timeline`'s data."""
    return tuple(
        Event(name, Resource(lane["resource"]), start_s, end_s, num_bytes)
        for lane in timeline["lanes"]
        for name, start_s, end_s, num_bytes in lane["events"]
    )


def explain_measured(timeline: dict[str, Any] | None, step: MeasuredStep) -> Group:
    """Tables of one real step beside the planned one.

    Args:
        timeline: `build_timeline`'s data of the plan; None (a plan that was fixed by hand, and no model to replay it
            for): only what was measured.
    """
    planned = planned_events(timeline) if timeline is not None else ()
    head = f"step {step.step}: {1e3 * step.step_s:.1f} ms measured"
    if timeline is not None:
        head += f", {1e3 * timeline['step_s']:.1f} ms planned ({step.step_s / timeline['step_s'] - 1:+.0%})"
    return Group(
        Text(head),
        _resources(planned, step.events, known=timeline is not None),
        _kinds(planned, step.events, known=timeline is not None),
        _waits(step),
        _memory(timeline, step),
    )


def _resources(planned: Sequence[Event], measured: Sequence[Event], *, known: bool) -> Table:
    table = Table(title="resources", title_justify="left")
    for column in ("", "planned", "measured", "difference", "bytes planned", "bytes measured", "rate measured"):
        table.add_column(column, justify="right" if column else "left")
    for row in compare_resources(planned, measured):
        rate = f"{row.measured_bytes / row.measured_busy_s / 1e9:.1f} GB/s" if row.measured_bytes else "-"
        table.add_row(
            LANE_NAMES[row.resource],
            _ms(row.planned_busy_s) if known else "-",
            _ms(row.measured_busy_s) if row.measured_busy_s else "-",
            _difference(row.planned_busy_s, row.measured_busy_s),
            format_bytes(row.planned_bytes) if row.planned_bytes else "-",
            format_bytes(row.measured_bytes) if row.measured_bytes else "-",
            rate,
        )
    return table


def _kinds(planned: Sequence[Event], measured: Sequence[Event], *, known: bool) -> Table:
    table = Table(title="operations", title_justify="left")
    for column in ("", "on", "times", "planned", "measured", "difference"):
        table.add_column(column, justify="left" if column in ("", "on") else "right")
    for row in compare_kinds(planned, measured):
        table.add_row(
            row.kind,
            LANE_NAMES[row.resource],
            str(row.count),
            _ms(row.planned_s) if known else "-",
            _ms(row.measured_s) if row.count else "-",
            _difference(row.planned_s, row.measured_s),
        )
    return table


def _waits(step: MeasuredStep) -> Table | Text:
    waits = {cause: seconds for cause, seconds in step.waits_s.items() if seconds > 0}
    if not waits:
        return Text("computing waited for nothing")
    table = Table(title="what computing waited for, as measured", title_justify="left")
    table.add_column("cause")
    table.add_column("time", justify="right")
    for cause, seconds in sorted(waits.items(), key=lambda item: -item[1]):
        table.add_row(cause, f"{_ms(seconds)} ({seconds / step.step_s:.1%})")
    return table


def _memory(timeline: dict[str, Any] | None, step: MeasuredStep) -> Table:
    planned = {memory["tier"]: memory["peak_bytes"] for memory in timeline["memory"]} if timeline is not None else {}
    table = Table(title="memory at its fullest", title_justify="left")
    for column in ("tier", "planned", "measured", "difference"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier, name in (("gpu", "GPU"), ("cpu", "host")):
        if measured := step.peak_bytes.get(tier):
            need = planned.get(tier, 0)
            table.add_row(
                name, format_bytes(need) if need else "-", format_bytes(measured), _difference(need, measured)
            )
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _difference(planned: float, measured: float) -> str:
    return f"{measured / planned - 1:+.0%}" if planned and measured else "-"
