"""Plain PyTorch meaning of every kernel: the tests' oracle of bits, and what runs where the C++ library is missing.

Each line is one IEEE operation per element, in the order that the C++ and Triton kernels have. Large tensors are worked
through in chunks, so that temporaries stay small. state8.py describes the 8-bit encoding and its noise, split.py the
splitting of weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from lazytrain_plugin.kernels import gradient_codes, state8
from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.scalars import AdamWScalars
from lazytrain_plugin.kernels.state8 import BLOCK, CodeBook

CHUNK_ELEMENTS = 2**20
LANES, PARTS = 1024, 256


def _chunks(numel: int) -> Iterator[slice]:
    for begin in range(0, numel, CHUNK_ELEMENTS):
        yield slice(begin, min(numel, begin + CHUNK_ELEMENTS))


def split(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    for part in _chunks(master.numel()):
        bits = torch.where(master[part].isnan(), 0x7FC00000, master[part].view(torch.int32))
        # bits + 0x8000 would overflow int32 just above -0.0's neighbours, so round on the high half
        high = (bits >> 16) + ((bits >> 15) & 1)
        weight[part].view(torch.int16).copy_(_wrap_int16(high))
        remainder[part].copy_(_wrap_int16(bits))


def join(weight: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    for part in _chunks(master.numel()):
        master[part].copy_(_joined(weight[part], remainder[part]))


def _wrap_int16(value: torch.Tensor) -> torch.Tensor:
    return (((value & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)


def _joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    high, low = weight.view(torch.int16).to(torch.int32), remainder.to(torch.int32)
    low = torch.where((low < 0) & ((high & 0x7FFF) == 0), 0, low)
    return (((high - (low < 0).to(torch.int32)) << 16) | (low & 0xFFFF)).view(torch.float32)


def _updated(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: AdamWScalars
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = g.to(torch.float32) * s.gradient_scale
    if s.use_l2:
        g = g + p * s.l2
    p = p * s.decay
    m = (g if s.lerp_from_gradient else m) + (g - m) * s.lerp_weight
    v = v * s.beta2 + (g * s.one_minus_beta2) * g
    denominator = _square_root(v) * s.inv_sqrt_bias2 + s.eps
    return p + (m * s.minus_step_size) / denominator, m, v


def _square_root(x: torch.Tensor) -> torch.Tensor:
    """IEEE's. torch's own fp32 one on the CPU is an ulp off for one value in six (MKL); through fp64 it is exact."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def _load_weight(weight: torch.Tensor, remainder: torch.Tensor | None, part: slice) -> torch.Tensor:
    return weight[part] if remainder is None else _joined(weight[part], remainder[part])


def _store_weight(weight: torch.Tensor, remainder: torch.Tensor | None, part: slice, p: torch.Tensor) -> None:
    if remainder is None:
        weight[part].copy_(p)
    else:
        split(p, weight[part], remainder[part])


def adamw_fp32(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: AdamWScalars,
) -> None:
    for part in _chunks(weight.numel()):
        p = _load_weight(weight, remainder, part)
        p, m, v = _updated(p, _values(gradient, part), exp_avg[part], exp_avg_sq[part], scalars)
        exp_avg[part].copy_(m)
        exp_avg_sq[part].copy_(v)
        _store_weight(weight, remainder, part, p)


def adamw_8bit(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    exp_avg: state8.Moment8,
    exp_avg_sq: state8.Moment8,
    scalars: AdamWScalars,
    seeds: tuple[int, int],
    first_index: int,
) -> None:
    for part in _chunks(weight.numel()):
        blocks = slice(part.start // BLOCK, state8.num_blocks(part.stop))
        m = _decoded(exp_avg.codes[part], exp_avg.scales[blocks], signed=True)
        v = _decoded(exp_avg_sq.codes[part], exp_avg_sq.scales[blocks], signed=False)
        p, m, v = _updated(_load_weight(weight, remainder, part), _values(gradient, part), m, v, scalars)
        _store_weight(weight, remainder, part, p)
        noise_m, noise_v = noise(first_index + part.start, m.numel(), seeds, m.device)
        exp_avg.codes[part], exp_avg.scales[blocks] = _encoded(m, noise_m, signed=True)
        exp_avg_sq.codes[part], exp_avg_sq.scales[blocks] = _encoded(v, noise_v, signed=False)


def noise(
    first_index: int, count: int, seeds: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform int32 noise, 0 .. 65535, of both moments for elements first_index .. first_index + count - 1."""
    index = torch.arange(first_index, first_index + count, device=device)  # int64: low 32 bits of products are right
    low_half = 0xFFFFFFFF
    h = (index & low_half) ^ seeds[0]
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & low_half
    h = h ^ seeds[1] ^ (((index >> 32) * 0x9E3779B9) & low_half)
    h = ((h ^ (h >> 15)) * 0x846CA68B) & low_half
    h = h ^ (h >> 16)
    return (h & 0xFFFF).to(torch.int32), (h >> 16).to(torch.int32)


@functools.lru_cache(maxsize=16)
def _tables(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    book = state8.code_book(signed)
    return (
        torch.tensor(book.values, dtype=torch.float32, device=device),
        torch.tensor(book.decade_tables(), dtype=torch.float32, device=device),
    )


def codes_above_zero(book: CodeBook, x: torch.Tensor, noise: torch.Tensor | int) -> torch.Tensor:
    """Codes above the code of zero for x >= 0, as int32; `noise` in 1/65536 of a code."""
    scale, offset, below, tail, first = _tables(book.zero_code != 0, x.device)[1]
    decade = x.view(torch.int32).to(torch.float32) * state8.round_fp32(state8.DECADE_SCALE)
    decade = (decade + state8.round_fp32(state8.DECADE_OFFSET)).clamp(0, 7).to(torch.int64)
    r = x * scale[decade] + offset[decade]
    p = torch.minimum(r, r * below[decade])
    p = torch.minimum(p, r * state8.round_fp32(1 / 3) + tail[decade])
    p = (p + first[decade]).clamp(max=book.top)
    return (p.to(torch.int32) + noise) >> 16


def _decoded(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    values = _tables(signed, codes.device)[0][codes.to(torch.int64)]
    return values * scales.repeat_interleave(BLOCK)[: codes.numel()]


def _encoded(values: torch.Tensor, noise: torch.Tensor | int, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    book, numel = state8.code_book(signed), values.numel()
    largest = torch.nn.functional.pad(values.abs(), (0, -numel % BLOCK)).view(-1, BLOCK).amax(1)  # NaN if there is one
    scales = largest / torch.full_like(largest, book.extreme)  # by a tensor: CUDA multiplies by a scalar's inverse
    finite = scales <= state8.LARGEST_FP32
    scales = torch.where(scales > 0, scales.clamp(min=state8.SMALLEST_NORMAL_FP32), 0.0)
    scales = torch.where(finite, scales, torch.nan)
    inverse = torch.where(scales > 0, (torch.ones_like(scales) / scales) * state8.INVERSE_FACTOR, 0.0)

    finite = finite.repeat_interleave(BLOCK)[:numel]
    x = torch.where(finite, values.abs() * inverse.repeat_interleave(BLOCK)[:numel], 0.0)
    k = codes_above_zero(book, x, noise)
    if signed:
        codes = book.zero_code + torch.where(values.view(torch.int32) < 0, -k, k)
    else:
        codes = torch.maximum(k, (values > 0).to(torch.int32))
    return torch.where(finite, codes, book.zero_code).to(torch.uint8), scales


def quantize(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:
    for part in _chunks(values.numel()):
        blocks = slice(part.start // BLOCK, state8.num_blocks(part.stop))
        codes[part], scales[blocks] = _encoded(values[part], state8.ONE_CODE // 2, signed=signed)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, signed: bool) -> None:
    for part in _chunks(values.numel()):
        blocks = slice(part.start // BLOCK, state8.num_blocks(part.stop))
        values[part] = _decoded(codes[part], scales[blocks], signed=signed)


def accumulate(accumulator: torch.Tensor, gradient: torch.Tensor, first: bool) -> None:
    if first:
        accumulator.copy_(gradient)
    else:
        accumulator.add_(gradient)


def _values(gradient: torch.Tensor | CodedGradient, part: slice) -> torch.Tensor:
    """Elements of a gradient as fp32, or as they are where it has no codes. `part` starts at a multiple of 64."""
    if not isinstance(gradient, CodedGradient):
        return gradient[part]
    numel = min(part.stop, gradient.numel()) - part.start
    coded = gradient.part(part.start, numel)
    codes = torch.nn.functional.pad(coded.codes, (0, -numel % gradient_codes.BLOCK)).view(-1, gradient_codes.BLOCK)
    return (codes.to(torch.float32) * (coded.steps.to(torch.int32) << 16).view(torch.float32)[:, None]).view(-1)[:numel]


def encode_gradient(values: torch.Tensor, coded: CodedGradient) -> None:
    for part in _chunks(values.numel()):
        _encode_codes(values[part].to(torch.float32), coded.part(part.start, part.stop - part.start))


def _encode_codes(values: torch.Tensor, coded: CodedGradient) -> None:
    numel = values.numel()
    padded = torch.nn.functional.pad(values, (0, -numel % gradient_codes.BLOCK)).view(-1, gradient_codes.BLOCK)
    counts, steps = gradient_codes.codes_of(padded, coded.bits)
    coded.steps.copy_(steps)
    coded.codes.copy_(counts.view(-1)[:numel])


def decode_gradient(coded: CodedGradient, values: torch.Tensor) -> None:
    for part in _chunks(values.numel()):
        values[part] = _values(coded, part)


def add_codes(total: CodedGradient, arrived: CodedGradient, first: bool) -> None:
    for part in _chunks(total.numel()):
        values = _values(arrived, part)
        if not first:
            values = _values(total, part) + values
        _encode_codes(values, total.part(part.start, part.stop - part.start))


def sum_squares(values: torch.Tensor | CodedGradient, lanes: torch.Tensor) -> None:
    """Lanes [1024] of sum_squares_lanes: rows of 1024, row r to part r % 256, parts row by row, then part by part."""
    numel = values.numel()
    parts = torch.zeros(PARTS, LANES, dtype=torch.float64, device=values.device)
    for begin in range(0, numel, PARTS * LANES):
        rows = _values(values, slice(begin, begin + PARTS * LANES)).to(torch.float64)
        rows = torch.nn.functional.pad(rows, (0, -rows.numel() % LANES)).view(-1, LANES)
        parts[: rows.shape[0]] += rows * rows
    lanes.copy_(parts[0])
    for part in range(1, min(PARTS, -(-numel // LANES))):
        lanes += parts[part]
