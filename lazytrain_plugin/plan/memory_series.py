"""What fills each tier over a step: the ledger's lines, spread over the time of a replay.

Each level is one window of the accounting, from when the replay enters it to when it leaves it, so that the highest
level is the ledger's own peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lazytrain_plugin.plan.accounting import account, head_room_bytes, sends_gradients, windows
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import Event, Resource
from lazytrain_plugin.vocab import Tier

PASSING = ("unit inputs", "saved activations", "gradients", "logits and loss", "backward workspace")
"""Lines of GPU memory that come and go; the rest of the ledger stands through the step."""


@dataclass(slots=True)
class _Levels:
    """A step function per line."""

    times_s: list[float] = field(default_factory=list)
    levels: list[dict[str, int]] = field(default_factory=list)

    def set(self, time_s: float, level: dict[str, int]) -> None:
        if self.times_s and time_s <= self.times_s[-1]:
            self.levels[-1] = level
        else:
            self.times_s.append(time_s)
            self.levels.append(level)

    def times(self, count: int) -> _Levels:
        """Of so many ranks, all alike."""
        self.levels = [{name: count * num_bytes for name, num_bytes in level.items()} for level in self.levels]
        return self

    def as_series(self, fixed: dict[str, int], step_s: float) -> dict[str, Any]:
        names = [*fixed, *sorted({name for level in self.levels for name in level}, key=_order)]
        times_s = self.times_s or [0.0]
        levels = self.levels or [{}]
        lines = [
            {"name": name, "bytes": [level.get(name, 0) + fixed.get(name, 0) for level in levels]} for name in names
        ]
        return {
            "times_s": [*times_s, max(step_s, times_s[-1])],
            "lines": [line for line in lines if any(line["bytes"])],
        }


def memory_series(
    problem: PlacementProblem, plan: PlacementPlan, events: Sequence[Event], step_s: float
) -> dict[str, dict[str, Any]]:
    """Per tier that is used: `{"times_s": [n + 1], "lines": [{"name", "bytes": [n]}]}`.

    Level i holds between times i and i + 1; lines are in the order in which they are stacked.

    Args:
        events: of the same plan's replay.
    """
    ledger = account(problem, plan)
    passing = _passing_levels(problem, plan, events)
    series = {}
    if problem.has_gpu:
        fixed = {line: size for line, size in ledger.gpu.items() if line not in (*PASSING, "head-room")}
        ring = fixed.get("activation slots", 0)
        levels = _with_head_room(passing, ring)
        series["gpu"] = levels.as_series(fixed, step_s)
        fixed = {line: size for line, size in ledger.cpu.items() if line != "offloaded activations"}
        series["cpu"] = _offloaded_levels(events).times(problem.local_ranks).as_series(fixed, step_s)
    else:
        fixed = {line: size for line, size in ledger.cpu.items() if line not in (*PASSING, "head-room")}
        series["cpu"] = _with_head_room(passing, 0).times(problem.local_ranks).as_series(fixed, step_s)
    if ledger.nvme:
        series["nvme"] = _Levels().as_series(ledger.nvme, step_s)
    return series


def _passing_levels(problem: PlacementProblem, plan: PlacementPlan, events: Sequence[Event]) -> _Levels:
    """What comes and goes on the device that computes."""
    units = {cost.name: u for u, cost in enumerate(problem.units)}
    costs = {cost.name: cost for cost in (*problem.units, *problem.stem)}
    plans = {unit.name: unit for unit in (*plan.units, *plan.stem)}
    by_window = list(windows(problem, plan))
    loss, backward, end = by_window[0], by_window[1:-1][::-1], by_window[-1]
    inputs, saved = _forward_bytes(problem, plan)
    # With sums over micro-batches nothing rests here but those, which stand in the ledger.
    resting = {
        name: cost.resident_gradient_bytes
        for name, cost in costs.items()
        if cost.num_trainable and not sends_gradients(cost, plans[name]) and not problem.has_accumulation
    }
    pending = sum(resting.values())
    levels = _Levels()
    levels.set(0.0, {"gradients": pending})
    for event in sorted((e for e in events if e.resource == Resource.COMPUTE), key=lambda event: event.start_s):
        kind, _, name = event.name.partition(" ")
        if kind == "update":
            pending -= resting.pop(name, 0)
            levels.set(event.end_s, {**levels.levels[-1], "gradients": pending})
        elif kind == "forward":
            u = units[name]
            levels.set(event.start_s, {"unit inputs": inputs[u], "saved activations": saved[u], "gradients": pending})
        elif kind == "loss":
            levels.set(
                event.start_s,
                {"unit inputs": loss.inputs, "saved activations": loss.saved, loss.other_name: loss.other},
            )
        elif kind == "backward":
            window = backward[units[name]]
            levels.set(
                event.start_s,
                {
                    "unit inputs": window.inputs,
                    "saved activations": window.saved,
                    "gradients": window.gradients,
                    window.other_name: window.other,
                },
            )
            if units[name] == 0:
                levels.set(event.end_s, {"gradients": end.gradients})
    return levels


def _forward_bytes(problem: PlacementProblem, plan: PlacementPlan) -> tuple[list[int], list[int]]:
    """Inputs and saved activations on the device while unit u's forward runs, its own included."""
    inputs, saved, input_sum, saved_sum = [], [], 0, 0
    for cost, unit in zip(problem.units, plan.units, strict=True):
        input_sum += cost.boundary_bytes_in(unit.boundary_bits) if unit.boundary == Tier.GPU else 0
        saved_sum += cost.saved_bytes(unit.activations, unit.saved_bits) if unit.saved == Tier.GPU else 0
        inputs.append(input_sum)
        saved.append(saved_sum)
    return inputs, saved


def _with_head_room(levels: _Levels, ring_bytes: int) -> _Levels:
    for level in levels.levels:
        lasting = level.get("unit inputs", 0) + level.get("saved activations", 0)
        passing = sum(level.values()) - lasting
        level["head-room"] = head_room_bytes(lasting=lasting + ring_bytes, passing=passing)
    return levels


def _offloaded_levels(events: Sequence[Event]) -> _Levels:
    """Activations in host memory: there from when they start to leave until they are back."""
    changes = [
        (e.start_s, e.num_bytes) if e.resource == Resource.D2H else (e.end_s, -e.num_bytes)
        for e in events
        if e.name.startswith("activations ")
    ]
    levels, total = _Levels(), 0
    levels.set(0.0, {"offloaded activations": 0})
    for time_s, change in sorted(changes):
        total += change
        levels.set(time_s, {"offloaded activations": total})
    return levels


def _order(name: str) -> int:
    known = ("gradients", "unit inputs", "saved activations", "offloaded activations")
    return known.index(name) if name in known else len(known) + (name == "head-room")
