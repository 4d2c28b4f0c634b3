"""The process groups of a reducer, and collectives whose failure says which phase it was and which ranks are silent."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lazytrain_plugin.comm.topology import Topology, node_key
from lazytrain_plugin.errors import CommunicationError

SIGN_OF_LIFE_S = 3.0
"""How long a rank whose collective failed waits for the others' reports before it names those that sent none."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


_spare: list = []
"""The process group of all ranks, and the groups within it that closed reducers left."""


def _spare_groups() -> dict[tuple, list[dist.ProcessGroup]]:
    """Groups are kept, not destroyed: torch gives the next group of the same ranks the name of one that is gone, and
    its ranks would find each other's old addresses under that name."""
    world = dist.group.WORLD
    if not _spare or _spare[0] is not world:
        _spare[:] = [world, {}]
    return _spare[1]


def _timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> datetime.timedelta | None:
    """The time-out that the user gave the group (`ddp_timeout` and the like); None, torch's default, if it has none."""
    try:
        return (group or dist.group.WORLD)._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None


def _options(device: torch.device, timeout: datetime.timedelta | None) -> Any:
    """NCCL's kernels go first: in line behind the blocks of a matrix product, each would wait for all of it."""
    if device.type != "cuda" or dist.get_backend_config().removeprefix("cuda:") != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options


class Hops:
    """Groups of its own, so that a reduction under way never meets another collective of the same ranks.

    `job`: all ranks; `inside`: this node's; `across`: the ranks at the same position of every node. Every rank of
    `group` makes one at the same point of its program. Only `inside` and `across` of a topology with nodes of one size
    exist; otherwise every rank counts as a node.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, topology: Topology | None, device: torch.device, timeout_s: float | None
    ) -> None:
        self.device = device
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self._timeout = _timeout_of(group, device) if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        self._groups: list[tuple[list[dist.ProcessGroup], dist.ProcessGroup]] = []
        self.job = self._new_group(range(len(self.ranks)))
        self.topology = self._discover() if topology is None else topology
        if self.topology.world_size != len(self.ranks):
            raise CommunicationError(
                f"The topology has {self.topology.world_size} ranks and the process group {len(self.ranks)}; give the "
                "nodes of this group, or none."
            )
        nodes = self.topology.nodes
        if self.topology.ranks_per_node is None:
            nodes = tuple((rank,) for rank in range(len(self.ranks)))
        node = next(node for node in nodes if self.rank in node)
        self.inside = self._subgroup(node) if len(node) > 1 else None
        peers = [other[node.index(self.rank)] for other in nodes]
        self.across = self._subgroup(peers) if len(peers) > 1 else None
        self.node_ranks = nodes
        """The ranks of each node, by position: nodes of one size, also where the topology has others."""
        self.ranks_per_node, self.nodes = len(node), len(nodes)
        self.smallest_coded_elements: int | None = None
        """From which size on codes are the faster between these nodes, once that was measured."""
        self.lines: dict[str, Any] = {}
        """What exchanges over these groups take, once that was measured (comm/links.py)."""

    def _subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Not a second one of all ranks: NCCL takes some hundred MiB of each GPU for a group."""
        return self.job if len(ranks) == len(self.ranks) else self._new_group(ranks)

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        members = tuple(self.ranks[rank] for rank in ranks)
        spare = _spare_groups().setdefault((members, self._timeout), [])
        if spare:
            group = spare.pop()
        else:
            options = _options(self.device, self._timeout)
            group = dist.new_group(
                list(members), timeout=self._timeout, pg_options=options, use_local_synchronization=True
            )
        self._groups.append((spare, group))
        return group

    def another_across(self) -> dist.ProcessGroup | None:
        """A group of the ranks of `across`, for exchanges that another thread launches beside those of `across`. Every
        rank makes it at the same point."""
        if self.across is None:
            return None
        return self._new_group([self.ranks.index(rank) for rank in dist.get_process_group_ranks(self.across)])

    def _discover(self) -> Topology:
        mine = torch.tensor([node_key()], dtype=torch.int64, device=self.device)
        keys = [torch.empty_like(mine) for _ in self.ranks]
        with self.phase("look-up of the nodes"):
            dist.all_gather(keys, mine, group=self.job)
        return Topology.from_keys([int(key) for key in keys])

    def position(self, group: dist.ProcessGroup | None) -> int:
        return 0 if group is None else dist.get_rank(group)

    # What starts a collective returns what waits for it (on CUDA, makes the current stream wait); both name the phase.

    def exchange(
        self, phase: str, received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup,
        received_sizes: list[int] | None = None, sent_sizes: list[int] | None = None,
    ) -> Callable[[], None]:  # fmt: skip
        with self.phase(phase):
            work = dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group, async_op=True)
        return lambda: self._wait(phase, work)

    def gather(
        self, phase: str, received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup
    ) -> Callable[[], None]:
        with self.phase(phase):
            work = _all_gather(received, sent, group=group, async_op=True)
        return lambda: self._wait(phase, work)

    def sum_across(self, phase: str, values: torch.Tensor) -> Callable[[], None]:
        """In place, over the ranks at this rank's position of every node."""
        with self.phase(phase):
            work = dist.all_reduce(values, group=self.across, async_op=True)
        return lambda: self._wait(phase, work)

    def _wait(self, phase: str, work: dist.Work) -> None:
        with self.phase(phase):
            work.wait()

    def sum(self, phase: str, values: torch.Tensor) -> None:
        with self.phase(phase):
            dist.all_reduce(values, group=self.job)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Each of `seconds` as the slowest rank has it."""
        values = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        with self.phase("comparison of measured times"):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.job)
        return values.tolist()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Raises CommunicationError, with the phase and the ranks that are gone, for what a backend raises."""
        begin = time.monotonic()
        try:
            yield
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise self.failed(name, time.monotonic() - begin, str(error)) from error

    def failed(self, phase: str, waited_s: float, why: str) -> CommunicationError:
        """What to raise where this rank has waited for others in vain; other ranks hear of it."""
        silent = self._silent_ranks()
        who = f"No sign of life from rank {', '.join(map(str, silent))}" if silent else "Every rank still answers"
        return CommunicationError(
            f"Rank {self.ranks[self.rank]}: the {phase} failed after {waited_s:.1f} s. "
            f"{who}; see the first error of that rank's log, then resume from the last checkpoint. ({why})"
        )

    @property
    def _failure_key(self) -> str:
        """Of the store: whether a reduction of these ranks failed; below it, the ranks that know."""
        return f"lazytrain/failed/{self.job.group_name}"

    def answer(self) -> None:
        """A rank that waits for a reduction calls it now and then. Its own collective may fail long after one of other
        ranks has: so that they name the rank that is gone and not this one."""
        with contextlib.suppress(RuntimeError, AttributeError):
            store = dist.distributed_c10d._get_default_store()
            if store.check([self._failure_key]):
                store.set(f"{self._failure_key}/{self.ranks[self.rank]}", "1")

    def _silent_ranks(self) -> list[int]:
        """Global ranks that don't report, within `SIGN_OF_LIFE_S`, that this reduction failed for them too."""
        try:
            # The store of the rendezvous: it needs no collective, and under a launcher it outlives every rank.
            store = dist.distributed_c10d._get_default_store()
            key = self._failure_key
            store.set(key, "1")
            store.set(f"{key}/{self.ranks[self.rank]}", "1")
            missing = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
            end = time.monotonic() + SIGN_OF_LIFE_S
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([f"{key}/{rank}"])]
                time.sleep(0.05)
            return missing
        except (RuntimeError, AttributeError):
            return [self.ranks[0]]  # the store lives in the first rank where there is no launcher

    def close(self, *, usable: bool) -> None:
        """Leaves the groups to the next one over the same ranks if they are `usable`; every rank calls it."""
        for spare, group in self._groups:
            if usable:
                spare.append(group)
        self._groups.clear()
