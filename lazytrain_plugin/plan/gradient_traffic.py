"""The simulator's part for gradients: to other ranks, home, and on to NVMe, through the places that there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lazytrain_plugin.plan.accounting import nvme_gradient_bytes, sends_gradients
from lazytrain_plugin.plan.clock import Clock, Resource, Ring
from lazytrain_plugin.plan.disk_traffic import read_disk, write_disk
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.profile.model import UnitRole

MEANS = 2
"""Parts of exchanged gradients that a rank holds at a time: one is made while one is on its way home."""


def stem_gradients(stem: Sequence[UnitCost]) -> tuple[list[int], list[int]]:
    """Places of stem units whose gradients the loss makes (the head's, then those of what lies between it and the last
    unit: the final norm), and of those that come last (the embedding's)."""
    with_role = lambda role: [s for s, cost in enumerate(stem) if cost.role == role]  # noqa: E731
    return [*with_role(UnitRole.HEAD), *with_role(UnitRole.REST)], with_role(UnitRole.EMBEDDING)


class GradientTraffic:
    """Gradients of one backward after the other."""

    def __init__(self, problem: PlacementProblem, plan: PlacementPlan, clock: Clock) -> None:
        self._problem, self._clock = problem, clock
        self.ready_s: dict[str, float] = {}
        """When a unit's were where its updater takes them from."""
        self._places = Ring(plan.gradient_slots)
        self._means = Ring(MEANS)
        """This rank's parts of what ranks have exchanged, until they are home."""
        self._buffers = Ring(plan.nvme_slots)
        """In host memory, for those on their way to NVMe."""
        self._buffered: deque[str] = deque(maxlen=plan.nvme_slots)
        """Units whose gradients are still in one."""
        self._written_s: dict[str, float] = {}
        self.first_micro_batch = True

    def deliver(self, cost: UnitCost, unit: UnitPlan, computed_s: float) -> float:
        """A unit's gradients are there; returns when the compute stream goes on.

        Those that go home, or meet those of other ranks, take a place, the stem's as the units': with all places taken
        it waits for the oldest.
        """
        meets_s, sends = cost.exchange_s, sends_gradients(cost, unit)
        if not (meets_s or sends):
            self.ready_s[cost.name] = computed_s
            return computed_s
        if meets_s:
            slot_s = self._means.free_s() if sends else 0.0
            computed_s = self._clock.run(
                f"exchange {cost.name}", Resource.EXCHANGE, meets_s, computed_s, slot_s, num_bytes=cost.gradient_bytes
            )
            self._places.use(computed_s)
        self.ready_s[cost.name] = self._send(cost, unit, computed_s, exchanged=meets_s > 0) if sends else computed_s
        return self._clock.wait(Resource.COMPUTE, self._places.free_s())

    def to_be_read(self, cost: UnitCost, unit: UnitPlan) -> tuple[int, float]:
        """What an update reads of a unit's gradients from NVMe, and when that can be read. Those that came last are
        still in memory."""
        if cost.name in self._buffered:
            return 0, 0.0
        return nvme_gradient_bytes(cost, unit), self._written_s.get(cost.name, 0.0)

    def _send(self, cost: UnitCost, unit: UnitPlan, computed_s: float, *, exchanged: bool) -> float:
        """A unit's gradients go home; returns when they can be used there."""
        on_disk, buffer_s = nvme_gradient_bytes(cost, unit), 0.0
        if on_disk:
            # The host waits for a buffer, and launches nothing meanwhile.
            buffer_s = self._buffers.free_s()
            self._clock.wait(Resource.COMPUTE, buffer_s)
        ready_s = max(computed_s, buffer_s)
        sent_s = self._clock.run(
            f"gradients {cost.name}", Resource.D2H, cost.gradient_d2h_s, ready_s, num_bytes=cost.gradient_bytes
        )
        if exchanged or cost.has_gradient_place:
            (self._means if exchanged else self._places).use(sent_s)
        if on_disk:
            return self._to_disk(cost, on_disk, sent_s)
        return self._accumulate(cost, sent_s)

    def _to_disk(self, cost: UnitCost, num_bytes: int, sent_s: float) -> float:
        """They are written, or added to sums that come to memory for it; returns when they can be used."""
        problem, clock, name = self._problem, self._clock, cost.name
        if cost.accumulate_s and not self.first_micro_batch:
            written_s = self._written_s.get(name, 0.0)
            sent_s = read_disk(problem, clock, f"read gradients {name}", num_bytes, sent_s, written_s)
        ready_s = self._accumulate(cost, sent_s)
        self._written_s[name] = write_disk(problem, clock, f"write gradients {name}", num_bytes, ready_s)
        self._buffers.use(self._written_s[name])
        self._buffered.append(name)
        return ready_s

    def _accumulate(self, cost: UnitCost, arrived_s: float) -> float:
        if not cost.accumulate_s:
            return arrived_s
        return self._clock.run(f"accumulate {cost.name}", Resource.WORKER, cost.accumulate_s, arrived_s)
