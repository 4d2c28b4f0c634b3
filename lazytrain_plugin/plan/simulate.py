"""Replays a plan as a discrete-event simulation: when does each copy, computation and update of a step end?

Four resources work in parallel, each in program order (FIFO): compute, H2D, D2H and the host's update worker. An
operation starts when its resource is free and everything it depends on has ended. Because the order on each resource is
fixed, visiting operations in program order is the event simulation: no queue is needed.
Several steps are replayed, and the time between the ends of the last two is the step time of the steady state (updates
of one step run under the forward of the next).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lazytrain_plugin.plan.accounting import is_streamed, sends_gradients
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.vocab import Activations, Tier, Updater

NEEDED_FIRST = (UnitRole.EMBEDDING, UnitRole.REST)
"""Stem units whose weights the forward needs before its first layer; small tensors are there early at no cost."""


class Resource(StrEnum):
    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of the replayed steady step, in seconds from the step's start."""

    name: str
    resource: Resource
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One steady step."""

    step_s: float
    forward_s: float
    """All forwards of the step, waits included."""
    backward_s: float
    compute_s: float
    """Time that the compute stream worked; the rest of `step_s` is waiting."""
    busy_s: dict[str, float]
    """Working time per resource."""
    events: tuple[Event, ...] = ()


class _Clock:
    """FIFO resources. `noise` multiplies each duration."""

    def __init__(self, noise: random.Random | None, noise_frac: float, record: bool) -> None:
        self.free_s = dict.fromkeys(Resource, 0.0)
        self.busy_s = dict.fromkeys(Resource, 0.0)
        self.events: list[Event] = []
        self._noise = noise
        self._noise_frac = noise_frac
        self._record = record

    def run(self, name: str, resource: Resource, duration_s: float, *after_s: float) -> float:
        if self._noise is not None:
            duration_s *= 1 + self._noise_frac * self._noise.random()
        start_s = max(self.free_s[resource], *after_s) if after_s else self.free_s[resource]
        end_s = start_s + duration_s
        self.free_s[resource] = end_s
        self.busy_s[resource] += duration_s
        if self._record and duration_s > 0:
            self.events.append(Event(name, resource, start_s, end_s))
        return end_s

    def wait(self, resource: Resource, until_s: float) -> float:
        """The resource idles until then."""
        self.free_s[resource] = max(self.free_s[resource], until_s)
        return self.free_s[resource]


class _Step:
    """The replay's state that lives across steps: when each unit's gradient was final and its weights new."""

    def __init__(self, problem: PlacementProblem, plan: PlacementPlan, clock: _Clock) -> None:
        self.problem, self.plan, self.clock = problem, plan, clock
        self.units = list(zip(problem.units, plan.units, strict=True))
        self.stem = list(zip(problem.stem, plan.stem, strict=True))
        self.gradient_s: dict[str, float] = {}
        self.weight_s: dict[str, float] = {}
        self.slots: dict[str, float] = {}
        """Units whose weights are in a slot -> end of the last computation that used them, the oldest first."""
        self.free_slots: list[float] = [0.0] * plan.weight_slots
        """When each slot that holds nothing of use became free."""
        self.gradient_slot_users: list[float] = []

    def updates(self, step_s: float) -> None:
        """`step()` at `step_s`: the clip factor is known. Units are updated in the order the forward needs them."""
        first = [pair for pair in self.stem if pair[0].role in NEEDED_FIRST]
        last = [pair for pair in self.stem if pair[0].role not in NEEDED_FIRST]
        on_cpu: list[tuple[UnitCost, UnitPlan]] = []
        for cost, unit in (*first, *self.units, *last):
            if not cost.num_trainable:
                self.weight_s[cost.name] = 0.0
            elif unit.updater == Updater.GPU:
                # On the compute stream, at once: short, and no copy to wait for.
                self.weight_s[cost.name] = self.clock.run(
                    f"update {cost.name}", Resource.COMPUTE, cost.gpu_update_s, step_s
                )
            else:
                on_cpu.append((cost, unit))
        for cost, _ in on_cpu:
            if cost.name in self.slots:  # its copy on the GPU is outdated now
                self.free_slots.append(self.slots.pop(cost.name))
            self.weight_s[cost.name] = self.clock.run(
                f"update {cost.name}", Resource.WORKER, cost.cpu_update_s, step_s, self.gradient_s.get(cost.name, 0.0)
            )

    def forward(self, *, fresh: bool) -> float:
        """One micro-batch's forward with loss; `fresh`: the weights were just updated."""
        if fresh:
            self._publish(*NEEDED_FIRST)
        end_s = max((self.weight_s[cost.name] for cost, _ in self.stem if cost.role in NEEDED_FIRST), default=0.0)
        for cost, unit in self.units:
            if fresh and not is_streamed(unit) and sends_gradients(cost, unit):
                self._publish_one(cost)
            ready_s = max(end_s, self._weights_arrive(cost, unit, "forward"))
            end_s = self.clock.run(f"forward {cost.name}", Resource.COMPUTE, cost.forward_s, ready_s)
            self._used_slot(cost, unit, end_s)
        if fresh:
            self._publish(UnitRole.HEAD)
        for cost, _ in self.stem:
            if cost.forward_s:
                # Head and loss, forward and backward together: the chunked loss does both chunk by chunk.
                end_s = self.clock.run(
                    f"loss {cost.name}",
                    Resource.COMPUTE,
                    cost.forward_s + cost.backward_s,
                    end_s,
                    self.weight_s[cost.name],
                )
        return end_s

    def backward(self) -> float:
        """One micro-batch's backward; sets when each unit's gradient rests at its updater."""
        end_s = self.clock.free_s[Resource.COMPUTE]
        for cost, unit in self.stem:
            if cost.role == UnitRole.HEAD:
                self._gradient(cost, unit, end_s)
        for cost, unit in reversed(self.units):
            ready_s = max(end_s, self._weights_arrive(cost, unit, "backward"))
            recompute_s = cost.forward_s if unit.activations == Activations.RECOMPUTE else 0.0
            end_s = self.clock.run(f"backward {cost.name}", Resource.COMPUTE, recompute_s + cost.backward_s, ready_s)
            if sends_gradients(cost, unit):
                # The unit's own gradients take one place; with all others still on their way the stream waits.
                end_s = self.clock.wait(Resource.COMPUTE, self._gradient_slot_free())
            self._used_slot(cost, unit, end_s)
            self._gradient(cost, unit, end_s)
            if sends_gradients(cost, unit):
                self.gradient_slot_users.append(self.gradient_s[f"sent {cost.name}"])
        for cost, unit in self.stem:
            if cost.role != UnitRole.HEAD:
                self._gradient(cost, unit, end_s)
        return end_s

    def _weights_arrive(self, cost: UnitCost, unit: UnitPlan, phase: str) -> float:
        if not is_streamed(unit):
            return self.weight_s.get(cost.name, 0.0)
        if cost.name in self.slots:  # still there from forward, or from the last micro-batch
            return 0.0
        slot_s = self.free_slots.pop(0) if self.free_slots else self.slots.pop(next(iter(self.slots)))
        return self.clock.run(
            f"weights {cost.name} ({phase})", Resource.H2D, cost.weight_h2d_s, slot_s, self.weight_s.get(cost.name, 0.0)
        )

    def _used_slot(self, cost: UnitCost, unit: UnitPlan, end_s: float) -> None:
        if is_streamed(unit):
            self.slots.pop(cost.name, None)  # the latest used goes to the end
            self.slots[cost.name] = end_s

    def _gradient_slot_free(self) -> float:
        slots = self.plan.gradient_slots - 1
        return self.gradient_slot_users[-slots] if len(self.gradient_slot_users) >= slots else 0.0

    def _gradient(self, cost: UnitCost, unit: UnitPlan, computed_s: float) -> None:
        if not sends_gradients(cost, unit):
            self.gradient_s[cost.name] = computed_s
            return
        sent_s = self.clock.run(f"gradients {cost.name}", Resource.D2H, cost.gradient_d2h_s, computed_s)
        self.gradient_s[f"sent {cost.name}"] = sent_s
        self.gradient_s[cost.name] = (
            self.clock.run(f"accumulate {cost.name}", Resource.WORKER, cost.accumulate_s, sent_s)
            if cost.accumulate_s
            else sent_s
        )

    def _publish(self, *roles: UnitRole) -> None:
        for cost, unit in self.stem:
            if cost.role in roles and unit.weights == Tier.GPU and sends_gradients(cost, unit):
                self._publish_one(cost)

    def _publish_one(self, cost: UnitCost) -> None:
        """A resident weight that the CPU updated pays one H2D."""
        self.weight_s[cost.name] = self.clock.run(
            f"publish {cost.name}", Resource.H2D, cost.weight_h2d_s, self.weight_s[cost.name]
        )


def simulate(
    problem: PlacementProblem,
    plan: PlacementPlan,
    *,
    steps: int = 3,
    record: bool = False,
    noise_frac: float = 0.0,
    seed: int = 0,
) -> StepTimes:
    """Replays `steps` steps and returns the last one.

    Args:
        record: keep the events of the last step.
        noise_frac: each duration is multiplied by a uniform draw from [1, 1 + noise_frac].
    """
    clock = _Clock(random.Random(seed) if noise_frac else None, noise_frac, record)
    step = _Step(problem, plan, clock)
    begin_s = forward_s = backward_s = end_s = 0.0
    busy_before = dict(clock.busy_s)
    for _ in range(steps):
        begin_s, forward_s, backward_s = end_s, 0.0, 0.0
        busy_before = dict(clock.busy_s)
        clock.events.clear()
        step.updates(begin_s)
        for micro in range(problem.accumulation_steps):
            micro_s = end_s
            loss_s = step.forward(fresh=micro == 0)
            end_s = step.backward()
            forward_s += loss_s - micro_s
            backward_s += end_s - loss_s
    busy = {resource.value: clock.busy_s[resource] - busy_before[resource] for resource in Resource}
    return StepTimes(
        step_s=end_s - begin_s,
        forward_s=forward_s,
        backward_s=backward_s,
        compute_s=busy["compute"],
        busy_s=busy,
        events=_shifted(clock.events, begin_s),
    )


def _shifted(events: Sequence[Event], origin_s: float) -> tuple[Event, ...]:
    return tuple(Event(e.name, e.resource, e.start_s - origin_s, e.end_s - origin_s) for e in events)
