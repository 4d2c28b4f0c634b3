"""`HomeStates`: the optimizer states of one unit, wherever they rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from lazytrain_plugin.kernels.adamw import Moment8
from lazytrain_plugin.runtime.held_states import HeldStates, StatesOfRank, blocks
from lazytrain_plugin.runtime.layout import FlatLayout, UnitTensor, common, elements
from lazytrain_plugin.runtime.state_layout import CODEC, MOMENTS
from lazytrain_plugin.vocab import Tier

if TYPE_CHECKING:
    from lazytrain_plugin.plan.result import UnitPlan
    from lazytrain_plugin.runtime.nvme.states import NvmeStates
    from lazytrain_plugin.runtime.rank_group import RankGroup


class HomeStates:
    """The states' part of a `UnitHome` (runtime/homes.py, where the arguments are described).

    With several ranks, states in host memory are there once for all ranks of a node, each of which updates its own
    elements of them (`span`). Of states on NVMe and on the GPU, and of all states where they are divided over the job,
    each rank has those elements only (`is_divided`). It reads the others' from their disk space; those on GPUs and on
    other nodes are sent, while all ranks that have a part read the same.
    """

    def __init__(self, layout: FlatLayout, plan: UnitPlan, ranks: RankGroup | None, *, native: bool) -> None:
        self.layout = layout
        self.plan = plan
        self.ranks = ranks
        self.native = native
        self.states_on_gpu = plan.states == Tier.GPU
        self.nvme_states: tuple[NvmeStates, ...] = ()
        """Piece by piece, in the order of the elements; each is in memory on its own."""
        self.state_flats: tuple[tuple[str, torch.dtype, int], ...] = ()
        """(key, dtype, numel) of each flat of states that rest in memory."""
        self.held: HeldStates | None = None
        """Remainder and moments while they are in memory."""
        self.state_writes = 0
        """How often they were opened to be changed here. Updates that pass the GPU don't count."""

    # What this rank updates.

    @property
    def is_shared(self) -> bool:
        """States and gradients are in host memory that ranks have in common; each updates a part of the unit."""
        return self.ranks is not None and not self.states_on_gpu and not self.ranks.shards_job

    @property
    def is_divided(self) -> bool:
        """States are on NVMe, on the GPU or divided over the job, and each rank has its own part of them."""
        return self.ranks is not None and (bool(self.nvme_states) or self.is_read_together)

    @property
    def is_read_together(self) -> bool:
        """States are on the GPUs of several ranks, or on several nodes: to read them whole takes all that have a part
        at once."""
        return self.ranks is not None and (self.states_on_gpu or self.ranks.shards_job)

    @property
    def is_read_from_disks(self) -> bool:
        """States are on NVMe, of each of several ranks on its own: to read them whole takes the others' disk space."""
        return self.is_divided and not self.is_read_together

    @property
    def held_part(self) -> tuple[int, int]:
        """[first, end) of the trained elements whose states this rank has: all, or those of its part."""
        return self.ranks.part(self.layout) if self.is_divided else self.layout.part(0, 1)

    def part(self, number: int) -> tuple[int, int]:
        """[first, end) of the trained elements in one of the parts that are updated by a rank each: whole blocks of
        256."""
        return self.layout.part(number, self.ranks.num_parts)

    def span(self, tensor: UnitTensor) -> slice:
        """The elements of the tensor that this rank updates."""
        return slice(0, tensor.numel) if self.ranks is None else self._span_of(tensor, self.ranks.own_part)

    def _span_of(self, tensor: UnitTensor, part: int) -> slice:
        """The elements of the tensor in a part."""
        return tensor.span_in(self.part(part))

    def _own_span(self, tensor: UnitTensor) -> slice:
        """The elements whose states this rank has: all, or those of its part."""
        return self.span(tensor) if self.is_divided else slice(0, tensor.numel)

    # Pieces of what this rank has: several of states on NVMe, otherwise one.

    @property
    def pieces(self) -> range:
        return range(len(self.nvme_states) or 1)

    def piece(self, index: int, part: int | None = None) -> tuple[int, int]:
        """[first, end) of the trained elements in a piece of a part (default: of what this rank has)."""
        if not self.is_divided:
            return self.layout.part(index, len(self.pieces))
        part = self.ranks.own_part if part is None else part
        return self.layout.piece(index, len(self.pieces), part, self.ranks.num_parts)

    def span_to_update(self, tensor: UnitTensor, piece: int) -> slice:
        """The elements of the tensor that this rank updates in a piece."""
        return tensor.span_in(self.piece(piece)) if len(self.pieces) > 1 else self.span(tensor)

    def _own_pieces(self, tensor: UnitTensor) -> Iterator[tuple[int, slice]]:
        """Each piece with states of the tensor that this rank has, and the tensor's elements in it."""
        for index in self.pieces:
            span = tensor.span_in(self.piece(index))
            if span.start < span.stop:
                yield index, span

    def _holding(self, flats: dict[str, torch.Tensor], first: int = 0) -> HeldStates:
        return HeldStates(flats, self.plan.state_bits, first)

    @contextmanager
    def states_in_memory(self, piece: int = 0, *, changes: bool, write_now: bool = False) -> Iterator[None]:
        """Within: a piece of the states that this rank has can be worked on, wherever they rest. Nests.

        Args:
            changes: whether they are changed within.
            write_now: for NVMe: start bringing changes to the disk at the end, in the background.

        Raises:
            StorageError: the disk failed.
        """
        self.state_writes += changes
        if not self.nvme_states:
            yield
            return
        states = self.nvme_states[piece]
        with states.in_memory(changes=changes, write_now=write_now):
            self.held = self._holding(states.tensors, self.piece(piece)[0])
            try:
                yield
            finally:
                if states.num_users == 1:
                    self.held = None

    def _each_part(self, tensor: UnitTensor, within: slice) -> Iterator[slice]:
        """Some of the tensor's elements, piece by piece; while one is given, its states are in memory, to be read.

        Where they are read together, all ranks that have a part go through them at once, and ask for the same.
        Errors as of `Journal.wait` (runtime/nvme/peers.py).
        """
        if tensor.numel == 0:
            with self.states_in_memory(changes=False):
                yield slice(0, 0)
            return
        if not self.is_divided:
            for index, span in self._own_pieces(tensor):
                span = common(span, within)
                if span.start < span.stop:
                    with self.states_in_memory(index, changes=False):
                        yield span
            return
        for rank, index in itertools.product(range(self.ranks.num_parts), self.pieces):
            span = common(tensor.span_in(self.piece(index, rank)), within)
            if span.start >= span.stop:
                continue
            if self.is_read_together:
                with self._sent_by(rank, index):
                    yield span
                continue
            if rank == self.ranks.own_part:
                with self.states_in_memory(index, changes=False):
                    yield span
                continue
            with self.nvme_states[index].peer_in_memory(rank) as flats:
                before, self.held = self.held, self._holding(flats, self.piece(index, rank)[0])
                try:
                    yield span
                finally:
                    self.held = before

    @contextmanager
    def _sent_by(self, part: int, piece: int) -> Iterator[None]:
        """Within: the rank that has a part sends what is asked for to all that have one."""
        own = part == self.ranks.own_part
        with self.states_in_memory(piece, changes=False) if own else nullcontext():
            before = self.held
            first, flats = (0, self.nvme_states[piece].kinds) if before is None else (before.first, before.flats)
            self.held = StatesOfRank(flats, self.plan.state_bits, first, ranks=self.ranks, owner=part)
            try:
                yield
            finally:
                self.held = before

    # What the update works on.

    def remainder_of(self, tensor: UnitTensor, span: slice | None = None) -> torch.Tensor | None:
        """Of some elements; default: all whose states are here."""
        return self.held.remainder(tensor, span or self._own_span(tensor))

    def moment(self, tensor: UnitTensor, name: str, span: slice | None = None) -> torch.Tensor | Moment8:
        """As `remainder_of`."""
        return self.held.moment(tensor, name, span or self._own_span(tensor))

    # Moments for checkpoints and moves. Storage order, 1-D [numel], on the CPU.

    def read_moments(self, tensor: UnitTensor, within: slice) -> dict[str, torch.Tensor]:
        """Of some elements, from a multiple of 256 on."""

        def read(span: slice) -> dict[str, torch.Tensor]:
            return {name: self.held.values(tensor, name, span) for name, _ in MOMENTS}

        return self._read(tensor, read, within)

    def read_codec(self, tensor: UnitTensor, within: slice) -> dict[str, torch.Tensor]:
        """The same in 8 bits as they are stored: `{name}.codes` uint8, `{name}.scales` fp32 [blocks], on the CPU."""

        def read(span: slice) -> dict[str, torch.Tensor]:
            moments = {name: self.moment(tensor, name, span) for name, _ in MOMENTS}
            return {f"{name}.{part}": getattr(moments[name], part) for name in moments for part in CODEC}

        return self._read(tensor, read, within)

    def _read(
        self, tensor: UnitTensor, read: Callable[[slice], dict[str, torch.Tensor]], within: slice
    ) -> dict[str, torch.Tensor]:
        """What `read` finds in each part of some elements of the tensor, put together on the CPU."""
        found: dict[str, torch.Tensor] = {}
        for span in self._each_part(tensor, within):
            for key, values in read(span).items():
                if not self.is_divided and not self.nvme_states:
                    found[key] = values.cpu()
                    continue
                # The memory is someone else's next.
                place, whole = (blocks(s) if key.endswith(".scales") else s for s in (span, within))
                flat = found.setdefault(key, values.new_empty(whole.stop - whole.start))
                flat[place.start - whole.start : place.stop - whole.start] = values
        return found

    def assembled(self, tensor: UnitTensor, own: torch.Tensor) -> torch.Tensor:
        """All elements on the CPU, of which each rank gives those of its part. All that have one call it at once."""
        whole = own.new_empty(tensor.numel, device="cpu")
        for part in range(self.ranks.num_parts):
            span = self._span_of(tensor, part)
            values = own.cpu() if part == self.ranks.own_part else whole.new_empty(span.stop - span.start)
            self.ranks.copy_of_owner(values, part, "reading of gradients")
            whole[span] = values
        return whole

    def write_codec(self, tensor: UnitTensor, values: dict[str, torch.Tensor]) -> None:
        for index, span in self._own_pieces(tensor):
            with self.states_in_memory(index, changes=True):
                for name, _ in MOMENTS:
                    moment = self.moment(tensor, name, span)
                    moment.codes.copy_(values[f"{name}.codes"][span])
                    moment.scales.copy_(values[f"{name}.scales"][blocks(span)])

    def write_moments(self, tensor: UnitTensor, values: dict[str, torch.Tensor]) -> None:
        for index, span in self._own_pieces(tensor):
            with self.states_in_memory(index, changes=True):
                for name, _ in MOMENTS:
                    self.held.set_values(tensor, name, span, elements(values[name], span))

    def take_states(self, other: HomeStates) -> None:
        """Takes over the states that `other` holds, bit for bit where the format is the same."""
        same_pieces = self.is_divided == other.is_divided and self.pieces == other.pieces
        alike = same_pieces and self.plan.state_bits == other.plan.state_bits
        for index in self.pieces:
            with self.states_in_memory(index, changes=True):
                if alike:
                    with other.states_in_memory(index, changes=False):
                        for key, values in self.held.flats.items():
                            values.copy_(other.held.flats[key])
                    continue
                for tensor in self.layout.trained:
                    for span in self._spans_to_take(other, tensor, self.piece(index)):
                        self.held.take(other.held, tensor, span, moments=self.native)

    def _spans_to_take(self, other: HomeStates, tensor: UnitTensor, piece: tuple[int, int]) -> Iterator[slice]:
        """Elements in a piece that this rank takes over from `other`, while they are in memory there."""
        wanted = tensor.span_in(piece)
        if self.is_divided or other.is_divided:
            # The others take theirs, into their parts or into memory that ranks share.
            wanted = common(wanted, self.span(tensor))
        for index, span in other._own_pieces(tensor):
            span = common(wanted, span)
            if span.start < span.stop:
                with other.states_in_memory(index, changes=False):
                    yield span
