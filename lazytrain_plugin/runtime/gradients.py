"""The gradient sink: where a unit's gradients go the moment they exist."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.gradient_format import Gradient, add_up, part_of
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.norms import GradientNorm, Squares
from lazytrain_plugin.runtime.slots import Outbox
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.worker import UpdateWorker

Gradients = list[tuple[UnitTensor, torch.Tensor]]


class GradientSink:
    """Sends gradients to their homes and sums them for the norm.

    A single micro-batch per step leaves the gradient as it came (bf16, or 8-bit codes made here, on the device). With
    several, or when a tensor gets a second gradient (a layer that is used twice), arrivals are added up in fp32 at
    home; nothing travels back. The norm takes a gradient before it becomes codes, and a sum as the update reads it.
    """

    def __init__(self, streams: Streams, worker: UpdateWorker, norm) -> None:
        self._streams = streams
        self._worker = worker
        self._norm = norm
        self.outbox = Outbox(streams, 1)
        # autograd has a thread per device: a penalty on weights at home is differentiated while units are.
        self.one_delivery = threading.Lock()
        self.last_micro_batch = True
        """Whether the backward that runs now completes the optimizer step's gradients."""

    def deliver(self, unit: Unit, gradients: Gradients) -> None:
        """Takes gradients of one backward of one unit. Launches on the current (compute) stream."""
        with self.one_delivery:
            self.take(unit, [(tensor, in_storage_order(tensor, gradient)) for tensor, gradient in gradients])

    def take(self, unit: Unit, gradients: Gradients) -> None:
        """Takes gradients as 1-D in storage order: of each tensor, the elements that this rank updates."""
        if not gradients:
            return
        if unit.home.states_on_gpu:
            self._keep_on_gpu(unit, gradients)
        else:
            self._send_home(unit, gradients)

    def _keep_on_gpu(self, unit: Unit, gradients: Gradients) -> None:
        complete: dict[UnitTensor, Gradient] = {}
        for tensor, gradient in gradients:
            if unit.arrived.get(tensor) == Arrival.WHOLE:
                unit.arrived[tensor] = Arrival.SUMMED
                self._add_up(unit, tensor, first=True)
            first = self._arrive(unit, tensor)
            unit.home.keep_gradient(tensor, gradient)
            complete[tensor] = gradient
            if unit.arrived[tensor] == Arrival.SUMMED:
                complete[tensor] = self._add_up(unit, tensor, first=first)
                unit.home.keep_gradient(tensor, None)
        if self.last_micro_batch:
            self._norm.add(complete)

    def _send_home(self, unit: Unit, gradients: Gradients) -> None:
        self._make_room(unit, gradients)
        on_nvme, buffer = unit.home.nvme_gradients, unit.home.gradient_buffer
        if on_nvme is not None:
            with self._streams.host_waits("gradients"):
                buffer = on_nvme.arrive(fresh=Arrival.WHOLE not in unit.arrived.values())
        raws, sums = [], []
        complete: dict[UnitTensor, Gradient] = {}
        for tensor, gradient in gradients:
            first = self._arrive(unit, tensor)
            if unit.arrived[tensor] == Arrival.SUMMED:
                sums.append((tensor, first))
            else:
                complete[tensor] = gradient
            raws.append((tensor, gradient))
        self._norm.add(complete)
        starts = [unit.home.span(tensor).start for tensor, _ in raws]
        pieces = [(buffer, offset, piece) for offset, piece in unit.home.gradient_format.pieces(raws, starts)]
        unit.gradient_event = self.outbox.send(unit, pieces, after=unit.gradients_read_event)
        if on_nvme is not None:
            on_nvme.arrived(unit.gradient_event, stays=not sums)
        self._fold(unit, sums)

    def _make_room(self, unit: Unit, gradients: Gradients) -> None:
        """The gradient memory at home is about to be overwritten: what it holds must have been used."""
        if unit.update_ticket is not None:
            unit.update_ticket.wait()
        if unit.streamed_update is not None:
            unit.streamed_update.begin()
        whole = [tensor for tensor, _ in gradients if unit.arrived.get(tensor) == Arrival.WHOLE]
        for tensor in whole:
            unit.arrived[tensor] = Arrival.SUMMED
        self._fold(unit, [(tensor, True) for tensor in whole])
        if unit.fold_ticket is not None:
            unit.fold_ticket.wait()

    def _arrive(self, unit: Unit, tensor: UnitTensor) -> bool:
        """Books an arrival; returns whether it is the window's first of this tensor."""
        first = tensor not in unit.arrived
        if first and self.last_micro_batch:
            unit.arrived[tensor] = Arrival.WHOLE
        else:
            unit.arrived[tensor] = Arrival.SUMMED
            self._norm.discard(tensor)
        return first

    def _fold(self, unit: Unit, sums: list[tuple[UnitTensor, bool]]) -> None:
        """Adds arrived gradients to the accumulators, on the update thread."""
        if not sums:
            return
        arrival = unit.gradient_event
        last = self.last_micro_batch
        used_up = Arrival.WHOLE not in unit.arrived.values()

        def fold() -> None:
            arrival.synchronize()
            home = unit.home
            with home.gradients_in_memory(), home.sums_in_memory(changes=True):
                with self._streams.span(f"accumulate {unit.name}", Resource.WORKER):
                    totals = {tensor: self._add_up(unit, tensor, first=first) for tensor, first in sums}
                    if last:
                        self._norm.add(totals)
            if used_up:
                home.drop_gradients()

        unit.fold_ticket = self._worker.submit(fold, f"gradient accumulation of {unit.name}")

    @staticmethod
    def _add_up(unit: Unit, tensor: UnitTensor, *, first: bool) -> Gradient:
        """Adds what arrived to the sum over micro-batches, and returns that."""
        span = unit.home.span(tensor)
        total = part_of(unit.home.accumulated(tensor), span)
        add_up(total, part_of(unit.home.gradient(tensor), span), first=first)
        return total

    def discard(self, units: list[Unit]) -> None:
        """Forgets what arrived in this window; the next gradient is a first one again."""
        for unit in units:
            if unit.fold_ticket is not None:
                unit.fold_ticket.wait()
                unit.fold_ticket = None
            for tensor in unit.arrived:
                self._norm.discard(tensor)
            unit.arrived = {}
            unit.home.drop_gradients()

    def sum_up(self, unit: Unit) -> None:
        """Brings what arrived in this window into the accumulator, where another home can take it over.

        Everything must be at rest: transfers, and the update thread.
        """
        whole = [tensor for tensor, arrival in unit.arrived.items() if arrival == Arrival.WHOLE]
        if whole:
            with unit.home.gradients_in_memory(), unit.home.sums_in_memory(changes=True):
                for tensor in whole:
                    unit.arrived[tensor] = Arrival.SUMMED
                    self._add_up(unit, tensor, first=True)
        unit.home.drop_gradients()

    def end_backward(self) -> None:
        """A backward is over; with one rank there is nothing left to do."""

    def use_slots(self, spare: int) -> int:
        """How many gradients may be on their way home, of `spare` slots besides the one that is being filled."""
        return spare

    def close(self) -> None:
        """Nothing to end with one rank."""

    def complete(self, units: list[Unit], agree: Callable[[Squares], Squares] | None = None) -> GradientNorm:
        """The norm of the window's gradients, which are complete; `agree` adds those of other ranks."""
        self._complete_norms([unit for unit in units if unit.arrived])
        return self._norm.finish() if agree is None else self._norm.finish(agree)

    def _complete_norms(self, units: list[Unit]) -> None:
        """Sums what was added up before anyone knew that it was complete (a boundary that came early)."""
        for unit in units:
            if unit.fold_ticket is not None:
                unit.fold_ticket.wait()
                unit.fold_ticket = None
            late = [t for t, arrival in unit.arrived.items() if arrival == Arrival.SUMMED and not self._norm.has(t)]
            if late:
                home = unit.home
                with home.sums_in_memory(changes=False):
                    self._norm.add({t: part_of(home.accumulated(t), home.span(t)) for t in late})


def in_storage_order(tensor: UnitTensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as 1-D [numel], element by element as the weight lies in memory."""
    if gradient.stride() != tensor.stride or gradient.dtype != tensor.dtype:
        ordered = torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype, device=gradient.device)
        gradient = ordered.copy_(gradient)
    return gradient.as_strided((tensor.numel,), (1,))
