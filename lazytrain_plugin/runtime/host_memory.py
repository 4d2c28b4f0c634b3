"""Host memory of exact size, pinned where a copy engine reads or writes it, invisible to forked workers."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lazytrain_plugin.runtime.private_look import PrivateLook
from lazytrain_plugin.units import MIB, align_up, format_bytes

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.rank_group import RankGroup

logger = logging.getLogger(__name__)

_PIN_CHUNK_BYTES = 64 * MIB
_warned_unpinned = False
_preferred_node: int | None = None
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())  # numbers of the system call, which libc doesn't wrap
_MPOL_PREFERRED = 1


def prefer_node(index: int | None) -> None:
    """From now on buffers that no other rank shares get their memory from this NUMA node, others' when it is full."""
    global _preferred_node
    _preferred_node = index


class HostBuffer(PrivateLook):
    """`nbytes` of zeroed, page-aligned, private host memory.

    Exact size: torch's pinned allocator rounds up to a power of two, which costs up to twice the memory.
    MADV_DONTFORK: a DataLoader worker's fork would otherwise copy (pinned) or share (the next update copies) it all.
    The memory lives as long as a tensor made by `tensor` does.

    Args:
        ranks: the ranks of a node that have this memory in common; all make it at the same point of their programs.
    """

    def __init__(self, nbytes: int, *, pin: bool, ranks: RankGroup | None = None) -> None:
        self.nbytes = nbytes
        size = align_up(max(nbytes, 1), mmap.PAGESIZE)
        if ranks is None:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._map, self._private = ranks.share(nbytes)
        for memory in filter(None, (self._map, self._private)):
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                if hasattr(mmap, advice):
                    memory.madvise(getattr(mmap, advice))
        if ranks is None and _preferred_node is not None:
            _take_from_node(self._map, size, _preferred_node)
        self._registered: list[int] = []
        self._spans: list[tuple[int, int]] = [(0, nbytes)]
        """[start, end) pieces that one transfer may cover: a transfer can't cross two pinned regions."""
        self._bytes = self._read_from = self.tensor(torch.uint8, 0, nbytes)
        self.pinned = pin and self._pin(size)

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
        """A 1-D tensor over part of the buffer with a storage of its own.

        Its own storage, because `torch.save` writes whole storages and `save_pretrained` clones shared ones.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset_bytes)

    def read_into(self, device_flat: torch.Tensor, nbytes: int | None = None) -> None:
        """Starts copying the buffer (or its first `nbytes`) to the front of a uint8 tensor on the device."""
        self.read(0, device_flat[: self.nbytes if nbytes is None else nbytes])

    def read(self, offset_bytes: int, target: torch.Tensor) -> None:
        """Starts copying what lies at `offset_bytes` over the whole of a uint8 tensor on the device."""
        for memory, piece in self._pieces(self._read_from, offset_bytes, target):
            piece.copy_(memory, non_blocking=True)

    def write(self, offset_bytes: int, source: torch.Tensor) -> None:
        """Starts copying a uint8 tensor on the device into the buffer at `offset_bytes`."""
        for memory, piece in self._pieces(self._bytes, offset_bytes, source):
            memory.copy_(piece, non_blocking=True)

    def _pieces(
        self, memory: torch.Tensor, offset_bytes: int, other: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What one transfer may cover: parts of the buffer, each with its part of a tensor that lies at an offset."""
        for span_start, span_end in self._spans:
            first, last = max(offset_bytes, span_start), min(offset_bytes + other.numel(), span_end)
            if first < last:
                yield memory[first:last], other[first - offset_bytes : last - offset_bytes]

    def _pin(self, size: int) -> bool:
        address = self.tensor(torch.uint8, 0, 1).data_ptr()
        if self._private is None:
            self._bytes.zero_()  # all threads make its pages; page-locking would, one after the other
        if _register(address, size):
            self._registered = [address]
            return True
        spans = []
        for offset in range(0, size, _PIN_CHUNK_BYTES):
            chunk = min(_PIN_CHUNK_BYTES, size - offset)
            if not _register(address + offset, chunk):
                self.unpin()
                _warn_unpinned(size)
                return False
            self._registered.append(address + offset)
            if offset < self.nbytes:
                spans.append((offset, min(offset + chunk, self.nbytes)))
        self._spans = spans
        return True

    def unpin(self) -> None:
        """Gives page locks back; the memory stays readable."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered = []
        self._spans = [(0, self.nbytes)]
        self.pinned = False


def _take_from_node(memory: mmap.mmap, nbytes: int, node: int) -> None:
    """Before the memory is touched. A preference only: where it can't be had, pages come from elsewhere."""
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MPOL_PREFERRED, mask, len(mask) * bits + 1, 0
    if _MBIND is None or libc.syscall(ctypes.c_long(_MBIND), *arguments) != 0:
        prefer_node(None)
        logger.info(
            "host memory can't be taken from NUMA node %d on purpose (%s): it comes from where threads run first",
            node,
            os.strerror(ctypes.get_errno()) if _MBIND is not None else platform.machine(),
        )


def _register(address: int, nbytes: int) -> bool:
    try:
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0 or _absorb_cuda_error()
    except RuntimeError:
        return _absorb_cuda_error()


def _absorb_cuda_error() -> bool:
    """A failed registration leaves its error for the next kernel launch to report as its own: take it here."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        pass
    return False


def _warn_unpinned(nbytes: int) -> None:
    global _warned_unpinned
    if not _warned_unpinned:
        _warned_unpinned = True
        logger.warning(
            "could not page-lock %s of host memory (this is a host limit, not a GPU shortage): transfers go through "
            "pageable memory, about 3-5 times slower. Raise `ulimit -l`, or on WSL2 the memory of the machine.",
            format_bytes(nbytes),
        )
