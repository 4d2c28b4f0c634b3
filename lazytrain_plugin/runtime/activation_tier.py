"""Where activations rest off the device: the interface of a tier, and host memory behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.size_pool import SizePool
from lazytrain_plugin.runtime.streams import Streams


class Ticket(Protocol):
    """Stands for bytes that a tier holds."""

    nbytes: int
    left: object
    """Event: the device memory they came from has been read."""


class ActivationTier(Protocol):
    """Holds bytes between forward and backward. Streams wait for its events; only a disk may make the host wait."""

    def put(self, sources: Sequence[torch.Tensor]) -> list[Ticket]:
        """Starts copying flat uint8 tensors away, which the compute stream has written; they come back together.

        The memory of a source must stay as it is until its `ticket.left`.
        """
        ...

    def read_ahead(self, tickets: Sequence[Ticket]) -> None:
        """These are asked for next, in this order. Never makes the host wait."""
        ...

    def ready(self, tickets: Sequence[Ticket]) -> bool:
        """Whether `get` would not make the host wait."""
        ...

    def get(self, tickets: Sequence[Ticket]) -> tuple[list[torch.Tensor], object]:
        """Starts bringing bytes back: flat uint8 tensors on the device, and the event of their arrival.

        A ticket may be read any number of times, also before it has left.
        """
        ...

    def drop(self, ticket: Ticket) -> None:
        """The bytes are not needed any more; what has been started may still run."""
        ...

    def close(self) -> None:
        """Gives everything back. Nothing may be in flight."""
        ...


class HostTicket:
    """Bytes in one host buffer."""

    def __init__(self, buffer: HostBuffer, nbytes: int) -> None:
        self.buffer = buffer
        self.nbytes = nbytes
        self.left = None
        self.last_use = None
        """Event of the last transfer that touched the buffer."""


class HostTier:
    """Pinned host memory, used again step after step.

    Bytes leave on the D2H stream and come back on the H2D stream. On the way back their device memory comes from the
    compute stream, so the H2D stream waits for what the compute stream has launched so far.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pool: SizePool[tuple[HostBuffer, object]] = SizePool(self._make, _discard)
        self._closed = False

    def _make(self, nbytes: int) -> tuple[HostBuffer, object]:
        return HostBuffer(nbytes, pin=self._streams.is_cuda), None

    def put(self, sources: Sequence[torch.Tensor]) -> list[HostTicket]:
        self._closed = False
        streams = self._streams
        written = streams.record()
        tickets = []
        for source in sources:
            buffer, last_use = self._pool.take(source.nbytes)
            ticket = HostTicket(buffer, source.nbytes)
            with streams.on(streams.d2h):
                streams.wait(streams.d2h, written)
                streams.wait(streams.d2h, last_use)
                name = f"activations ({streams.phase})"
                with streams.span(name, Resource.D2H, stream=streams.d2h, num_bytes=source.nbytes):
                    buffer.write(0, source)
            ticket.left = ticket.last_use = streams.record(streams.d2h)
            tickets.append(ticket)
        return tickets

    def read_ahead(self, tickets: Sequence[HostTicket]) -> None:
        """Nothing: a transfer is all that there is to wait for."""

    def ready(self, tickets: Sequence[HostTicket]) -> bool:
        return True

    def get(self, tickets: Sequence[HostTicket]) -> tuple[list[torch.Tensor], object]:
        streams = self._streams
        found = [torch.empty(ticket.nbytes, dtype=torch.uint8, device=streams.device) for ticket in tickets]
        allocated = streams.record()
        with streams.on(streams.h2d):
            streams.wait(streams.h2d, allocated)
            for ticket, tensor in zip(tickets, found, strict=True):
                streams.wait(streams.h2d, ticket.left)
                name = f"activations ({streams.phase})"
                with streams.span(name, Resource.H2D, stream=streams.h2d, num_bytes=ticket.nbytes):
                    ticket.buffer.read_into(tensor, ticket.nbytes)
        arrived = streams.record(streams.h2d)
        for ticket in tickets:
            ticket.last_use = arrived
        return found, arrived

    def drop(self, ticket: HostTicket) -> None:
        entry = ticket.buffer, ticket.last_use
        if self._closed:  # a graph that outlived the plan it was made under
            _discard(entry)
        else:
            self._pool.give(ticket.buffer.nbytes, entry)

    @property
    def free_bytes(self) -> int:
        """Of buffers that wait for their next use."""
        return self._pool.free_bytes

    def close(self) -> None:
        self._closed = True
        self._pool.clear()


def _discard(entry: tuple[HostBuffer, object]) -> None:
    buffer, last_use = entry
    last_use.synchronize()
    buffer.unpin()
