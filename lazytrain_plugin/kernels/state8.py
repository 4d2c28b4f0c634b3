"""Block-wise 8-bit optimizer states: the code book, its rounding, and the scales.

Format (that of bitsandbytes' AdamW8bit): blocks of 256 values share one fp32 scale; a value is `values[code] * scale`,
where the 256 values are the "dynamic" map of Dettmers et al. (8-bit Optimizers via Block-wise Quantization, 2021):
seven decades from 1e-7 to 1, each with twice the codes of the one below, evenly spaced within a decade, and 0 and 1.
Signed for the first moment (1 to 64 codes per decade and sign), unsigned for the second (2 to 128).

How a value is rounded (everywhere in this order of fp32 operations, so with the same bits):

    scale     the largest magnitude of the block / the last code below 1, so that the negative end is a code too
              (1 has no negative; bitsandbytes' own scale is the magnitude, which cuts the negative end by 0.7 %).
              NaN if the block holds NaN or infinity: it then decodes to NaN, nothing is hidden.
    x         |value| * (1 / scale * (1 + 2^-20)): a hair more, so that the largest always gets the last code
    position  in 1/65536 of a code, from the code of zero: linear between any two neighbouring codes, so its fraction
              says how far x is between them. That function is concave, hence the least of three lines for each decade:
              with r = x * scale + offset (the decade's own line, 0 at its first code, its codes 65536 apart) those are
              r * below (the wider gap to the decade below), r, and r / 3 + tail (the gap to the decade above);
              then + first, the position of the decade's first code.
    code      (int(position) + noise) >> 16

Noise of 1/2 rounds to nearest (`quantize_moment`: encoding what was decoded gives the same codes and scales). An update
draws it uniformly from [0, 1): with nearest rounding beta2 = .999 would leave most second moments where they are, since
a step moves them by less than half the distance between two codes. A second moment above zero never gets the code of
zero: the update would divide by eps alone and explode.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from lazytrain_plugin.errors import KernelError

BLOCK = 256
NUM_DECADES = 7
ONE_CODE = 65536
# The decade of x is int(bits(x) * DECADE_SCALE + DECADE_OFFSET), where bits(x) is a piecewise linear log2. It is off by
# up to 6 % at a decade's edge, which does no harm: in the gap there, both decades have the same line.
DECADE_SCALE = 3.6014841e-08
DECADE_OFFSET = -31.347432
LARGEST_FP32 = torch.finfo(torch.float32).max
SMALLEST_NORMAL_FP32 = torch.finfo(torch.float32).tiny
INVERSE_FACTOR = 1.0 + 2.0**-20


@dataclass(frozen=True, slots=True)
class Moment8:
    """One moment of `n` values: `codes` uint8 [n], `scales` fp32 [ceil(n / 256)]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(cls, numel: int, *, signed: bool, device: torch.device | str = "cpu") -> Moment8:
        return cls(
            torch.full((numel,), code_book(signed).zero_code, dtype=torch.uint8, device=device),
            torch.zeros(num_blocks(numel), dtype=torch.float32, device=device),
        )


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


@dataclass(frozen=True, slots=True)
class CodeBook:
    """The codes, and per decade (entry 7 repeats entry 6) the lines of the position; all exact in fp32."""

    values: tuple[float, ...]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    below: tuple[float, ...]
    tail: tuple[float, ...]
    first: tuple[float, ...]
    top: float
    """Position of the last code in use, 254 of 0 to 255; a block's largest magnitude gets it."""
    extreme: float
    """Value of that code."""
    zero_code: int

    def decade_tables(self) -> tuple[tuple[float, ...], ...]:
        return self.scale, self.offset, self.below, self.tail, self.first


def round_fp32(value: float) -> float:
    """The fp32 value nearest to `value`; beyond the largest, infinity."""
    return ctypes.c_float(value).value


@functools.cache
def code_book(signed: bool) -> CodeBook:
    """The signed (first moment) or unsigned (second moment) book."""
    magnitudes, tables = [], []
    for decade in range(NUM_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        magnitudes += _decade_values(decade, count)
        width = 0.9 * 10.0 ** (decade - NUM_DECADES + 1)
        at_zero = -count / 9 - 0.5  # of the decade's own line, in codes
        tables.append(
            (
                ONE_CODE * count / width,
                ONE_CODE * at_zero,
                5 / 3 if decade > 0 else -1 / at_zero,  # below the first decade the line must meet zero
                ONE_CODE * (count - 1) * 2 / 3,
                ONE_CODE * (count if signed else count - 1),
            )
        )
    scale, offset, below, tail, first = (
        tuple(round_fp32(entry) for entry in (*column, column[-1])) for column in zip(*tables, strict=True)
    )
    values = ([-magnitude for magnitude in reversed(magnitudes)] if signed else []) + [0.0, *magnitudes, 1.0]
    return CodeBook(
        values=tuple(values),
        scale=scale,
        offset=offset,
        below=below,
        tail=tail,
        first=first,
        top=float(ONE_CODE * len(magnitudes)),
        extreme=magnitudes[-1],
        zero_code=127 if signed else 0,
    )


def _decade_values(decade: int, count: int) -> list[float]:
    """Middles of `count` equal parts of [.1, 1] times the decade's power of ten, rounded as torch.linspace (FMA) is."""
    start, end = round_fp32(0.1), 1.0
    step = round_fp32(round_fp32(end - start) / count)
    edges = [
        round_fp32(start + step * i) if i < (count + 1) // 2 else round_fp32(end - step * (count - i))
        for i in range(count + 1)
    ]
    power = round_fp32(10.0 ** (decade - NUM_DECADES + 1))
    return [round_fp32(power * round_fp32((low + high) / 2)) for low, high in zip(edges, edges[1:], strict=False)]


def quantize_moment(values_fp32: torch.Tensor, moment: Moment8, *, signed: bool) -> None:
    """Encodes `values_fp32` [n] into `moment`, rounding to nearest. Unsigned values must not be negative.

    Raises KernelError when sizes, dtypes or devices don't fit.
    """
    check_moment(values_fp32, moment)
    if values_fp32.device.type == "cpu":
        from lazytrain_plugin.kernels import native

        native.quantize(values_fp32, moment.codes, moment.scales, signed)
    else:
        from lazytrain_plugin.kernels import reference

        reference.quantize(values_fp32, moment.codes, moment.scales, signed)


def dequantize_moment(moment: Moment8, values_fp32_out: torch.Tensor, *, signed: bool) -> None:
    """Decodes `moment` into `values_fp32_out` [n]. Raises KernelError when sizes, dtypes or devices don't fit."""
    check_moment(values_fp32_out, moment)
    if values_fp32_out.device.type == "cpu":
        from lazytrain_plugin.kernels import native

        native.dequantize(moment.codes, moment.scales, values_fp32_out, signed)
    else:
        from lazytrain_plugin.kernels import reference

        reference.dequantize(moment.codes, moment.scales, values_fp32_out, signed)


def check_moment(values: torch.Tensor, moment: Moment8) -> None:
    numel, device = values.numel(), values.device
    check_flat("values", values, torch.float32, numel, device)
    check_flat("codes", moment.codes, torch.uint8, numel, device)
    check_flat("scales", moment.scales, torch.float32, num_blocks(numel), device)


def check_flat(name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    """Raises KernelError unless `tensor` is contiguous, 1-D [numel], of `dtype`, on `device`."""
    if (
        tensor.dtype == dtype
        and tensor.dim() == 1
        and tensor.numel() == numel
        and tensor.device == device
        and tensor.is_contiguous()
    ):
        return
    raise KernelError(
        f"{name} must be a contiguous 1-D {dtype} tensor of {numel} elements on {device}, but it is {tensor.dtype} "
        f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}. Pass tensor.view(-1)."
    )


def noise_seeds(noise_key: int, step: int) -> tuple[int, int]:
    """Two 32-bit seeds of (parameter, step): the output function of splitmix64 (Steele et al., 2014), twice."""
    mixed = _splitmix64(_splitmix64(noise_key) + step)
    return mixed & 0xFFFFFFFF, mixed >> 32


def _splitmix64(value: int) -> int:
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
