"""AdamW on CUDA, with fp32 or 8-bit states: the C++ kernels' operations in the same order, so the same bits.

One launch updates many tensors (tables.py), with `enable_fp_fusion=False` (a fused multiply-add rounds once where the
CPU rounds twice); division and square root are the IEEE ones. state8.py and split.py describe the formats, scalars.py
the update.
"""

from __future__ import annotations

import functools
import struct

import torch
import triton
import triton.language as tl

from lazytrain_plugin.kernels import state8
from lazytrain_plugin.kernels.batch import Batch, run_or_add
from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.scalars import AdamWScalars
from lazytrain_plugin.kernels.state8 import Moment8
from lazytrain_plugin.kernels.triton import on_device
from lazytrain_plugin.kernels.triton.coded_gradient import load_gradient, pointers
from lazytrain_plugin.kernels.triton.tables import TYPES, Row, launches, length, pointer, row_of

FP32_BLOCK = 1024
# One quantization block in one warp: its scale is found without a barrier. On an H200 141 G parameters/s; 4 blocks in 4
# warps do 112.
BLOCKS_PER_PROGRAM = 1
WARPS = 1

MAX_ROWS = 64
"""Tensors of a launch."""
SCALAR_NAMES = (
    "gradient_scale", "l2", "decay", "lerp_weight", "beta2", "one_minus_beta2", "inv_sqrt_bias2", "eps",
    "minus_step_size",
)  # fmt: skip

# Columns of the table; scalars are the bits of fp32.
WEIGHTS, REMAINDERS, GRADIENTS, GRADIENT_STEPS = (tl.constexpr(column) for column in range(1, 5))
FIRST_MOMENTS, SECOND_MOMENTS, FIRST_SCALES, SECOND_SCALES = (tl.constexpr(column) for column in range(5, 9))
NUMEL, SEED0, SEED1, FIRST_INDEX, SCALARS = (tl.constexpr(column) for column in range(9, 14))
COLUMNS = tl.constexpr(13 + len(SCALAR_NAMES))

QUANTIZATION_BLOCK = tl.constexpr(state8.BLOCK)
DECADE_SCALE = tl.constexpr(state8.DECADE_SCALE)
DECADE_OFFSET = tl.constexpr(state8.DECADE_OFFSET)
THIRD = tl.constexpr(1 / 3)
INVERSE_FACTOR = tl.constexpr(state8.INVERSE_FACTOR)
LARGEST_FP32 = tl.constexpr(state8.LARGEST_FP32)
SMALLEST_NORMAL_FP32 = tl.constexpr(state8.SMALLEST_NORMAL_FP32)
NAN_BITS = tl.constexpr(0x7FC00000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_weight(weight_ptr, remainder_ptr, offsets, inside, SPLIT: tl.constexpr):
    if not SPLIT:
        return tl.load(weight_ptr + offsets, mask=inside, other=0.0)
    high = tl.load(weight_ptr + offsets, mask=inside, other=0).to(tl.int32)
    low = tl.load(remainder_ptr + offsets, mask=inside, other=0).to(tl.int32)
    low = tl.where((low < 0) & ((high & 0x7FFF) == 0), 0, low)
    joined = ((high - (low < 0).to(tl.int32)) << 16) | (low & 0xFFFF)
    return joined.to(tl.float32, bitcast=True)


@triton.jit
def store_weight(weight_ptr, remainder_ptr, offsets, inside, p, SPLIT: tl.constexpr):
    if SPLIT:
        bits = tl.where(p != p, NAN_BITS, p.to(tl.int32, bitcast=True))
        high = (bits >> 16) + ((bits >> 15) & 1)
        tl.store(weight_ptr + offsets, high.to(tl.int16), mask=inside)
        tl.store(remainder_ptr + offsets, bits.to(tl.int16), mask=inside)
    else:
        tl.store(weight_ptr + offsets, p, mask=inside)


@triton.jit
def scalar(row, INDEX: tl.constexpr):
    return tl.load(row + SCALARS + INDEX).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def updated(row, p, g, m, v, USE_L2: tl.constexpr, LERP_FROM_GRADIENT: tl.constexpr):
    """Weight and moments after the step; scalars in the order of `SCALAR_NAMES`."""
    gradient_scale, l2, decay = scalar(row, 0), scalar(row, 1), scalar(row, 2)
    lerp_weight, beta2, one_minus_beta2 = scalar(row, 3), scalar(row, 4), scalar(row, 5)
    inv_sqrt_bias2, eps, minus_step_size = scalar(row, 6), scalar(row, 7), scalar(row, 8)
    g = g.to(tl.float32) * gradient_scale
    if USE_L2:
        g = g + p * l2
    p = p * decay
    step = (g - m) * lerp_weight
    if LERP_FROM_GRADIENT:
        m = g + step
    else:
        m = m + step
    v = v * beta2 + (g * one_minus_beta2) * g
    denominator = tl.sqrt_rn(v) * inv_sqrt_bias2 + eps
    return p + tl.div_rn(m * minus_step_size, denominator), m, v


@triton.jit
def adamw_fp32_kernel(
    table_ptr, num_rows,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, USE_L2: tl.constexpr, LERP_FROM_GRADIENT: tl.constexpr,
    SPLIT: tl.constexpr, CODED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MAX_ROWS: tl.constexpr,
):  # fmt: skip
    row = row_of(table_ptr, num_rows, COLUMNS, MAX_ROWS)
    weight_ptr = pointer(row, WEIGHTS, WEIGHT, ALIGNED)
    remainder_ptr = pointer(row, REMAINDERS, tl.int16, ALIGNED)
    gradient_ptr = pointer(row, GRADIENTS, GRADIENT, ALIGNED)
    steps_ptr = pointer(row, GRADIENT_STEPS, tl.int16, ALIGNED)
    exp_avg_ptr = pointer(row, FIRST_MOMENTS, tl.float32, ALIGNED)
    exp_avg_sq_ptr = pointer(row, SECOND_MOMENTS, tl.float32, ALIGNED)
    offsets = (tl.program_id(0) - tl.load(row)) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length(row, NUMEL, ALIGNED)
    p = load_weight(weight_ptr, remainder_ptr, offsets, inside, SPLIT)
    g = load_gradient(gradient_ptr, steps_ptr, offsets, inside, CODED)
    m = tl.load(exp_avg_ptr + offsets, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=inside, other=0.0)
    p, m, v = updated(row, p, g, m, v, USE_L2, LERP_FROM_GRADIENT)
    tl.store(exp_avg_ptr + offsets, m, mask=inside)
    tl.store(exp_avg_sq_ptr + offsets, v, mask=inside)
    store_weight(weight_ptr, remainder_ptr, offsets, inside, p, SPLIT)


@triton.jit
def block_scale(values, inside, extreme):
    """Scales of the rows of `values` [blocks, 256], their inverses, and whether they are finite."""
    bits = tl.where(inside, values.to(tl.int32, bitcast=True) & MAGNITUDE_BITS, 0)
    largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True)  # bits order like magnitudes, NaN above infinity
    scale = tl.div_rn(largest, extreme)
    finite = scale <= LARGEST_FP32
    scale = tl.where(scale > 0.0, tl.maximum(scale, SMALLEST_NORMAL_FP32), 0.0)
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0)) * INVERSE_FACTOR, 0.0)
    return tl.where(finite, scale, float("nan")), inverse, finite


@triton.jit
def codes_above_zero(lines_ptr, x, noise, top):
    decade = x.to(tl.int32, bitcast=True).to(tl.float32) * DECADE_SCALE + DECADE_OFFSET
    line = lines_ptr + tl.minimum(tl.maximum(decade, 0.0), 7.0).to(tl.int32)
    r = x * tl.load(line) + tl.load(line + 8)
    p = tl.minimum(r, r * tl.load(line + 16))
    p = tl.minimum(p, r * THIRD + tl.load(line + 24))
    p = tl.minimum(p + tl.load(line + 32), top)
    return (p.to(tl.int32) + noise) >> 16


@triton.jit
def noise_bits(index, seed0, seed1):
    h = index ^ seed0
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = h ^ seed1
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def adamw_8bit_kernel(
    table_ptr, num_rows, signed_values_ptr, signed_lines_ptr, unsigned_values_ptr, unsigned_lines_ptr,
    signed_top, signed_extreme, unsigned_top, unsigned_extreme,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, USE_L2: tl.constexpr, LERP_FROM_GRADIENT: tl.constexpr,
    SPLIT: tl.constexpr, CODED: tl.constexpr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr, MAX_ROWS: tl.constexpr,
):  # fmt: skip
    row = row_of(table_ptr, num_rows, COLUMNS, MAX_ROWS)
    weight_ptr = pointer(row, WEIGHTS, WEIGHT, ALIGNED)
    remainder_ptr = pointer(row, REMAINDERS, tl.int16, ALIGNED)
    gradient_ptr = pointer(row, GRADIENTS, GRADIENT, ALIGNED)
    steps_ptr = pointer(row, GRADIENT_STEPS, tl.int16, ALIGNED)
    m_codes_ptr = pointer(row, FIRST_MOMENTS, tl.uint8, ALIGNED)
    m_scales_ptr = pointer(row, FIRST_SCALES, tl.float32, False)
    v_codes_ptr = pointer(row, SECOND_MOMENTS, tl.uint8, ALIGNED)
    v_scales_ptr = pointer(row, SECOND_SCALES, tl.float32, False)
    numel = length(row, NUMEL, ALIGNED)
    block = (tl.program_id(0) - tl.load(row)) * BLOCKS + tl.arange(0, BLOCKS)
    start = block * QUANTIZATION_BLOCK
    block_inside = start < numel
    offsets = start[:, None] + tl.arange(0, QUANTIZATION_BLOCK)[None, :]
    inside = offsets < numel

    p = load_weight(weight_ptr, remainder_ptr, offsets, inside, SPLIT)
    g = load_gradient(gradient_ptr, steps_ptr, offsets, inside, CODED)
    m = tl.load(signed_values_ptr + tl.load(m_codes_ptr + offsets, mask=inside, other=0).to(tl.int32))
    v = tl.load(unsigned_values_ptr + tl.load(v_codes_ptr + offsets, mask=inside, other=0).to(tl.int32))
    m = m * tl.load(m_scales_ptr + block, mask=block_inside, other=0.0)[:, None]
    v = v * tl.load(v_scales_ptr + block, mask=block_inside, other=0.0)[:, None]
    p, m, v = updated(row, p, g, m, v, USE_L2, LERP_FROM_GRADIENT)
    store_weight(weight_ptr, remainder_ptr, offsets, inside, p, SPLIT)

    index = start + tl.load(row + FIRST_INDEX)
    seed1 = tl.load(row + SEED1).to(tl.uint32) ^ ((index >> 32).to(tl.uint32) * 0x9E3779B9)
    low_index = index.to(tl.uint32)[:, None] + tl.arange(0, QUANTIZATION_BLOCK).to(tl.uint32)[None, :]
    h = noise_bits(low_index, tl.load(row + SEED0).to(tl.uint32), seed1[:, None])

    scale, inverse, finite = block_scale(m, inside, signed_extreme)
    tl.store(m_scales_ptr + block, scale, mask=block_inside)
    x = tl.where(finite[:, None], tl.abs(m) * inverse[:, None], 0.0)
    k = codes_above_zero(signed_lines_ptr, x, (h & 0xFFFF).to(tl.int32), signed_top)
    codes = 127 + tl.where(finite[:, None], tl.where(m.to(tl.int32, bitcast=True) < 0, -k, k), 0)
    tl.store(m_codes_ptr + offsets, codes.to(tl.uint8), mask=inside)

    scale, inverse, finite = block_scale(v, inside, unsigned_extreme)
    tl.store(v_scales_ptr + block, scale, mask=block_inside)
    x = tl.where(finite[:, None], v * inverse[:, None], 0.0)
    k = codes_above_zero(unsigned_lines_ptr, x, (h >> 16).to(tl.int32), unsigned_top)
    codes = tl.where(finite[:, None], tl.maximum(k, (v > 0.0).to(tl.int32)), 0)
    tl.store(v_codes_ptr + offsets, codes.to(tl.uint8), mask=inside)


@functools.lru_cache(maxsize=16)
def _book_tensors(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    book = state8.code_book(signed)
    values = torch.tensor(book.values, dtype=torch.float32, device=device)
    return values, torch.tensor(book.decade_tables(), dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def _bits(scalars: AdamWScalars) -> tuple[int, ...]:
    """Cached, as all tensors of a group have the same ones."""
    return struct.unpack("9i", struct.pack("9f", *(getattr(scalars, name) for name in SCALAR_NAMES)))


def _row(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    moments: tuple[torch.Tensor | None, ...],
    scalars: AdamWScalars,
    elements_per_program: int,
    *noise: int,
) -> Row:
    """`moments`: first, second, and the scales of both; `noise`: two seeds and the index of the first element."""
    values, steps, coded = pointers(gradient)
    tensors = (weight, remainder, values, steps if coded else None, *moments)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    numel = weight.numel()
    switches = {
        "WEIGHT": tl.int16 if remainder is not None else tl.float32,
        "GRADIENT": TYPES[values.dtype],
        "USE_L2": scalars.use_l2,
        "LERP_FROM_GRADIENT": scalars.lerp_from_gradient,
        "SPLIT": remainder is not None,
        "CODED": coded,
        # Scales are read one by one.
        "ALIGNED": numel % 16 == 0 and all(address % 16 == 0 for address in addresses[:6]),
    }
    return Row(
        num_programs=-(-numel // elements_per_program),
        device=weight.device,
        values=[*addresses, numel, *(noise or (0, 0, 0)), *_bits(scalars)],
        switches=switches,
        tensors=tensors,
    )


def adamw_fp32(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: AdamWScalars,
    batch: Batch | None = None,
) -> None:
    if weight.numel():
        moments = (exp_avg, exp_avg_sq, None, None)
        run_or_add(_update_fp32, _row(weight, remainder, gradient, moments, scalars, FP32_BLOCK), batch)


def _update_fp32(rows: list[Row]) -> None:
    for launch in launches(rows, MAX_ROWS):
        with on_device(launch.table.device):
            adamw_fp32_kernel[(launch.num_programs,)](
                launch.table, launch.num_rows, **launch.switches, BLOCK=FP32_BLOCK, enable_fp_fusion=False
            )


def adamw_8bit(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    exp_avg: Moment8,
    exp_avg_sq: Moment8,
    scalars: AdamWScalars,
    seeds: tuple[int, int],
    first_index: int,
    batch: Batch | None = None,
) -> None:
    if weight.numel():
        moments = (exp_avg.codes, exp_avg_sq.codes, exp_avg.scales, exp_avg_sq.scales)
        elements = BLOCKS_PER_PROGRAM * state8.BLOCK
        row = _row(weight, remainder, gradient, moments, scalars, elements, *seeds, first_index)
        run_or_add(_update_8bit, row, batch)


def _update_8bit(rows: list[Row]) -> None:
    signed, unsigned = state8.code_book(True), state8.code_book(False)
    for launch in launches(rows, MAX_ROWS):
        device = launch.table.device
        with on_device(device):
            adamw_8bit_kernel[(launch.num_programs,)](
                launch.table, launch.num_rows, *_book_tensors(True, device), *_book_tensors(False, device),
                signed.top, signed.extreme, unsigned.top, unsigned.extreme,
                **launch.switches, BLOCKS=BLOCKS_PER_PROGRAM, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
