"""`NvmeWeights`: the weights of one unit on NVMe, as a mapped file that `parameter.data` points into.

[Note: coherence] Weights on NVMe have readers and writers outside: whoever holds the model. So there is one copy of
them, the page cache: the mapping shows it, an upload reads it (read(2), not direct I/O), the update changes it in
place. That a mapping and read(2) of one file see the same bytes is how Linux keeps files (mmap(2), MAP_SHARED); direct
I/O beside a mapping is what open(2) warns of. Bytes go to the disk and out of memory behind each update. Blocks have no
checksums: anyone may write a weight through the model, and nobody would know.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque

import torch

from lazytrain_plugin.errors import LazyTrainError
from lazytrain_plugin.runtime.nvme import mapped_faults
from lazytrain_plugin.runtime.nvme.folder import PeerFile
from lazytrain_plugin.runtime.nvme.io import Job
from lazytrain_plugin.runtime.nvme.peers import agree_on_places
from lazytrain_plugin.runtime.nvme.region import Region
from lazytrain_plugin.runtime.nvme.staging import Staging, StagingBuffer
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.private_look import PrivateLook
from lazytrain_plugin.runtime.rank_group import RankGroup


class WeightStaging:
    """Pinned buffers between the disk and weight slots. Used by the thread that runs the model; `stage` by any."""

    def __init__(self, count: int, nbytes: int, *, pin: bool) -> None:
        self.buffers = Staging(count, nbytes, pin=pin)
        self._uploads: deque[tuple[object, StagingBuffer]] = deque()
        """Transfers that read a buffer, with the event of their end."""
        self._ending = threading.Lock()

    def stage(self, weights: NvmeWeights) -> None:
        """Brings weights to a buffer if one is free; waits for that."""
        with self._ending:
            self._end_uploads()
        reading = self.buffers.begin(weights)
        if reading is not None:
            reading.wait()

    def fetch(self, weights: NvmeWeights) -> StagingBuffer:
        """The buffer with these weights; waits for the disk. `uploaded` gives it back."""
        with self._ending:
            self._end_uploads()
            if len(self._uploads) >= self.buffers.count:
                self._end_first_upload()
        return self.buffers.acquire(weights)

    def uploaded(self, event, buffer: StagingBuffer) -> None:
        """The buffer may serve others from `event` on."""
        with self._ending:
            self._uploads.append((event, buffer))

    def _end_uploads(self) -> None:
        while self._uploads and self._uploads[0][0].query():
            self._end_first_upload()

    def _end_first_upload(self) -> None:
        event, buffer = self._uploads.popleft()
        event.synchronize()
        self.buffers.release(buffer)

    def close(self) -> None:
        self.buffers.read_ahead(())  # a buffer that comes free would be filled from a file that is gone
        while self._uploads:
            self._end_first_upload()
        self.buffers.close()


class NvmeWeights(PrivateLook):
    """Stands for the `HostBuffer` of a unit whose weights rest on NVMe. See [Note: coherence].

    Ranks of a node have one file, the first one's: each maps it, and updates its own elements there.

    Args:
        what: names it in messages.
        own: the bytes that this rank updates.
        ranks: those of the node, if there are several; all make it at the same point.
    """

    def __init__(
        self,
        tier: NvmeTier,
        staging: WeightStaging,
        nbytes: int,
        *,
        what: str,
        own: slice,
        ranks: RankGroup | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.staging = staging
        self.region: Region = _region(tier, nbytes, ranks, what=what)
        self._own = own
        self._tier = tier
        descriptor, size = self.region.files[0][1], self.region.padded_bytes
        self._map = mmap.mmap(descriptor, size)
        if ranks is not None:
            self._private = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE)
        self._bytes = self._read_from = torch.frombuffer(self._map, dtype=torch.uint8, count=size)[:nbytes]
        self._address = self._bytes.data_ptr()
        mapped_faults.watch(self._map, self._address, self.region.files[0][2])
        self._warming: Job | None = None
        self._leaving: Job | None = None
        self._is_shared = ranks is not None
        self._taken: StagingBuffer | None = None

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        """A 1-D tensor over part of the file with a storage of its own; it outlives the file's name."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes)

    # On their way to a slot.

    @property
    def staged(self) -> bool:
        """Whether `read_into` would not wait for the disk."""
        return self.has_writes or self.staging.buffers.holds(self)

    def read_into(self, device_flat: torch.Tensor) -> None:
        """Starts copying the weights to the front of a uint8 tensor on the device; `uploaded` must follow."""
        if self.has_writes:  # what this process alone shows is in memory
            device_flat[: self.nbytes].copy_(self._read_from)
            return
        self._taken = self.staging.fetch(self)
        self._taken.memory.read_into(device_flat, self.nbytes)

    def uploaded(self, event) -> None:
        """`event`: the end of the copy that `read_into` started."""
        if self._taken is None:
            return
        self.staging.uploaded(event, self._taken)
        self.staging.buffers.forget(self)  # the slot has it now
        self._taken = None

    def forget_staged(self) -> None:
        """The weights are about to change, or did."""
        self.staging.buffers.forget(self)

    # Around a change.

    def warm(self) -> None:
        """Starts bringing what this rank updates into the page cache, for an update in place; not while it leaves."""
        if self._warming is None and (self._leaving is None or self._leaving.done):
            self._warming = self.region.warm(self._own)

    def wait_until_warm(self) -> None:
        """Raises StorageError if the disk failed."""
        if self._leaving is not None:
            self._leaving.wait()
        self.warm()
        self._warming.wait()
        self._warming = None

    def let_go(self, *, updated: bool) -> None:
        """Starts bringing changes to the disk, and the weights out of memory.

        Args:
            updated: only what this rank updates was changed, and the weights go to a slot soon. So they are copied to a
                buffer, if one is free, while they are in the page cache; later they come from the disk again. Not with
                several ranks: the others' updates may be still to come.
        """
        if updated and not self._is_shared:
            self.staging.stage(self)
        span = self._own if updated else slice(0, self.nbytes)
        self._leaving = self.region.write_back(self._address, self._map, span)

    def close(self) -> None:
        """Gives the disk space back, as soon as nobody holds a view any more."""
        self.forget_staged()
        self._tier.give_back(self.region)


def _region(tier: NvmeTier, nbytes: int, ranks: RankGroup | None, *, what: str) -> Region:
    """Room for the weights: for all ranks of a node, the first one's.

    Raises:
        LazyTrainError: there is none.
    """
    if ranks is None:
        return tier.region(nbytes, what=what, direct=False)
    region = failure = None
    if ranks.is_first_of_node:
        try:
            region = tier.region(nbytes, what=what, direct=False, sharers=ranks.local_size)
        except LazyTrainError as error:
            failure = error
    places = agree_on_places(ranks, region, failure, what=what)
    if region is not None:
        return region
    path, direct = places[0][0]
    file = PeerFile(path, direct=direct, writes=True)
    return tier.mapped_peer_region(file, nbytes, what=what, sharers=ranks.local_size)
