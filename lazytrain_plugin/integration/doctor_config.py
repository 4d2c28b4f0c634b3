"""What `lazytrain doctor` finds in a config: the block, its budgets, the plan it names, and the model it is for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lazytrain_plugin.config.parse import lazytrain_block
from lazytrain_plugin.config.schema import BLOCK, LazyTrainConfig
from lazytrain_plugin.errors import LazyTrainError
from lazytrain_plugin.integration.findings import Finding, Status
from lazytrain_plugin.units import GIB, gib_to_bytes


def check_config(path: Path, *, hook_works: bool = True, model: str | None = None) -> Iterator[Finding]:
    """The block of a DeepSpeed JSON, or of the one that an Accelerate launch YAML points to, and the plan it names."""
    from lazytrain_plugin.integration.hook import load_config

    try:
        ds_config = _read_config(path)
        block = lazytrain_block(ds_config)
        if block is None and BLOCK in ds_config:
            yield Finding("config", Status.NOTE, f'{path}: "enabled" is false, plain DeepSpeed will run')
            return
        config = load_config(ds_config)
    except OSError as error:
        named = str(error.filename or path)
        what = f"{path}: {'' if named == str(path) else f'{named}: '}{error.strerror}"
        remedy = "give a DeepSpeed JSON or a launch YAML; paths in a YAML start at the folder that the job starts in"
        yield Finding("config", Status.ERROR, what, remedy)
        return
    except (LazyTrainError, ValueError) as error:
        yield Finding("config", Status.ERROR, f"{path}: {error}")
        return
    if not hook_works:
        yield Finding("config", Status.ERROR, f"{path}: the block is right, but the hook is not active", "see hook")
        return
    yield Finding("config", Status.OK, f"{path}: {config.fidelity}, {config.state_bits}-bit optimizer states")
    if config.state_bits == 32 and config.optimizer.embedding_state_bits == 8:
        what = f'"{config.optimizer.PATH}.embedding_state_bits" is 8, which 32-bit states exclude'
        remedy = (
            'fine with an 8-bit optimizer class; else set "state_bits" to 8, "fidelity" to "balanced", or leave it out'
        )
        yield Finding("config", Status.NOTE, f"{path}: {what}", remedy)
    yield from _budgets(config)
    if model is not None:
        yield from _model(config, ds_config, model)
    if config.plan.path is not None:
        yield from _plan(config, model)


def _plan(config: LazyTrainConfig, model: str | None) -> Iterator[Finding]:
    """Whether a job under `config` could follow its plan file."""
    from lazytrain_plugin.integration.meta_model import profile_from_config
    from lazytrain_plugin.plan.check import load_plan_file
    from lazytrain_plugin.plan.result import PlacementPlan, uses_nvme

    path = config.plan.path
    try:
        plan = PlacementPlan.load(path)
        units = (*plan.units, *plan.stem)
        if model is not None:
            profile = profile_from_config(model)
            units = (*profile.units, *profile.stem)
        load_plan_file(
            path,
            {unit.name for unit in units},
            state_bits=config.state_bits,
            gradient_bits=config.resting_gradient_bits,
            activation_bits=config.activation_bits,
            shard=config.shard,
        )
    except (LazyTrainError, OSError) as error:
        yield Finding("plan", Status.ERROR, str(error))
        return
    if uses_nvme(plan) and not config.nvme_paths:
        what = f'{path} puts a part on NVMe, and the block has no "nvme_path"'
        yield Finding("plan", Status.ERROR, what, 'name a folder in "nvme_path", or plan again without --nvme-gib')
        return
    what = f"{path}: {len(plan.units)} layers, {plan.units[0].name if plan.units else 'none'} the first"
    if model is None:
        yield Finding("plan", Status.NOTE, f"{what}; not compared with a model", "add --model MODEL")
    else:
        yield Finding("plan", Status.OK, f"{what}; of {model}")


def _budgets(config: LazyTrainConfig) -> Iterator[Finding]:
    """Budgets that the machine does not have, and those that training itself fills before any model."""
    import torch

    from lazytrain_plugin.plan.problem import GPU_RESERVE_BYTES, HOST_RESERVE_CPU_BYTES, HOST_RESERVE_GPU_BYTES
    from lazytrain_plugin.profile.capacity import host_capacity

    has_gpu = torch.cuda.is_available()
    host_reserve_bytes = HOST_RESERVE_GPU_BYTES if has_gpu else HOST_RESERVE_CPU_BYTES
    limits = {"cpu_memory_gib": (host_reserve_bytes, host_capacity().total_bytes)}
    if has_gpu:
        limits["gpu_memory_gib"] = (GPU_RESERVE_BYTES, torch.cuda.mem_get_info()[1])
    for key, (reserve_bytes, available_bytes) in limits.items():
        budget_gib = getattr(config, key)
        if budget_gib is None:
            continue
        budget_bytes, what = gib_to_bytes(budget_gib), f'"{BLOCK}.{key}" is {budget_gib:g}'
        if budget_bytes > available_bytes:
            what = f"{what}, but there are {available_bytes / GIB:.1f} GiB"
            yield Finding("config", Status.ERROR, what, "lower it, or write null")
        elif budget_bytes <= reserve_bytes:
            what = f"{what}, in GiB, of which each process takes {reserve_bytes / GIB:.2f} before any weight"
            remedy = "write null to use what is free, or more than that and the model (--model MODEL: how much)"
            yield Finding("config", Status.ERROR, what, remedy)


def _model(config: LazyTrainConfig, ds_config: dict[str, Any], model: str) -> Iterator[Finding]:
    """Whether a model fits the budgets with the smallest batch."""
    import torch

    from lazytrain_plugin.integration.early_refusal import shortage
    from lazytrain_plugin.integration.meta_model import profile_from_config

    in_bf16 = (ds_config.get("bf16") or {}).get("enabled") is True
    try:
        profile = profile_from_config(
            model,
            "bfloat16" if in_bf16 else "float32",
            fused_kernels=config.fused_kernels and torch.cuda.is_available(),
        )
        short = shortage(profile, config, ds_config)
    except LazyTrainError as error:
        yield Finding("model", Status.ERROR, f"{model}: {error}")
        return
    if short is None:
        yield Finding("model", Status.OK, f"{model}: fits, in a small batch (`lazytrain plan` says how large)")
    elif short.even_frozen:
        yield Finding("model", Status.ERROR, f"{model}, in one process: {short.refusal}")
    else:
        remedy = "fine if most of it is frozen (adapters)"
        yield Finding("model", Status.WARNING, f"{model}, trained as a whole by one process: {short.refusal}", remedy)


def _read_config(path: Path) -> dict[str, Any]:
    """Reads a DeepSpeed JSON; a YAML is followed to the JSON it names, from the folder a job would start in."""
    if path.suffix in (".yaml", ".yml"):
        import yaml

        section = (yaml.safe_load(path.read_text()) or {}).get("deepspeed_config") or {}
        target = section.get("deepspeed_config_file")
        if target is None:
            raise ValueError(
                'there is no "deepspeed_config: deepspeed_config_file:" in it; name the DeepSpeed JSON there'
            )
        return _read_config(Path(target))
    ds_config = json.loads(path.read_text())
    if not isinstance(ds_config, dict):
        raise ValueError("it does not hold a JSON object")
    return ds_config
