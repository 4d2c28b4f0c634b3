"""`RankGroup`: the ranks that train one model together, and what they tell each other.

The ranks of a node share one copy of the model and its optimizer states in host memory: each maps all of it, and
updates a part of its own. (States on the GPUs are divided: each rank has those of its part.) So a rank reads whole
weights without asking anybody, whatever the others do at that moment, and needs to know one thing only: that all of
them have updated a unit. That is a counter in shared memory (`UpdateCounters`). Collectives are left where gradients
meet, and where weights on the GPUs do after their update; they are launched by one thread, in one order.

Between nodes everything is replicated, and gradients are averaged. Or the states are divided over all ranks of the job
(`Shard.JOB`): then each rank updates a part of its node's part, and its copy of the weights' other parts comes from the
ranks at its position of the other nodes.
"""

from __future__ import annotations

import datetime
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lazytrain_plugin.comm.hops import Hops
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.errors import CommunicationError
from lazytrain_plugin.runtime.worker import LOOK_UP_S
from lazytrain_plugin.units import align_up, format_bytes
from lazytrain_plugin.vocab import Shard

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.layout import FlatLayout

POLL_S = 2e-4
"""Between two looks at a counter of another rank."""
DEFAULT_TIMEOUT_S = 1800.0
BEFORE_NCCL_FRAC = 0.9
"""At its time-out NCCL's watchdog ends the process, and doesn't say which rank was missing."""
_FAILED = -1


@dataclass(frozen=True, slots=True)
class Source:
    """The rank whose values a node takes over: the first that has some, or the first of this node where that has the
    same."""

    rank: int
    """Its position among all ranks that train together."""
    crosses_nodes: bool
    """All nodes take that rank's values."""


class RankGroup:
    """Every rank of `group` makes one at the same point of its program.

    Args:
        group: default: all ranks.
        device: of the gradients.
        topology: default: found from the launcher and host names.
        timeout_s: how long one rank waits for another; default: the group's.
        shard: over which ranks states are divided; on one node there is no difference.

    Raises:
        CommunicationError: a rank is gone.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        topology: Topology | None = None,
        timeout_s: float | None = None,
        shard: Shard = Shard.NODE,
    ) -> None:
        self.hops = hops = Hops(group, topology, device, timeout_s)
        self.device = device
        self.size = len(hops.ranks)
        self.rank = hops.rank
        self.num_nodes = hops.nodes
        self.local_size = hops.ranks_per_node
        self.local_rank = hops.position(hops.inside)
        self.shards_job = shard == Shard.JOB and hops.across is not None
        """States are divided over all ranks, and not over those of each node."""
        self.num_parts = self.size if self.shards_job else self.local_size
        """Ranks among which a unit's update is divided."""
        node = hops.position(hops.across)
        self.own_part = self.local_rank * self.num_nodes + node if self.shards_job else self.local_rank
        """Number of this rank's part. The parts of one position in all nodes are neighbours: together they are what its
        ranks would have if each node had all states."""
        owners = zip(*hops.node_ranks, strict=True)
        if not self.shards_job:
            owners = ((rank,) for rank in hops.node_ranks[node])
        self.owners = [rank for ranks in owners for rank in ranks]
        """By part the position of its rank among all that train together."""
        self.weights_group = hops.another_across() if self.shards_job else None
        """For updated weights, which meet while gradients of the next step may."""
        timeout = hops._timeout
        self.timeout_s = timeout.total_seconds() if timeout is not None else DEFAULT_TIMEOUT_S
        if device.type == "cuda":
            self.timeout_s *= BEFORE_NCCL_FRAC
        # What is agreed upon is small and on the host, so it goes a way of its own.
        self._control = dist.new_group(hops.ranks, backend="gloo", timeout=datetime.timedelta(seconds=self.timeout_s))
        members = hops.ranks if hops.inside is None else dist.get_process_group_ranks(hops.inside)
        self.local_ranks = members if hops.inside is not None else [hops.ranks[self.rank]]
        """Of this node, as the whole job counts them."""
        self.local_indices = [hops.ranks.index(rank) for rank in self.local_ranks]
        """Their positions among the ranks that train together."""
        self._control_inside = None
        if hops.inside is not None:
            limit = datetime.timedelta(seconds=self.timeout_s)
            self._control_inside = dist.new_group(
                self.local_ranks, backend="gloo", timeout=limit, use_local_synchronization=True
            )

        self._pids = [pid for i, pid in enumerate(self.gather_objects(os.getpid(), "start")) if i in self.local_indices]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_of_first_node(self) -> bool:
        return self.hops.ranks[0] in self.local_ranks

    @property
    def is_first_of_node(self) -> bool:
        return self.local_rank == 0

    def part(self, layout: FlatLayout) -> tuple[int, int]:
        """[first, end) of a unit's trained elements that this rank updates."""
        return layout.part(self.own_part, self.num_parts)

    # Agreement.

    def barrier(self, phase: str) -> None:
        """Returns when every rank has called it."""
        self.maximum([0], phase)

    def barrier_of_node(self, phase: str) -> None:
        """Returns when every rank of this node has called it."""
        if self._control_inside is not None:
            with self.hops.phase(phase):
                dist.all_reduce(torch.zeros(1, dtype=torch.uint8), group=self._control_inside)

    def barrier_of_owners(self, phase: str) -> None:
        """Returns when every rank has called it among which states are divided."""
        if self.shards_job:
            self.barrier(phase)
        else:
            self.barrier_of_node(phase)

    def maximum(self, values: Sequence[int], phase: str) -> list[int]:
        """Each value as the largest over all ranks."""
        mine = torch.tensor(values, dtype=torch.int64)
        with self.hops.phase(phase):
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._control)
        return mine.tolist()

    def gather(self, values: torch.Tensor, phase: str) -> torch.Tensor:
        """[ranks, ...] of a CPU tensor that has the same shape on every rank."""
        received = [torch.empty_like(values) for _ in range(self.size)]
        with self.hops.phase(phase):
            dist.all_gather(received, values, group=self._control)
        return torch.stack(received)

    def gather_objects(self, mine: Any, phase: str) -> list[Any]:
        """What each rank has, in the order of ranks."""
        everyone: list[Any] = [None] * self.size
        with self.hops.phase(phase):
            dist.all_gather_object(everyone, mine, group=self._control)
        return everyone

    def from_first(self, make: Callable[[], Any], phase: str) -> Any:
        """What `make` returns on the first rank, on every rank; what it raises there is raised everywhere."""
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer[0] = make()
            except Exception as error:
                answer[1] = error
        with self.hops.phase(phase):
            dist.broadcast_object_list(answer, src=self.hops.ranks[0], group=self._control)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def copy_of_first(self, values: torch.Tensor, phase: str) -> None:
        """Overwrites a contiguous tensor, on `device` or the CPU, with the first rank's."""
        self.copy_of(0, values, phase)

    def copy_of(self, rank: int, values: torch.Tensor, phase: str) -> None:
        """As `copy_of_first`, of any rank."""
        group = self._control if values.device.type == "cpu" else self.hops.job
        with self.hops.phase(phase):
            # As bytes: backends do not know every dtype.
            dist.broadcast(values.view(torch.uint8), src=self.hops.ranks[rank], group=group)

    def copy_of_owner(self, values: torch.Tensor, part: int, phase: str) -> None:
        """Overwrites a contiguous CPU tensor with that of the rank that has a part; all that have one call it."""
        group = self._control if self.shards_job else self._control_inside
        if group is not None and values.numel():
            with self.hops.phase(phase):
                dist.broadcast(values.view(torch.uint8), src=self.hops.ranks[self.owners[part]], group=group)

    def sources(self, digests: Sequence[int], phase: str) -> list[Source | None]:
        """Of each thing whose values this node takes over; None: no rank has values of its own for it.

        Args:
            digests: of this rank's own values; 0: it has none.
        """
        everyone = self.gather(torch.tensor(digests, dtype=torch.int64), phase)
        return [self._source(column) for column in everyone.T.tolist()]

    def _source(self, digests: list[int]) -> Source | None:
        having = [rank for rank, digest in enumerate(digests) if digest]
        if not having:
            return None
        firsts = [next((rank for rank in node if digests[rank]), None) for node in self.hops.node_ranks]
        if None in firsts or len({digests[rank] for rank in firsts}) > 1:
            return Source(having[0], crosses_nodes=True)
        return Source(next(rank for rank in firsts if rank in self.local_indices), crosses_nodes=False)

    def gone(self) -> list[int]:
        """Ranks of this node whose process has ended."""
        return [rank for rank, pid in zip(self.local_ranks, self._pids, strict=True) if not _runs(pid)]

    def give_up_on_others(self, phase: str, waited_s: float) -> None:
        """Raises CommunicationError where waiting any longer is in vain: a rank of this node is gone, or time is up."""
        self.hops.answer()
        if gone := self.gone():
            raise self.hops.failed(phase, waited_s, f"the process of rank {', '.join(map(str, gone))} has ended")
        if waited_s > self.timeout_s:
            raise self.hops.failed(phase, waited_s, f"time-out after {self.timeout_s:.0f} s")

    # Memory of the node.

    def share(self, nbytes: int) -> tuple[mmap.mmap, mmap.mmap]:
        """`nbytes` of zeroed memory that the ranks of this node share, and a private look at it.

        What is written to the second mapping stays in this process, page by page, until those pages are dropped; where
        nothing was written, it shows what is in the first. Not in /dev/shm: containers make that small.
        """
        size = align_up(max(nbytes, 1), mmap.PAGESIZE)
        descriptor, place, failure = -1, None, ""
        try:
            if self.is_first_of_node:
                descriptor = os.memfd_create("lazytrain")
                os.ftruncate(descriptor, size)
                place = (os.getpid(), descriptor)
        except OSError as error:
            failure = str(error)
        places = self.gather_objects(place, "sharing of host memory")
        try:
            if not self.is_first_of_node:
                pid, number = places[self.local_indices[0]] or (0, 0)
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
            maps = tuple(mmap.mmap(descriptor, size, flags=kind) for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE))
        except OSError as error:
            failure = failure or str(error)
        failures = self.maximum([int(bool(failure))], "sharing of host memory")  # and all have opened it
        if descriptor >= 0:
            os.close(descriptor)
        if failures[0]:
            raise CommunicationError(
                f"The ranks of this node can't share {format_bytes(nbytes)} of host memory"
                f"{f' ({failure})' if failure else ''}; they must run as one user in one container (/proc of the first "
                "rank must be readable), with enough free memory."
            )
        return maps

    def update_counters(self, num_units: int) -> UpdateCounters:
        """Counters of this node, all 0; every rank makes them at the same point."""
        return UpdateCounters(self, num_units)


def _runs(pid: int) -> bool:
    """Whether a process of this machine is there, and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class UpdateCounters:
    """How many updates of each unit each rank of this node has done."""

    def __init__(self, ranks: RankGroup, num_units: int) -> None:
        self._ranks = ranks
        nbytes = 8 * num_units * ranks.local_size
        # No tensor: the interpreter may end while a thread of its own waits, which torch does not take well.
        self._done = memoryview(ranks.share(nbytes)[0])[:nbytes].cast("q")

    def _of(self, unit: int) -> list[int]:
        size = self._ranks.local_size
        return self._done[unit * size : (unit + 1) * size].tolist()

    def count(self, unit: int, number: int) -> None:
        """This rank's part of the unit's update `number` is in memory."""
        self._done[unit * self._ranks.local_size + self._ranks.local_rank] = number

    def fail(self, unit: int) -> None:
        """This rank can't update its part of the unit, now or later."""
        self._done[unit * self._ranks.local_size + self._ranks.local_rank] = _FAILED

    def wait(self, unit: int, number: int, name: str) -> None:
        """Returns when every rank of the node has done that update.

        Raises:
            CommunicationError: a rank failed, or did not within the time-out.
        """
        begin = look = time.monotonic()
        gone: list[int] = []
        while min(done := self._of(unit)) < number:
            if (now := time.monotonic()) >= look + LOOK_UP_S:
                look, gone = now, self._ranks.gone()
            if _FAILED in done or gone or now > begin + self._ranks.timeout_s:
                late = gone or [rank for rank, n in zip(self._ranks.local_ranks, done, strict=True) if n < number]
                waited = f"did not end within {self._ranks.timeout_s:.0f} s"
                how = "failed there" if _FAILED in done else "ended with that process" if gone else waited
                raise CommunicationError(
                    f"Rank {self._ranks.rank}: the optimizer update of {name} on rank {', '.join(map(str, late))} "
                    f"{how}; see the first error of that rank's log, then resume from the last checkpoint."
                )
            time.sleep(POLL_S)
