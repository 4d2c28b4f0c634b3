"""Gradient codes on CUDA; gradient_codes.py describes the format and the arithmetic, which are the same here.

A program works on BLOCKS blocks of one row as a tile [BLOCKS, 4, 16], because the low bits of 10-bit codes are packed
across the quarters of a block. Launched with `enable_fp_fusion=False`, so that codes are those of the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lazytrain_plugin.kernels import gradient_codes as codes
from lazytrain_plugin.kernels.triton import on_device

BLOCKS = 16
NUM_WARPS = 4

BLOCK: tl.constexpr = tl.constexpr(codes.BLOCK)
QUARTER: tl.constexpr = tl.constexpr(codes.BLOCK // 4)
MAGNITUDE_BITS: tl.constexpr = tl.constexpr(codes.MAGNITUDE_BITS)
INFINITY_BITS: tl.constexpr = tl.constexpr(codes.INFINITY_BITS)
BF16_NAN: tl.constexpr = tl.constexpr(codes.BF16_NAN)
SMALLEST_NORMAL_FP32: tl.constexpr = tl.constexpr(codes.SMALLEST_NORMAL_FP32)


@triton.jit
def tile_offsets(block):
    """Element offsets of a tile [n, 4, 16] from the numbers of its blocks [n]."""
    quarter = tl.arange(0, 4)[None, :, None] * QUARTER + tl.arange(0, QUARTER)[None, None, :]
    return block[:, None, None] * BLOCK + quarter


@triton.jit
def low_bits_offsets(block):
    return block[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]


@triton.jit
def codes_of(x, inverse_of_largest, largest_code):
    """Codes int32 of blocks x fp32 [n, 4, 16], and the bf16 bits of their steps, int32 [n]."""
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS
    largest_bits = tl.max(tl.max(bits, axis=2), axis=1)
    finite = largest_bits < INFINITY_BITS
    largest = largest_bits.to(tl.float32, bitcast=True)
    step = tl.where(largest > 0.0, tl.maximum(largest * inverse_of_largest, SMALLEST_NORMAL_FP32), 0.0)
    high = tl.where(finite, (step.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, BF16_NAN)
    step = (high << 16).to(tl.float32, bitcast=True)
    usable = finite & (step > 0.0)
    inverse = tl.where(usable, tl.div_rn(1.0, tl.where(usable, step, 1.0)), 0.0)
    magnitude = tl.where(finite[:, None, None], tl.abs(x) * inverse[:, None, None], 0.0)
    count = tl.minimum(tl.floor(magnitude + 0.5), largest_code).to(tl.int32)
    code = tl.where(x.to(tl.int32, bitcast=True) < 0, -count, count)
    return code, high


@triton.jit
def encode_kernel(
    values_ptr, rows_ptr, steps_ptr, numel, blocks, row_bytes, inverse_of_largest, largest_code,
    BITS: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    inside = block < blocks
    offsets = tile_offsets(block)
    source = row * blocks * BLOCK + offsets
    x = tl.load(values_ptr + source, mask=inside[:, None, None] & (source < numel), other=0.0).to(tl.float32)

    code, high = codes_of(x, inverse_of_largest, largest_code)
    target = rows_ptr + row * row_bytes
    if BITS == 8:
        tl.store(target + offsets, (code & 0xFF).to(tl.uint8), mask=inside[:, None, None])
    else:
        biased = code + 512
        tl.store(target + offsets, (biased >> 2).to(tl.uint8), mask=inside[:, None, None])
        low = tl.sum((biased & 3) << (2 * tl.arange(0, 4)[None, :, None]), axis=1)
        tl.store(target + blocks * BLOCK + low_bits_offsets(block), low.to(tl.uint8), mask=inside[:, None])
    first_step = (row * row_bytes + row_bytes) // 2 - blocks
    tl.store(steps_ptr + first_step + block, high.to(tl.int16), mask=inside)


@triton.jit
def decoded(rows_ptr, steps_ptr, row, block, blocks, row_bytes, BITS: tl.constexpr):
    """Blocks `block` [n] of one row as fp32 [n, 4, 16]."""
    inside = block < blocks
    source = rows_ptr + row * row_bytes
    high = tl.load(source + tile_offsets(block), mask=inside[:, None, None], other=0).to(tl.int32)
    if BITS == 8:
        code = tl.where(high > 127, high - 256, high)
    else:
        packed = tl.load(source + blocks * BLOCK + low_bits_offsets(block), mask=inside[:, None], other=0).to(tl.int32)
        low = (packed[:, None, :] >> (2 * tl.arange(0, 4)[None, :, None])) & 3
        code = ((high << 2) | low) - 512
    first_step = (row * row_bytes + row_bytes) // 2 - blocks
    step_bits = tl.load(steps_ptr + first_step + block, mask=inside, other=0).to(tl.int32) << 16
    return code.to(tl.float32) * step_bits.to(tl.float32, bitcast=True)[:, None, None]


@triton.jit
def decode_kernel(
    rows_ptr, steps_ptr, values_ptr, numel, blocks, row_bytes, BITS: tl.constexpr, NUM: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    x = decoded(rows_ptr, steps_ptr, row, block, blocks, row_bytes, BITS)
    target = row * blocks * BLOCK + tile_offsets(block)
    mask = (block < blocks)[:, None, None] & (target < numel)
    tl.store(values_ptr + target, x.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit
def decode_mean_kernel(
    rows_ptr, steps_ptr, values_ptr, num_rows, blocks, row_bytes, divisor, BITS: tl.constexpr, NUM: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    total = decoded(rows_ptr, steps_ptr, tl.program_id(1).to(tl.int64), block, blocks, row_bytes, BITS)
    for row in range(1, num_rows):
        total += decoded(rows_ptr, steps_ptr, tl.full((), row, tl.int64), block, blocks, row_bytes, BITS)
    mean = tl.div_rn(total, tl.full((NUM, 4, QUARTER), 1.0, tl.float32) * divisor)
    tl.store(values_ptr + tile_offsets(block), mean, mask=(block < blocks)[:, None, None])


def _grid(blocks: int, rows: int) -> tuple[int, int]:
    return triton.cdiv(blocks, BLOCKS), rows


_LAUNCH = {"NUM": BLOCKS, "num_warps": NUM_WARPS, "enable_fp_fusion": False}


def encode(values: torch.Tensor, bits: int, blocks: int, rows_out: torch.Tensor) -> None:
    with on_device(values.device):
        encode_kernel[_grid(blocks, rows_out.shape[0])](
            values, rows_out, rows_out.view(torch.int16), values.numel(), blocks, rows_out.shape[1],
            codes.inverse_of_largest(bits), float(codes.LARGEST_CODE[bits]), BITS=bits, **_LAUNCH,
        )  # fmt: skip


def decode(rows: torch.Tensor, bits: int, blocks: int, values_out: torch.Tensor) -> None:
    with on_device(rows.device):
        decode_kernel[_grid(blocks, rows.shape[0])](
            rows, rows.view(torch.int16), values_out, values_out.numel(), blocks, rows.shape[1], BITS=bits, **_LAUNCH
        )


def decode_mean(rows: torch.Tensor, bits: int, blocks: int, divisor: float, values_out: torch.Tensor) -> None:
    with on_device(rows.device):
        decode_mean_kernel[_grid(blocks, 1)](
            rows, rows.view(torch.int16), values_out, rows.shape[0], blocks, rows.shape[1], float(divisor),
            BITS=bits, **_LAUNCH,
        )  # fmt: skip
