"""`NvmeStates`: remainder and moments of one unit on NVMe, in memory only while somebody works on them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lazytrain_plugin.runtime.nvme.region import Region, padded
from lazytrain_plugin.runtime.nvme.staging import Staging, StagingBuffer
from lazytrain_plugin.runtime.nvme.tier import NvmeTier


@dataclass(frozen=True, slots=True)
class Part:
    """One flat of the record."""

    key: str
    dtype: torch.dtype
    numel: int
    offset_bytes: int


def lay_out_parts(flats: list[tuple[str, torch.dtype, int]]) -> tuple[tuple[Part, ...], int]:
    """Places (key, dtype, numel) flats one after the other, each page-aligned; returns them and the total bytes."""
    parts, end = [], 0
    for key, dtype, numel in flats:
        parts.append(Part(key, dtype, numel, end))
        end += padded(numel * dtype.itemsize)
    return tuple(parts), end


class NvmeStates:
    """One unit's states as one record on disk, staged through a shared `Staging`.

    Zero until written, as fresh states are: nothing is read or written before the first update.

    Args:
        staging: buffers of at least the record's size.
        flats: (key, dtype, numel) of each flat.
        what: names it in messages.
    """

    def __init__(
        self, tier: NvmeTier, staging: Staging, flats: list[tuple[str, torch.dtype, int]], *, what: str
    ) -> None:
        self.parts, self.nbytes = lay_out_parts(flats)
        self.tensors: dict[str, torch.Tensor] = {}
        """The flats, while in memory."""
        self.staging = staging
        self.region: Region = tier.region(self.nbytes, what=what)
        self._tier = tier
        self._buffer: StagingBuffer | None = None
        self._users = 0
        self._changed = False
        self._lock = threading.Lock()

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
                memory = self._buffer.memory
                self.tensors = {
                    part.key: memory.tensor(part.dtype, part.offset_bytes, part.numel) for part in self.parts
                }
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

    def close(self) -> None:
        """Gives the disk space back."""
        self.staging.forget(self)
        self._tier.give_back(self.region)
