"""RMSNorm, SwiGLU and RoPE: forward and backward, fp32 inside, rounded where Hugging Face's eager code rounds.

Nothing is written in place: a saved tensor keeps its value, so a graph may run twice and recompute sees what forward
saw. Sums run in a fixed order, so the same inputs give the same bits.
"""

import torch
import triton
import triton.language as tl

# Weight gradients are partial sums of this many programs, whatever the GPU: a fixed order of summation.
NUM_PARTIALS = 512
SWIGLU_BLOCK = 1024


@triton.jit
def normalise_rows(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, num_rows, num_columns, eps,
    CAST_BEFORE_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores this program's rows of y and of rstd."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = rows[:, None] * num_columns + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / num_columns + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    normalised = x * rstd[:, None]
    if CAST_BEFORE_WEIGHT:
        normalised = normalised.to(y_ptr.dtype.element_ty).to(tl.float32)
    if UNIT_OFFSET:
        weight = weight + 1.0
    tl.store(y_ptr + offsets, (normalised * weight[None, :]).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, num_rows, num_columns, eps,
    CAST_BEFORE_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    normalise_rows(
        x_ptr, weight_ptr, y_ptr, rstd_ptr, num_rows, num_columns, eps, CAST_BEFORE_WEIGHT, UNIT_OFFSET, ROWS, BLOCK
    )


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, num_rows, num_columns,
    CAST_BEFORE_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight = weight + 1.0
    partial = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        offsets = rows[:, None] * num_columns + columns[None, :]
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        normalised = x * rstd
        weighted = dy * weight[None, :]
        mean = tl.sum(weighted * normalised, axis=1) / num_columns
        dx = rstd * (weighted - normalised * mean[:, None])
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if WEIGHT_GRADIENT:
            if CAST_BEFORE_WEIGHT:
                normalised = normalised.to(dx_ptr.dtype.element_ty).to(tl.float32)
            partial += tl.sum(dy * normalised, axis=0)
    if WEIGHT_GRADIENT:
        tl.store(partial_ptr + program.to(tl.int64) * num_columns + columns, partial, mask=columns < num_columns)


@triton.jit
def store_swiglu(gate, up, y_ptr, offsets, inside):
    """`gate` and `up` in fp32."""
    silu = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + offsets, (silu * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_swiglu_gradients(dy, gate, up, dgate_ptr, dup_ptr, offsets, inside):
    """`dy`, `gate` and `up` in fp32."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = (gate * sigmoid).to(dup_ptr.dtype.element_ty).to(tl.float32)
    dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dgate_ptr + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + offsets, (dy * silu).to(dup_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_forward_kernel(gate_ptr, up_ptr, y_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    store_swiglu(gate, up, y_ptr, offsets, inside)


@triton.jit
def swiglu_backward_kernel(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    store_swiglu_gradients(dy, gate, up, dgate_ptr, dup_ptr, offsets, inside)


@triton.jit
def rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, num_tokens, num_heads, half,
    x_batch_stride, x_head_stride, x_token_stride, cos_batch_stride, cos_token_stride,
    TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (token, batch); y is [batch, token, head, 2 * half], contiguous."""
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    heads = tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    in_half = columns < half
    inside = (heads < num_heads)[:, None] & in_half[None, :]
    table = batch * cos_batch_stride + token * cos_token_stride + columns
    cos_low = tl.load(cos_ptr + table, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr + table, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + table + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + table + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    x_row = x_ptr + batch * x_batch_stride + token * x_token_stride + heads[:, None] * x_head_stride + columns[None, :]
    low = tl.load(x_row, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_row + half, mask=inside, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    if TRANSPOSED:  # the rotation's transpose: its gradient
        new_low = (low * cos_low).to(dtype).to(tl.float32) + (high * sin_high).to(dtype).to(tl.float32)
        new_high = (high * cos_high).to(dtype).to(tl.float32) - (low * sin_low).to(dtype).to(tl.float32)
    else:
        new_low = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
        new_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    y_row = y_ptr + ((batch * num_tokens + token) * num_heads + heads[:, None]) * (2 * half) + columns[None, :]
    tl.store(y_row, new_low.to(dtype), mask=inside)
    tl.store(y_row + half, new_high.to(dtype), mask=inside)


def _tile(num_columns: int) -> tuple[int, int, int]:
    """(rows a program, padded columns, warps): short rows (a head's norm) share a program."""
    block = triton.next_power_of_2(num_columns)
    return max(1, 1024 // block), block, 4 if block <= 1024 else (8 if block <= 8192 else 16)


def rms_norm_forward(x, weight, eps: float, *, cast_before_weight: bool, unit_offset: bool):
    """y like `x` [rows, columns] (contiguous) and rstd fp32 [rows]."""
    num_rows, num_columns = x.shape
    y = torch.empty_like(x)
    rstd = x.new_empty(num_rows, dtype=torch.float32)
    rows, block, num_warps = _tile(num_columns)
    if num_rows:
        rms_norm_forward_kernel[(triton.cdiv(num_rows, rows),)](
            x, weight, y, rstd, num_rows, num_columns, eps, CAST_BEFORE_WEIGHT=cast_before_weight,
            UNIT_OFFSET=unit_offset, ROWS=rows, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return y, rstd


def rms_norm_backward(dy, x, weight, rstd, *, cast_before_weight: bool, unit_offset: bool, weight_gradient: bool):
    """dx like `x`, and dweight in the weight's dtype or None."""
    num_rows, num_columns = x.shape
    dx = torch.empty_like(x)
    rows, block, num_warps = _tile(num_columns)
    programs = max(1, min(NUM_PARTIALS, triton.cdiv(num_rows, rows)))
    partial = x.new_empty((programs, num_columns) if weight_gradient else (1, 1), dtype=torch.float32)
    rms_norm_backward_kernel[(programs,)](
        dy, x, weight, rstd, dx, partial, num_rows, num_columns, CAST_BEFORE_WEIGHT=cast_before_weight,
        UNIT_OFFSET=unit_offset, WEIGHT_GRADIENT=weight_gradient, ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype) if weight_gradient else None


def swiglu_forward(gate, up):
    y = torch.empty_like(gate)
    numel = gate.numel()
    if numel:
        swiglu_forward_kernel[(triton.cdiv(numel, SWIGLU_BLOCK),)](gate, up, y, numel, BLOCK=SWIGLU_BLOCK, num_warps=4)
    return y


def swiglu_backward(dy, gate, up, *, in_place: bool = False):
    """Gradients of gate and up; `in_place`: in the memory of gate and up."""
    dgate, dup = (gate, up) if in_place else (torch.empty_like(gate), torch.empty_like(up))
    numel = gate.numel()
    if numel:
        swiglu_backward_kernel[(triton.cdiv(numel, SWIGLU_BLOCK),)](
            dy, gate, up, dgate, dup, numel, BLOCK=SWIGLU_BLOCK, num_warps=4
        )
    return dgate, dup


def rope(x, cos, sin, *, transposed: bool):
    """Rotates `x` [batch, heads, tokens, width] (last stride 1) by tables [1 or batch, tokens, width].

    The result is a [batch, heads, tokens, width] view of [batch, tokens, heads, width] memory, as the projection's
    output is.
    """
    batch, num_heads, num_tokens, width = x.shape
    y = x.new_empty(batch, num_tokens, num_heads, width)
    if y.numel():
        rope_kernel[(num_tokens, batch)](
            x, y, cos, sin, num_tokens, num_heads, width // 2, x.stride(0), x.stride(1), x.stride(2),
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), TRANSPOSED=transposed,
            HEADS=triton.next_power_of_2(num_heads), BLOCK=triton.next_power_of_2(width // 2), num_warps=4,
        )  # fmt: skip
    return y.transpose(1, 2)
