"""`HeldStates`: a unit's optimizer states, or a part of them, where they can be worked on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lazytrain_plugin.kernels.adamw import Moment8
from lazytrain_plugin.kernels.state8 import dequantize_moment, quantize_moment
from lazytrain_plugin.runtime.layout import ALIGNMENT_ELEMENTS, UnitTensor
from lazytrain_plugin.runtime.state_layout import MOMENTS

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.rank_group import RankGroup

SIGNED = dict(MOMENTS)


def blocks(span: slice) -> slice:
    """The blocks of 256 that hold some elements; `span` begins at one."""
    return slice(span.start // ALIGNMENT_ELEMENTS, -(-span.stop // ALIGNMENT_ELEMENTS))


@dataclass(frozen=True, slots=True)
class HeldStates:
    """Flats by key (runtime/state_layout.py), from a trained element of the unit on. Spans are of one tensor's elements
    and begin at multiples of 256."""

    flats: dict[str, torch.Tensor]
    state_bits: int
    first: int = 0
    """The trained element with which they begin: whole blocks of 256."""
    _parts: dict[tuple, torch.Tensor | Moment8] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was asked for: slicing takes the host longer, three to five times for each tensor of an update."""

    def remainder(self, tensor: UnitTensor, span: slice) -> torch.Tensor | None:
        """None: an fp32 weight is its own master."""
        return self._part("remainder", tensor, span) if tensor.is_split else None

    def moment(self, tensor: UnitTensor, name: str, span: slice) -> torch.Tensor | Moment8:
        return self._part(name, tensor, span)

    def _part(self, key: str, tensor: UnitTensor, span: slice) -> torch.Tensor | Moment8:
        asked = (key, tensor, span.start, span.stop)
        part = self._parts.get(asked)
        if part is None:
            part = self._parts[asked] = self._slice(key, tensor, span)
        return part

    def _slice(self, name: str, tensor: UnitTensor, span: slice) -> torch.Tensor | Moment8:
        place = self._place(tensor, span)
        if self.state_bits != 8 or name == "remainder":
            return self.flats[name][place]
        if tensor.exact_offset is not None:
            return self.flats[name][tensor.exact_offset + span.start : tensor.exact_offset + span.stop]
        return Moment8(codes=self.flats[f"{name}.codes"][place], scales=self.flats[f"{name}.scales"][blocks(place)])

    def _place(self, tensor: UnitTensor, span: slice) -> slice:
        begin = tensor.state_offset - self.first
        return slice(begin + span.start, begin + span.stop)

    def values(self, tensor: UnitTensor, name: str, span: slice) -> torch.Tensor:
        """A moment in fp32 where the states are; where it rests so, the memory itself."""
        moment = self.moment(tensor, name, span)
        if not isinstance(moment, Moment8):
            return moment
        values = torch.empty(span.stop - span.start, dtype=torch.float32, device=moment.codes.device)
        dequantize_moment(moment, values, signed=SIGNED[name])
        return values

    def set_values(self, tensor: UnitTensor, name: str, span: slice, values: torch.Tensor) -> None:
        """Takes a moment in fp32 over."""
        moment = self.moment(tensor, name, span)
        if isinstance(moment, Moment8):
            quantize_moment(values.to(moment.codes.device), moment, signed=SIGNED[name])
        else:
            moment.copy_(values)

    def take(self, other: HeldStates, tensor: UnitTensor, span: slice, *, moments: bool) -> None:
        """Takes elements of another home over, bit for bit where the format is the same."""
        if tensor.is_split:
            self.remainder(tensor, span).copy_(other.remainder(tensor, span))
        for name in SIGNED if moments else ():
            mine, theirs = self.moment(tensor, name, span), other.moment(tensor, name, span)
            if isinstance(mine, Moment8) and isinstance(theirs, Moment8):
                mine.codes.copy_(theirs.codes)
                mine.scales.copy_(theirs.scales)
            else:
                self.set_values(tensor, name, span, other.values(tensor, name, span))


@dataclass(frozen=True, slots=True)
class StatesOfRank(HeldStates):
    """What one rank holds on its GPU or for itself, for all that have a part: each makes one and asks it for the same,
    in the same order. Gives copies on the CPU."""

    ranks: RankGroup | None = None
    owner: int = 0
    """Number of that rank's part. The flats are this rank's own."""

    def _slice(self, name: str, tensor: UnitTensor, span: slice) -> torch.Tensor | Moment8:
        part = HeldStates._slice(self, name, tensor, span) if self.owner == self.ranks.own_part else None
        count = span.stop - span.start
        if name == "remainder" or self.state_bits != 8 or tensor.exact_offset is not None:
            return self._sent(part, name, count)
        return Moment8(
            codes=self._sent(part and part.codes, f"{name}.codes", count),
            scales=self._sent(part and part.scales, f"{name}.scales", -(-count // ALIGNMENT_ELEMENTS)),
        )

    def _sent(self, own: torch.Tensor | None, key: str, count: int) -> torch.Tensor:
        values = torch.empty(count, dtype=self.flats[key].dtype) if own is None else own.cpu()
        self.ranks.copy_of_owner(values, self.owner, "reading of states")
        return values
