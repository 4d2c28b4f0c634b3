"""`PendingParameter`: nobody sees a weight before its update.

Between `step()` and a unit's update, its parameters' `__class__` is this subclass. What only asks for metadata is
answered at once; anything that could reach the data waits for the unit's update first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_resolve: dict[int, Callable[[], None]] = {}
"""id(parameter) -> waits for its update and calls `settle`. Outside the object, so that a pickle never holds it."""

_Tensor = torch.Tensor
_METADATA = frozenset(
    [
        getattr(_Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim",
                     "is_cuda", "is_cpu", "is_meta", "is_quantized", "is_sparse", "itemsize", "nbytes")
    ]
    + [_Tensor.grad.__set__, _Tensor.grad.__delete__, _Tensor.requires_grad.__set__]
    + [
        getattr(_Tensor, name)
        for name in ("size", "dim", "numel", "nelement", "stride", "is_contiguous", "element_size", "is_floating_point",
                     "is_complex", "requires_grad_", "get_device", "__len__", "register_hook",
                     "register_post_accumulate_grad_hook")
    ]
    + [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor]
)  # fmt: skip


class PendingParameter(nn.Parameter):
    """A parameter whose optimizer update has not been carried out yet."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in _METADATA:
            for leaf in tree_leaves((args, kwargs)):
                if type(leaf) is PendingParameter:
                    settle_now(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo):
        settle_now(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        settle_now(self)
        return self.__reduce_ex__(protocol)


def mark_pending(parameter: nn.Parameter, resolve: Callable[[], None]) -> None:
    """From now on the first access to the parameter's data calls `resolve`, which must end in `settle`."""
    _resolve[id(parameter)] = resolve
    parameter.__class__ = PendingParameter


def settle(parameter: nn.Parameter) -> None:
    """The update is done (or given up): an ordinary parameter again."""
    if _resolve.pop(id(parameter), None) is not None:
        parameter.__class__ = nn.Parameter


def settle_now(parameter: nn.Parameter) -> None:
    """Waits for the parameter's update."""
    resolve = _resolve.get(id(parameter))
    if resolve is not None:
        resolve()
