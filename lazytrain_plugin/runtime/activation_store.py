"""Activations that rest off the device between forward and backward.

A unit call's inputs leave while the unit computes, what it saves leaves while the next unit computes, and both come
back while the unit after it runs backward. Where they rest is a tier's business (runtime/activation_tier.py); when they
move, and how long device memory is held, is decided here.

[Note: whose memory] Device memory is held here until its copy is complete, and the compute stream waits for the copy
before the last reference goes: only then may the allocator hand it to the next kernel.

[Note: identity] Memory is known by its storage object while a reference keeps it alive, never by its address alone: an
address is used again as soon as its storage dies. A storage is sent once, however many views of it were saved; each
view comes back with its own shape and strides. The version that a tensor had when it was saved says whether it was
changed in place before its copy was complete; what was is refused when it is asked for.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.runtime.activation_tier import ActivationTier, HostTier, Ticket
from lazytrain_plugin.runtime.nvme.activations import NvmeActivations
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.vocab import Tier

SMALLEST_BYTES = 64 << 10
"""What is smaller stays on the device: a transfer would cost more than the memory is worth."""

_ALIGNMENT_BYTES = 16


@dataclass(slots=True, eq=False)
class _Piece:
    """A stretch of one storage, [start, end) in bytes."""

    start: int
    end: int
    tier: ActivationTier
    views: list[tuple[torch.Tensor, Handle]] = field(default_factory=list)
    """What was saved; held while the memory is still needed here."""
    here: torch.Tensor | None = None
    """The bytes on the device: before they have left, and after they have come back."""
    ticket: Ticket | None = None
    needed: bool = False
    """Whether backward is going to read it soon: it stays if it is still here."""

    def check(self) -> None:
        """Marks views that were changed in place since they were saved."""
        for tensor, handle in self.views:
            handle.changed = handle.changed or tensor._version != handle.version


@dataclass(slots=True, eq=False)
class Handle:
    """Stands for one saved tensor of a parcel."""

    piece: _Piece
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int
    version: int
    changed: bool = False


class Parcel:
    """What one unit call has off the device."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._pieces: list[_Piece] = []
        self._unsent: dict[int, _Piece] = {}
        self._arrived: list[object] = []
        self._fetched = False
        self.number, self._before = store.remember(self)

    def pack(self, tensor: torch.Tensor, tier: Tier) -> Handle:
        """Takes a tensor that `ActivationStore.can_leave` allows; it goes to `tier` with the next `send`.

        What shares its storage goes along, to the tier that was named first.
        """
        tensor = tensor.detach()  # holding it must not hold the graph that made it
        storage, size = tensor.untyped_storage(), tensor.element_size()
        start = tensor.storage_offset() * size
        length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        piece = self._unsent.setdefault(storage._cdata, _Piece(start, start, self._store.tier_of(tier)))
        piece.start = min(piece.start, start // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES)
        piece.end = max(piece.end, start + length * size)
        handle = Handle(piece, tensor.dtype, tensor.shape, tensor.stride(), start, tensor._version)
        piece.views.append((tensor, handle))
        return handle

    def send(self) -> None:
        """Starts the way out of all that was packed since the last call."""
        pieces, self._unsent = list(self._unsent.values()), {}
        for piece in pieces:
            piece.check()
            storage = piece.views[0][0].untyped_storage()
            nbytes = piece.end - piece.start
            piece.here = torch.empty(0, dtype=torch.uint8, device=storage.device)
            piece.here.set_(storage, piece.start, (nbytes,), (1,))
        for tier, group in _by_tier(pieces):
            for piece, ticket in zip(group, tier.put([piece.here for piece in group]), strict=True):
                piece.ticket = ticket
        self._pieces += pieces
        self._store.hold(self, pieces)

    def bring_back(self) -> None:
        """Everything is on the device when this returns, as the compute stream sees it.

        Starts bringing back what the units that run backward next will need.
        """
        self._store.read_ahead(self)
        self._fetch()
        before = self._before()
        for _ in range(self._store.slots):
            if before is not None:
                before._fetch(only_if_ready=True)
                before = before._before()
        for arrived in self._arrived:
            self._store.streams.compute_waits(arrived, "activations")

    def unpack(self, handle: Handle) -> torch.Tensor:
        """The saved tensor, after `bring_back`.

        Raises:
            RuntimeError: it was changed in place after it was saved, or is asked for outside the unit's backward.
        """
        if handle.changed:
            raise RuntimeError(
                f"a tensor of shape {tuple(handle.shape)} that backward needs was changed in place while it was copied "
                "off the GPU; replace the in-place operation on the layer's output or input by an ordinary one, or "
                "plan with activations on the GPU"
            )
        piece = handle.piece
        if piece.here is None:
            raise RuntimeError("activations that rest off the GPU were asked for outside of their layer's backward")
        offset_bytes = piece.here.storage_offset() + handle.offset_bytes - piece.start
        with torch.no_grad():
            tensor = torch.empty(0, dtype=handle.dtype, device=piece.here.device)
            tensor.set_(
                piece.here.untyped_storage(), offset_bytes // handle.dtype.itemsize, handle.shape, handle.stride
            )
        return tensor

    def _fetch(self, *, only_if_ready: bool = False) -> None:
        if self._fetched:
            return
        gone = _by_tier(piece for piece in self._pieces if piece.here is None)
        if only_if_ready and not all(tier.ready([piece.ticket for piece in group]) for tier, group in gone):
            return  # only what is needed now is worth a wait for the disk
        self._fetched = True
        for piece in self._pieces:
            piece.needed = True
            piece.check()
        for tier, group in gone:
            found, arrived = tier.get([piece.ticket for piece in group])
            self._arrived.append(arrived)
            for piece, tensor in zip(group, found, strict=True):
                piece.here = tensor

    def gone_to(self, tier: ActivationTier) -> list[Ticket]:
        """Of what rests in `tier` and is not on the device."""
        return [piece.ticket for piece in self._pieces if piece.tier is tier and piece.here is None]

    def put_away(self) -> None:
        """The unit's backward is over, and may run again: lets go of the device memory."""
        # Brought back ahead of a backward that never came: see [Note: whose memory].
        for arrived in self._arrived:
            self._store.streams.compute_waits(arrived, "activations")
        self._arrived, self._fetched = [], False
        for piece in self._pieces:
            piece.needed = False
            if not piece.views:
                piece.here = None

    def release(self) -> None:
        """Nothing is going to be read any more. Safe to call twice."""
        self.put_away()
        self._unsent = {}
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._store.let_go(piece)
            piece.tier.drop(piece.ticket)

    __del__ = release


class ActivationStore:
    """Sends activations away and brings them back in time.

    Args:
        slots: units whose activations may be on their way in one direction at once.
    """

    def __init__(self, streams: Streams, slots: int) -> None:
        self.streams = streams
        self.slots = slots
        self.tier: ActivationTier = HostTier(streams)
        self.nvme: NvmeActivations | None = None
        """Where the plan's NVMe tier is, if there is one."""
        self.said: set = set()
        """What was said about activations in fewer bits; each kind of unit is reported once."""
        self._leaving: deque[tuple[int, list[_Piece]]] = deque()
        self._number = 0
        self._latest: weakref.ReferenceType = _nothing
        self._seen: list[weakref.ReferenceType] = []

    def follow(self, plan: PlacementPlan) -> None:
        """Takes over a plan's counts, and gives back what it has no use for."""
        self.slots = plan.activation_slots
        used = {tier for unit in plan.units for tier in (unit.boundary, unit.saved)}
        if Tier.CPU not in used or Tier.NVME not in used:
            self.trim(0)
        if Tier.CPU not in used:
            self.tier.close()
        if self.nvme is not None:
            if Tier.NVME not in used:
                self.nvme.close()
            self.nvme.count = plan.nvme_slots

    def tier_of(self, tier: Tier) -> ActivationTier:
        return self.nvme if tier == Tier.NVME else self.tier

    def read_ahead(self, parcel: Parcel) -> None:
        """Units run backward from the one of `parcel` on: a disk brings what they have there into host memory."""
        if self.nvme is None:
            return
        tickets, units = [], 0
        while parcel is not None and units < self.nvme.count:
            found = parcel.gone_to(self.nvme)
            tickets += found
            units += bool(found)
            parcel = parcel._before()
        self.nvme.read_ahead(tickets)

    def can_leave(self, tensor: torch.Tensor) -> bool:
        """Whether it is plain memory of the device, and enough of it to be worth a transfer."""
        return (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.device.type == self.streams.device.type
            and tensor.numel() > 0
            and tensor.untyped_storage().nbytes() >= SMALLEST_BYTES
            and not tensor.is_conj()
            and not tensor.is_neg()
        )

    def own_inputs(self, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """Positions of a unit's inputs that may leave: differentiable, and not shared with the unit before."""
        before = [ref() for ref in self._seen]
        self._seen = [weakref.ref(tensor) for tensor in tensors]
        return frozenset(
            i
            for i, tensor in enumerate(tensors)
            if tensor.requires_grad and self.can_leave(tensor) and not any(tensor is other for other in before)
        )

    def remember(self, parcel: Parcel) -> tuple[int, weakref.ReferenceType]:
        """Returns the parcel's number and a reference to the one before."""
        before, self._latest = self._latest, weakref.ref(parcel)
        self._number += 1
        return self._number, before

    def hold(self, parcel: Parcel, pieces: list[_Piece]) -> None:
        """Keeps device memory until it has left; the first of more than `slots` units on their way are waited for."""
        if pieces:
            self._leaving.append((parcel.number, pieces))
        self.trim(self.slots)

    def trim(self, count: int) -> None:
        """Lets go of all but the last `count` units on their way; the compute stream waits for their copies."""
        while len({number for number, _ in self._leaving}) > count:
            _, pieces = self._leaving.popleft()
            for piece in pieces:
                self.let_go(piece)

    def let_go(self, piece: _Piece) -> None:
        """Ends what holds a piece's device memory on its way out, if it still does. See [Note: whose memory]."""
        if piece.views:
            self.streams.compute_waits(piece.ticket.left, "activations")
            piece.check()
            piece.views.clear()
            if not piece.needed:
                piece.here = None

    def close(self) -> None:
        """Gives page locks back. Everything must be at rest."""
        self.trim(0)
        self.tier.close()
        if self.nvme is not None:
            self.nvme.close()


def _by_tier(pieces: Iterable[_Piece]) -> list[tuple[ActivationTier, list[_Piece]]]:
    groups: dict[int, tuple[ActivationTier, list[_Piece]]] = {}
    for piece in pieces:
        groups.setdefault(id(piece.tier), (piece.tier, []))[1].append(piece)
    return list(groups.values())


def _nothing() -> None:
    """A reference to no parcel."""
