"""`NvmeWeights`: the weights of one unit on NVMe, as a mapped file that `parameter.data` points into.

[Note: coherence] Weights on NVMe have readers and writers outside: whoever holds the model. So there is one copy of
them, the page cache: the mapping shows it, an upload reads it (read(2), not direct I/O), the update changes it in
place. That a mapping and read(2) of one file see the same bytes is how Linux keeps files (mmap(2), MAP_SHARED); direct
I/O beside a mapping is what open(2) warns of. Bytes go to the disk and out of memory behind each update. Blocks have no
checksums: anyone may write a weight through the model, and nobody would know.
"""

from __future__ import annotations

import mmap
from collections import deque

import torch

from lazytrain_plugin.runtime.nvme import mapped_faults
from lazytrain_plugin.runtime.nvme.io import Job
from lazytrain_plugin.runtime.nvme.region import Region
from lazytrain_plugin.runtime.nvme.staging import Staging, StagingBuffer
from lazytrain_plugin.runtime.nvme.tier import NvmeTier


class WeightStaging:
    """Pinned buffers between the disk and weight slots. Used by the thread that runs the model only."""

    def __init__(self, count: int, nbytes: int, *, pin: bool) -> None:
        self.buffers = Staging(count, nbytes, pin=pin)
        self._uploads: deque[tuple[object, StagingBuffer]] = deque()
        """Transfers that read a buffer, with the event of their end."""

    def fetch(self, weights: NvmeWeights) -> StagingBuffer:
        """The buffer with these weights; waits for the disk. `uploaded` gives it back."""
        while self._uploads and (len(self._uploads) >= self.buffers.count or self._uploads[0][0].query()):
            self._end_first_upload()
        return self.buffers.acquire(weights)

    def uploaded(self, event, buffer: StagingBuffer) -> None:
        """The buffer may serve others from `event` on."""
        self._uploads.append((event, buffer))

    def _end_first_upload(self) -> None:
        event, buffer = self._uploads.popleft()
        event.synchronize()
        self.buffers.release(buffer)

    def close(self) -> None:
        while self._uploads:
            self._end_first_upload()
        self.buffers.close()


class NvmeWeights:
    """Stands for the `HostBuffer` of a unit whose weights rest on NVMe. See [Note: coherence].

    Args:
        what: names it in messages.
    """

    def __init__(self, tier: NvmeTier, staging: WeightStaging, nbytes: int, *, what: str) -> None:
        self.nbytes = nbytes
        self.staging = staging
        self.region: Region = tier.region(nbytes, what=what, direct=False)
        self._tier = tier
        self._map = mmap.mmap(self.region.files[0][1], self.region.padded_bytes)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        mapped_faults.watch(self._map, self._address, self.region.files[0][2])
        self._warming: Job | None = None
        self._taken: StagingBuffer | None = None

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        """A 1-D tensor over part of the file with a storage of its own; it outlives the file's name."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes)

    shown = tensor

    # On their way to a slot.

    @property
    def staged(self) -> bool:
        """Whether `read_into` would not wait for the disk."""
        return self.staging.buffers.holds(self)

    def read_into(self, device_flat: torch.Tensor) -> None:
        """Starts copying the weights to the front of a uint8 tensor on the device; `uploaded` must follow."""
        self._taken = self.staging.fetch(self)
        self._taken.memory.read_into(device_flat, self.nbytes)

    def uploaded(self, event) -> None:
        """`event`: the end of the copy that `read_into` started."""
        self.staging.uploaded(event, self._taken)
        self.staging.buffers.forget(self)  # the slot has it now
        self._taken = None

    def forget_staged(self) -> None:
        """The weights are about to change, or did."""
        self.staging.buffers.forget(self)

    # Around a change.

    def warm(self) -> None:
        """Starts bringing the weights into the page cache, for an update in place."""
        if self._warming is None:
            self._warming = self.region.warm()

    def wait_until_warm(self) -> None:
        """Raises StorageError if the disk failed."""
        self.warm()
        self._warming.wait()
        self._warming = None

    def let_go(self) -> None:
        """Starts bringing changes to the disk, and the weights out of memory."""
        self.region.write_back(self._address, self._map)

    def close(self) -> None:
        """Gives the disk space back, as soon as nobody holds a view any more."""
        self.forget_staged()
        self._tier.give_back(self.region)
