"""RMSNorm and SwiGLU that write or read block-wise codes of their inputs in one pass (kernels/coded_elementwise.py).

Values are those of elementwise.py's kernels on the tensors themselves (or, read from codes, on the decoded ones), codes
those of blockwise.py's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.triton import on_device
from lazytrain_plugin.kernels.triton.blockwise import (
    BLOCK,
    BLOCKS_PER_PROGRAM,
    decode_halves,
    encode_blocks,
    format_constants,
    stored_as,
)
from lazytrain_plugin.kernels.triton.elementwise import _tile, normalise_rows, store_swiglu, store_swiglu_gradients


@triton.jit
def _load_half(pointer, offsets, inside):
    return tl.load(pointer + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def swiglu_quantize_kernel(
    gate_ptr, up_ptr, y_ptr, gate_codes_ptr, gate_scales_ptr, up_codes_ptr, up_scales_ptr, table_ptr, numel,
    largest_level, largest_scale, KIND: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    block_inside = block * BLOCK < numel
    offsets = block[:, None] * BLOCK + tl.arange(0, 64)[None, :]
    inside1, inside2 = offsets < numel, offsets + 64 < numel
    gate1, gate2 = _load_half(gate_ptr, offsets, inside1), _load_half(gate_ptr, offsets + 64, inside2)
    up1, up2 = _load_half(up_ptr, offsets, inside1), _load_half(up_ptr, offsets + 64, inside2)
    store_swiglu(gate1, up1, y_ptr, offsets, inside1)
    store_swiglu(gate2, up2, y_ptr, offsets + 64, inside2)
    encode_blocks(
        gate1, gate2, gate_codes_ptr, gate_scales_ptr, table_ptr, block, block_inside, largest_level, largest_scale,
        gate1, gate2, KIND, BITS, False, BLOCKS,
    )  # fmt: skip
    encode_blocks(
        up1, up2, up_codes_ptr, up_scales_ptr, table_ptr, block, block_inside, largest_level, largest_scale,
        up1, up2, KIND, BITS, False, BLOCKS,
    )  # fmt: skip


@triton.jit
def _swiglu_half(gate, up, y_ptr, offsets, numel):
    gate = stored_as(gate, y_ptr).to(tl.float32)
    up = stored_as(up, y_ptr).to(tl.float32)
    store_swiglu(gate, up, y_ptr, offsets, offsets < numel)


@triton.jit
def swiglu_decoded_kernel(
    gate_codes_ptr, gate_scales_ptr, up_codes_ptr, up_scales_ptr, table_ptr, y_ptr, numel,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    block_inside = block * BLOCK < numel
    gate1, gate2 = decode_halves(gate_codes_ptr, gate_scales_ptr, table_ptr, block, block_inside, KIND, BITS)
    up1, up2 = decode_halves(up_codes_ptr, up_scales_ptr, table_ptr, block, block_inside, KIND, BITS)
    offsets = block[:, None] * BLOCK + tl.arange(0, 64)[None, :]
    _swiglu_half(gate1, up1, y_ptr, offsets, numel)
    _swiglu_half(gate2, up2, y_ptr, offsets + 64, numel)


@triton.jit
def _swiglu_backward_half(gate, up, dy_ptr, dgate_ptr, dup_ptr, offsets, numel):
    inside = offsets < numel
    dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    gate = stored_as(gate, dy_ptr).to(tl.float32)
    up = stored_as(up, dy_ptr).to(tl.float32)
    store_swiglu_gradients(dy, gate, up, dgate_ptr, dup_ptr, offsets, inside)


@triton.jit
def swiglu_backward_decoded_kernel(
    dy_ptr, gate_codes_ptr, gate_scales_ptr, up_codes_ptr, up_scales_ptr, table_ptr, dgate_ptr, dup_ptr, numel,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    block_inside = block * BLOCK < numel
    gate1, gate2 = decode_halves(gate_codes_ptr, gate_scales_ptr, table_ptr, block, block_inside, KIND, BITS)
    up1, up2 = decode_halves(up_codes_ptr, up_scales_ptr, table_ptr, block, block_inside, KIND, BITS)
    offsets = block[:, None] * BLOCK + tl.arange(0, 64)[None, :]
    _swiglu_backward_half(gate1, up1, dy_ptr, dgate_ptr, dup_ptr, offsets, numel)
    _swiglu_backward_half(gate2, up2, dy_ptr, dgate_ptr, dup_ptr, offsets + 64, numel)


@triton.jit
def rms_norm_quantize_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, codes_ptr, scales_ptr, table_ptr, num_rows, num_columns, eps,
    largest_level, largest_scale, CAST_BEFORE_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`num_columns` is a multiple of 128: a row is whole blocks. COLUMNS: the next power of two."""
    normalise_rows(
        x_ptr, weight_ptr, y_ptr, rstd_ptr, num_rows, num_columns, eps, CAST_BEFORE_WEIGHT, UNIT_OFFSET, ROWS, COLUMNS
    )
    BLOCKS: tl.constexpr = ROWS * COLUMNS // 128
    index = tl.arange(0, BLOCKS)
    row, block = tl.program_id(0).to(tl.int64) * ROWS + index // (COLUMNS // 128), index % (COLUMNS // 128)
    block_inside = (row < num_rows) & (block < num_columns // 128)
    block = row * (num_columns // 128) + block
    offsets = block[:, None] * BLOCK + tl.arange(0, 64)[None, :]
    # Read again, out of the cache: to hand the rows over from thread to thread takes longer.
    first = _load_half(x_ptr, offsets, block_inside[:, None])
    second = _load_half(x_ptr, offsets + 64, block_inside[:, None])
    encode_blocks(
        first, second, codes_ptr, scales_ptr, table_ptr, block, block_inside, largest_level, largest_scale, first,
        second, KIND, BITS, False, BLOCKS,
    )  # fmt: skip


def _codes(quantized: blockwise.QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantized.codes, quantized.scales.view(torch.int16)


def swiglu_quantized(
    gate: torch.Tensor, up: torch.Tensor, gate_out: blockwise.QuantizedTensor, up_out: blockwise.QuantizedTensor
) -> torch.Tensor:
    y, numel, form = torch.empty_like(gate), gate.numel(), gate_out.format
    if numel:
        with on_device(gate.device):
            swiglu_quantize_kernel[(triton.cdiv(numel, 128 * BLOCKS_PER_PROGRAM),)](
                gate, up, y, *_codes(gate_out), *_codes(up_out), blockwise.nf4_table(gate.device), numel,
                form.largest_level, form.largest_scale, **format_constants(form), BLOCKS=BLOCKS_PER_PROGRAM,
                num_warps=4,
            )  # fmt: skip
    return y


def swiglu_decoded(gate: blockwise.QuantizedTensor, up: blockwise.QuantizedTensor, y: torch.Tensor) -> None:
    if y.numel():
        with on_device(y.device):
            swiglu_decoded_kernel[(triton.cdiv(y.numel(), 128 * BLOCKS_PER_PROGRAM),)](
                *_codes(gate), *_codes(up), blockwise.nf4_table(y.device), y, y.numel(),
                **format_constants(gate.format), BLOCKS=BLOCKS_PER_PROGRAM, num_warps=4,
            )  # fmt: skip


def swiglu_backward_decoded(
    dy: torch.Tensor,
    gate: blockwise.QuantizedTensor,
    up: blockwise.QuantizedTensor,
    dgate: torch.Tensor,
    dup: torch.Tensor,
) -> None:
    if dy.numel():
        with on_device(dy.device):
            swiglu_backward_decoded_kernel[(triton.cdiv(dy.numel(), 128 * BLOCKS_PER_PROGRAM),)](
                dy, *_codes(gate), *_codes(up), blockwise.nf4_table(dy.device), dgate, dup, dy.numel(),
                **format_constants(gate.format), BLOCKS=BLOCKS_PER_PROGRAM, num_warps=4,
            )  # fmt: skip


def rms_norm_quantized(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: blockwise.QuantizedTensor,
    *,
    cast_before_weight: bool,
    unit_offset: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y like `x` [rows, columns] and rstd fp32 [rows]; `columns` is a multiple of 128."""
    num_rows, num_columns = x.shape
    y, rstd, form = torch.empty_like(x), x.new_empty(num_rows, dtype=torch.float32), out.format
    rows, columns, num_warps = _tile(num_columns)
    if num_rows:
        with on_device(x.device):
            rms_norm_quantize_kernel[(triton.cdiv(num_rows, rows),)](
                x, weight, y, rstd, *_codes(out), blockwise.nf4_table(x.device), num_rows, num_columns, eps,
                form.largest_level, form.largest_scale, CAST_BEFORE_WEIGHT=cast_before_weight,
                UNIT_OFFSET=unit_offset, **format_constants(form), ROWS=rows, COLUMNS=columns, num_warps=num_warps,
            )  # fmt: skip
    return y, rstd
