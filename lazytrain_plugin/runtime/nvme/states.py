"""`NvmeStates`: a piece of a unit's remainder and moments on NVMe, in memory only while somebody works on it.

With several ranks it is of the part that this rank updates; `PeerPart`s (runtime/nvme/peers.py) are the others' pieces.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lazytrain_plugin.errors import LazyTrainError
from lazytrain_plugin.runtime.nvme.peers import Journal, PeerPart, agree_on_places
from lazytrain_plugin.runtime.nvme.region import Region, padded
from lazytrain_plugin.runtime.nvme.staging import Staging, StagingBuffer
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.worker import UpdateWorker

Flats = list[tuple[str, torch.dtype, int]]
"""(key, dtype, numel) of each flat."""


@dataclass(frozen=True, slots=True)
class Part:
    """One flat of the record."""

    key: str
    dtype: torch.dtype
    numel: int
    offset_bytes: int


def lay_out_parts(flats: Flats) -> tuple[tuple[Part, ...], int]:
    """Places (key, dtype, numel) flats one after the other, each page-aligned; returns them and the total bytes."""
    parts, end = [], 0
    for key, dtype, numel in flats:
        parts.append(Part(key, dtype, numel, end))
        end += padded(numel * dtype.itemsize)
    return tuple(parts), end


def _tensors(buffer: StagingBuffer, parts: tuple[Part, ...]) -> dict[str, torch.Tensor]:
    return {part.key: buffer.memory.tensor(part.dtype, part.offset_bytes, part.numel) for part in parts}


class NvmeStates:
    """States as one record on disk, staged through a shared `Staging`.

    Zero until written, as fresh states are: nothing is read or written before the first update.

    Args:
        staging: buffers of at least the record's size.
        flats: (key, dtype, numel) of each flat.
        what: names it in messages.
        journal: of the parts of this node's ranks, if there are several.
    """

    def __init__(
        self, tier: NvmeTier, staging: Staging, flats: Flats, *, what: str, journal: Journal | None = None
    ) -> None:
        self.parts, self.nbytes = lay_out_parts(flats)
        self.tensors: dict[str, torch.Tensor] = {}
        """The flats, while in memory."""
        self.staging = staging
        options = {}
        if journal is not None:
            options = {"checksums": journal.checksums(journal.ranks.local_rank), "on_write": journal.follow}
        self.region: Region = tier.region(self.nbytes, what=what, **options)
        self.peers: dict[int, tuple[PeerPart, tuple[Part, ...]]] = {}
        """By local rank."""
        self._journal = journal
        self._tier = tier
        self._buffer: StagingBuffer | None = None
        self._users = 0
        self._changed = False
        self._lock = threading.Lock()

    @classmethod
    def of_ranks(
        cls,
        tier: NvmeTier,
        staging: Staging,
        flats: list[Flats],
        ranks: RankGroup,
        follower: UpdateWorker,
        *,
        what: str,
    ) -> NvmeStates:
        """This rank's part, which knows the others'; all ranks make it at the same point.

        Args:
            flats: of each local rank's part.
            follower: notes when writes are done.

        Raises:
            LazyTrainError: a rank has no room for its part.
        """
        laid_out = [lay_out_parts(of_rank) for of_rank in flats]
        journal = Journal(ranks, [nbytes for _, nbytes in laid_out], tier.block_bytes, follower, what=what)
        states = failure = None
        try:
            states = cls(tier, staging, flats[ranks.local_rank], what=what, journal=journal)
        except LazyTrainError as error:
            failure = error
        places = agree_on_places(ranks, states and states.region, failure, what=what)
        for rank, (parts, nbytes) in enumerate(laid_out):
            if rank != ranks.local_rank:
                states.peers[rank] = PeerPart(tier, journal, places[rank], rank, nbytes), parts
        return states

    @property
    def kinds(self) -> dict[str, torch.Tensor]:
        """The flats without elements: only their dtypes tell."""
        return {part.key: torch.empty(0, dtype=part.dtype) for part in self.parts}

    @property
    def num_users(self) -> int:
        return self._users

    @contextlib.contextmanager
    def in_memory(self, *, changes: bool, write_now: bool = False) -> Iterator[None]:
        """Within: `tensors` holds the flats. Nests.

        Args:
            changes: whether they are changed within; they go to the disk when the staging buffer is needed for others.
            write_now: start that at the end, in the background.

        Raises:
            StorageError: the disk failed.
        """
        with self._lock:
            self._users += 1
            if self._users == 1:
                try:
                    self._buffer = self.staging.acquire(self)
                except BaseException:
                    self._users = 0
                    raise
                self.tensors = _tensors(self._buffer, self.parts)
            if changes and self._journal is not None:
                self._journal.begin_change()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._changed = self._changed or changes
                if self._users == 0:
                    changed, self._changed, self.tensors = self._changed, False, {}
                    buffer, self._buffer = self._buffer, None
                    self.staging.release(buffer, changed=changed, write=write_now)

    @contextlib.contextmanager
    def peer_in_memory(self, rank: int) -> Iterator[dict[str, torch.Tensor]]:
        """Within: the flats of another local rank's part, to read. Errors as of `Journal.wait`."""
        peer, parts = self.peers[rank]
        with peer.in_memory(self.staging) as buffer:
            yield _tensors(buffer, parts)

    def close(self) -> None:
        """Gives the disk space back."""
        for peer, _ in self.peers.values():
            peer.close(self.staging)
        self.staging.forget(self)
        self._tier.give_back(self.region)
