"""The simulator's part for activations: off the GPU and back, through host buffers where they rest on NVMe."""

from __future__ import annotations

from dataclasses import replace

from lazytrain_plugin.plan.accounting import offloaded_bytes
from lazytrain_plugin.plan.clock import Clock, Resource, Ring
from lazytrain_plugin.plan.disk_traffic import read_disk, write_disk
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.vocab import Tier


class ActivationTraffic:
    """One micro-batch's activations between forward and backward."""

    def __init__(self, problem: PlacementProblem, plan: PlacementPlan, clock: Clock) -> None:
        self._problem, self._clock = problem, clock
        self._leaving = Ring(plan.activation_slots)
        self._returning = Ring(plan.activation_slots)
        self._disk = DiskActivations(replace(problem, nvme_slots=plan.nvme_slots), clock)
        self._left_s: dict[str, float] = {}
        """When activations that are off the GPU had left it."""
        self._back_s: dict[str, float] = {}
        """When those of this backward were back."""

    def begin_forward(self) -> None:
        self._leaving.clear()
        self._disk.clear()

    def begin_backward(self) -> None:
        self._returning.clear()
        self._back_s.clear()

    def slot_s(self) -> float:
        """When a unit whose activations are to leave may compute."""
        return self._leaving.free_s()

    def leave(self, cost: UnitCost, unit: UnitPlan, computed_s: float) -> tuple[float, float]:
        """A unit's activations leave the GPU; returns when they have left, and the seconds that it took."""
        num_bytes, on_disk = offloaded_bytes(cost, unit), offloaded_bytes(cost, unit, (Tier.NVME,))
        duration_s = self._problem.d2h_s(num_bytes)
        if on_disk:
            computed_s = max(computed_s, self._disk.buffer_s())
        left_s = self._clock.run(
            f"activations {cost.name} (forward)", Resource.D2H, duration_s, computed_s, num_bytes=num_bytes
        )
        if on_disk:
            self._disk.leave(cost.name, on_disk, left_s)
        self._left_s[cost.name] = left_s
        self._leaving.use(left_s)
        return left_s, duration_s

    def come_back(self, cost: UnitCost, unit: UnitPlan) -> float:
        """When a unit's activations are on the GPU again; they come once, the input of an edge's source early."""
        returns = offloaded_bytes(cost, unit)
        if not returns or cost.name not in self._left_s:
            return self._back_s.get(cost.name, 0.0)
        left_s, on_disk = self._left_s.pop(cost.name), offloaded_bytes(cost, unit, (Tier.NVME,))
        if on_disk:
            left_s = max(left_s, self._disk.read(cost.name))
        back_s = self._clock.run(
            f"activations {cost.name} (backward)",
            Resource.H2D,
            self._problem.h2d_s(returns),
            left_s,
            self._returning.free_s(),
            num_bytes=returns,
        )
        if on_disk:
            self._disk.returned(back_s)
        self._back_s[cost.name] = back_s
        return back_s

    def used(self, cost: UnitCost, unit: UnitPlan, end_s: float) -> None:
        """The unit's backward has ended."""
        if offloaded_bytes(cost, unit):
            self._returning.use(end_s)


class DiskActivations:
    """One micro-batch's activations on NVMe, as the runtime moves them (runtime/nvme/activations.py).

    Each unit's crosses one of `nvme_slots` buffers in host memory, which keeps it until others need the place: of the
    units that ran last, which run backward first, nothing is read.
    """

    def __init__(self, problem: PlacementProblem, clock: Clock) -> None:
        self._problem, self._clock = problem, clock
        self.clear()

    def clear(self) -> None:
        """A new micro-batch."""
        self._written_s: dict[str, float] = {}
        self._num_bytes: dict[str, int] = {}
        self._buffers: list[str] = []
        """What is in a buffer, the oldest first."""
        self._back_s: list[float] = []

    def buffer_s(self) -> float:
        """When the next unit's may leave for a buffer: one has been written to the disk."""
        if len(self._buffers) < self._problem.nvme_slots:
            return 0.0
        return self._written_s[self._buffers[0]]

    def leave(self, name: str, num_bytes: int, left_s: float) -> None:
        """They have left the GPU for a buffer."""
        if len(self._buffers) == self._problem.nvme_slots:
            self._buffers.pop(0)
        self._buffers.append(name)
        self._num_bytes[name] = num_bytes
        what = f"write activations {name}"
        self._written_s[name] = write_disk(self._problem, self._clock, what, num_bytes, left_s, each=True)

    def read(self, name: str) -> float:
        """When they are in host memory again."""
        if name in self._buffers:
            return 0.0
        slots = self._problem.nvme_slots
        free_s = self._back_s[-slots] if len(self._back_s) >= slots else 0.0
        what, num_bytes = f"read activations {name}", self._num_bytes[name]
        return read_disk(self._problem, self._clock, what, num_bytes, free_s, self._written_s[name], each=True)

    def returned(self, back_s: float) -> None:
        """They are on the GPU: their buffer is free."""
        self._back_s.append(back_s)
