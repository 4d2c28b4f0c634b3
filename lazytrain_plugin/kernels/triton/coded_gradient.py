"""Stored gradient codes on CUDA; coded_gradient.py describes them, and gradient_codes.py the arithmetic.

`load_gradient` is how the update and norm kernels read a gradient of any kind: codes are decoded in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lazytrain_plugin.kernels import gradient_codes as codes
from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.triton import on_device
from lazytrain_plugin.kernels.triton.gradient_codes import BLOCKS, NUM_WARPS, codes_of, tile_offsets

BLOCK: tl.constexpr = tl.constexpr(codes.BLOCK)


@triton.jit
def load_gradient(gradient_ptr, steps_ptr, offsets, inside, CODED: tl.constexpr):
    """Elements of a gradient: its own values, or its codes decoded to fp32."""
    if CODED:
        code = tl.load(gradient_ptr + offsets, mask=inside, other=0).to(tl.float32)
        step_bits = tl.load(steps_ptr + offsets // BLOCK, mask=inside, other=0).to(tl.int32) << 16
        x = code * step_bits.to(tl.float32, bitcast=True)
    else:
        x = tl.load(gradient_ptr + offsets, mask=inside, other=0.0)
    return x


@triton.jit
def store_codes(x, codes_ptr, steps_ptr, block, blocks, numel, inverse_of_largest, largest_code):
    offsets = tile_offsets(block)
    code, high = codes_of(x, inverse_of_largest, largest_code)
    tl.store(codes_ptr + offsets, code.to(codes_ptr.dtype.element_ty), mask=offsets < numel)
    tl.store(steps_ptr + block, high.to(tl.int16), mask=block < blocks)


@triton.jit
def encode_kernel(
    values_ptr, codes_ptr, steps_ptr, numel, blocks, inverse_of_largest, largest_code,
    NUM: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    offsets = tile_offsets(block)
    x = tl.load(values_ptr + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
    store_codes(x, codes_ptr, steps_ptr, block, blocks, numel, inverse_of_largest, largest_code)


@triton.jit
def decode_kernel(codes_ptr, steps_ptr, values_ptr, numel, NUM: tl.constexpr):
    offsets = tile_offsets(tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM))
    inside = offsets < numel
    x = load_gradient(codes_ptr, steps_ptr, offsets, inside, True)
    tl.store(values_ptr + offsets, x, mask=inside)


@triton.jit
def add_codes_kernel(
    codes_ptr, steps_ptr, arrived_ptr, arrived_steps_ptr, numel, blocks, inverse_of_largest, largest_code,
    FIRST: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    offsets = tile_offsets(block)
    inside = offsets < numel
    x = load_gradient(arrived_ptr, arrived_steps_ptr, offsets, inside, True)
    if not FIRST:
        x += load_gradient(codes_ptr, steps_ptr, offsets, inside, True)
    store_codes(x, codes_ptr, steps_ptr, block, blocks, numel, inverse_of_largest, largest_code)


def pointers(gradient: torch.Tensor | CodedGradient) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Values and steps of a gradient (itself, where it has none), and CODED for `load_gradient`."""
    if isinstance(gradient, CodedGradient):
        return gradient.codes, gradient.steps, True
    return gradient, gradient, False


_LAUNCH = {"NUM": BLOCKS, "num_warps": NUM_WARPS, "enable_fp_fusion": False}


def _grid(coded: CodedGradient) -> tuple[int]:
    return (triton.cdiv(coded.steps.numel(), BLOCKS),)


def encode_gradient(values: torch.Tensor, coded: CodedGradient) -> None:
    bits = coded.bits
    with on_device(values.device):
        encode_kernel[_grid(coded)](
            values, coded.codes, coded.steps, values.numel(), coded.steps.numel(), codes.inverse_of_largest(bits),
            float(codes.LARGEST_CODE[bits]), **_LAUNCH,
        )  # fmt: skip


def decode_gradient(coded: CodedGradient, values: torch.Tensor) -> None:
    with on_device(values.device):
        decode_kernel[_grid(coded)](coded.codes, coded.steps, values, values.numel(), **_LAUNCH)


def add_codes(total: CodedGradient, arrived: CodedGradient, first: bool) -> None:
    bits = total.bits
    with on_device(total.device):
        add_codes_kernel[_grid(total)](
            total.codes, total.steps, arrived.codes, arrived.steps, total.numel(), total.steps.numel(),
            codes.inverse_of_largest(bits), float(codes.LARGEST_CODE[bits]), FIRST=first, **_LAUNCH,
        )  # fmt: skip
