"""Staging buffers on the GPU: weights on their way in, gradients on their way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
        """When the copy is complete."""
        self.last_use = None
        """When the last computation that read it is complete."""
        self.leases = 0
        self.last_lease = 0
        """Counts up; the slot with the smallest number was used the longest ago."""
        self._views: dict[Unit, list[torch.Tensor]] = {}

    def views(self, unit: Unit) -> list[torch.Tensor]:
        """The unit's parameters inside this slot, in layout order (made once)."""
        if unit not in self._views:
            self._views[unit] = [t.shaped(t.weight_view(self.flat)) for t in unit.layout.tensors]
        return self._views[unit]


class WeightSlots:
    """Copies of streamed weights, kept as long as nothing that is needed sooner wants the place.

    The rule of eviction: never a leased slot, never a unit that `needed` names; among the rest the oldest.
    """

    def __init__(self, streams: Streams, count: int, nbytes: int) -> None:
        self._streams = streams
        self._slots = [WeightSlot(nbytes, streams.device) for _ in range(count)]
        self._holding: dict[Unit, WeightSlot] = {}
        self._clock = 0

    def acquire(self, unit: Unit, since) -> WeightSlot:
        """Leases the slot that holds the unit's weights; the compute stream waits until they are there."""
        slot = self._holding.get(unit) or self._fill(unit, frozenset())
        if slot is None:
            raise RuntimeError(
                f"{unit.name}: all {len(self._slots)} weight slots are in use by units that run inside each other; "
                "raise weight_slots in the plan"
            )
        slot.leases += 1
        self._clock += 1
        slot.last_lease = self._clock
        self._streams.compute_waits(slot.ready, "weights", since=since)
        return slot

    def prefetch(self, unit: Unit, needed: frozenset[Unit]) -> None:
        """Starts the unit's transfer if a slot is free of `needed` units; never blocks the host."""
        if unit not in self._holding:
            self._fill(unit, needed)

    def release(self, slot: WeightSlot) -> None:
        slot.leases -= 1
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
        slot = min(candidates, key=lambda s: (s.unit is not None, s.last_lease))
        if slot.unit is not None:
            self.drop(slot.unit)
        streams = self._streams
        with streams.on(streams.h2d):
            streams.wait(streams.h2d, slot.last_use)
            unit.home.host_buffer.copy_to(slot.flat)
        slot.ready = unit.upload_event = streams.record(streams.h2d)
        slot.unit = unit
        self._holding[unit] = slot
        return slot


class GradientSlots:
    """Buffers in which a unit's gradients are gathered before they go home in one transfer."""

    def __init__(self, streams: Streams, count: int, nbytes: int) -> None:
        self._streams = streams
        self._flats = [torch.empty(nbytes, dtype=torch.uint8, device=streams.device) for _ in range(count)]
        self._sent: list = [None] * count
        """Per slot: when its last transfer is complete."""
        self._next = 0

    def acquire(self) -> tuple[int, torch.Tensor]:
        """The slot whose transfer began the longest ago; the compute stream waits until it is complete."""
        index = self._next
        self._next = (index + 1) % len(self._flats)
        self._streams.compute_waits(self._sent[index], "gradients")
        return index, self._flats[index]

    def send(self, index: int, unit: Unit, start: int, end: int):
        """Sends bytes [start, end) of the slot to the unit's gradients at home; returns the arrival event."""
        streams = self._streams
        written = streams.record()
        with streams.on(streams.d2h):
            streams.wait(streams.d2h, written)
            unit.home.gradient_buffer.copy_from(self._flats[index], start, end)
        self._sent[index] = streams.record(streams.d2h)
        return self._sent[index]
