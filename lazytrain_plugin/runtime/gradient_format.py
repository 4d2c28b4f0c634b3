"""`GradientFormat`: how the gradients of one unit, and their sums over micro-batches, lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lazytrain_plugin.kernels.adamw import accumulate
from lazytrain_plugin.kernels.coded_gradient import CodedGradient, add_codes, decode_gradient, encode_gradient
from lazytrain_plugin.kernels.gradient_codes import BLOCK as CODE_BLOCK
from lazytrain_plugin.runtime.layout import ALIGNMENT_ELEMENTS
from lazytrain_plugin.units import align_up

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.layout import FlatLayout, UnitTensor

Gradient = torch.Tensor | CodedGradient
"""1-D in storage order: in the weight's dtype, in fp32, or in codes."""
Raw = list[tuple["UnitTensor", torch.Tensor]]
"""Gradients as autograd made them, 1-D in storage order."""


@dataclass(frozen=True, slots=True)
class GradientFormat:
    """One flat for what arrives and one for sums.

    With 16 bits: gradients in their weights' dtypes, and fp32 sums with an element per trained element. With 8: codes
    (kernels/coded_gradient.py), int8 in the one and int16 in the other, an element per trained element, then their
    steps, two bytes per 64 elements.

    With a `part` the flats hold those elements only, and so do what `arrival` and `sum` give.
    """

    layout: FlatLayout
    bits: int
    part: tuple[int, int]
    """[first, end) of the unit's trained elements: whole blocks of 256."""

    @property
    def coded(self) -> bool:
        return self.bits == 8

    @property
    def arrival_bytes(self) -> int:
        """Bytes of the flat of arrivals."""
        if self.coded:
            return self._numel + 2 * (self._numel // CODE_BLOCK)
        held = self._gradient_bytes
        return held.stop - held.start

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of the flat of sums; int16 holds codes and steps."""
        return torch.int16 if self.coded else torch.float32

    @property
    def sum_numel(self) -> int:
        """Elements of the flat of sums."""
        return self._numel + self._numel // CODE_BLOCK if self.coded else self._numel

    @property
    def _numel(self) -> int:
        return self.part[1] - self.part[0]

    @property
    def _gradient_bytes(self) -> slice:
        """Of the flat of the whole unit's gradients in their weights' dtypes."""
        whole = self._numel == self.layout.state_numel
        return slice(0, self.layout.gradient_bytes) if whole else self.layout.gradient_bytes_of(self.part)

    @property
    def first_byte(self) -> int:
        """Where the flat of arrivals that has no codes begins in that of the whole unit."""
        return self._gradient_bytes.start

    def _place(self, tensor: UnitTensor) -> tuple[int, int]:
        """A tensor's elements in flats with an element per trained one: the first one's index, and their number."""
        span = tensor.span_in(self.part)
        count = span.stop - span.start
        return (tensor.state_offset + span.start - self.part[0] if count else 0), count

    def arrival(self, tensor: UnitTensor, flat_uint8: torch.Tensor) -> Gradient:
        """A tensor's part of the flat of arrivals."""
        first, count = self._place(tensor)
        if self.coded:
            codes, steps = flat_uint8[: self._numel].view(torch.int8), flat_uint8[self._numel :].view(torch.int16)
            return CodedGradient(codes, steps).part(first, count)
        start = self._offset_bytes(tensor, tensor.span_in(self.part).start) if count else 0
        return flat_uint8[start : start + count * tensor.dtype.itemsize].view(tensor.dtype)

    def _offset_bytes(self, tensor: UnitTensor, start: int) -> int:
        """Where an element of a tensor lies in the flat of arrivals that has no codes."""
        return tensor.gradient_offset_bytes + start * tensor.dtype.itemsize - self._gradient_bytes.start

    def sum(self, tensor: UnitTensor, flat: torch.Tensor) -> Gradient:
        """A tensor's part of the flat of sums."""
        first, count = self._place(tensor)
        if self.coded:
            return CodedGradient(flat[: self._numel], flat[self._numel :]).part(first, count)
        return flat[first : first + count]

    def at_rest(self, raw: torch.Tensor) -> Gradient:
        """What is kept of a gradient on its device: itself, or its codes."""
        if not self.coded:
            return raw
        coded = CodedGradient.empty(raw.numel(), 8, raw.device)
        encode_gradient(raw, coded)
        return coded

    def pieces(self, raws: Raw, starts: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """What is sent home of `raws`: (offset in bytes in the flat of arrivals, contiguous tensor on their device).

        Codes are made on the current stream; neighbours share pieces.

        Args:
            starts: index of the first given element in each tensor, a multiple of 256.
        """
        if not self.coded:
            return [(self._offset_bytes(tensor, start), raw) for (tensor, raw), start in zip(raws, starts, strict=True)]
        placed = [
            (tensor.state_offset + start - self.part[0], raw) for (tensor, raw), start in zip(raws, starts, strict=True)
        ]
        pieces = []
        for run in _neighbours(placed):
            first, (last, last_raw) = run[0][0], run[-1]
            coded = CodedGradient.empty(last + last_raw.numel() - first, 8, last_raw.device)
            for place, raw in run:
                encode_gradient(raw, coded.part(place - first, raw.numel()))
            pieces.append((first, coded.codes))
            pieces.append((self._numel + 2 * (first // CODE_BLOCK), coded.steps))
        return pieces

    def ranges(self, first_element: int, numel: int, *, summed: bool) -> list[tuple[int, int]]:
        """Codes and steps of trained elements (whole blocks of 256), counted from the first of the part: (offset, size)
        in bytes in their flat."""
        width = 2 if summed else 1
        steps = self._numel * width
        return [
            (first_element * width, numel * width),
            (steps + 2 * (first_element // CODE_BLOCK), 2 * (numel // CODE_BLOCK)),
        ]


def add_up(total: Gradient, arrived: Gradient, *, first: bool) -> None:
    """total = arrived if `first`, else total + arrived, in fp32; rounded to codes where `total` has them."""
    if isinstance(total, CodedGradient):
        add_codes(total, arrived, first=first)
    else:
        accumulate(total, arrived, first=first)


def take_over(total: Gradient, other: Gradient) -> None:
    """Makes `total` what `other` is, a sum of another format or device; bit for bit where the formats are the same."""
    if isinstance(total, CodedGradient) and not isinstance(other, CodedGradient):
        encode_gradient(other.to(total.device), total)
    elif isinstance(other, CodedGradient) and not isinstance(total, CodedGradient):
        total.copy_(as_values(other))
    else:
        total.copy_(other)


def as_values(gradient: Gradient) -> torch.Tensor:
    """The gradient, decoded to fp32 if it has codes."""
    if not isinstance(gradient, CodedGradient):
        return gradient
    values = torch.empty(gradient.numel(), dtype=torch.float32, device=gradient.device)
    decode_gradient(gradient, values)
    return values


def part_of(gradient: Gradient, span: slice) -> Gradient:
    """Elements of a gradient; `span` begins at a multiple of 256."""
    if span.stop - span.start == gradient.numel():
        return gradient  # mostly so, and a slice takes the host as long as a small update
    if isinstance(gradient, CodedGradient):
        return gradient.part(span.start, span.stop - span.start)
    return gradient[span]


def _neighbours(placed: list[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    """Gradients, given with the place of their first element, that lie side by side, so that they travel as one."""
    runs: list[list[tuple[int, torch.Tensor]]] = []
    end = None
    for place, raw in sorted(placed, key=lambda item: item[0]):
        if not raw.numel():
            continue
        if place != end:
            runs.append([])
        runs[-1].append((place, raw))
        end = align_up(place + raw.numel(), ALIGNMENT_ELEMENTS)
    return runs
