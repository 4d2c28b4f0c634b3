"""RMSNorm, SwiGLU and RoPE as single autograd nodes: fewer passes over memory, fewer saved tensors.

CUDA tensors go to Triton, others to the plain torch below, which is also the tests' oracle. Rounding follows Hugging
Face's eager code. Nothing is overwritten in place (but see `swiglu`), so a kept graph may run twice. (Liger-Kernel
0.8.5 has these operations too; its SwiGLU backward overwrites the saved gate and up whoever holds them, its RoPE
rotates its inputs in place, and its patches are per model type and partly process-wide: hence our own.)

    rms_norm   y = w * round(x * rstd), round(w * x * rstd), or round((1 + w) * x * rstd)
               rstd = rsqrt(mean(x^2) + eps)
    swiglu     y = round(silu(gate)) * up
    rope       y = x * cos + rotate_half(x) * sin
"""

import enum

import torch
from torch.autograd.function import once_differentiable

from lazytrain_plugin.kernels import blockwise, fused_saves
from lazytrain_plugin.kernels.coded_elementwise import (
    can_quantize_rows,
    swiglu_backward_decoded,
    swiglu_decoded,
    swiglu_gradients,
    swiglu_quantized,
)


class NormRounding(enum.Enum):
    """Which of the RMSNorm formulas in use a model means; they differ in rounding (and Gemma's in the weight)."""

    BEFORE_WEIGHT = "llama"  # w * round(x * rstd)
    AFTER_WEIGHT = "olmo"  # round(w * x * rstd)
    UNIT_OFFSET = "gemma"  # round((1 + w) * x * rstd)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: NormRounding) -> torch.Tensor:
    """Normalises `x` [..., columns] over its last dimension; `weight` [columns], same floating dtype."""
    return _RMSNorm.apply(x, weight, eps, rounding)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, consume: bool = False, private: bool = False) -> torch.Tensor:
    """silu(gate) * up, element by element; one shape and one floating dtype.

    `consume`: nobody else looks at `gate` and `up`, so a backward that frees its graph may write their gradients over
    them (CUDA). That spares two of a layer's largest tensors at the peak of its backward.
    `private`: nobody else reads them at all, so in a unit that saves in codes they are encoded and decoded here
    (fused_saves.py).
    """
    return _SwiGLU.apply(gate, up, consume, private)


def rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of `query` and `key` [batch, heads, tokens, width]; `cos`, `sin` [1 or batch, tokens, width].

    All of one floating dtype; `width` even. The tables get no gradient.
    """
    return _RoPE.apply(query, key, cos, sin)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, rounding):
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        saves = fused_saves.running()
        codes = saves.codes_of_input(x) if saves and x.is_contiguous() and can_quantize_rows(x) else None
        if flat.is_cuda:
            formula = {
                "cast_before_weight": rounding is NormRounding.BEFORE_WEIGHT,
                "unit_offset": rounding is NormRounding.UNIT_OFFSET,
            }
            with torch.cuda.device(flat.device):
                if codes is not None:
                    from lazytrain_plugin.kernels.triton.coded_elementwise import rms_norm_quantized

                    y, rstd = rms_norm_quantized(flat, weight.contiguous(), eps, codes, **formula)
                else:
                    from lazytrain_plugin.kernels.triton.elementwise import rms_norm_forward

                    y, rstd = rms_norm_forward(flat, weight.contiguous(), eps, **formula)
        else:
            y, rstd = _rms_norm_forward_reference(flat, weight, eps, rounding)
            if codes is not None:
                blockwise.quantize_reference(flat.view(-1), codes)
        ctx.rounding = rounding
        ctx.save_for_backward(flat.view(x.shape), weight, rstd)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        flat, flat_dy = x.view(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1]).contiguous()
        if flat.is_cuda:
            from lazytrain_plugin.kernels.triton.elementwise import rms_norm_backward

            with torch.cuda.device(flat.device):
                dx, dweight = rms_norm_backward(
                    flat_dy,
                    flat,
                    weight.contiguous(),
                    rstd,
                    cast_before_weight=ctx.rounding is NormRounding.BEFORE_WEIGHT,
                    unit_offset=ctx.rounding is NormRounding.UNIT_OFFSET,
                    weight_gradient=ctx.needs_input_grad[1],
                )
        else:
            dx, dweight = _rms_norm_backward_reference(flat_dy, flat, weight, rstd, ctx.rounding)
        return dx.view(x.shape), dweight if ctx.needs_input_grad[1] else None, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, consume, private=False):
        saves = fused_saves.running()
        ctx.consume = consume
        ctx.codes = saves.take(gate, up) if saves else None
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        if ctx.codes is not None:
            return swiglu_decoded(*ctx.codes, gate.shape)
        out = saves.codes_of_private(gate, up) if saves and private else None
        if out is not None:
            return swiglu_quantized(gate, up, *out)
        if gate.is_cuda:
            from lazytrain_plugin.kernels.triton.elementwise import swiglu_forward

            with torch.cuda.device(gate.device):
                return swiglu_forward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        dy = dy.contiguous()
        in_place = ctx.consume and not torch._C._autograd._get_current_graph_task_keep_graph()
        if ctx.codes is not None:
            # `gate` and `up` are memory without values.
            gradients = (gate, up) if in_place else (torch.empty_like(gate), torch.empty_like(up))
            swiglu_backward_decoded(dy, *ctx.codes, *gradients)
            return *gradients, None, None
        if gate.is_cuda:
            from lazytrain_plugin.kernels.triton.elementwise import swiglu_backward

            with torch.cuda.device(gate.device):
                return *swiglu_backward(dy, gate, up, in_place=in_place), None, None
        return *swiglu_gradients(dy, gate, up), None, None


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(query, cos, sin, transposed=False), _rotate(key, cos, sin, transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dquery, dkey):
        cos, sin = ctx.saved_tensors
        return _rotate(dquery, cos, sin, transposed=True), _rotate(dkey, cos, sin, transposed=True), None, None


def _rotate(x, cos, sin, *, transposed):
    if x.is_cuda:
        from lazytrain_plugin.kernels.triton.elementwise import rope as rope_triton

        with torch.cuda.device(x.device):
            if x.stride(-1) != 1:
                x = x.contiguous()
            return rope_triton(x, cos.contiguous(), sin.contiguous(), transposed=transposed)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if transposed:
        low, high = (x * sin).chunk(2, dim=-1)
        return x * cos + torch.cat((high, -low), dim=-1)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _rms_norm_forward_reference(x, weight, eps, rounding):
    x32 = x.float()
    rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    normalised = x32 * rstd
    if rounding is NormRounding.BEFORE_WEIGHT:
        return weight * normalised.to(x.dtype), rstd.squeeze(-1)
    weight32 = weight.float() + 1.0 if rounding is NormRounding.UNIT_OFFSET else weight.float()
    return (weight32 * normalised).to(x.dtype), rstd.squeeze(-1)


def _rms_norm_backward_reference(dy, x, weight, rstd, rounding):
    dy32 = dy.float()
    normalised = x.float() * rstd.unsqueeze(-1)
    weighted = dy32 * (weight.float() + 1.0 if rounding is NormRounding.UNIT_OFFSET else weight.float())
    mean = (weighted * normalised).mean(-1, keepdim=True)
    dx = (rstd.unsqueeze(-1) * (weighted - normalised * mean)).to(x.dtype)
    if rounding is NormRounding.BEFORE_WEIGHT:
        normalised = normalised.to(x.dtype).float()
    return dx, (dy32 * normalised).sum(0).to(weight.dtype)
