"""What ranks of a node have of each other's parts on NVMe.

Each rank keeps its own part of a unit's states in a folder of its own, and writes nothing else. Whoever wants a whole
tensor (a checkpoint, a move to the GPU) reads the others' parts from their files.

[Note: who may read when] Memory that the ranks share (`Journal`) holds the checksums of all parts and, of each part,
how often it was changed and which change is on the disk. A rank counts a change before it makes one, so before it says
that its update is done; whoever knows that an update is done and then waits for the two counts to be equal reads what
that update made. Nobody changes a part meanwhile: the next update needs the gradients of the rank that reads. What a
move or a checkpoint puts there is read after a barrier, since a rank that has not begun to change a part looks as if it
were done.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator

from lazytrain_plugin.errors import CommunicationError, LazyTrainError, StorageError
from lazytrain_plugin.runtime.nvme.folder import PeerFile
from lazytrain_plugin.runtime.nvme.io import Job
from lazytrain_plugin.runtime.nvme.region import Region, num_blocks
from lazytrain_plugin.runtime.nvme.staging import Staging, StagingBuffer
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.rank_group import POLL_S, RankGroup
from lazytrain_plugin.runtime.worker import UpdateWorker

_FAILED = -1


class Journal:
    """Counts and checksums of every rank's part of one thing on disk; all ranks make it at the same point.

    Args:
        sizes: bytes of each local rank's part.
        what: names it in messages.
    """

    def __init__(
        self, ranks: RankGroup, sizes: list[int], block_bytes: int, follower: UpdateWorker, *, what: str
    ) -> None:
        self.ranks, self.what = ranks, what
        self._follower = follower
        self._num_blocks = [num_blocks(size, block_bytes) for size in sizes]
        counts_bytes = 16 * len(sizes)
        self._map = ranks.share(counts_bytes + 8 * sum(self._num_blocks))[0]
        counts = memoryview(self._map)[:counts_bytes].cast("q")
        self._changes, self._on_disk = counts[: len(sizes)], counts[len(sizes) :]

    def checksums(self, rank: int) -> ctypes.Array:
        """Of a local rank's part."""
        first = 2 * len(self._num_blocks) + sum(self._num_blocks[:rank])
        return (ctypes.c_uint64 * self._num_blocks[rank]).from_buffer(self._map, 8 * first)

    def changes(self, rank: int) -> int:
        """How often a rank's part was changed."""
        return self._changes[rank]

    def begin_change(self) -> None:
        """This rank is about to change its part."""
        self._changes[self.ranks.local_rank] += 1

    def follow(self, job: Job) -> None:
        """This rank has begun to write its part, which nobody changes before that is done."""
        mine = self.ranks.local_rank
        number = self._changes[mine]

        def note() -> None:
            try:
                job.wait()
            except BaseException:  # raised by whoever needs the disk next
                number_now = _FAILED
            else:
                number_now = number
            self._on_disk[mine] = number_now

        self._follower.submit(note, f"writing of {self.what}")

    def wait(self, rank: int) -> None:
        """Returns when a rank's part is on disk as that rank last changed it.

        Raises:
            StorageError: its disk failed.
            CommunicationError: it did not come there within the time-out.
        """
        ranks, end = self.ranks, time.monotonic() + self.ranks.timeout_s
        while (written := self._on_disk[rank]) != self._changes[rank]:
            if written == _FAILED:
                raise StorageError(
                    f"Rank {ranks.rank}: {self.what} can't be read: rank {ranks.local_ranks[rank]} of this node could "
                    "not write its part; see the first error of that rank's log, then resume from the last checkpoint"
                )
            if time.monotonic() > end:
                raise CommunicationError(
                    f"Rank {ranks.rank}: rank {ranks.local_ranks[rank]} did not write its part of {self.what} within "
                    f"{ranks.timeout_s:.0f} s. Ask for whole optimizer states on every rank, or after all of them "
                    "called engine.flush()"
                )
            time.sleep(POLL_S)


class PeerPart:
    """Another rank's part, to read; its files are opened at the first use.

    Args:
        places: path of each file, and whether it goes past the page cache.
        rank: the local rank that has it.
    """

    def __init__(
        self, tier: NvmeTier, journal: Journal, places: list[tuple[str, bool]], rank: int, nbytes: int
    ) -> None:
        self._tier, self._journal, self._places, self._rank, self._nbytes = tier, journal, places, rank, nbytes
        self._region: Region | None = None
        self._seen = 0
        """Which change a staging buffer holds."""

    @property
    def region(self) -> Region:
        """Raises StorageError if it can't be read."""
        if self._region is None:
            self._region = self._tier.peer_region(
                [PeerFile(path, direct=direct) for path, direct in self._places],
                self._nbytes,
                what=self._journal.what,
                checksums=self._journal.checksums(self._rank),
            )
        return self._region

    @contextlib.contextmanager
    def in_memory(self, staging: Staging) -> Iterator[StagingBuffer]:
        """Within: a buffer holds it as its rank last changed it. Errors as of `Journal.wait`."""
        self._journal.wait(self._rank)
        if self._seen != self._journal.changes(self._rank):
            staging.forget(self)
            self._seen = self._journal.changes(self._rank)
        buffer = staging.acquire(self)
        try:
            yield buffer
        finally:
            staging.release(buffer)

    def close(self, staging: Staging) -> None:
        staging.forget(self)
        if self._region is not None:
            self._region.wait()
            self._region.close()
            self._region = None


def agree_on_places(ranks: RankGroup, region: Region | None, failure: LazyTrainError | None, *, what: str) -> list:
    """The places (see `PeerPart`) of each local rank's region; every rank calls it at the same point.

    Args:
        region: this rank's.
        failure: why there is none.

    Raises:
        LazyTrainError: `failure`.
        StorageError: another rank has none.
    """
    mine = None if region is None else [(path, folder.direct) for folder, _, path in region.files]
    everyone = ranks.gather_objects((mine, failure and str(failure)), f"making room for {what}")
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise StorageError(f"Rank {rank}: {text}")
    return [everyone[index][0] for index in ranks.local_indices]
