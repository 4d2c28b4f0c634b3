"""Replays a plan as a discrete-event simulation: when does each copy, computation and update of a step end?

Resources work in parallel, each in program order (FIFO): compute, H2D, D2H, the host's update worker, reads from and
writes to NVMe. An operation starts when its resource is free and everything it depends on has ended. Because the order
on each resource is fixed, visiting operations in program order is the event simulation: no queue is needed.
Several steps are replayed, and the time between the ends of the last two is the step time of the steady state (updates
of one step run under the forward of the next).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lazytrain_plugin.plan.accounting import is_streamed, nvme_staged_bytes, offloaded_bytes, sends_gradients
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.vocab import Tier, Updater

NEEDED_FIRST = (UnitRole.EMBEDDING, UnitRole.REST)
"""Stem units whose weights the forward needs before its first layer; small tensors are there early at no cost."""


class Resource(StrEnum):
    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    WORKER = "worker"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of the replayed steady step, in seconds from the step's start."""

    name: str
    resource: Resource
    start_s: float
    end_s: float
    num_bytes: int = 0
    """What is copied, read or written; 0 for computations."""


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

    def run(self, name: str, resource: Resource, duration_s: float, *after_s: float, num_bytes: int = 0) -> float:
        if self._noise is not None:
            duration_s *= 1 + self._noise_frac * self._noise.random()
        start_s = max(self.free_s[resource], *after_s) if after_s else self.free_s[resource]
        end_s = start_s + duration_s
        self.free_s[resource] = end_s
        self.busy_s[resource] += duration_s
        if self._record and duration_s > 0:
            self.events.append(Event(name, resource, start_s, end_s, num_bytes))
        return end_s

    def wait(self, resource: Resource, until_s: float) -> float:
        """The resource idles until then."""
        self.free_s[resource] = max(self.free_s[resource], until_s)
        return self.free_s[resource]


class _Ring:
    """Staging buffers used in turn: the next user waits for the one `count` places before it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free_s: list[float] = []

    def free_s(self) -> float:
        return self._free_s[-self._count] if len(self._free_s) >= self._count > 0 else 0.0

    def use(self, until_s: float) -> None:
        self._free_s.append(until_s)

    def clear(self) -> None:
        self._free_s.clear()


class _Step:
    """The replay's state that lives across steps: when each unit's gradient was final and its weights new."""

    def __init__(self, problem: PlacementProblem, plan: PlacementPlan, clock: _Clock) -> None:
        self.problem, self.plan, self.clock = problem, plan, clock
        self.units = list(zip(problem.units, plan.units, strict=True))
        self.stem = list(zip(problem.stem, plan.stem, strict=True))
        self.first = [pair for pair in self.stem if pair[0].role in NEEDED_FIRST]
        self.last = [pair for pair in self.stem if pair[0].role not in NEEDED_FIRST]
        self.gradient_s: dict[str, float] = {}
        self.weight_s: dict[str, float] = {}
        """When a unit's newest weights were where they are fetched from."""
        self.slots: dict[str, float] = {}
        """Units whose weights are in a slot -> end of the last computation that used them, the oldest first."""
        self.free_slots: list[float] = [0.0] * plan.weight_slots
        """When each slot that holds nothing of use became free."""
        self.gradients = _Ring(plan.gradient_slots - 1)
        self.states = _Ring(plan.state_slots)
        self.leaving = _Ring(plan.activation_slots)
        self.returning = _Ring(plan.activation_slots)
        self.disk = _Ring(plan.nvme_slots)
        self.offloaded_s: dict[str, float] = {}
        self.written_s: dict[str, float] = {}

    def updates(self, step_s: float) -> None:
        """`step()` at `step_s`: the clip factor is known. Units are updated in the order the forward needs them."""
        updated_on_cpu: set[str] = set()
        for cost, unit in (*self.first, *self.units, *self.last):
            if not cost.num_trainable:
                self.weight_s[cost.name] = 0.0
                continue
            if cost.name in self.slots and unit.states != Tier.GPU:  # its copy on the GPU is outdated now
                self.free_slots.append(self.slots.pop(cost.name))
            if unit.streams_states:
                self.weight_s[cost.name] = step_s  # its update is a part of forward
            elif unit.updater == Updater.GPU:
                # On the compute stream, at once: short, and no copy to wait for.
                self.weight_s[cost.name] = self.clock.run(
                    f"update {cost.name}", Resource.COMPUTE, cost.gpu_update_s, step_s
                )
            else:
                updated_on_cpu.add(cost.name)
        for cost, unit in (*self.first, *self.units, *self.last):
            delay_s = self.problem.update_delay_s(offloaded_bytes(cost, unit)) if updated_on_cpu else 0.0
            if cost.name in updated_on_cpu:
                self._update_on_cpu(cost, unit, step_s, delay_s)
            elif delay_s:
                self.clock.run(f"slower updates beside the offload of {cost.name}", Resource.WORKER, delay_s, step_s)

    def _update_on_cpu(self, cost: UnitCost, unit: UnitPlan, step_s: float, delay_s: float) -> None:
        staged = nvme_staged_bytes(cost, unit)
        ready_s = step_s
        if staged:
            ready_s = self._read_nvme(f"read {cost.name}", staged, step_s, self.written_s.get(cost.name, 0.0))
        updated_s = self.clock.run(
            f"update {cost.name}",
            Resource.WORKER,
            cost.cpu_update_s + delay_s,
            ready_s,
            self.gradient_s.get(cost.name, 0.0),
        )
        self.weight_s[cost.name] = updated_s
        if staged:
            write_s = self.problem.nvme_write_s(staged)
            self.written_s[cost.name] = self.clock.run(
                f"write {cost.name}", Resource.NVME_WRITE, write_s, updated_s, num_bytes=staged
            )
            self.disk.use(self.written_s[cost.name])

    def _read_nvme(self, name: str, num_bytes: int, *after_s: float) -> float:
        read_s = self.problem.nvme_read_s(num_bytes)
        return self.clock.run(name, Resource.NVME_READ, read_s, self.disk.free_s(), *after_s, num_bytes=num_bytes)

    def forward(self, *, fresh: bool) -> float:
        """One micro-batch's forward with loss; `fresh`: the weights were just updated."""
        self.leaving.clear()
        if fresh:
            self._renew_stem(self.first)
        end_s = max((self.weight_s[cost.name] for cost, _ in self.first), default=0.0)
        for cost, unit in self.units:
            if fresh and not is_streamed(unit) and unit.updater == Updater.CPU and cost.num_trainable:
                self._publish_one(cost)
            ready_s = max(end_s, self._weights_arrive(cost, unit, "forward", fresh=fresh))
            if fresh and unit.streams_states:
                ready_s = self._streamed_update(cost, unit, ready_s)
            leaves = offloaded_bytes(cost, unit)
            if leaves:
                ready_s = max(ready_s, self.leaving.free_s())
            end_s = self.clock.run(f"forward {cost.name}", Resource.COMPUTE, cost.forward_s, ready_s)
            self._used_slot(cost, unit, end_s)
            if leaves:
                left_s = self.clock.run(
                    f"activations {cost.name} (forward)",
                    Resource.D2H,
                    self.problem.d2h_s(leaves),
                    end_s,
                    num_bytes=leaves,
                )
                self.offloaded_s[cost.name] = left_s
                self.leaving.use(left_s)
        if fresh:
            self._renew_stem(self.last)
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
        self.returning.clear()
        end_s = self.clock.free_s[Resource.COMPUTE]
        for cost, unit in self.stem:
            if cost.role == UnitRole.HEAD:
                self._gradient(cost, unit, end_s)
        for cost, unit in reversed(self.units):
            ready_s = max(end_s, self._weights_arrive(cost, unit, "backward", fresh=False))
            returns = offloaded_bytes(cost, unit)
            if returns:
                back_s = self.clock.run(
                    f"activations {cost.name} (backward)",
                    Resource.H2D,
                    self.problem.h2d_s(returns),
                    self.offloaded_s[cost.name],
                    self.returning.free_s(),
                    num_bytes=returns,
                )
                ready_s = max(ready_s, back_s)
            compute_s = cost.recompute_s(unit.activations) + cost.backward_s
            end_s = self.clock.run(f"backward {cost.name}", Resource.COMPUTE, compute_s, ready_s)
            if sends_gradients(cost, unit):
                # The unit's own gradients take one place; with all others still on their way the stream waits.
                end_s = self.clock.wait(Resource.COMPUTE, self.gradients.free_s())
            self._used_slot(cost, unit, end_s)
            if returns:
                self.returning.use(end_s)
            self._gradient(cost, unit, end_s)
            if sends_gradients(cost, unit):
                self.gradients.use(self.gradient_s[f"sent {cost.name}"])
        for cost, unit in self.stem:
            if cost.role != UnitRole.HEAD:
                self._gradient(cost, unit, end_s)
        return end_s

    def _weights_arrive(self, cost: UnitCost, unit: UnitPlan, phase: str, *, fresh: bool) -> float:
        if not is_streamed(unit):
            return self.weight_s.get(cost.name, 0.0)
        if cost.name in self.slots:  # still there from forward, or from the last micro-batch
            return 0.0
        slot_s = self.free_slots.pop(0) if self.free_slots else self.slots.pop(next(iter(self.slots)))
        ready_s = self.weight_s.get(cost.name, 0.0)
        if unit.weights == Tier.NVME and not (fresh and cost.num_trainable):
            # Updated weights leave for the GPU from the staging buffer of their update.
            ready_s = self._read_nvme(
                f"read {cost.name} ({phase})", cost.weight_bytes, ready_s, self.written_s.get(cost.name, 0.0)
            )
        arrived_s = self.clock.run(
            f"weights {cost.name} ({phase})",
            Resource.H2D,
            cost.weight_h2d_s,
            slot_s,
            ready_s,
            num_bytes=cost.weight_bytes,
        )
        if unit.weights == Tier.NVME and not (fresh and cost.num_trainable):
            self.disk.use(arrived_s)
        return arrived_s

    def _streamed_update(self, cost: UnitCost, unit: UnitPlan, ready_s: float) -> float:
        """The GPU updates a unit whose states pass through it; returns when its weights are new."""
        problem = self.problem
        here_s = self.clock.run(
            f"states {cost.name}",
            Resource.H2D,
            problem.h2d_s(cost.streamed_in_bytes),
            self.states.free_s(),
            self.weight_s[cost.name],
            self.gradient_s.get(cost.name, 0.0),
            num_bytes=cost.streamed_in_bytes,
        )
        updated_s = self.clock.run(f"update {cost.name}", Resource.COMPUTE, cost.gpu_update_s, max(ready_s, here_s))
        leaving_bytes = cost.streamed_out_bytes + (cost.weight_bytes if is_streamed(unit) else 0)
        back_s = self.clock.run(
            f"states {cost.name} (back)",
            Resource.D2H,
            problem.d2h_s(leaving_bytes),
            updated_s,
            num_bytes=leaving_bytes,
        )
        self.states.use(back_s)
        self.weight_s[cost.name] = back_s if is_streamed(unit) else updated_s
        return updated_s

    def _used_slot(self, cost: UnitCost, unit: UnitPlan, end_s: float) -> None:
        if is_streamed(unit):
            self.slots.pop(cost.name, None)  # the latest used goes to the end
            self.slots[cost.name] = end_s

    def _gradient(self, cost: UnitCost, unit: UnitPlan, computed_s: float) -> None:
        if not sends_gradients(cost, unit):
            self.gradient_s[cost.name] = computed_s
            return
        sent_s = self.clock.run(
            f"gradients {cost.name}", Resource.D2H, cost.gradient_d2h_s, computed_s, num_bytes=cost.gradient_bytes
        )
        self.gradient_s[f"sent {cost.name}"] = sent_s
        self.gradient_s[cost.name] = (
            self.clock.run(f"accumulate {cost.name}", Resource.WORKER, cost.accumulate_s, sent_s)
            if cost.accumulate_s
            else sent_s
        )

    def _renew_stem(self, stem: Sequence[tuple[UnitCost, UnitPlan]]) -> None:
        """Brings the stem's weights up to date where its states rest off the GPU."""
        for cost, unit in stem:
            if unit.streams_states:
                self._streamed_update(cost, unit, 0.0)
            elif unit.weights == Tier.GPU and unit.updater == Updater.CPU and cost.num_trainable:
                self._publish_one(cost)

    def _publish_one(self, cost: UnitCost) -> None:
        """A resident weight that the CPU updated pays one H2D."""
        self.weight_s[cost.name] = self.clock.run(
            f"publish {cost.name}",
            Resource.H2D,
            cost.weight_h2d_s,
            self.weight_s[cost.name],
            num_bytes=cost.weight_bytes,
        )


def simulate(
    problem: PlacementProblem,
    plan: PlacementPlan,
    *,
    steps: int = 3,
    record: bool = False,
    noise_frac: float = 0.0,
    seed: int = 0,
    synchronous: bool = False,
) -> StepTimes:
    """Replays `steps` steps and returns the last one.

    Args:
        record: keep the events of the last step.
        noise_frac: each duration is multiplied by a uniform draw from [1, 1 + noise_frac].
        synchronous: the forward waits for all updates of the step before, as systems do that are no lazy ones.
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
        if synchronous:
            clock.wait(Resource.COMPUTE, max(step.weight_s.values(), default=begin_s))
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
    return tuple(replace(e, start_s=e.start_s - origin_s, end_s=e.end_s - origin_s) for e in events)
