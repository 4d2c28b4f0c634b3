"""DeepSpeed's debug API (`deepspeed.utils.safe_get_full_fp32_param` and its siblings) on LazyTrain's homes.

DeepSpeed's functions look for attributes that its own optimizers put on a parameter, and answer None without them,
which callers take for "frozen". Attributes would travel in every pickle of a parameter, so the functions are wrapped
instead: for a parameter of a LazyTrain engine they ask the engine, for any other DeepSpeed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lazytrain_plugin.errors import LazyTrainError

if TYPE_CHECKING:  # plain DeepSpeed jobs load this module too
    from lazytrain_plugin.runtime.state import ParamRecord
    from lazytrain_plugin.runtime.train_state import ExecutorState

READING, SETTING = "reading of masters and states", "setting of masters and states"
_managed = WeakIdKeyDictionary()
"""Trained parameter -> (weak reference to the state that knows it, its name)."""


def manage(state: ExecutorState) -> None:
    """From now on DeepSpeed's functions answer for this engine's trained parameters."""
    for record in state.records:
        if record.group is not None:
            _managed[record.parameter] = (weakref.ref(state), record.name)


def get_master(state: ExecutorState, record: ParamRecord) -> torch.Tensor:
    """The fp32 master in the parameter's shape: a copy on the engine's device."""
    master = state.read_master(record)
    state.leave_together(record, READING)
    return _shaped(state, record, master)


def set_master(state: ExecutorState, record: ParamRecord, value: torch.Tensor) -> None:
    """Replaces master and weight."""
    flat = _flat(record, value)
    with _on_all_ranks(state):
        state.write_master(record, flat)


def get_optimizer_state(state: ExecutorState, record: ParamRecord, optim_state_key: str) -> Any:
    """One optimizer state, decoded to fp32, in the parameter's shape; None before the parameter's first update."""
    value = state.read_state(record).get(optim_state_key)
    state.leave_together(record, READING)
    elementwise = isinstance(value, torch.Tensor) and value.numel() == record.numel
    return _shaped(state, record, value) if elementwise else value


def set_optimizer_state(state: ExecutorState, record: ParamRecord, value: torch.Tensor, optim_state_key: str) -> None:
    """Replaces one optimizer state; 8-bit states are encoded again."""
    states = {key: old for key, old in state.read_state(record).items() if "." not in key}
    if optim_state_key not in states:
        known = ", ".join(states) or "none before its first update"
        raise LazyTrainError(f"{record.name} has no optimizer state {optim_state_key!r}; it has {known}")
    states[optim_state_key] = _flat(record, value)
    with _on_all_ranks(state):
        state.write_state(record, states)


def get_gradient(state: ExecutorState, record: ParamRecord) -> torch.Tensor | None:
    """The gradient between backward and step, summed over the window's micro-batches; None where there is none."""
    gradient = state.read_gradient(record)
    return None if gradient is None else _shaped(state, record, gradient)


def set_gradient(state: ExecutorState, record: ParamRecord, value: torch.Tensor) -> None:
    raise LazyTrainError(
        f"{record.name}: a gradient can't be replaced after backward under LazyTrain, which has its norm already; "
        "change it while it is computed, with parameter.register_hook"
    )


ANSWERS: dict[str, Callable] = {
    "safe_get_full_fp32_param": get_master,
    "safe_set_full_fp32_param": set_master,
    "safe_get_full_optimizer_state": get_optimizer_state,
    "safe_set_full_optimizer_state": set_optimizer_state,
    "safe_get_full_grad": get_gradient,
    "safe_set_full_grad": set_gradient,
}


def patch() -> None:
    """Wraps the functions in `deepspeed.utils` and in the module they come from. Safe to call more than once."""
    for module_name in ("deepspeed.utils", "deepspeed.utils.tensor_fragment"):
        module = sys.modules.get(module_name)
        for name, answer in ANSWERS.items():
            original = getattr(module, name, None)
            if original is not None and getattr(original, "_lazytrain_original", None) is None:
                setattr(module, name, _wrap(original, answer))


def _wrap(original: Callable, answer: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(param: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        state_ref, name = _managed.get(param, (None, ""))
        if state_ref is None:
            return original(param, *args, **kwargs)
        state = state_ref()
        if state is None or state.executor.closed:
            raise LazyTrainError(f"{name}: its engine was destroyed; read the parameter itself")
        state.flush()
        record = next(record for record in state.records if record.parameter is param)
        return answer(state, record, *args, **kwargs)

    wrapper._lazytrain_original = original
    return wrapper


@contextlib.contextmanager
def _on_all_ranks(state: ExecutorState) -> Iterator[None]:
    """Ranks of a node have one copy: none changes it while another still reads, or reads what is half changed. What was
    written to weights before counts as older."""
    state.executor.share_changes()
    state.meet(SETTING)
    yield
    state.meet(SETTING)


def _shaped(state: ExecutorState, record: ParamRecord, flat: torch.Tensor) -> torch.Tensor:
    return flat.to(state.executor.device, torch.float32, copy=True).view(record.shape)


def _flat(record: ParamRecord, value: torch.Tensor) -> torch.Tensor:
    if value.shape != record.shape:
        raise LazyTrainError(
            f"{record.name} has shape {tuple(record.shape)} and was given {tuple(value.shape)}; give its own shape"
        )
    return value.detach().to("cpu", torch.float32).reshape(-1)
