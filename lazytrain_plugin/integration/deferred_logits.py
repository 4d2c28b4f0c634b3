"""Logits that are computed only if somebody looks at them.

In a training forward with labels a causal language model computes `logits = lm_head(hidden)` and gives them to its
loss function. `DeferredLogits` stands in for them: it knows shape, dtype and device at once and carries what the
chunked loss needs. Any other use computes the ordinary logits, once, with their ordinary place in the autograd
graph, so code that caps, scales or stores logits, or that computes a loss of its own, stays right and only loses
the saving.

Logits that are looked at after the optimizer changed the head's weight would be wrong: that is an error.
"""

import torch
from torch.utils._pytree import tree_map

from lazytrain_plugin.errors import LazyTrainError


class LossCall:
    """State of one model's training forward, shared by its head and its hooks (a deepcopy keeps it shared)."""

    def __init__(self) -> None:
        self.active = False  # inside a forward whose head may defer its logits
        self.weights_epoch = 0  # grows whenever an optimizer changes the weights
        self.consumed = 0  # logits that went into the chunked loss
        self.materialised_early = 0  # logits that the model's forward looked at itself
        self.pointless = False  # it always does: no more deferring


class _Source:
    """What makes the logits: linear(hidden, weight, bias), cast to `dtype`."""

    def __init__(self, hidden, weight, bias, call: LossCall, dtype: torch.dtype, base: "DeferredLogits | None") -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.call, self.dtype, self.base = call, dtype, base
        self.weights_epoch, self.weight_version = call.weights_epoch, weight._version
        self.materialised: torch.Tensor | None = None
        self.hooks: list = []
        """Gradient hooks that were put on the stand-in: its ordinary logits, once they exist, get them too."""

    @property
    def is_materialised(self) -> bool:
        return self.materialised is not None or (self.base is not None and self.base.source.is_materialised)

    def materialise(self) -> torch.Tensor:
        if self.materialised is None:
            with torch.enable_grad(), torch.autocast(self.hidden.device.type, enabled=False):
                if self.base is not None:
                    self.materialised = self.base.materialise().to(self.dtype)
                else:
                    self._require_same_weights()
                    self.call.materialised_early += self.call.active
                    self.materialised = torch.nn.functional.linear(self.hidden, self.weight, self.bias)
            for hook in self.hooks if self.materialised.requires_grad else ():
                self.materialised.register_hook(hook)
        return self.materialised

    def _require_same_weights(self) -> None:
        if self.weights_epoch != self.call.weights_epoch or self.weight_version != self.weight._version:
            raise LazyTrainError(
                "outputs.logits of a training forward were read after the optimizer step: they are computed on demand "
                "and the head's weight has changed since. Read them before step(), or set "
                '"fused_kernels": false in the "lazytrain" block'
            )


class _Defer(torch.autograd.Function):
    """Makes the stand-in a proper node of the graph, for users that reach it below the Python level.

    A custom `autograd.Function` takes tensors without asking `__torch_function__`; its gradient arrives here.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, dtype):
        ctx.save_for_backward(hidden, weight)
        ctx.has_bias = bias is not None
        shape = (*hidden.shape[:-1], weight.shape[0])
        return torch.Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=hidden.device)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(weight.dtype)
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            flat.t() @ hidden.reshape(-1, hidden.shape[-1]) if ctx.needs_input_grad[1] else None,
            flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None,
            None,
        )


class DeferredLogits(torch.Tensor):
    """See the module docstring; made by `defer_logits`. `source` says what it stands for."""

    source: _Source

    def materialise(self) -> torch.Tensor:
        """The ordinary logits [..., classes]; computed once, and the same tensor ever after."""
        return self.source.materialise()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _ANSWERED_AT_ONCE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.register_hook and not args[0].source.is_materialised:
            # DeepSpeed puts a hook on every output of a training forward.
            args[0].source.hooks.append(args[1] if len(args) > 1 else kwargs["hook"])
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float and args[0].dtype in (torch.bfloat16, torch.float16):
            return _cast(args[0], torch.float32)  # Accelerate's output conversion: no reason to compute them yet
        return func(*_materialised(args), **_materialised(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Below autograd (see _Defer): values only.
        def value(x):
            return x.materialise().detach() if isinstance(x, DeferredLogits) else x

        return func(*tree_map(value, args), **tree_map(value, kwargs or {}))


def _materialised(arguments):
    return tree_map(lambda x: x.materialise() if isinstance(x, DeferredLogits) else x, arguments)


_T = torch.Tensor
_ANSWERED_AT_ONCE = frozenset(
    [getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf")]
    + [getattr(_T, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested")]
    + [getattr(_T, name).__get__ for name in ("grad_fn", "itemsize", "is_mkldnn", "is_xpu", "is_mps", "is_sparse_csr")]
    + [_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, _T.element_size]
    + [_T.is_floating_point, _T.is_complex, _T.is_contiguous, _T.is_signed, _T.get_device, _T.stride]
)


def defer_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LossCall
) -> DeferredLogits:
    """Stands for linear(hidden, weight, bias): `hidden` [..., hidden_size], `weight` [classes, hidden_size].

    Under autocast operands are cast as `linear` would cast them.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        compute_dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
        bias = None if bias is None else bias.to(compute_dtype)
    logits = _Defer.apply(hidden, weight, bias, hidden.dtype)
    logits.source = _Source(hidden, weight, bias, call, hidden.dtype, base=None)
    return logits


def _cast(logits: DeferredLogits, dtype: torch.dtype) -> DeferredLogits:
    source = logits.source
    cast = _Defer.apply(source.hidden, source.weight, source.bias, dtype)
    cast.source = _Source(source.hidden, source.weight, source.bias, source.call, dtype, base=logits)
    return cast
