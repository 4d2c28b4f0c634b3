"""Unit inputs that wait in host memory between forward and backward.

A unit's input leaves on the D2H stream while the unit computes, and comes back on the H2D stream while the unit after
it runs backward. Host buffers are pinned, of exact size, and used again step after step.

[Note: whose memory] A device tensor is held here until its copy is complete, and the compute stream waits for the copy
before the last reference goes: only then may the allocator hand its memory to the next kernel. On the way back the
memory comes from the compute stream, so the H2D stream waits for what the compute stream has launched so far.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.streams import Streams

SMALLEST_BYTES = 64 << 10
"""What is smaller stays on the device: a transfer would cost more than the memory is worth."""


class Parcel:
    """The inputs of one unit call: some on the device, some on the host."""

    def __init__(self, store: BoundaryStore, tensors: Sequence[torch.Tensor], leaving: frozenset[int]) -> None:
        self._store = store
        self.on_device = [tensor for i, tensor in enumerate(tensors) if i not in leaving]
        """For autograd to save."""
        self._flags = [(i in leaving, tensor.requires_grad) for i, tensor in enumerate(tensors)]
        self._copies = [store.send(tensors[i]) for i in sorted(leaving)]
        self._returned: list[torch.Tensor] | None = None
        self._returned_event = None
        self._before = store.remember(self)

    def get(self, on_device: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All inputs in order; starts bringing back those of the units that run backward next."""
        self._fetch()
        parcel = self
        for _ in range(self._store.slots):
            parcel = parcel._before() if parcel is not None else None
            if parcel is not None:
                parcel._fetch()
        self._store.streams.compute_waits(self._returned_event, "activations")
        returned, self._returned = self._returned or [], None
        here, back = iter(on_device), iter(returned)
        return [next(back).requires_grad_(requires_grad) if left else next(here) for left, requires_grad in self._flags]

    def _fetch(self) -> None:
        if self._returned is None and self._copies:
            self._returned, self._returned_event = self._store.fetch(self._copies)

    def release(self) -> None:
        """Nothing is going to be read any more. Safe to call twice."""
        if self._returned is not None:  # brought back for nothing: see [Note: whose memory]
            self._store.streams.compute_waits(self._returned_event, "activations")
            self._returned = None
        copies, self._copies = self._copies, []
        for copy in copies:
            self._store.recycle(copy)

    __del__ = release


class _HostCopy:
    """One tensor in host memory."""

    def __init__(self, buffer: HostBuffer, like: torch.Tensor) -> None:
        self.buffer = buffer
        self.shape, self.dtype = like.shape, like.dtype
        self.written = None
        self.read = None


class BoundaryStore:
    """Sends unit inputs to the host and back.

    Args:
        slots: units whose inputs may be on their way in one direction at once.
    """

    def __init__(self, streams: Streams, slots: int) -> None:
        self.streams = streams
        self.slots = slots
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)
        self._last_use: dict[HostBuffer, object] = {}
        self._leaving: deque[tuple[object, torch.Tensor, int]] = deque()
        self._latest: weakref.ReferenceType = _nothing
        self._seen: list[weakref.ReferenceType] = []

    def put(self, tensors: Sequence[torch.Tensor]) -> Parcel:
        """Takes a unit's inputs; those that require grad and that no other unit shares leave the device."""
        before = [ref() for ref in self._seen]
        leaving = frozenset(
            i
            for i, tensor in enumerate(tensors)
            if tensor.requires_grad
            and tensor.nbytes >= SMALLEST_BYTES
            and tensor.is_contiguous()
            and not any(tensor is other for other in before)
        )
        self._seen = [weakref.ref(tensor) for tensor in tensors]
        parcel = Parcel(self, tensors, leaving)
        self.trim(self.slots)
        return parcel

    def remember(self, parcel: Parcel) -> weakref.ReferenceType:
        """Returns a reference to the parcel before."""
        before, self._latest = self._latest, weakref.ref(parcel)
        return before

    def send(self, tensor: torch.Tensor) -> _HostCopy:
        streams = self.streams
        tensor = tensor.detach()  # holding it must not hold the graph that made it
        free = self._free[tensor.nbytes]
        buffer = free.pop() if free else HostBuffer(tensor.nbytes, pin=streams.is_cuda)
        copy = _HostCopy(buffer, tensor)
        written = streams.record()
        with streams.on(streams.d2h):
            streams.wait(streams.d2h, written)
            streams.wait(streams.d2h, self._last_use.pop(buffer, None))
            buffer.write(0, tensor.view(-1).view(torch.uint8))
        copy.written = streams.record(streams.d2h)
        self._leaving.append((copy.written, tensor, tensor._version))
        return copy

    def trim(self, count: int) -> None:
        """Lets go of all but the last `count` tensors on their way; the compute stream waits for their copies."""
        while len(self._leaving) > count:
            arrived, tensor, version = self._leaving.popleft()
            self.streams.compute_waits(arrived, "activations")
            if tensor._version != version:
                raise RuntimeError(
                    f"a layer's input of shape {tuple(tensor.shape)} was changed in place while it was copied to host "
                    "memory; replace the in-place operation by an ordinary one, or plan with boundaries on the GPU"
                )

    def fetch(self, copies: list[_HostCopy]):
        """Starts bringing tensors back; returns them and the event of their arrival."""
        streams = self.streams
        tensors = [torch.empty(copy.shape, dtype=copy.dtype, device=streams.device) for copy in copies]
        allocated = streams.record()
        with streams.on(streams.h2d):
            streams.wait(streams.h2d, allocated)
            for copy, tensor in zip(copies, tensors):
                streams.wait(streams.h2d, copy.written)
                copy.buffer.read_into(tensor.view(-1).view(torch.uint8))
        arrived = streams.record(streams.h2d)
        for copy in copies:
            copy.read = arrived
        return tensors, arrived

    def recycle(self, copy: _HostCopy) -> None:
        """The buffer may be written again, once its last reader is done."""
        self._free[copy.buffer.nbytes].append(copy.buffer)
        self._last_use[copy.buffer] = copy.read

    @property
    def host_bytes(self) -> int:
        """Of buffers that are free now."""
        return sum(nbytes * len(buffers) for nbytes, buffers in self._free.items())

    def close(self) -> None:
        """Gives page locks back. Everything must be at rest."""
        self.trim(0)
        for buffers in self._free.values():
            for buffer in buffers:
                buffer.unpin()
        self._free.clear()
        self._last_use.clear()


def _nothing() -> None:
    """A reference to no parcel."""
