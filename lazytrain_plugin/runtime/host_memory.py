"""Host memory of exact size, pinned where a copy engine reads or writes it, invisible to forked workers."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator

import torch

from lazytrain_plugin.units import MIB, align_up, format_bytes

logger = logging.getLogger(__name__)

_PIN_CHUNK_BYTES = 64 * MIB
_warned_unpinned = False


class HostBuffer:
    """`nbytes` of zeroed, page-aligned, private host memory.

    Exact size: torch's pinned allocator rounds up to a power of two, which costs up to twice the memory.
    MADV_DONTFORK: a DataLoader worker's fork would otherwise copy (pinned) or share (the next update copies) it all.
    The memory lives as long as a tensor made by `tensor` does.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.nbytes = nbytes
        size = align_up(max(nbytes, 1), mmap.PAGESIZE)
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                self._map.madvise(getattr(mmap, advice))
        self._registered: list[int] = []
        self._spans: list[tuple[int, int]] = [(0, nbytes)]
        """[start, end) pieces that one transfer may cover: a transfer can't cross two pinned regions."""
        self._bytes = self.tensor(torch.uint8, 0, nbytes)
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
        for memory, piece in self._pieces(offset_bytes, target):
            piece.copy_(memory, non_blocking=True)

    def write(self, offset_bytes: int, source: torch.Tensor) -> None:
        """Starts copying a uint8 tensor on the device into the buffer at `offset_bytes`."""
        for memory, piece in self._pieces(offset_bytes, source):
            memory.copy_(piece, non_blocking=True)

    def _pieces(self, offset_bytes: int, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What one transfer may cover: parts of the buffer, each with its part of a tensor that lies at an offset."""
        for span_start, span_end in self._spans:
            first, last = max(offset_bytes, span_start), min(offset_bytes + other.numel(), span_end)
            if first < last:
                yield self._bytes[first:last], other[first - offset_bytes : last - offset_bytes]

    def _pin(self, size: int) -> bool:
        address = self.tensor(torch.uint8, 0, 1).data_ptr()
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
