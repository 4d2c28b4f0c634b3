"""`CommLane`: where gradients meet those of other ranks, beside the rest of backward.

[Note: memory] What a reduction reads is held until it has been read, and there may be as many reductions under way as
the plan has gradient slots to spare. Then the compute stream waits for the oldest, and the memory of its gradients is
used again without `record_stream`: with that, a host that is far ahead would take new memory for every unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from lazytrain_plugin.errors import CommunicationError
from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.worker import Ticket, UpdateWorker


class LaneTicket:
    """Work that a lane has begun: `Ticket`'s part of the interface."""

    def __init__(self, lane: CommLane, ticket: Ticket | None, event) -> None:
        self._lane, self._ticket = lane, ticket
        self.event = event
        """On CUDA when it is done; else None."""

    @property
    def done(self) -> bool:
        """On CUDA: it is launched."""
        return self._ticket is None or self._ticket.done

    def wait(self) -> None:
        if self._ticket is not None:
            self._lane.wait(self._ticket)


class Fence:
    """The end of what a lane had been given when this was made."""

    def __init__(self, lane: CommLane, ticket: Ticket | None, event) -> None:
        self._lane, self._ticket, self._event = lane, ticket, event

    def stops(self, stream) -> None:
        """What is launched on `stream` from now on comes after it; on the CPU, whatever this thread does."""
        if self._ticket is not None:
            self._lane.wait(self._ticket)
        else:
            self._lane.streams.wait(stream, self._event)


class CommLane:
    """Does work in the order in which it is submitted, so that all ranks launch the same collectives in one order.

    On CUDA the caller launches it, on a stream of its own. On the CPU, where collectives block, a thread does it.

    Args:
        meanwhile: called now and then by a thread that waits.
    """

    def __init__(self, streams: Streams, meanwhile: Callable[[], None]) -> None:
        self.streams = streams
        self._meanwhile = meanwhile
        self._worker = None if streams.is_cuda else UpdateWorker("comm")
        self.slots = 1
        """How many reductions may be under way while the next gradients are computed."""
        self._under_way: deque[tuple[object, list[torch.Tensor]]] = deque()

    def submit(self, work: Callable[[], None], name: str, inputs: Iterable[torch.Tensor]) -> None:
        """Launches on the compute stream before: `inputs`, which are held as long as `work` needs them.

        Raises:
            CommunicationError: this work or earlier one failed.
        """
        streams, span = self.streams, f"exchange {name}"
        if self._worker is None:
            streams.wait(streams.comm, streams.record())
            with streams.on(streams.comm), torch.no_grad(), streams.span(span, Resource.EXCHANGE, stream=streams.comm):
                work()
            done = streams.record(streams.comm)
        else:
            done = self._worker.submit(torch.no_grad()(self._spanned(work, span)), f"exchange of gradients of {name}")
        self._under_way.append((done, list(inputs)))
        self._trim(self.slots)

    def begin(self, work: Callable[[], None], label: str) -> LaneTicket:
        """Launches work that nothing here waits for, after all that was submitted before and after the compute stream's
        work so far."""
        streams = self.streams
        if self._worker is not None:
            return LaneTicket(self, self._worker.submit(torch.no_grad()(work), label), None)
        streams.wait(streams.comm, streams.record())
        with streams.on(streams.comm), torch.no_grad():
            work()
        return LaneTicket(self, None, streams.record(streams.comm))

    def fence(self) -> Fence:
        if self._worker is not None:
            return Fence(self, self._worker.submit(_nothing, "fence"), None)
        return Fence(self, None, self.streams.record(self.streams.comm))

    def _spanned(self, work: Callable[[], None], span: str) -> Callable[[], None]:
        def measured() -> None:
            with self.streams.span(span, Resource.EXCHANGE):
                work()

        return measured

    def launched(self) -> None:
        """Returns when all work is launched: on the CPU, done."""
        if self._worker is not None:
            self.finish()

    def finish(self) -> None:
        """Returns when all work is done; on CUDA, when the compute stream is made to wait for it."""
        self._trim(0)

    def _trim(self, count: int) -> None:
        while len(self._under_way) > count:
            done, _ = self._under_way.popleft()
            if self._worker is None:
                self.streams.compute_waits(done, "gradients")
                continue
            with self.streams.host_waits("gradients"):
                self.wait(done)

    def wait(self, ticket: Ticket) -> None:
        """Returns when that is done; raises what went wrong there."""
        try:
            ticket.wait(self._meanwhile)
        except RuntimeError as error:
            if isinstance(error.__cause__, CommunicationError):
                raise error.__cause__ from None  # its own text says all
            raise

    def close(self) -> None:
        """Ends the thread once its work is done, and doesn't wait for that: other ranks may be gone."""
        self._under_way.clear()
        if self._worker is not None:
            self._worker.close(wait=False)


def _nothing() -> None:
    """For a ticket that tells when the work before it is done."""
