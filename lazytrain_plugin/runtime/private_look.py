"""`PrivateLook`: what a process shows of memory that ranks have in common, and what it writes there on its own."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
from functools import cache

import torch


class PrivateLook:
    """Memory with, for several ranks, a second mapping of it in which writes stay in this process, page by page.

    Parameters at rest show the second one: whoever holds the model may write to them without asking. Where nothing was
    written, it shows what is in the first.
    """

    nbytes: int
    _bytes: torch.Tensor
    """All of the memory, as uint8."""
    _private: mmap.mmap | None = None
    has_writes = False
    """Whether this process is known to show other values than the ranks have in common."""
    _read_from: torch.Tensor
    """What reads give: `_bytes`, or the private look."""

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        """A 1-D tensor over part of the memory with a storage of its own."""
        raise NotImplementedError

    def shown(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        """As `tensor`, for those who may write to it without asking.

        Of shared memory it is a private look: writes are this process's own until `forget_writes`.
        """
        if self._private is None or numel == 0:
            return self.tensor(dtype, offset_bytes, numel)
        return torch.frombuffer(self._private, dtype=dtype, count=numel, offset=offset_bytes)

    @property
    def is_shared(self) -> bool:
        return self._private is not None

    def was_written(self) -> bool:
        """Whether this process has written to `shown` tensors of shared memory."""
        return self._private is not None and _has_own_pages(self._look())

    def _look(self) -> torch.Tensor:
        return torch.frombuffer(self._private, dtype=torch.uint8, count=max(self.nbytes, 1))[: self.nbytes]

    def notice_writes(self) -> None:
        """After writes to `shown` tensors: reads give those values from now on. Nobody may write meanwhile."""
        look = self._look()
        self.has_writes = not torch.equal(look, self._bytes)
        if self.has_writes:
            self._read_from = look
        else:
            self.forget_writes()  # or these pages would stay behind

    def forget_writes(self) -> None:
        """What was written to `shown` tensors of shared memory gives way to what the ranks have in common."""
        if self._private is not None:
            self._private.madvise(mmap.MADV_DONTNEED)
            self.has_writes, self._read_from = False, self._bytes


class _Scan(ctypes.Structure):
    """The argument of Linux's PAGEMAP_SCAN."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    ]


_PAGEMAP_SCAN = 0xC0606610
_OF_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4


def _has_own_pages(memory: torch.Tensor) -> bool:
    """Whether pages of a private file mapping were written to, by /proc/self/pagemap; True where that can't be read.

    Every forward asks this of all weights, while the GPU has nothing to do: where no page was looked at, which is the
    rule, that takes no time.
    """
    first = memory.data_ptr() // mmap.PAGESIZE
    count = -(-memory.numel() // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            if _can_scan():
                return _finds_own_page(pagemap, first, count)
            entries = torch.empty(count, dtype=torch.int64)
            pagemap.seek(8 * first)
            if pagemap.readinto(memoryview(entries.numpy()).cast("B")) != entries.nbytes:
                return True
    except OSError:
        return True
    if entries.max() == entries.min() == 0:
        return False
    in_use, of_file = (entries >> 62) & 3, (entries >> 61) & 1  # present or swapped; a page of a file
    return bool(((in_use != 0) & (of_file == 0)).any())


def _finds_own_page(pagemap, first: int, count: int) -> bool:
    found = (ctypes.c_uint64 * 3)()
    scan = _Scan(
        size=ctypes.sizeof(_Scan),
        start=first * mmap.PAGESIZE,
        end=(first + count) * mmap.PAGESIZE,
        vec=ctypes.addressof(found),
        vec_len=1,
        max_pages=1,
        category_inverted=_OF_FILE,
        category_mask=_OF_FILE,
        category_anyof_mask=_PRESENT | _SWAPPED,
        return_mask=_PRESENT | _SWAPPED,
    )
    return fcntl.ioctl(pagemap, _PAGEMAP_SCAN, scan) > 0


@cache
def _can_scan() -> bool:
    """Linux has it since 6.7."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            _finds_own_page(pagemap, 0, 1)
    except OSError:
        return False
    return True
