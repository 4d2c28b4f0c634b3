"""AdamW on CUDA, with fp32 or 8-bit states: the C++ kernels' operations in the same order, so the same bits.

Launched with `enable_fp_fusion=False` (a fused multiply-add rounds once where the CPU rounds twice); division and
square root are the IEEE ones. state8.py and split.py describe the formats, scalars.py the update.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from lazytrain_plugin.kernels import state8
from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.scalars import AdamWScalars
from lazytrain_plugin.kernels.state8 import Moment8
from lazytrain_plugin.kernels.triton import on_device
from lazytrain_plugin.kernels.triton.coded_gradient import load_gradient, pointers

FP32_BLOCK = 1024
BLOCKS_PER_PROGRAM = 4  # quantization blocks: 8 elements a thread, 156 registers on sm_90

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
def update(
    p, g, m, v, gradient_scale, l2, decay, lerp_weight, beta2, one_minus_beta2, inv_sqrt_bias2, eps, minus_step_size,
    USE_L2: tl.constexpr, LERP_FROM_GRADIENT: tl.constexpr,
):  # fmt: skip
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
    weight_ptr, remainder_ptr, gradient_ptr, steps_ptr, exp_avg_ptr, exp_avg_sq_ptr, numel,
    gradient_scale, l2, decay, lerp_weight, beta2, one_minus_beta2, inv_sqrt_bias2, eps, minus_step_size,
    USE_L2: tl.constexpr, LERP_FROM_GRADIENT: tl.constexpr, SPLIT: tl.constexpr, CODED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    p = load_weight(weight_ptr, remainder_ptr, offsets, inside, SPLIT)
    g = load_gradient(gradient_ptr, steps_ptr, offsets, inside, CODED)
    m = tl.load(exp_avg_ptr + offsets, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=inside, other=0.0)
    p, m, v = update(
        p, g, m, v, gradient_scale, l2, decay, lerp_weight, beta2, one_minus_beta2, inv_sqrt_bias2, eps,
        minus_step_size, USE_L2, LERP_FROM_GRADIENT,
    )  # fmt: skip
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


@triton.jit(do_not_specialize=["first_index", "seed0", "seed1"])
def adamw_8bit_kernel(
    weight_ptr, remainder_ptr, gradient_ptr, steps_ptr, m_codes_ptr, m_scales_ptr, v_codes_ptr, v_scales_ptr,
    signed_values_ptr, signed_lines_ptr, unsigned_values_ptr, unsigned_lines_ptr,
    signed_top, signed_extreme, unsigned_top, unsigned_extreme, numel, first_index, seed0, seed1,
    gradient_scale, l2, decay, lerp_weight, beta2, one_minus_beta2, inv_sqrt_bias2, eps, minus_step_size,
    USE_L2: tl.constexpr, LERP_FROM_GRADIENT: tl.constexpr, SPLIT: tl.constexpr, CODED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
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
    p, m, v = update(
        p, g, m, v, gradient_scale, l2, decay, lerp_weight, beta2, one_minus_beta2, inv_sqrt_bias2, eps,
        minus_step_size, USE_L2, LERP_FROM_GRADIENT,
    )  # fmt: skip
    store_weight(weight_ptr, remainder_ptr, offsets, inside, p, SPLIT)

    index = start + first_index
    seed1 = seed1.to(tl.uint32, bitcast=True) ^ ((index >> 32).to(tl.uint32) * 0x9E3779B9)
    low_index = index.to(tl.uint32)[:, None] + tl.arange(0, QUANTIZATION_BLOCK).to(tl.uint32)[None, :]
    h = noise_bits(low_index, seed0.to(tl.uint32, bitcast=True), seed1[:, None])

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


def _common(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    scalars: AdamWScalars,
) -> tuple[tuple, tuple, dict]:
    """Pointers of weight and gradient, floats and switches of one launch."""
    split = remainder is not None
    values, steps, coded = pointers(gradient)
    weights = (weight.view(torch.int16), remainder) if split else (weight, weight)
    floats = (
        scalars.gradient_scale, scalars.l2, scalars.decay, scalars.lerp_weight, scalars.beta2, scalars.one_minus_beta2,
        scalars.inv_sqrt_bias2, scalars.eps, scalars.minus_step_size,
    )  # fmt: skip
    switches = {
        "USE_L2": scalars.use_l2,
        "LERP_FROM_GRADIENT": scalars.lerp_from_gradient,
        "SPLIT": split,
        "CODED": coded,
        "enable_fp_fusion": False,
    }
    return (*weights, values, steps), floats, switches


def adamw_fp32(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: AdamWScalars,
) -> None:
    numel = weight.numel()
    if numel == 0:
        return
    tensors, floats, switches = _common(weight, remainder, gradient, scalars)
    with on_device(weight.device):
        adamw_fp32_kernel[(triton.cdiv(numel, FP32_BLOCK),)](
            *tensors, exp_avg, exp_avg_sq, numel, *floats, **switches, BLOCK=FP32_BLOCK
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
) -> None:
    numel = weight.numel()
    if numel == 0:
        return
    tensors, floats, switches = _common(weight, remainder, gradient, scalars)
    signed, unsigned = state8.code_book(True), state8.code_book(False)
    seed0, seed1 = (
        seed - 2**32 if seed >= 2**31 else seed for seed in seeds
    )  # int32 for every seed: one compiled kernel
    with on_device(weight.device):
        adamw_8bit_kernel[(triton.cdiv(state8.num_blocks(numel), BLOCKS_PER_PROGRAM),)](
            *tensors, exp_avg.codes, exp_avg.scales, exp_avg_sq.codes, exp_avg_sq.scales,
            *_book_tensors(True, weight.device), *_book_tensors(False, weight.device),
            signed.top, signed.extreme, unsigned.top, unsigned.extreme, numel, first_index, seed0, seed1,
            *floats, **switches, BLOCKS=BLOCKS_PER_PROGRAM,
        )  # fmt: skip
