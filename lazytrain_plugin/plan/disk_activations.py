"""The simulator's part for activations on NVMe: host buffers that they cross, writes, and reads ahead of backward."""

from __future__ import annotations

from lazytrain_plugin.plan.clock import Clock, Resource
from lazytrain_plugin.plan.problem import PlacementProblem


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
        write_s = self._problem.nvme_write_s(num_bytes)
        self._written_s[name] = self._clock.run(
            f"write activations {name}", Resource.NVME_WRITE, write_s, left_s, num_bytes=num_bytes
        )

    def read(self, name: str) -> float:
        """When they are in host memory again."""
        if name in self._buffers:
            return 0.0
        slots = self._problem.nvme_slots
        free_s = self._back_s[-slots] if len(self._back_s) >= slots else 0.0
        num_bytes = self._num_bytes[name]
        read_s = self._problem.nvme_read_s(num_bytes)
        return self._clock.run(
            f"read activations {name}",
            Resource.NVME_READ,
            read_s,
            free_s,
            self._written_s[name],
            num_bytes=num_bytes,
        )

    def returned(self, back_s: float) -> None:
        """They are on the GPU: their buffer is free."""
        self._back_s.append(back_s)
