"""Staging buffers on the GPU through which optimizer states that rest in host memory pass for their update.

A unit's states pass in chunks, so that a buffer of bounded size serves units of any size: one chunk comes while another
is updated and a third leaves. A chunk is a range of the unit's trained elements, at the same place in every flat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lazytrain_plugin.kernels.adamw import Moment8
from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.gradient_codes import BLOCK as CODE_BLOCK
from lazytrain_plugin.plan.result import UnitPlan
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.gradient_format import Gradient
from lazytrain_plugin.runtime.homes import UnitHome
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.layout import ALIGNMENT_ELEMENTS, FlatLayout, UnitTensor
from lazytrain_plugin.runtime.state_layout import ACCUMULATOR, MOMENTS, has_codes
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.units import align_up

BLOCK = ALIGNMENT_ELEMENTS
GRADIENT_BYTES_PER_BLOCK = {16: 4 * BLOCK, 8: 2 * BLOCK + 2 * BLOCK // CODE_BLOCK}
"""By gradient bits, at most: of the sum, and of gradients with the padding between small ones."""
WEIGHT_BYTES_PER_BLOCK = 4 * BLOCK
"""Of weights, at most, with the padding between small ones."""
PADDING_BYTES = 5 * BLOCK
"""Between the parts of a chunk."""
WEIGHTS = "weights"
GRADIENT = "gradient"
STEPS = "steps"
"""Of a gradient in codes, beside `GRADIENT` or `ACCUMULATOR`."""
Piece = tuple[str, torch.dtype, HostBuffer, int, int]
"""Key, dtype, buffer at home, offset there, bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of one tensor."""

    tensor: UnitTensor
    start: int
    """Index of the first one in its tensor, a multiple of 256."""
    numel: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What passes the GPU at once: neighbours in the unit's flats, with gradients of one kind."""

    spans: tuple[Span, ...]
    arrival: Arrival

    @property
    def first_element(self) -> int:
        """In the unit's trained part; a multiple of 256."""
        return self.spans[0].tensor.state_offset + self.spans[0].start

    @property
    def numel(self) -> int:
        """With padding between and after tensors: whole blocks of 256."""
        last = self.spans[-1]
        return align_up(last.tensor.state_offset + last.start + last.numel, BLOCK) - self.first_element

    def exact_range(self) -> tuple[int, int]:
        """[first, end) of the elements with 32-bit states beside codes, in their flats; they are neighbours there."""
        offsets = [
            (span.tensor.exact_offset + span.start, span.numel)
            for span in self.spans
            if span.tensor.exact_offset is not None
        ]
        return (offsets[0][0], sum(offsets[-1])) if offsets else (0, 0)

    def byte_range(self, offset_name: str) -> tuple[int, int]:
        """[start, end) in the flat of weights or gradients, where tensors of several dtypes lie side by side."""
        first, last = self.spans[0], self.spans[-1]
        start = getattr(first.tensor, offset_name) + first.start * first.tensor.dtype.itemsize
        end = getattr(last.tensor, offset_name) + (last.start + last.numel) * last.tensor.dtype.itemsize
        return start, end


def cut(
    arrived: dict[UnitTensor, Arrival], layout: FlatLayout, max_blocks: int, part: tuple[int, int] | None = None
) -> list[Chunk]:
    """Chunks of at most `max_blocks` blocks of 256 elements that hold every arrived tensor, in storage order.

    Args:
        part: [first, end) of the trained elements, whole blocks of 256, to which they are limited.
    """
    chunks = []
    begin, stop = (0, layout.state_numel) if part is None else part
    for run in _runs(arrived, layout):
        first = max(run[0].state_offset, begin) // BLOCK
        end = min(run[-1].state_offset // BLOCK + _blocks(run[-1]), stop // BLOCK)
        if first >= end:
            continue
        count = -(-(end - first) // max_blocks)
        size = -(-(end - first) // count)  # equal parts: a short one at the end would leave a buffer idle
        for start in range(first, end, size):
            spans = tuple(_spans(run, start * BLOCK, min(start + size, end) * BLOCK))
            chunks.append(Chunk(spans, arrived[run[0]]))
    return chunks


def _blocks(tensor: UnitTensor) -> int:
    return -(-tensor.numel // BLOCK)


def _runs(arrived: dict[UnitTensor, Arrival], layout: FlatLayout) -> Iterator[list[UnitTensor]]:
    """Neighbours whose gradients arrived in the same way."""
    run: list[UnitTensor] = []
    for tensor in layout.trained:
        if run and arrived.get(tensor) != arrived[run[0]]:
            yield run
            run = []
        if tensor in arrived and tensor.numel:
            run.append(tensor)
    if run:
        yield run


def _spans(run: list[UnitTensor], start: int, end: int) -> Iterator[Span]:
    for tensor in run:
        first, last = max(start - tensor.state_offset, 0), min(end - tensor.state_offset, tensor.numel)
        if first < last:
            yield Span(tensor, first, last - first)


def bytes_per_block(home: UnitHome, *, with_weights: bool = False) -> int:
    """What 256 elements of a unit take in a slot: states, the gradient or its sum, and weights that pass with them;
    without `exact_bytes`."""
    flats = [flat for flat in home.state_flats if not _is_exact(flat[0], home.plan)]
    num_blocks = max(1, (home.held_part[1] - home.held_part[0]) // BLOCK)
    return (
        sum(dtype.itemsize * numel for _, dtype, numel in flats) // num_blocks
        + GRADIENT_BYTES_PER_BLOCK[home.plan.gradient_bits]
        + (WEIGHT_BYTES_PER_BLOCK if with_weights else 0)
    )


def exact_bytes(home: UnitHome) -> int:
    """What all 32-bit moments beside codes take, which a slot has room for in any case."""
    return sum(dtype.itemsize * numel for key, dtype, numel in home.state_flats if _is_exact(key, home.plan))


def _is_exact(key: str, plan: UnitPlan) -> bool:
    """Whether it is the flat of the moments of tensors that are too small for codes."""
    return plan.state_bits == 8 and any(key == name for name, _ in MOMENTS)


class Staged:
    """The states and gradients of one chunk in a slot."""

    def __init__(self, chunk: Chunk, parts: dict[str, torch.Tensor], plan: UnitPlan) -> None:
        self._chunk, self._parts = chunk, parts
        self._plan, self._gradient_bits = plan, plan.gradient_bits

    def weight(self, span: Span) -> torch.Tensor | None:
        """None: the weights did not pass with the states."""
        return self._dense(WEIGHTS, "weight_offset_bytes", span) if WEIGHTS in self._parts else None

    def remainder(self, span: Span) -> torch.Tensor | None:
        return self._elements("remainder", span) if span.tensor.is_split else None

    def moment(self, name: str, span: Span) -> torch.Tensor | Moment8:
        if not has_codes(span.tensor, self._plan):
            if self._plan.state_bits == 32:
                return self._elements(name, span)
            first = span.tensor.exact_offset + span.start - self._chunk.exact_range()[0]
            return self._parts[name][first : first + span.numel]
        first = self._first(span) // BLOCK
        scales = self._parts[f"{name}.scales"][first : first - (-span.numel // BLOCK)]
        return Moment8(codes=self._elements(f"{name}.codes", span), scales=scales)

    def gradient(self, span: Span) -> Gradient:
        summed = self._chunk.arrival == Arrival.SUMMED
        if self._gradient_bits == 8:
            codes = CodedGradient(self._parts[ACCUMULATOR if summed else GRADIENT], self._parts[STEPS])
            return codes.part(self._first(span), span.numel)
        if summed:
            return self._elements(ACCUMULATOR, span)
        return self._dense(GRADIENT, "gradient_offset_bytes", span)

    def _dense(self, key: str, offset_name: str, span: Span) -> torch.Tensor:
        """From a part in which tensors lie in their own dtypes."""
        itemsize = span.tensor.dtype.itemsize
        start = getattr(span.tensor, offset_name) + span.start * itemsize
        start -= self._chunk.byte_range(offset_name)[0]
        return self._parts[key][start : start + span.numel * itemsize].view(span.tensor.dtype)

    def _first(self, span: Span) -> int:
        return span.tensor.state_offset + span.start - self._chunk.first_element

    def _elements(self, key: str, span: Span) -> torch.Tensor:
        first = self._first(span)
        return self._parts[key][first : first + span.numel]


class StateSlot:
    """One staging buffer, and the stream on which everything happens to it.

    Args:
        stream: of no other slot (`Streams.slot_stream`).
        with_weights: weights in host memory come and leave with their states.
    """

    def __init__(self, nbytes: int, streams: Streams, stream, *, with_weights: bool = False) -> None:
        self.with_weights = with_weights
        self._memory = torch.empty(nbytes + PADDING_BYTES, dtype=torch.uint8, device=streams.device)
        self.stream = stream
        self._brought: tuple[UnitHome, Chunk, int] | None = None
        """Whose states have come ahead of their update, and how often their home had been written to then."""
        streams.wait(self.stream, streams.record())  # its memory may be what running kernels still read

    def bring(self, home: UnitHome, chunk: Chunk) -> None:
        """Starts bringing the states of a chunk in, on the current stream, before its gradients are there."""
        self._brought, end = None, 0
        for _, _, buffer, start, nbytes in self._states(home, chunk):
            buffer.read(start, self._memory[end : end + nbytes])
            end += align_up(nbytes, BLOCK)
        self._brought = home, chunk, home.state_writes

    @property
    def is_free(self) -> bool:
        """No states were brought that are still those at home."""
        return self._brought is None or self._brought[2] != self._brought[0].state_writes

    def holds(self, home: UnitHome, chunk: Chunk) -> bool:
        """Whether the chunk's states were brought, and are still those at home."""
        return not self.is_free and self._brought[0] is home and self._brought[1].spans == chunk.spans

    def forget(self, home: UnitHome, chunk: Chunk) -> None:
        """The chunk is updated elsewhere: states that were brought are outdated if they have elements of it."""
        if self._brought is None or self._brought[0] is not home:
            return
        begin, other = chunk.first_element, self._brought[1].first_element
        if begin < other + self._brought[1].numel and other < begin + chunk.numel:
            self._brought = None

    def load(self, home: UnitHome, chunk: Chunk) -> Staged:
        """Starts bringing a chunk in, but for states that are here, on the current stream."""
        parts, end, brought = {}, 0, self.holds(home, chunk)
        self._brought = None
        for states, pieces in ((True, self._states(home, chunk)), (False, self._others(home, chunk))):
            for key, dtype, buffer, start, nbytes in pieces:
                part = self._memory[end : end + nbytes]
                if not (states and brought):
                    buffer.read(start, part)
                parts[key] = part.view(dtype)
                end += align_up(nbytes, BLOCK)
        return Staged(chunk, parts, home.plan)

    def store(self, home: UnitHome, chunk: Chunk) -> None:
        """Starts bringing what was updated of the chunk that was loaded last home, on the current stream."""
        end = 0
        for key, _, buffer, start, nbytes in (*self._states(home, chunk), *self._others(home, chunk)):
            if key not in (GRADIENT, ACCUMULATOR, STEPS):
                buffer.write(start, self._memory[end : end + nbytes])
            end += align_up(nbytes, BLOCK)

    def state_bytes(self, home: UnitHome, chunk: Chunk) -> int:
        """What `bring` brings, and `store` takes home beside weights."""
        return sum(nbytes for *_, nbytes in self._states(home, chunk))

    def missing_bytes(self, home: UnitHome, chunk: Chunk) -> int:
        """What `load` is going to bring."""
        states = 0 if self.holds(home, chunk) else self.state_bytes(home, chunk)
        return states + sum(nbytes for *_, nbytes in self._others(home, chunk))

    @staticmethod
    def _states(home: UnitHome, chunk: Chunk) -> Iterator[Piece]:
        """What makes up a chunk, whatever gradients it has."""
        for key, dtype, numel in home.state_flats:
            if not _is_exact(key, home.plan):
                yield _part_of_flat(home, chunk, key, dtype, numel)
                continue
            first, end = chunk.exact_range()
            if first < end:
                yield key, dtype, home.state_buffers[key], first * dtype.itemsize, (end - first) * dtype.itemsize

    def _others(self, home: UnitHome, chunk: Chunk) -> Iterator[Piece]:
        """Its gradients, and weights that pass with them."""
        first_held, end_held = home.held_part
        form, summed = home.gradient_format, chunk.arrival == Arrival.SUMMED
        if form.coded:
            buffer = home.state_buffers[ACCUMULATOR] if summed else home.gradient_buffer
            kinds = ((ACCUMULATOR, torch.int16) if summed else (GRADIENT, torch.int8), (STEPS, torch.int16))
            ranges = form.ranges(chunk.first_element - first_held, chunk.numel, summed=summed)
            for (key, dtype), (start, nbytes) in zip(kinds, ranges, strict=True):
                yield key, dtype, buffer, start, nbytes
        elif summed:
            yield _part_of_flat(home, chunk, ACCUMULATOR, torch.float32, end_held - first_held)
        else:
            start, end = (offset - form.first_byte for offset in chunk.byte_range("gradient_offset_bytes"))
            yield GRADIENT, torch.uint8, home.gradient_buffer, start, end - start
        if self.with_weights:
            start, end = chunk.byte_range("weight_offset_bytes")
            yield WEIGHTS, torch.uint8, home.host_buffer, start, end - start


def _part_of_flat(home: UnitHome, chunk: Chunk, key: str, dtype: torch.dtype, numel: int) -> Piece:
    """A chunk's part of a flat that has as much for each block of 256 elements."""
    first_held, end_held = home.held_part
    block_bytes = numel // ((end_held - first_held) // BLOCK) * dtype.itemsize
    start = (chunk.first_element - first_held) // BLOCK * block_bytes
    return key, dtype, home.state_buffers[key], start, chunk.numel // BLOCK * block_bytes
