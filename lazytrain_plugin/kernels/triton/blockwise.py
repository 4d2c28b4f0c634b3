"""Block-wise formats on CUDA: the bits of blockwise.py's plain torch, one pass over memory.

`encode_blocks` and `decode_halves` are also the parts that fused kernels are made of (coded_elementwise.py): a tile of
whole blocks is encoded or decoded. Scales travel as int16, the bits of their bf16: no conversion that might flush a
subnormal. On an H200 encoding is bound by instructions, not by memory: hence FP4's codes come from comparisons of bits
with seven products a block, without a division for each value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.triton.adamw import noise_bits, on_device

BLOCK = tl.constexpr(128)
BLOCKS_PER_PROGRAM = 16
FP4, NF4, INTEGER = (tl.constexpr(kind) for kind in range(3))
LARGEST_FP16 = tl.constexpr(blockwise.LARGEST_FP16)
FP16_LIMIT = tl.constexpr(blockwise.FP16_LIMIT)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to nearest even below 2^22


@triton.jit
def block_scales(values, largest_level, largest_scale):
    """Scales fp32 [blocks] of `values` fp32 [blocks, 128], whether a block is worth coding, and whether it holds NaN or
    infinity. Magnitudes are compared as whole numbers, where infinity and NaN come last."""
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    hidden = largest > 0x7F7FFFFF
    magnitude = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, tl.zeros_like(magnitude) + largest_level)
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale = tl.minimum(bits.to(tl.float32, bitcast=True), largest_scale)  # NaN, infinity: see `hidden`
    return scale, (scale > 0.0) & (largest <= 0x7F7FFFFF), hidden


@triton.jit
def fp4_threshold(scale, usable, boundary, IS_TIE_UP: tl.constexpr):
    """What the bits of a magnitude must exceed to get the code above a boundary; the product is exact."""
    bits = (scale * boundary).to(tl.int32, bitcast=True)
    if IS_TIE_UP:
        bits -= 1
    return tl.where(usable, bits, 0x7FFFFFFF)[:, None]


@triton.jit
def fp4_codes(values, scale, usable):
    bits = values.to(tl.int32, bitcast=True)
    m = bits & 0x7FFFFFFF
    codes = (m > fp4_threshold(scale, usable, 0.25, False)).to(tl.int32)
    codes += (m > fp4_threshold(scale, usable, 0.75, True)).to(tl.int32)
    codes += (m > fp4_threshold(scale, usable, 1.25, False)).to(tl.int32)
    codes += (m > fp4_threshold(scale, usable, 1.75, True)).to(tl.int32)
    codes += (m > fp4_threshold(scale, usable, 2.5, False)).to(tl.int32)
    codes += (m > fp4_threshold(scale, usable, 3.5, True)).to(tl.int32)
    codes += (m > fp4_threshold(scale, usable, 5.0, False)).to(tl.int32)
    return tl.where(codes > 0, codes | ((bits >> 28) & 8), 0)


@triton.jit
def encode_blocks(
    values, codes_ptr, scales_ptr, table_ptr, block, block_inside, largest_level, largest_scale, noise,
    KIND: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Encodes `values` fp32 [BLOCKS, 128] as the blocks `block` [BLOCKS]."""
    scale, usable, hidden = block_scales(values, largest_level, largest_scale)
    if KIND == FP4:
        codes = fp4_codes(values, scale, usable)
    else:
        divisor = tl.where(usable, scale, 1.0)[:, None] + tl.zeros_like(values)
        x = tl.where(usable[:, None], tl.div_rn(values, divisor), 0.0)
        if KIND == NF4:
            codes = tl.zeros_like(x).to(tl.int32)
            for index in tl.static_range(15):
                codes += (x > tl.load(table_ptr + 16 + index)).to(tl.int32)
        else:
            if STOCHASTIC:
                rounded = tl.floor(x + noise)
            else:
                rounded = (x + ROUND) - ROUND
            rounded = tl.minimum(tl.maximum(rounded, -largest_level), largest_level)
            codes = rounded.to(tl.int32) & ((1 << BITS) - 1)

    scale_bits = tl.where(hidden, 0x7FC0, scale.to(tl.int32, bitcast=True) >> 16)
    tl.store(scales_ptr + block, scale_bits.to(tl.int16), mask=block_inside)
    row = codes_ptr + (block * (16 * BITS))[:, None]
    low = tl.reshape(codes & 15, (BLOCKS, 2, 64))
    low = tl.sum(low << (4 * tl.arange(0, 2))[None, :, None], axis=1)
    tl.store(row + tl.arange(0, 64)[None, :], low.to(tl.uint8), mask=block_inside[:, None])
    if BITS > 4:
        WIDTH: tl.constexpr = BITS - 4
        high = tl.reshape(codes >> 4, (BLOCKS, 8 // WIDTH, 16 * WIDTH))
        high = tl.sum(high << (WIDTH * tl.arange(0, 8 // WIDTH))[None, :, None], axis=1)
        tl.store(row + 64 + tl.arange(0, 16 * WIDTH)[None, :], high.to(tl.uint8), mask=block_inside[:, None])


@triton.jit
def levels_of(codes, table_ptr, KIND: tl.constexpr, BITS: tl.constexpr):
    """Levels fp32 of `codes` int32."""
    if KIND == FP4:
        m = codes & 7
        doubled = m + tl.maximum(m - 4, 0) + 2 * tl.maximum(m - 6, 0)  # 0, 1, 2, 3, 4, 6, 8, 12
        level = doubled.to(tl.float32) * 0.5
        level = (level.to(tl.int32, bitcast=True) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)
    elif KIND == NF4:
        level = tl.load(table_ptr + codes)
    else:
        SIGN: tl.constexpr = 1 << (BITS - 1)
        level = ((codes ^ SIGN) - SIGN).to(tl.float32)
    return level


@triton.jit
def decode(codes_ptr, scales_ptr, table_ptr, offsets, inside, KIND: tl.constexpr, BITS: tl.constexpr):
    """Values fp32 of the elements `offsets` (int64, any shape) of the flattened tensor; 0 outside."""
    block = offsets // BLOCK
    element = (offsets % BLOCK).to(tl.int32)
    row = codes_ptr + block * (16 * BITS)
    codes = (tl.load(row + element % 64, mask=inside, other=0).to(tl.int32) >> (4 * (element // 64))) & 15
    if BITS > 4:
        WIDTH: tl.constexpr = BITS - 4
        COUNT: tl.constexpr = 16 * WIDTH
        high = tl.load(row + 64 + element % COUNT, mask=inside, other=0).to(tl.int32)
        codes += ((high >> (WIDTH * (element // COUNT))) & ((1 << WIDTH) - 1)) << 4
    scale_bits = tl.load(scales_ptr + block, mask=inside, other=0).to(tl.int32) << 16
    return levels_of(codes, table_ptr, KIND, BITS) * scale_bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_halves(codes_ptr, scales_ptr, table_ptr, block, block_inside, KIND: tl.constexpr, BITS: tl.constexpr):
    """Values fp32 [blocks, 64] of the first and of the second half of the blocks `block` [blocks]; 0 outside.

    A byte holds one value of each half, so each is read once."""
    columns = tl.arange(0, 64)
    row = codes_ptr + (block * (16 * BITS))[:, None]
    both = tl.load(row + columns[None, :], mask=block_inside[:, None], other=0).to(tl.int32)
    first, second = both & 15, both >> 4
    if BITS > 4:
        WIDTH: tl.constexpr = BITS - 4
        COUNT: tl.constexpr = 16 * WIDTH
        upper = tl.load(row + 64 + (columns % COUNT)[None, :], mask=block_inside[:, None], other=0).to(tl.int32)
        upper = upper >> (WIDTH * (columns // COUNT))[None, :]
        first += (upper & ((1 << WIDTH) - 1)) << 4
        second += ((upper >> (WIDTH * (64 // COUNT))) & ((1 << WIDTH) - 1)) << 4
    scale_bits = tl.load(scales_ptr + block, mask=block_inside, other=0).to(tl.int32) << 16
    scale = scale_bits.to(tl.float32, bitcast=True)[:, None]
    return levels_of(first, table_ptr, KIND, BITS) * scale, levels_of(second, table_ptr, KIND, BITS) * scale


@triton.jit
def stored_as(values, pointer):
    """`values` fp32 in the element type of `pointer`; what a scale's rounding carried beyond fp16 is cut."""
    if pointer.dtype.element_ty == tl.float16:
        cut = tl.minimum(tl.maximum(values, -LARGEST_FP16), LARGEST_FP16)
        values = tl.where(tl.abs(values) <= FP16_LIMIT, cut, values)
    return values.to(pointer.dtype.element_ty)


@triton.jit(do_not_specialize=["seed0", "seed1"])
def quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, table_ptr, numel, largest_level, largest_scale, seed0, seed1,
    KIND: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    block_inside = block * BLOCK < numel
    values = tl.load(x_ptr + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
    if ACCUMULATE:
        values = decode(codes_ptr, scales_ptr, table_ptr, offsets, block_inside[:, None], KIND, BITS) + values
    noise = values
    if STOCHASTIC:
        high = (offsets >> 32).to(tl.uint32) * 0x9E3779B9
        h = noise_bits(
            offsets.to(tl.uint32), seed0.to(tl.uint32, bitcast=True), seed1.to(tl.uint32, bitcast=True) ^ high
        )
        noise = (h & 0xFFFF).to(tl.float32) * 1.52587890625e-05
    tl.debug_barrier()  # the codes were read by other threads than will write them
    encode_blocks(
        values,
        codes_ptr,
        scales_ptr,
        table_ptr,
        block,
        block_inside,
        largest_level,
        largest_scale,
        noise,
        KIND,
        BITS,
        STOCHASTIC,
        BLOCKS,
    )


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, table_ptr, out_ptr, numel, KIND: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    first, second = decode_halves(codes_ptr, scales_ptr, table_ptr, block, block * BLOCK < numel, KIND, BITS)
    offsets = block[:, None] * BLOCK + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + offsets, stored_as(first, out_ptr), mask=offsets < numel)
    tl.store(out_ptr + offsets + 64, stored_as(second, out_ptr), mask=offsets + 64 < numel)


def format_constants(form: blockwise.BlockFormat) -> dict[str, int]:
    kind = {"fp4": FP4, "nf4": NF4}.get(form.name, INTEGER)
    return {"KIND": kind.value, "BITS": form.bits}


def quantize(
    flat: torch.Tensor, out: blockwise.QuantizedTensor, *, seeds: tuple[int, int] | None, accumulate: bool
) -> None:
    """Encodes `flat` [numel], contiguous, into `out`; with `accumulate`, the sum of both."""
    numel = flat.numel()
    if numel == 0:
        return
    seed0, seed1 = (seed - 2**32 if seed >= 2**31 else seed for seed in seeds or (0, 0))
    with on_device(flat.device):
        quantize_kernel[(triton.cdiv(out.scales.numel(), BLOCKS_PER_PROGRAM),)](
            flat, out.codes, out.scales.view(torch.int16), blockwise.nf4_table(flat.device), numel,
            out.format.largest_level, out.format.largest_scale, seed0, seed1,
            **format_constants(out.format), STOCHASTIC=seeds is not None, ACCUMULATE=accumulate,
            BLOCKS=BLOCKS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip


def dequantize(quantized: blockwise.QuantizedTensor, out: torch.Tensor) -> None:
    """Decodes into `out` [numel], contiguous."""
    numel = out.numel()
    if numel == 0:
        return
    with on_device(out.device):
        dequantize_kernel[(triton.cdiv(numel, BLOCKS_PER_PROGRAM * 128),)](
            quantized.codes, quantized.scales.view(torch.int16), blockwise.nf4_table(out.device), out, numel,
            **format_constants(quantized.format), BLOCKS=BLOCKS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip
