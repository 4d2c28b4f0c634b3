"""Block-wise 8-bit optimizer states: the code book, its rounding, and the scales.

Format (that of bitsandbytes' AdamW8bit): blocks of 256 values share one fp32 scale; a value is `codes[c] * scale`, where the
256 codes are the "dynamic" map of Dettmers et al. (8-Bit Optimizers via Block-wise Quantization, 2021): seven decades from
1e-7 to 1, each with twice the codes of the one below, evenly spaced within a decade, and 0 and 1. Signed for the first
moment (1 to 64 codes per decade and sign), unsigned for the second (2 to 128).

How a value is rounded (on every device, in this order of fp32 operations, so with the same bits):

    scale     the largest value, or the most negative one / the most negative code, whichever is larger, so that both ends
              are codes (bitsandbytes takes the largest magnitude and cuts the negative end). NaN if the block holds NaN or inf:
              the block then decodes to NaN, nothing is hidden.
    x         |value| * (1 / scale * (1 + 2^-20))      the hair makes sure that the extreme gets the extreme code
    position  a piecewise linear function of x that is k at the k-th code above zero: so its fraction is how far x is
              between two codes. Within a decade it is `x * scale + offset`; before the first and after the last code of
              the decade the gap to the neighbour has another width (`below`, `above`).
    code      floor(position + noise)

Noise of 1/2 rounds to nearest (`quantize_moment`: decode and encode again gives the same codes and scales). An update draws
it uniformly from [0, 1): with nearest rounding beta2 = .999 would leave most second moments where they are, since a step
moves them by less than half the distance between two codes. A second moment above zero never gets the code of zero.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from lazytrain_plugin.errors import KernelError

BLOCK = 256
NUM_DECADES = 7
# x's decade is floor(bits(x) * DECADE_SCALE + DECADE_OFFSET), 0 to 7, where bits(x) is a piecewise linear log2. It is off by up to 6 %
# at a decade's edge, which does no harm: there both neighbours' formulas describe the same line.
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
    """The codes, and per decade (entry 7 repeats entry 6) the numbers of the position formula; all exact in fp32."""

    values: tuple[float, ...]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    last: tuple[float, ...]
    below: tuple[float, ...]
    above: tuple[float, ...]
    first: tuple[float, ...]
    top: float
    negative_extreme: float
    zero_code: int

    def decade_tables(self) -> tuple[tuple[float, ...], ...]:
        return self.scale, self.offset, self.last, self.below, self.above, self.first


def round_fp32(value: float) -> float:
    """The fp32 value nearest to `value`."""
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


@functools.cache
def code_book(signed: bool) -> CodeBook:
    """The signed (first moment) or unsigned (second moment) book."""
    magnitudes, tables = [], []
    for decade in range(NUM_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        magnitudes += _decade_values(decade, count)
        width = 0.9 * 10.0 ** (decade - NUM_DECADES + 1)
        at_zero = -count / 9 - 0.5
        tables.append(
            (
                count / width,
                at_zero,
                count - 1.0,
                -1 / at_zero - 1 if decade == 0 else 2 / 3,
                1.0 if decade == NUM_DECADES - 1 else -2 / 3,
                float(count if signed else count - 1),
            )
        )
    scale, offset, last, below, above, first = (
        tuple(round_fp32(entry) for entry in (*column, column[-1])) for column in zip(*tables, strict=True)
    )
    values = ([-magnitude for magnitude in reversed(magnitudes)] if signed else []) + [0.0, *magnitudes, 1.0]
    return CodeBook(
        values=tuple(values),
        scale=scale,
        offset=offset,
        last=last,
        below=below,
        above=above,
        first=first,
        top=128.0 if signed else 255.0,
        negative_extreme=magnitudes[-1] if signed else 0.0,
        zero_code=127 if signed else 0,
    )


def _decade_values(decade: int, count: int) -> list[float]:
    """Middles of `count` equal intervals of [.1, 1] times the decade's power of ten, rounded as fp32 linspace rounds them."""
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
        f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}. Pass a flat view, e.g. tensor.view(-1)."
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
