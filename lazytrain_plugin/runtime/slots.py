"""Weights on their way to the GPU (slots) and gradients on their way home (outbox)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.plan.unit_cost import SMALL_SEND_BYTES
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.streams import Streams

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.unit import Unit


class WeightSlot:
    """One buffer that holds a copy of one unit's weights at a time."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.address = self.flat.untyped_storage().data_ptr()
        self.unit: Unit | None = None
        self.ready = None
        """When the copy is complete, and the update of the weights in it, if they are updated here."""
        self.last_use = None
        """When the last computation that read it is complete."""
        self.left = None
        """When weights that were updated in it have arrived at home."""
        self.leases = 0
        self.last_lease = 0
        """Counts up; the slot with the smallest number was used the longest ago."""
        self.is_waiting = False
        """Its weights came and no computation has used them yet."""
        self._views: dict[Unit, list[torch.Tensor]] = {}

    def views(self, unit: Unit) -> list[torch.Tensor]:
        """The unit's parameters inside this slot, in layout order (made once)."""
        if unit not in self._views:
            with torch.inference_mode(False):  # training is going to use them too
                self._views[unit] = [t.shaped(t.weight_view(self.flat)) for t in unit.layout.tensors]
        return self._views[unit]


class WeightSlots:
    """Copies of streamed weights, kept as long as nothing that is needed sooner wants the place.

    The rule of eviction: never a leased slot, never a unit that `needed` names; among the rest the one that was used
    the longest ago. One that still waits for its first use is needed sooner than any that was used.
    """

    def __init__(self, streams: Streams, count: int, nbytes: int) -> None:
        self._streams = streams
        self._slots = [WeightSlot(nbytes, streams.device) for _ in range(count)]
        for slot in self._slots:
            slot.last_use = streams.record()  # its memory may be what running kernels still read
        self._holding: dict[Unit, WeightSlot] = {}
        self._clock = 0
        self._last_upload = None
        self._backward_ends_with_us = False

    def acquire(self, unit: Unit, cause: str, since) -> WeightSlot:
        """Leases the slot that holds the unit's weights; the compute stream waits until they are there.

        What it stood still since the event `since` is booked under `cause`.
        """
        slot = self.hold(unit)
        slot.leases += 1
        self._clock += 1
        slot.last_lease, slot.is_waiting = self._clock, False
        self._streams.compute_waits(slot.ready, cause, since=since)
        return slot

    def hold(self, unit: Unit) -> WeightSlot:
        """The slot that holds the unit's weights, or is going to; without a lease others may take it."""
        slot = self._holding.get(unit) or self._fill(unit, frozenset())
        if slot is None:
            raise RuntimeError(
                f"{unit.name}: all {len(self._slots)} weight slots are in use by units that run inside each other; "
                "raise weight_slots in the plan"
            )
        return slot

    def holds(self, unit: Unit) -> bool:
        return unit in self._holding

    def prefetch(self, unit: Unit, needed: frozenset[Unit]) -> None:
        """Starts the unit's transfer if a slot is free of `needed` units; never blocks the host."""
        on_disk = unit.home.nvme_weights is not None and not unit.home.nvme_weights.staged
        if unit not in self._holding and not on_disk:
            self._fill(unit, needed)

    def release(self, slot: WeightSlot) -> None:
        slot.leases -= 1
        slot.last_use = self._streams.record()

    def leave_home_alone_after_backward(self) -> None:
        """Makes the running backward wait, at its end, for the last copy from home to the device.

        Whoever called it may then change weights in host memory at once, as after a backward on the CPU. The device
        has the computations that follow that copy to do meanwhile.
        """
        if self._streams.is_cuda and not self._backward_ends_with_us:
            self._backward_ends_with_us = True
            torch.autograd.Variable._execution_engine.queue_callback(self._wait_for_uploads)

    def _wait_for_uploads(self) -> None:
        self._backward_ends_with_us = False
        if self._last_upload is not None:
            self._streams.reach(self._last_upload)

    def end_leases(self) -> None:
        """Nothing runs now: leases that an interrupt left behind are over."""
        self._backward_ends_with_us = False
        for slot in self._slots:
            if slot.leases:
                slot.leases = 0
                slot.last_use = self._streams.record()

    def drop(self, unit: Unit) -> None:
        """Forgets the unit's copy: its weights at home are about to change."""
        slot = self._holding.pop(unit, None)
        if slot is not None:
            slot.unit = None

    def _fill(self, unit: Unit, needed: frozenset[Unit]) -> WeightSlot | None:
        candidates = [slot for slot in self._slots if slot.leases == 0 and slot.unit not in needed]
        if not candidates:
            return None
        slot = min(candidates, key=lambda s: (s.unit is not None, s.is_waiting, s.last_lease))
        if slot.unit is not None:
            self.drop(slot.unit)
        streams = self._streams
        with streams.on(streams.h2d):
            for event in (slot.last_use, slot.left, unit.returned_event):
                streams.wait(streams.h2d, event)
            name = f"weights {unit.name} ({streams.phase})"
            with streams.span(name, Resource.H2D, stream=streams.h2d, num_bytes=unit.layout.weight_bytes):
                unit.home.host_buffer.read_into(slot.flat)
        slot.ready = unit.upload_event = self._last_upload = streams.record(streams.h2d)
        if unit.home.nvme_weights is not None:
            unit.home.nvme_weights.uploaded(slot.ready)
        slot.unit, slot.is_waiting = unit, True
        self._holding[unit] = slot
        return slot


class Outbox:
    """Gradients on their way home: held until they have arrived, at most `count` units' worth at a time.

    They go straight from where autograd put them. Holding the tensors themselves (instead of `record_stream`) lets
    their memory be used again as soon as the compute stream has waited for the transfer, which it rarely has to.
    """

    def __init__(self, streams: Streams, count: int) -> None:
        self._streams = streams
        self._count = count
        self._sent: deque[tuple[object, list[torch.Tensor], bool]] = deque()

    def send(self, unit: Unit, pieces: list[tuple[HostBuffer, int, torch.Tensor]], *, after=None):
        """Starts one transfer per piece (buffer, offset in bytes, contiguous device tensor); returns their event.

        `unit`: whose gradients they are; `after`: when what the buffers hold has been read.
        """
        streams = self._streams
        written = streams.record()
        with streams.on(streams.d2h):
            streams.wait(streams.d2h, written)
            streams.wait(streams.d2h, after)
            num_bytes = sum(tensor.nbytes for _, _, tensor in pieces)
            with streams.span(f"gradients {unit.name}", Resource.D2H, stream=streams.d2h, num_bytes=num_bytes):
                for buffer, offset_bytes, tensor in pieces:
                    buffer.write(offset_bytes, tensor.view(torch.uint8))
        arrived = streams.record(streams.d2h)
        takes_place = unit.module is not None or num_bytes >= SMALL_SEND_BYTES
        self._sent.append((arrived, [tensor for _, _, tensor in pieces], takes_place))
        self.trim(self._count)
        return arrived

    def trim(self, count: int) -> None:
        """Lets go of all but the last `count` units' gradients; the compute stream waits for their arrival first.

        Small ones of the stem don't count: they come just after the head's, and would make it wait for those.
        """
        while sum(takes_place for _, _, takes_place in self._sent) > count or not count and self._sent:
            self._streams.compute_waits(self._sent.popleft()[0], "gradients")
