"""Where each tensor of a unit sits in the unit's flat buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lazytrain_plugin.profile.model import LEAST_CODED_NUMEL
from lazytrain_plugin.units import align_up

ALIGNMENT_ELEMENTS = 256
"""Quantization blocks never straddle two tensors."""
ALIGNMENT_BYTES = 1024
"""256 elements of the widest dtype (fp32)."""


@dataclass(slots=True, eq=False)
class UnitTensor:
    """One parameter of a unit. Offsets count from the start of the unit's flats."""

    name: str
    """Name in `model.named_parameters()`."""
    parameter: nn.Parameter
    dtype: torch.dtype
    """Dtype of the weight at home."""
    shape: torch.Size
    stride: tuple[int, ...]
    numel: int
    weight_offset_bytes: int
    trained: bool
    """The optimizer updates it: it has states and a gradient."""
    index: int = -1
    """Position among all trained tensors of the model; keys norms and rounding noise, so never plan-dependent."""
    group: int = -1
    """Index of its optimizer group."""
    position_in_group: int = -1
    gradient_offset_bytes: int = 0
    state_offset: int = 0
    """In elements of the trained part."""
    exact_offset: int | None = None
    """Too small for 8-bit states: in elements of the flats of fp32 moments that an 8-bit plan has beside the codes."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def whole(self) -> slice:
        """All of its elements."""
        return slice(0, self.numel)

    @property
    def is_row_major(self) -> bool:
        """Storage order is the order of its elements."""
        return self.stride == torch.empty(self.shape, device="meta").stride()

    @property
    def is_split(self) -> bool:
        """bf16 weight + int16 remainder = fp32 master; an fp32 weight is its own master."""
        return self.trained and self.dtype == torch.bfloat16

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """1-D [numel] in storage order -> the parameter's shape and strides."""
        return flat.as_strided(self.shape, self.stride)

    def span_in(self, part: tuple[int, int]) -> slice:
        """This tensor's elements among [first, end) of the unit's trained elements."""
        first, end = (min(max(e - self.state_offset, 0), self.numel) for e in part)
        return slice(first, end)

    def weight_view(self, flat_uint8: torch.Tensor) -> torch.Tensor:
        """This weight, 1-D [numel], inside a uint8 flat of the unit's weights."""
        return _typed(flat_uint8, self.weight_offset_bytes, self.numel, self.dtype)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Sizes of a unit's flats. Trained tensors come first, so that what is updated is contiguous."""

    tensors: tuple[UnitTensor, ...]
    weight_bytes: int
    gradient_bytes: int
    state_numel: int
    exact_numel: int = 0
    """Elements of the tensors that are too small for 8-bit states, padded."""

    @property
    def trained(self) -> tuple[UnitTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.trained)

    def part(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """[first, end) of the trained elements that one of several ranks updates: whole blocks of 256."""
        num_blocks = self.state_numel // ALIGNMENT_ELEMENTS
        first, end = (num_blocks * r // num_ranks for r in (rank, rank + 1))
        return first * ALIGNMENT_ELEMENTS, end * ALIGNMENT_ELEMENTS

    def piece(self, index: int, count: int, rank: int, num_ranks: int) -> tuple[int, int]:
        """[first, end) of one of `count` pieces of such a part."""
        return self.part(rank * count + index, num_ranks * count)

    def weight_bytes_of(self, part: tuple[int, int]) -> slice:
        """The bytes of the flat of weights that hold some of the trained elements."""
        return self._bytes_of(part, "weight_offset_bytes")

    def gradient_bytes_of(self, part: tuple[int, int]) -> slice:
        """The bytes of the flat of gradients that hold some of the trained elements."""
        return self._bytes_of(part, "gradient_offset_bytes")

    def _bytes_of(self, part: tuple[int, int], offset_name: str) -> slice:
        places = []
        for tensor in self.trained:
            span = tensor.span_in(part)
            if span.start < span.stop:
                offset = getattr(tensor, offset_name)
                places += [offset + count * tensor.dtype.itemsize for count in (span.start, span.stop)]
        return slice(min(places, default=0), max(places, default=0))


def lay_out(
    named: list[tuple[str, nn.Parameter]],
    dtypes: dict[nn.Parameter, torch.dtype],
    trained,
    *,
    least_coded_numel: int = LEAST_CODED_NUMEL,
) -> FlatLayout:
    """Lays the parameters of one unit out.

    Args:
        named: (name, parameter) pairs, each parameter once.
        dtypes: dtype of each weight at home.
        trained: predicate on a parameter.
        least_coded_numel: tensors with fewer elements have 32-bit states under 8-bit plans too.
    """
    weight_bytes = gradient_bytes = state_numel = exact_numel = 0
    tensors = []
    for name, parameter in sorted(named, key=lambda item: not trained(item[1])):
        dtype, numel = dtypes[parameter], parameter.numel()
        tensor = UnitTensor(
            name=name,
            parameter=parameter,
            dtype=dtype,
            shape=parameter.shape,
            stride=_dense_stride(parameter),
            numel=numel,
            weight_offset_bytes=weight_bytes,
            trained=trained(parameter),
        )
        weight_bytes = align_up(weight_bytes + tensor.nbytes, ALIGNMENT_BYTES)
        if tensor.trained:
            tensor.gradient_offset_bytes, tensor.state_offset = gradient_bytes, state_numel
            gradient_bytes = align_up(gradient_bytes + tensor.nbytes, ALIGNMENT_BYTES)
            state_numel = align_up(state_numel + numel, ALIGNMENT_ELEMENTS)
            if numel < least_coded_numel:
                tensor.exact_offset = exact_numel
                exact_numel = align_up(exact_numel + numel, ALIGNMENT_ELEMENTS)
        tensors.append(tensor)
    return FlatLayout(tuple(tensors), weight_bytes, gradient_bytes, state_numel, exact_numel)


def elements(flat: torch.Tensor, span: slice) -> torch.Tensor:
    """Elements of a flat tensor; no slice of all of them, which takes the host as long as a small update."""
    return flat if span.stop - span.start == flat.numel() else flat[span]


def common(first: slice, second: slice) -> slice:
    """Elements in both; of none the end may come before the start."""
    return slice(max(first.start, second.start), min(first.stop, second.stop))


def _dense_stride(parameter: nn.Parameter) -> tuple[int, ...]:
    """The parameter's own strides where its memory is dense (a transpose, channels-last), else dense ones."""
    return torch.empty_like(parameter, device="meta").stride()


def _typed(flat_uint8: torch.Tensor, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return flat_uint8[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)
