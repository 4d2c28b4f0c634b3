"""Replays a plan as a discrete-event simulation: when does each copy, computation and update of a step end?

Resources work in parallel, each in program order (FIFO): compute, H2D, D2H, the host's update worker, reads from and
writes to NVMe, and the links on which ranks exchange gradients. An operation starts when its resource is free and
everything it depends on has ended. Because the order on each resource is fixed, visiting operations in program order is
the event simulation: no queue is needed.
Several steps are replayed, and the time between the ends of the last two is the step time of the steady state (updates
of one step run under the forward of the next).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lazytrain_plugin.plan.accounting import (
    again_s,
    is_streamed,
    nvme_updated_bytes,
    offloaded_bytes,
    sends_gradients,
    updates_meet_at_home,
)
from lazytrain_plugin.plan.activation_traffic import ActivationTraffic
from lazytrain_plugin.plan.clock import Clock, Event, Resource, Ring
from lazytrain_plugin.plan.disk_traffic import read_disk, write_disk
from lazytrain_plugin.plan.edges import backward_order
from lazytrain_plugin.plan.gradient_traffic import GradientTraffic, stem_gradients
from lazytrain_plugin.plan.launches import launches_of
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.vocab import Tier, Updater

NEEDED_FIRST = (UnitRole.EMBEDDING, UnitRole.REST)
"""Stem units whose weights the forward needs before its first layer; small tensors are there early at no cost."""


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
    launching_s: float = 0.0
    """Time that the host launched; it runs ahead of the GPU where it can."""
    launch_waits_s: float = 0.0
    """Time that the compute stream stood still for that alone."""
    events: tuple[Event, ...] = ()


class _Step:
    """The replay's state that lives across steps: when each unit's weights were new, what holds slots and buffers."""

    def __init__(self, problem: PlacementProblem, plan: PlacementPlan, clock: Clock) -> None:
        self.problem, self.plan, self.clock = problem, plan, clock
        self.units = list(zip(problem.units, plan.units, strict=True))
        self.stem = list(zip(problem.stem, plan.stem, strict=True))
        self.first = [pair for pair in self.stem if pair[0].role in NEEDED_FIRST]
        self.last = [pair for pair in self.stem if pair[0].role not in NEEDED_FIRST]
        self.weight_s: dict[str, float] = {}
        """When a unit's newest weights were where they are fetched from."""
        self.slots: dict[str, float] = {}
        """Units whose weights are in a slot -> end of the last computation that used them, the oldest first."""
        self.free_slots: list[float] = [0.0] * plan.weight_slots
        """When each slot that holds nothing of use became free."""
        self.gradients = GradientTraffic(problem, plan, clock)
        self.states: deque[float] = deque([0.0] * plan.state_slots, maxlen=plan.state_slots)
        """When the last chunks of streamed states had left their slots."""
        self.states_back_s = 0.0
        """When the states that were sent last are home; they pass activations that aren't computed yet."""
        self.crossing: deque[tuple[float, float]] = deque()
        """Activations that leave while states might: begin, duration."""
        self.disk = Ring(plan.nvme_slots)
        self.activations = ActivationTraffic(problem, plan, clock)
        self.back_s: dict[str, float] = {}
        """When weights that were updated in a slot are home."""
        self.written_s: dict[str, float] = {}
        in_order = (*self.first, *self.units, *self.last)
        self.place = {cost.name: place for place, (cost, _) in enumerate(in_order)}
        self.divided: deque[UnitCost] = deque()
        """Units with streamed states, of which each rank updates a part, whose updates have not begun."""

    def updates(self, step_s: float) -> None:
        """`step()` at `step_s`: the clip factor is known. Units are updated in the order the forward needs them."""
        self.clock.host_s = max(self.clock.host_s, step_s)  # the host has waited for it
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
                updated_s = self.clock.compute(
                    f"update {cost.name}", cost.own_update_s, launches_of(cost, unit).update_s, step_s
                )
                if cost.gather_s:
                    # Every rank has updated its part.
                    updated_s = self.clock.run(f"gather {cost.name}", Resource.EXCHANGE, cost.gather_s, updated_s)
                self.weight_s[cost.name] = updated_s
            else:
                updated_on_cpu.add(cost.name)
        for cost, unit in (*self.first, *self.units, *self.last):
            delay_s = self.problem.update_delay_s(offloaded_bytes(cost, unit)) if updated_on_cpu else 0.0
            if cost.name in updated_on_cpu:
                self._update_on_cpu(cost, unit, step_s, delay_s)
            elif delay_s:
                self.clock.run(f"slower updates beside the offload of {cost.name}", Resource.WORKER, delay_s, step_s)

    def _update_on_cpu(self, cost: UnitCost, unit: UnitPlan, step_s: float, delay_s: float) -> None:
        updated, ready_s = nvme_updated_bytes(cost, unit), step_s
        if updated:
            gradients, written_s = self.gradients.to_be_read(cost, unit)
            ready_s = self._read_nvme(cost, "", updated + gradients, max(step_s, written_s), each=False)
        updated_s = self.clock.run(
            f"update {cost.name}",
            Resource.WORKER,
            cost.cpu_update_s + delay_s,
            ready_s,
            self.gradients.ready_s.get(cost.name, 0.0),
        )
        self.weight_s[cost.name] = updated_s
        if updated:
            self.written_s[cost.name] = write_disk(self.problem, self.clock, f"write {cost.name}", updated, updated_s)
            self.disk.use(self.written_s[cost.name])

    def _read_nvme(self, cost: UnitCost, why: str, num_bytes: int, after_s: float, *, each: bool) -> float:
        after_s = max(after_s, self.disk.free_s(), self.written_s.get(cost.name, 0.0))
        return read_disk(self.problem, self.clock, f"read {cost.name}{why}", num_bytes, after_s, each=each)

    def forward(self, *, fresh: bool) -> float:
        """One micro-batch's forward with loss; `fresh`: the weights were just updated."""
        self.activations.begin_forward()
        self.gradients.first_micro_batch = fresh
        if fresh:
            self.crossing.clear()
            self.states_back_s = self.clock.free_s[Resource.D2H]
            in_order = (*self.first, *self.units, *self.last)
            self.divided = deque(cost for cost, unit in in_order if updates_meet_at_home(cost, unit))
            self._renew_stem(self.first)
        end_s = max((self.weight_s[cost.name] for cost, _ in self.first), default=0.0)
        for cost, unit in self.units:
            if fresh:
                if unit.updater == Updater.CPU:
                    # The host launches nothing of a unit that is being updated.
                    self.clock.host_s = max(self.clock.host_s, self.weight_s[cost.name])
                self._begin_divided(cost)
                self._spread(cost, unit)
                if self._is_published(cost, unit):
                    self._publish_one(cost)
            ready_s = self._weights_arrive(cost, unit, "forward", fresh=fresh)
            if fresh and unit.streams_states and not updates_meet_at_home(cost, unit):
                ready_s = self._streamed_update(cost, unit, ready_s, end_s)
            leaves = offloaded_bytes(cost, unit)
            ready_s = max(ready_s, end_s)
            if leaves:
                ready_s = max(ready_s, self.activations.slot_s())
            end_s = self.clock.compute(
                f"forward {cost.name}", cost.forward_s, launches_of(cost, unit).forward_s, ready_s
            )
            self._used_slot(cost, unit, end_s)
            if leaves:
                self._leave(cost, unit, end_s)
        if fresh:
            self._renew_stem(self.last)
            self.clock.wait(Resource.D2H, self.states_back_s)
        for cost, _ in self.stem:
            if cost.forward_s:
                # Head and loss, forward and backward together: the chunked loss does both chunk by chunk.
                end_s = self.clock.compute(
                    f"loss {cost.name}",
                    cost.forward_s + cost.backward_s,
                    cost.forward_launch_s,
                    end_s,
                    self.weight_s[cost.name],
                )
        return end_s

    def backward(self) -> float:
        """One micro-batch's backward; sets when each unit's gradient rests at its updater."""
        self.activations.begin_backward()
        end_s = self.clock.free_s[Resource.COMPUTE]
        early, late = stem_gradients(self.problem.stem)
        for s in early:
            end_s = self.gradients.deliver(*self.stem[s], end_s)
        for u, again in backward_order(self.plan.units):
            cost, unit = self.units[u]
            ready_s = max(end_s, self._weights_arrive(cost, unit, "again" if again else "backward", fresh=False))
            ready_s = max(ready_s, self.activations.come_back(cost, unit))
            if again:
                end_s = self.clock.compute(f"again {cost.name}", cost.forward_s, cost.forward_launch_s, ready_s)
                self._used_slot(cost, unit, end_s)
                continue
            compute_s = again_s(cost, unit) + cost.backward_s
            end_s = self.clock.compute(f"backward {cost.name}", compute_s, launches_of(cost, unit).backward_s, ready_s)
            end_s = self.gradients.deliver(cost, unit, end_s)
            self._used_slot(cost, unit, end_s)
            self.activations.used(cost, unit, end_s)
        for s in late:
            end_s = self.gradients.deliver(*self.stem[s], end_s)
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
            ready_s = self._read_nvme(cost, f" ({phase})", cost.weight_bytes, ready_s, each=True)
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

    def _leave(self, cost: UnitCost, unit: UnitPlan, computed_s: float) -> None:
        """A unit's activations leave the GPU, before states that have not begun to."""
        left_s, duration_s = self.activations.leave(cost, unit, computed_s)
        if self.states_back_s > left_s - duration_s:
            self.states_back_s += duration_s
        else:
            self.crossing.append((left_s - duration_s, duration_s))

    def _streamed_update(self, cost: UnitCost, unit: UnitPlan, weights_s: float, computed_s: float) -> float:
        """The GPU updates a unit whose states pass through it, chunk by chunk; returns when its weights are new.

        On streams of its own: as early as the states, the weights and a slot are there, while units before it compute,
        which it takes its share of time from.

        Args:
            weights_s: when the weights are on the GPU.
            computed_s: when the computation before ends.
        """
        returned_bytes = cost.weight_bytes if is_streamed(unit) else 0
        updated_s, back_s = self._pass_states(cost, returned_bytes, weights_s, computed_s)
        self.back_s[cost.name] = back_s
        self.weight_s[cost.name] = back_s if is_streamed(unit) else updated_s
        computing_s = max(computed_s, updated_s - cost.own_update_s)
        launch_s = launches_of(cost, unit).update_s
        return self.clock.compute(f"update {cost.name}", cost.own_update_s, launch_s, computing_s)

    def _begin_divided(self, upto: UnitCost) -> None:
        """Divided updates are all launched at `step()`, and run ahead of the copies of weights: this one's and those of
        the next units, as many as there are slots, which share the link with them."""
        last = self.place[upto.name] + len(self.states)
        while self.divided and self.place[self.divided[0].name] <= last:
            cost = self.divided.popleft()
            _, self.weight_s[cost.name] = self._pass_states(cost, cost.returned_weight_bytes, 0.0, 0.0)
            self.clock.run(f"update {cost.name}", Resource.COMPUTE, cost.own_update_s, 0.0)

    def _pass_states(
        self, cost: UnitCost, returned_bytes: int, weights_s: float, computed_s: float
    ) -> tuple[float, float]:
        """States come in, are updated, and leave with so many bytes of weights; returns when they are new, and home.

        Until `computed_s` the GPU computes: an update that begins before waits for the kernel that runs.
        """
        problem, clock, count = self.problem, self.clock, cost.state_chunks
        leaving_bytes = cost.streamed_out_bytes + returned_bytes
        in_s = clock.noisy(problem.h2d_s(cost.streamed_in_bytes)) / count
        out_s = clock.noisy(problem.d2h_s(leaving_bytes)) / count
        here_s = max(clock.free_s[Resource.H2D], self.states[0], self.gradients.ready_s.get(cost.name, 0.0))
        begin_s = here_s = max(here_s, self.weight_s[cost.name])
        first_s, back_s = None, self.states_back_s
        for _ in range(count):
            here_s = max(here_s, self.states[0]) + in_s
            begun_s = max(here_s, weights_s)
            if begun_s < computed_s:
                begun_s = min(begun_s + cost.kernel_wait_s, computed_s)
            updated_s = begun_s + cost.own_update_s / count
            first_s = max(back_s, updated_s) if first_s is None else first_s
            back_s = max(back_s, updated_s) + out_s
            while self.crossing and self.crossing[0][0] < back_s:
                back_s += self.crossing.popleft()[1]
            self.states.append(back_s)
        self.states_back_s = back_s
        clock.ran(f"states {cost.name}", Resource.H2D, begin_s, here_s, in_s * count, cost.streamed_in_bytes)
        clock.ran(f"states {cost.name} (back)", Resource.D2H, first_s, back_s, out_s * count, leaving_bytes)
        clock.wait(Resource.H2D, here_s)
        return updated_s, back_s

    def _used_slot(self, cost: UnitCost, unit: UnitPlan, end_s: float) -> None:
        if is_streamed(unit):
            self.slots.pop(cost.name, None)  # the latest used goes to the end
            # Weights that were updated in the slot leave it for their home.
            self.slots[cost.name] = max(end_s, self.back_s.pop(cost.name, 0.0))

    def _renew_stem(self, stem: Sequence[tuple[UnitCost, UnitPlan]]) -> None:
        """Brings the stem's weights up to date where its states rest off the GPU."""
        for cost, unit in stem:
            self._begin_divided(cost)
            self._spread(cost, unit)
            if self._is_published(cost, unit):
                self._publish_one(cost)
            elif unit.streams_states:
                self._streamed_update(cost, unit, self.weight_s[cost.name], 0.0)

    def _spread(self, cost: UnitCost, unit: UnitPlan) -> None:
        """New weights in host memory come to the other nodes, in forward order."""
        if cost.spread_s and sends_gradients(cost, unit):
            self.weight_s[cost.name] = self.clock.run(
                f"weights {cost.name} (nodes)", Resource.EXCHANGE, cost.spread_s, self.weight_s[cost.name]
            )

    @staticmethod
    def _is_published(cost: UnitCost, unit: UnitPlan) -> bool:
        """Whether new weights come to the GPU, where they rest, from a copy on the host."""
        on_host = unit.updater == Updater.CPU or updates_meet_at_home(cost, unit)
        return not is_streamed(unit) and on_host and cost.num_trainable > 0

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
    clock = Clock(random.Random(seed) if noise_frac else None, noise_frac, record)
    step = _Step(problem, plan, clock)
    begin_s = forward_s = backward_s = end_s = 0.0
    busy_before = dict(clock.busy_s)
    for _ in range(steps):
        begin_s, forward_s, backward_s = end_s, 0.0, 0.0
        busy_before = dict(clock.busy_s)
        clock.launching_s = clock.launch_waits_s = 0.0
        clock.events.clear()
        step.updates(begin_s)
        if synchronous:
            clock.wait(Resource.COMPUTE, max(step.weight_s.values(), default=begin_s))
        for micro in range(problem.accumulation_steps):
            micro_s = end_s
            loss_s = step.forward(fresh=micro == 0)
            end_s = step.backward()
            if micro + 1 == problem.accumulation_steps or not problem.has_gpu:
                # The clip factor needs all gradients; a CPU also waits for those of each micro-batch.
                end_s = clock.wait(Resource.COMPUTE, clock.free_s[Resource.EXCHANGE])
            forward_s += loss_s - micro_s
            backward_s += end_s - loss_s
    busy = {resource.value: clock.busy_s[resource] - busy_before[resource] for resource in Resource}
    return StepTimes(
        step_s=end_s - begin_s,
        forward_s=forward_s,
        backward_s=backward_s,
        compute_s=busy["compute"],
        busy_s=busy,
        launching_s=clock.launching_s,
        launch_waits_s=clock.launch_waits_s,
        events=_shifted(clock.events, begin_s),
    )


def _shifted(events: Sequence[Event], origin_s: float) -> tuple[Event, ...]:
    return tuple(replace(e, start_s=e.start_s - origin_s, end_s=e.end_s - origin_s) for e in events)
