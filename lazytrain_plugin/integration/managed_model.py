"""What an engine does to the model object itself, and how it gives it back.

While an engine manages a model, device moves do nothing (a weight's home is the plan's business), and a pickle or a
deepcopy of it is an ordinary model with true weights, which knows neither the engine nor DeepSpeed.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from torch import nn

from lazytrain_plugin.integration import fused
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.streamed_module import guarded_apply

logger = logging.getLogger(__name__)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOK_OPTIONS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


class ModelGuard:
    """Stands in for methods of the outermost module, found on the object before its class's own."""

    def __init__(self, module: nn.Module, executor: Executor) -> None:
        self._module = module
        self.executor = executor

    def apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """For `_apply`, so that `.to`, `.cuda` and `.half` can't move weights from their homes."""
        return guarded_apply(self._module, fn)

    def reduce(self, protocol: Any) -> tuple:
        """For `__reduce_ex__`, of pickle and copy: without these methods, hooks that lead to the engine, and fused
        kernels."""
        how, arguments, state, *more = type(self._module).__reduce_ex__(self._module, protocol)
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key not in _METHODS}
            hooks = [item for name in _HOOKS for item in state.get(name, {}).items()]
            engines = {key for key, hook in hooks if (getattr(hook, "__module__", "") or "").startswith("deepspeed.")}
            for name in {*_HOOKS, *_HOOK_OPTIONS} & state.keys():
                kept = state[name].copy()
                for key in engines & kept.keys():
                    del kept[key]
                state[name] = kept
            # A copy of the modules around the same tensors, so that kernels can be taken off it.
            tensors = {id(tensor): tensor for tensor in (*self._module.parameters(), *self._module.buffers())}
            copied = how(*arguments)
            copied.__dict__.update(copy.deepcopy(state, tensors))
            fused.remove(copied)
            state = copied.__dict__
        return how, arguments, state, *more


_METHODS = {"_apply": ModelGuard.apply, "__reduce_ex__": ModelGuard.reduce}


def manage(module: nn.Module, executor: Executor) -> None:
    """From now on `module` is guarded; `release` ends that."""
    guard = ModelGuard(module, executor)
    for name, method in _METHODS.items():
        module.__dict__[name] = method.__get__(guard)


def release(module: nn.Module, executor: Executor) -> None:
    """Gives the model back as an ordinary one with true weights. Safe to call twice."""
    executor.close()
    guard = _guard(module)
    if guard is not None and guard.executor is executor:
        fused.remove(module)
        for name in _METHODS:
            del module.__dict__[name]


def release_from_other_engines(model: nn.Module) -> None:
    """A model (or a part of it) that an engine still manages goes to the new one: a second Trainer, a sweep."""
    for module in model.modules():
        guard = _guard(module)
        if guard is not None:
            logger.info("the model was managed by another engine, which lets go of it now")
            release(module, guard.executor)


def executor_of(model: nn.Module) -> Executor | None:
    """The executor of the engine that manages `model`."""
    guard = _guard(model)
    return None if guard is None else guard.executor


def _guard(module: nn.Module) -> ModelGuard | None:
    guard = getattr(module.__dict__.get("_apply"), "__self__", None)
    return guard if isinstance(guard, ModelGuard) else None
