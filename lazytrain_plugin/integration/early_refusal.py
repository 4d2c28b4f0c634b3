"""Refuses a model that can't be trained here before its weights are read: minutes of loading, or an out-of-memory kill.

At that time nobody knows yet what will be trained: a script may freeze layers or add adapters later. So a model is
refused only where not even its frozen weights fit the budgets; where the whole model as trained does not fit, that is
said as a warning, and the engine refuses it later, before weights move.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from lazytrain_plugin.config.deepspeed_conflicts import keeps_deepspeed_engine
from lazytrain_plugin.config.parse import lazytrain_block, parse_block
from lazytrain_plugin.config.schema import LazyTrainConfig
from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.integration.logs import setup_logging
from lazytrain_plugin.integration.training_request import training_request
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.refusal import Rebuilder, feasible, infeasible
from lazytrain_plugin.profile.capacity import host_capacity
from lazytrain_plugin.profile.extract import extract_model_profile
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.measure import measure_capacities
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.units import format_bytes, gib_to_bytes

logger = logging.getLogger(__name__)

_STORED_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""As safetensors names them."""


def check_before_loading(model: nn.Module, ds_config: dict[str, Any]) -> None:
    """Looks at a model on the meta device whose weights are about to be read; does nothing for any other.

    Raises:
        InfeasiblePlanError: not even the weights alone fit; need and have per tier, and the nearest remedies.
    """
    setup_logging()
    config = parse_block(lazytrain_block(ds_config))
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    quantized = getattr(model, "hf_quantizer", None) is not None
    # Several ranks hold the model together, and how many is known once they have met.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not alone or config.plan.path is not None or keeps_deepspeed_engine(ds_config) or quantized or not on_meta:
        return
    try:
        _check(model, config, ds_config)
    except InfeasiblePlanError:
        raise
    except Exception as error:  # what the engine does not like either is its to say, with the trained model at hand
        logger.info("whether %s fits was not checked before it is loaded: %s", type(model).__name__, error)


def check_copies_of_ranks(model: nn.Module, checkpoint_files: Sequence[str] | None) -> None:
    """Before several ranks of a machine read a checkpoint: says where each would have weights of its own.

    Weights that are loaded in the dtype that they are stored in rest in a mapping of the file, which all ranks share.
    Converted ones are copies, until the engine is made and the ranks hold one model together.

    Raises:
        InfeasiblePlanError: such copies don't fit the machine.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wanted = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    converted = _stored_dtypes(checkpoint_files) - wanted if ranks > 1 else set()
    if not converted:
        return
    need_bytes = ranks * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    have_bytes = host_capacity().total_bytes
    names = [", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) for dtypes in (converted, wanted)]
    what = (
        f"{type(model).__name__} is stored in {names[0]} and loaded in {names[1]}, so each of the {ranks} ranks of "
        f"this machine has a copy until the engine is made, {format_bytes(need_bytes)} together of "
        f'{format_bytes(have_bytes)} of host memory; load it with dtype="auto" for a bf16 job, else save it in '
        f"{names[1]} once: then they share one"
    )
    if need_bytes > have_bytes:
        raise InfeasiblePlanError(what)
    logger.warning("%s", what)


def _stored_dtypes(checkpoint_files: Sequence[str] | None) -> set[torch.dtype]:
    """Of the floating-point tensors in the first file; none where it is no safetensors file."""
    if not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
        return set()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(checkpoint_files[0], framework="pt") as file:
            found = {file.get_slice(key).get_dtype() for key in file.keys()}
    except (SafetensorError, OSError):  # whoever reads it says so
        return set()
    return {_STORED_FLOATS[name] for name in found if name in _STORED_FLOATS}


def _check(model: nn.Module, config: LazyTrainConfig, ds_config: dict[str, Any]) -> None:
    profile = _profile(model, ds_config)
    short = shortage(profile, config, ds_config)
    if short is None:
        return
    if short.even_frozen:
        raise InfeasiblePlanError(f"{short.refusal} Not even frozen weights alone would fit, so none were loaded.")
    logger.warning(
        "trained as a whole, %s does not fit: %s Unless most of it is frozen (adapters), training will be refused",
        profile.name,
        short.refusal,
    )


@dataclass(frozen=True, slots=True)
class Shortage:
    """A model does not fit the budgets, trained as a whole by one process."""

    refusal: InfeasiblePlanError
    even_frozen: bool
    """Not even its weights alone fit."""


def shortage(profile: ModelProfile, config: LazyTrainConfig, ds_config: dict[str, Any]) -> Shortage | None:
    """What this machine lacks for the smallest batch of a job; None: it fits."""
    machine, accumulation = _capacities(config), ds_config.get("gradient_accumulation_steps")
    request = training_request(
        config,
        _tokens(config, ds_config),
        state_bits=config.state_bits,
        accumulation_steps=accumulation if isinstance(accumulation, int) else 1,
        native=config.optimizer.implementation == "native",
    )
    whole = build_problem(profile, machine, request)
    if feasible(whole):
        return None
    tightest = replace(request, weight_slots=2, gradient_slots=1)
    return Shortage(
        infeasible(whole, Rebuilder(profile, machine, request)),
        even_frozen=not feasible(build_problem(_frozen(profile), machine, tightest)),
    )


def _profile(model: nn.Module, ds_config: dict[str, Any]) -> ModelProfile:
    bf16 = (ds_config.get("bf16") or {}).get("enabled") is True
    found = discover(model)
    return extract_model_profile(
        model,
        [(unit.name, unit.module) for unit in found.units],
        [(unit.name, [parameter for _, parameter in unit.parameters]) for unit in found.stem],
        dtypes={
            parameter: torch.bfloat16 if bf16 and parameter.is_floating_point() else parameter.dtype
            for parameter in model.parameters()
        },
    )


def _frozen(profile: ModelProfile) -> ModelProfile:
    def freeze(unit):
        return replace(unit, tensors=tuple(replace(tensor, trainable=False) for tensor in unit.tensors))

    return replace(profile, units=tuple(map(freeze, profile.units)), stem=tuple(map(freeze, profile.stem)))


def _capacities(config: LazyTrainConfig) -> HardwareProfile:
    """This machine's sizes. Its rates are no matter here, and measuring them takes seconds."""
    sizes = measure_capacities(_device())
    if config.nvme_paths:
        sizes["nvme_bytes"] = NvmeTier(config.nvme_paths, limit_bytes=gib_to_bytes(config.nvme_gib)).free_bytes()
    rates = [field.name for field in fields(HardwareProfile) if field.name.endswith(("per_s", "_frac"))]
    return HardwareProfile(source="sizes only", **sizes, **dict.fromkeys(rates, 1.0))


def _device() -> torch.device:
    """Where training is going to compute, as far as Accelerate knows it."""
    from accelerate.state import PartialState

    if PartialState._shared_state:
        return PartialState().device
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    return torch.device("cuda" if on_gpu else "cpu")


def _tokens(config: LazyTrainConfig, ds_config: dict[str, Any]) -> int:
    """Tokens that a micro-batch has at least: each sequence has one."""
    batch = ds_config.get("train_micro_batch_size_per_gpu")
    return config.max_tokens or (batch if isinstance(batch, int) and batch > 0 else 1)
