"""Stand-ins for fused kernels on meta tensors: right shapes, and exactly what the kernel saves for backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

CODE_BLOCK = 128
"""A fused norm makes codes of rows of whole blocks (kernels/blockwise.py)."""
OnAttention = Callable[[int, int], None]
OnFused = Callable[[str, tuple[torch.Tensor, ...]], None]


class _Attention(torch.autograd.Function):
    """Flash attention saves q, k, v, the output and the log-sum-exp of each row."""

    @staticmethod
    def forward(ctx, query, key, value):
        batch, heads, length, _ = query.shape
        # [batch, heads, length, head size], but laid out as [batch, length, heads, head size]: joining the heads again
        # is then a view, no copy.
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Norm(torch.autograd.Function):
    """A fused norm saves its input and one fp32 statistic per row."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx, gradient):
        _, weight, _ = ctx.saved_tensors
        return torch.empty_like(gradient), torch.empty_like(weight)


class _GatedProduct(torch.autograd.Function):
    """Fused act(gate) * up saves both inputs and nothing in between."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(gradient), torch.empty_like(gradient)


class _AttentionMode(TorchFunctionMode):
    """Answers attention calls with `_Attention`; meta tensors have no backend to choose from."""

    def __init__(self, on_attention: OnAttention) -> None:
        super().__init__()
        self._on_attention = on_attention

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))[:3]
            output = _Attention.apply(query, key, value)
            self._on_attention(query.shape[-3] * query.shape[-1], output.nbytes + 4 * query.shape[:-1].numel())
            return output
        if function is torch.Tensor.__bool__ and args[0].is_meta:
            # Only asked to find out whether a mask is needed ("are all positions plain?"): they are.
            return True
        return function(*args, **kwargs)


@contextlib.contextmanager
def shape_kernels(
    model: nn.Module, *, fused: bool, on_attention: OnAttention, on_fused: OnFused = lambda kind, read: None
) -> Iterator[None]:
    """Within it, attention (and with `fused` RMSNorm and gated MLPs) run as their fused kernels would, shapes only.

    Args:
        on_attention: told of every attention call the query width (heads x head size), and the bytes of its output with
            the log-sum-exp.
        on_fused: told of every fused call ("norm" or "swiglu") what it reads, if it can make codes of that on its way.
    """
    replaced: list[nn.Module] = []
    try:
        if fused:
            for module in model.modules():
                forward = _fused_forward(module, on_fused)
                if forward is not None and "forward" not in vars(module):
                    module.forward = forward
                    replaced.append(module)
        with _AttentionMode(on_attention):
            yield
    finally:
        for module in replaced:
            del module.forward


def _fused_forward(module: nn.Module, on_fused: OnFused) -> Callable | None:
    if type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), nn.Parameter):

        def norm(hidden, *args, **kwargs):
            if hidden.shape[-1] % CODE_BLOCK == 0:
                on_fused("norm", (hidden,))
            return _Norm.apply(hidden, module.weight)

        return norm
    if all(isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "up_proj", "down_proj")):
        makes_codes = _is_silu(getattr(module, "act_fn", None)) and all(
            type(projection) is nn.Linear for projection in (module.gate_proj, module.up_proj)
        )

        def gated(hidden, *args, **kwargs):
            gate, up = module.gate_proj(hidden), module.up_proj(hidden)
            if makes_codes:
                on_fused("swiglu", (gate, up))
            return module.down_proj(_GatedProduct.apply(gate, up))

        return gated
    return None


def _is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
