"""Block-wise formats on CUDA: the bits of blockwise.py's plain torch, one pass over memory.

`encode_blocks` and `decode_halves` are also the parts that fused kernels are made of (coded_elementwise.py): a tile of
whole blocks is encoded or decoded. Scales travel as int16, the bits of their bf16: no conversion that might flush a
subnormal. On an H200 encoding is bound by instructions, not by memory: hence FP4's codes come from comparisons of bits
with seven products a block, without a division for each value, and tiles are halves of blocks, so that no thread needs
another one's codes.
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
def block_scales(first, second, largest_level, largest_scale):
    """Scales fp32 [blocks] of blocks whose halves are `first` and `second` fp32 [blocks, 64], whether a block is worth
    coding, and whether it holds NaN or infinity. Magnitudes are compared as whole numbers, where infinity and NaN come
    last."""
    magnitudes = tl.maximum(
        first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, second.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    largest = tl.max(magnitudes, axis=1)
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
    """By a search among the seven boundaries, three comparisons a value."""
    bits = values.to(tl.int32, bitcast=True)
    m = bits & 0x7FFFFFFF
    upper = m > fp4_threshold(scale, usable, 1.75, True)
    middle = m > tl.where(upper, fp4_threshold(scale, usable, 3.5, True), fp4_threshold(scale, usable, 0.75, True))
    above = tl.where(upper, fp4_threshold(scale, usable, 5.0, False), fp4_threshold(scale, usable, 1.25, False))
    below = tl.where(upper, fp4_threshold(scale, usable, 2.5, False), fp4_threshold(scale, usable, 0.25, False))
    last = m > tl.where(middle, above, below)
    codes = tl.where(upper, 4, 0) + tl.where(middle, 2, 0) + last.to(tl.int32)
    return tl.where(codes > 0, codes | ((bits >> 28) & 8), 0)


@triton.jit
def codes_of(
    values, scale, usable, table_ptr, largest_level, noise,
    KIND: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Codes int32 of `values` fp32 [blocks, n] of blocks with these scales."""
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
    return codes


@triton.jit
def upper_bits(codes, HALF: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """What one half of the blocks puts into the bytes of the bits above the fourth."""
    WIDTH: tl.constexpr = BITS - 4
    COUNT: tl.constexpr = 4 // WIDTH
    parts = tl.reshape(codes >> 4, (BLOCKS, COUNT, 16 * WIDTH))
    return tl.sum(parts << (WIDTH * (tl.arange(0, COUNT) + HALF * COUNT))[None, :, None], axis=1)


@triton.jit
def encode_blocks(
    first, second, codes_ptr, scales_ptr, table_ptr, block, block_inside, largest_level, largest_scale, first_noise,
    second_noise, KIND: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Encodes the halves `first` and `second` fp32 [BLOCKS, 64] of the blocks `block` [BLOCKS].

    A byte holds a code of each half: a thread that has both writes it without asking another one."""
    scale, usable, hidden = block_scales(first, second, largest_level, largest_scale)
    scale_bits = tl.where(hidden, 0x7FC0, scale.to(tl.int32, bitcast=True) >> 16)
    tl.store(scales_ptr + block, scale_bits.to(tl.int16), mask=block_inside)
    first = codes_of(first, scale, usable, table_ptr, largest_level, first_noise, KIND, BITS, STOCHASTIC)
    second = codes_of(second, scale, usable, table_ptr, largest_level, second_noise, KIND, BITS, STOCHASTIC)
    row = codes_ptr + (block * (16 * BITS))[:, None]
    both = (first & 15) | ((second & 15) << 4)
    tl.store(row + tl.arange(0, 64)[None, :], both.to(tl.uint8), mask=block_inside[:, None])
    if BITS > 4:
        upper = upper_bits(first, 0, BITS, BLOCKS) | upper_bits(second, 1, BITS, BLOCKS)
        tl.store(row + 64 + tl.arange(0, 16 * (BITS - 4))[None, :], upper.to(tl.uint8), mask=block_inside[:, None])


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


@triton.jit
def noise_of(offsets, seed0, seed1):
    """Uniform in [0, 1), from the elements' places alone."""
    high = (offsets >> 32).to(tl.uint32) * 0x9E3779B9
    h = noise_bits(offsets.to(tl.uint32), seed0.to(tl.uint32, bitcast=True), seed1.to(tl.uint32, bitcast=True) ^ high)
    return (h & 0xFFFF).to(tl.float32) * 1.52587890625e-05


@triton.jit(do_not_specialize=["seed0", "seed1"])
def quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, table_ptr, numel, largest_level, largest_scale, seed0, seed1,
    KIND: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = block[:, None] * BLOCK + tl.arange(0, 64)[None, :]
    block_inside = block * BLOCK < numel
    first = tl.load(x_ptr + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offsets + 64, mask=offsets + 64 < numel, other=0.0).to(tl.float32)
    if ACCUMULATE:
        old_first, old_second = decode_halves(codes_ptr, scales_ptr, table_ptr, block, block_inside, KIND, BITS)
        first, second = old_first + first, old_second + second
    first_noise, second_noise = first, second
    if STOCHASTIC:
        first_noise, second_noise = noise_of(offsets, seed0, seed1), noise_of(offsets + 64, seed0, seed1)
    tl.debug_barrier()  # the codes were read by other threads than will write them
    encode_blocks(
        first, second, codes_ptr, scales_ptr, table_ptr, block, block_inside, largest_level, largest_scale,
        first_noise, second_noise, KIND, BITS, STOCHASTIC, BLOCKS,
    )  # fmt: skip


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
