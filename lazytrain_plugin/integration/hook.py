"""What is patched in deepspeed and transformers, and when it acts: only under an enabled `"lazytrain"` block.

`deepspeed.initialize` looks its engine class up as a global of the `deepspeed` module; there is no registry and no
config key for it. So the wrapped function puts `LazyTrainEngine` in that global for the length of one call. Leaving it
there would break `isinstance(engine, DeepSpeedEngine)` for plain engines.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any

from lazytrain_plugin.config.deepspeed_conflicts import (
    BESIDE_DEEPSPEED,
    check_deepspeed_config,
    keeps_deepspeed_engine,
)
from lazytrain_plugin.config.parse import lazytrain_block, parse_block
from lazytrain_plugin.config.schema import BLOCK, GradientCommConfig, LazyTrainConfig
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.integration import hf_loading, hf_trainer, tensor_access
from lazytrain_plugin.integration.build_locks import build_root, is_built, wait_for_builder
from lazytrain_plugin.integration.logs import setup_logging
from lazytrain_plugin.integration.single_process import provide_rendezvous
from lazytrain_plugin.profile.capacity import SHM_REMEDY, small_shared_memory

logger = logging.getLogger(__name__)

_active: contextvars.ContextVar[LazyTrainConfig | None] = contextvars.ContextVar("lazytrain_config", default=None)


def active_config() -> LazyTrainConfig | None:
    """The config of the `deepspeed.initialize` call in progress; None outside of one that LazyTrain serves."""
    return _active.get()


def load_config(ds_config: dict) -> LazyTrainConfig:
    """Parses the block of a DeepSpeed config dict and checks what stands around it.

    Raises ConfigError for a wrong block, a conflicting setting, or a config without an enabled block.
    """
    block = lazytrain_block(ds_config)
    if block is None:
        raise ConfigError('There is no enabled "lazytrain" block in this DeepSpeed config; add "lazytrain": {}.')
    config = parse_block(block)
    check_deepspeed_config(ds_config)
    if keeps_deepspeed_engine(ds_config):
        _refuse_placement_keys(config)
    return config


def _refuse_placement_keys(config: LazyTrainConfig) -> None:
    default = LazyTrainConfig()
    for item in fields(LazyTrainConfig):
        if item.name not in BESIDE_DEEPSPEED and getattr(config, item.name) != getattr(default, item.name):
            raise ConfigError(
                f'"{BLOCK}.{item.name}" is set, but at ZeRO stages 0, 1 and 2 DeepSpeed places everything and '
                'only "gradient_comm" is LazyTrain\'s; delete the key, or write "zero_optimization": {"stage": 3}.'
            )


def patch_module(module: ModuleType) -> None:
    """Patches one of `_bootstrap.TARGETS`, which has been executed. Safe to call more than once."""
    if module.__name__ == "deepspeed":
        _patch_initialize(module)
        _patch_zero_init(module)
        _patch_shared_memory_op()
        tensor_access.patch()
    elif module.__name__ == "transformers.trainer_callback":
        hf_trainer.patch(module)
    else:
        hf_loading.patch(module)


def _patch_initialize(deepspeed: ModuleType) -> None:
    original = deepspeed.initialize
    if getattr(original, "_lazytrain_original", None) is not None:
        return
    if "DeepSpeedEngine" not in original.__code__.co_names:
        raise RuntimeError(
            "deepspeed.initialize no longer makes its engine from the global DeepSpeedEngine; "
            "install a deepspeed version in LazyTrain's range"
        )
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        arguments = _bind(signature, args, kwargs)
        ds_config = _config_of_call(deepspeed, arguments)
        if lazytrain_block(ds_config) is None:
            _warn_of_near_miss(ds_config)
            return original(*args, **kwargs)
        config = load_config(ds_config)
        if isinstance(arguments.get("model"), deepspeed.PipelineModule):
            raise ConfigError(
                "The model is a deepspeed PipelineModule, which runs on an engine of its own; "
                'give the plain model, or switch LazyTrain off with "lazytrain": {"enabled": false}.'
            )
        setup_logging()
        provide_rendezvous()
        if keeps_deepspeed_engine(ds_config):
            engine_and_rest = original(*args, **kwargs)
            _attach_gradient_comm(engine_and_rest[0], config)
            return engine_and_rest
        with _engine_class(deepspeed), _config_active(config):
            engine_and_rest = original(*args, **kwargs)
        logger.info(
            "active: fidelity %s, %d-bit optimizer states%s, %s update, plan %s",
            config.fidelity,
            config.state_bits,
            ", 8-bit gradients" if config.resting_gradient_bits == 8 else "",
            config.optimizer.implementation,
            config.plan.path or "from the first batch",
        )
        if small := small_shared_memory():
            logger.warning("/dev/shm is %s: %s", small, SHM_REMEDY)
        if config.gradient_comm != GradientCommConfig() and engine_and_rest[0].world_size == 1:
            logger.info("gradient_comm: one rank has nobody to exchange gradients with, so it changes nothing here")
        return engine_and_rest

    initialize._lazytrain_original = original
    deepspeed.initialize = initialize


def _attach_gradient_comm(engine: Any, config: LazyTrainConfig) -> None:
    from lazytrain_plugin.integration.gradient_comm import GradientComm

    GradientComm.attach(engine, config)


def _warn_of_near_miss(ds_config: dict | None) -> None:
    """DeepSpeed takes any top-level key without a word, so a misspelt block would be plain DeepSpeed in silence."""
    if ds_config and BLOCK not in ds_config:
        for key in difflib.get_close_matches(
            BLOCK, [key for key in ds_config if isinstance(key, str)], n=1, cutoff=0.7
        ):
            setup_logging()
            logger.warning('the DeepSpeed config has a block "%s" that nobody reads; did you mean "%s"?', key, BLOCK)


@contextlib.contextmanager
def _engine_class(deepspeed: ModuleType) -> Iterator[None]:
    from lazytrain_plugin.integration.deepspeed_engine import LazyTrainEngine

    plain = deepspeed.DeepSpeedEngine
    deepspeed.DeepSpeedEngine = LazyTrainEngine
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine = plain


@contextlib.contextmanager
def _config_active(config: LazyTrainConfig) -> Iterator[None]:
    token = _active.set(config)
    try:
        yield
    finally:
        _active.reset(token)


def _bind(signature: inspect.Signature, args: tuple, kwargs: dict) -> Mapping[str, Any]:
    """Arguments by name; empty if they don't fit, so that the wrapped function raises its own error."""
    try:
        return signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return {}


def _config_of_call(deepspeed: ModuleType, arguments: Mapping[str, Any]) -> dict | None:
    """The config dict that `deepspeed.initialize` is going to use, by its own order of precedence."""
    config = arguments.get("config")
    if config is None:
        config = arguments.get("config_params")
    for name in ("deepspeed_config", "deepscale_config"):
        if config is None:
            config = getattr(arguments.get("args"), name, None)
    return _as_dict(config, deepspeed.load_ds_config)


def _as_dict(config: Any, load: Callable[[Any], dict]) -> dict | None:
    """A config given as a dict, a path, or encoded; None if it can't be read, which DeepSpeed reports by itself."""
    if isinstance(config, os.PathLike):
        config = os.fspath(config)
    if not isinstance(config, dict | str):
        return None
    try:
        return load(config)
    except (OSError, ValueError):
        return None


def _patch_zero_init(deepspeed: ModuleType) -> None:
    """Makes `zero.Init(...)` a context that does nothing under an enabled block: our weights are never partitioned.

    The class itself stays, and so do names imported from it by value: only what its call returns changes. Inside
    `deepspeed.initialize` nothing changes, as there DeepSpeed's own engines convert parameters with it.
    """
    init_class = deepspeed.zero.Init
    if "__new__" in vars(init_class):
        return
    signature = inspect.signature(init_class.__init__)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if active_config() is not None:
            return object.__new__(cls)
        arguments = _bind(signature, (None, *args), kwargs)
        config = arguments.get("config_dict_or_path", arguments.get("config"))
        if config is None:
            ds_config = hf_loading.hf_deepspeed_config()
        else:
            ds_config = _as_dict(config, deepspeed.load_ds_config)
        if lazytrain_block(ds_config) is not None:
            return contextlib.nullcontext()
        return object.__new__(cls)

    init_class.__new__ = staticmethod(__new__)


def _computes_on_cpu() -> bool:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name() == "cpu"


def _patch_shared_memory_op() -> None:
    """Spares a single process without a GPU the compilation of DeepSpeed's all-reduce among ranks of one host.

    DeepSpeed compiles it at the first start: a minute that needs a compiler and ninja, and a build that was killed
    leaves a lock on which later starts wait for ever. One process has nobody to reduce with; several go on without the
    op, which is for inference, rather than wait.
    """
    comm = sys.modules.get("deepspeed.comm.torch")
    original = getattr(comm, "build_shm_op", None)
    if original is None or getattr(original, "_lazytrain_original", None) is not None:
        return

    @functools.wraps(original)
    def build_shm_op() -> Any:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return None
        if lock := wait_for_builder():
            setup_logging()
            logger.warning(
                "%s was left by a build that was killed, and DeepSpeed would wait on it for ever: going on without its "
                "shared-memory all-reduce (torch's own is used); delete the file",
                lock,
            )
            return None
        if os.environ.get("LOCAL_RANK", "0") == "0" and not is_built() and _computes_on_cpu():
            setup_logging()
            logger.info(
                "DeepSpeed now compiles its shared-memory all-reduce for ranks on the CPU, in silence: one to a few "
                "minutes, once; it is kept under %s",
                build_root(),
            )
        return original()

    build_shm_op._lazytrain_original = original
    comm.build_shm_op = build_shm_op
