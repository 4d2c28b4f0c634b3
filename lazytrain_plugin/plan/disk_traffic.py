"""The simulator's disk: reads and writes are queues of their own that take each other's time.

What one direction loses to the other is counted where the other's operation is booked (`nvme_read_delay_s`). So a disk
is as long in use as all that is read and written takes together, whatever the order; that the two also meet at the same
moment is not looked at. The program counts alike (Eq. 11, 20).
"""

from __future__ import annotations

from lazytrain_plugin.plan.clock import Clock, Resource
from lazytrain_plugin.plan.problem import PlacementProblem


def read_disk(
    problem: PlacementProblem, clock: Clock, name: str, num_bytes: int, *after_s: float, each: bool = False
) -> float:
    """Ends a read that begins after `after_s`; returns when. `each`: every rank reads as much."""
    read_s = problem.nvme_read_s(num_bytes, each=each)
    end_s = clock.run(name, Resource.NVME_READ, read_s, *after_s, num_bytes=num_bytes)
    clock.free_s[Resource.NVME_WRITE] += problem.nvme_write_delay_s(num_bytes, each=each)
    return end_s


def write_disk(
    problem: PlacementProblem, clock: Clock, name: str, num_bytes: int, *after_s: float, each: bool = False
) -> float:
    """Ends a write that begins after `after_s`; returns when. `each`: every rank writes as much."""
    write_s = problem.nvme_write_s(num_bytes, each=each)
    end_s = clock.run(name, Resource.NVME_WRITE, write_s, *after_s, num_bytes=num_bytes)
    clock.free_s[Resource.NVME_READ] += problem.nvme_read_delay_s(num_bytes, each=each)
    return end_s
