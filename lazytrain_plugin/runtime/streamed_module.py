"""Puts a unit's forward under the executor by changing the module's class, and takes it back."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lazytrain_plugin.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor
    from lazytrain_plugin.runtime.unit import Unit

_ATTRIBUTE = "_lazytrain"


@functools.cache
def _streamed_class(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass that looks like `original` by name and type, and runs `forward` through the executor."""

    class Streamed(original):
        @functools.wraps(original.forward)
        def forward(self, *args, **kwargs):
            executor, unit = self.__dict__[_ATTRIBUTE]
            return executor.run_unit(unit, args, kwargs)

        def _apply(self, fn, recurse=True):
            return guarded_apply(self, fn)

        def compile(self, *args, **kwargs):
            # Of what the unit computes: the way of its weights can't be traced.
            refuse_cuda_graphs(kwargs)
            self.__dict__[_ATTRIBUTE][1].compile(*args, **kwargs)

        def __reduce_ex__(self, protocol):
            # A copy or a pickle is an ordinary module with true weights: it has no executor, and needs no LazyTrain.
            state = {k: v for k, v in self.__dict__.items() if k != _ATTRIBUTE}
            return object.__new__, (original,), state

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Streamed, name, getattr(original, name))
    return Streamed


def install(module: nn.Module, executor: Executor, unit: Unit) -> None:
    """From now on `module(...)` is run by the executor."""
    # A forward that someone bound to the instance would hide the class's: it becomes the original.
    bound = module.__dict__.pop("forward", None)
    original = type(module)
    unit.original_forward = unit.eager_forward = bound or functools.partial(original.forward, module)
    module.__dict__[_ATTRIBUTE] = (executor, unit)
    module.__class__ = _streamed_class(original)


def remove(module: nn.Module, unit: Unit) -> None:
    """The module runs by itself again."""
    if module.__dict__.pop(_ATTRIBUTE, None) is None:
        return
    module.__class__ = type(module).__mro__[1]
    if not isinstance(unit.eager_forward, functools.partial):
        module.forward = unit.eager_forward


def refuse_cuda_graphs(options: dict[str, Any]) -> None:
    """Raises ConfigError for options of `torch.compile` that record addresses: weights change theirs."""
    mode = options.get("mode")
    graphs = mode in ("reduce-overhead", "max-autotune") or (options.get("options") or {}).get("triton.cudagraphs")
    if graphs or options.get("backend") == "cudagraphs":
        raise ConfigError(
            f"torch.compile with {f'mode {mode!r}' if mode else 'CUDA graphs'} records the addresses of weights, which "
            'move under LazyTrain; use mode "default" or "max-autotune-no-cudagraphs"'
        )


def guarded_apply(module: nn.Module, fn) -> nn.Module:
    """`nn.Module._apply` for managed modules: device moves do nothing, dtype changes are an error.

    Raises:
        UnsupportedModelError: `fn` changes the dtype of a weight.
    """
    for name, parameter in module.named_parameters():
        probe = torch.empty(0, dtype=parameter.dtype)
        if (changed := fn(probe).dtype) != parameter.dtype:
            raise UnsupportedModelError(
                f"{name} can't be changed from {parameter.dtype} to {changed} while LazyTrain manages it; "
                "choose the dtype when the model is made, or with bf16 in the DeepSpeed config"
            )
    return module
