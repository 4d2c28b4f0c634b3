"""Which updater serves the optimizer that the user made."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from lazytrain_plugin.config.schema import LazyTrainConfig
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.runtime.update import ClientOptimizer, NativeAdamW

logger = logging.getLogger(__name__)

_ADAM_CLASSES = {
    # class name -> (module prefix, decoupled weight decay unless the groups say otherwise)
    "AdamW": (("torch.optim", "bitsandbytes.optim"), True),
    "Adam": (("torch.optim", "bitsandbytes.optim"), False),
    "AdamW8bit": (("bitsandbytes.optim",), True),
    "PagedAdamW": (("bitsandbytes.optim",), True),
    "PagedAdamW8bit": (("bitsandbytes.optim",), True),
    "Adam8bit": (("bitsandbytes.optim",), True),
    "DeepSpeedCPUAdam": (("deepspeed.ops",), True),
    "FusedAdam": (("deepspeed.ops",), True),
}


def make_updater(optimizer: torch.optim.Optimizer | None, implementation: str) -> NativeAdamW | ClientOptimizer | None:
    """The native kernels for AdamW and Adam, the client's own `step` for every other class (or when asked for).

    Args:
        optimizer: the client's; None: evaluation only.
        implementation: "native" or "torch", from the config.
    """
    if optimizer is None:
        return None
    decoupled = _native_decay(optimizer)
    if decoupled is None:
        _refuse_closures(optimizer)
    if implementation == "torch":
        return ClientOptimizer(optimizer)
    if decoupled is None:
        logger.warning(
            "%s has no native kernel: its own step runs unit by unit on fp32 masters, which is slower than the native "
            "AdamW (on the CPU by a factor of about 5)",
            type(optimizer).__name__,
        )
        return ClientOptimizer(optimizer)
    return NativeAdamW(decoupled=decoupled)


def optimizer_state_bits(optimizer: torch.optim.Optimizer | None, config: LazyTrainConfig) -> int:
    """32 or 8: what the config says, else 8 for an optimizer whose class is an 8-bit one.

    Raises:
        ConfigError: the embedding is to have 8-bit states, and nothing else has.
    """
    bits = config.state_bits
    if config.optimizer.state_bits is None and optimizer is not None and "8bit" in type(optimizer).__name__:
        bits = 8
    if optimizer is not None and bits == 32 and config.optimizer.embedding_state_bits == 8:
        raise ConfigError(
            f'"{config.optimizer.PATH}.embedding_state_bits" is 8, but optimizer states have 32 bits here (fidelity '
            f'"{config.fidelity}"), those of the embedding too; set "state_bits" to 8 beside it or "fidelity" to '
            '"balanced", or leave it out'
        )
    return bits


def make_adam(name: str | None, params: dict[str, Any] | None, model_parameters: Any) -> torch.optim.Optimizer | None:
    """A torch optimizer for an "Adam" or "AdamW" section of the DeepSpeed JSON; None for other names."""
    if name is None or name.lower() not in ("adam", "adamw"):
        return None
    params = dict(params or {})
    params.pop("torch_adam", None)
    # DeepSpeed's "Adam" means AdamW unless the section says otherwise.
    decoupled = params.pop("adam_w_mode", True) or name.lower() == "adamw"
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(model_parameters, **params)


def _native_decay(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether decay is decoupled, for an optimizer that the kernels reproduce; None for any other."""
    modules, decoupled = _ADAM_CLASSES.get(type(optimizer).__name__, ((), None))
    if not type(optimizer).__module__.startswith(tuple(modules) or ("\0",)):
        return None
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return None
    if type(optimizer).__module__.startswith("deepspeed"):
        return getattr(optimizer, "adam_w_mode", True) in (True, 1)
    return decoupled


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError for an optimizer that evaluates the model inside `step` (LBFGS)."""
    required = [
        parameter.name
        for parameter in list(inspect.signature(type(optimizer).step).parameters.values())[1:]
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if required:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs {', '.join(required)}: it evaluates the model inside an update, "
            "which is not possible while layers are updated one by one; use another optimizer, or disable LazyTrain"
        )
