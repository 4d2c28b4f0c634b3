"""Settings of a DeepSpeed config that the LazyTrain engine can't honour, each with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lazytrain_plugin.config.schema import BLOCK, show_json
from lazytrain_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Conflict:
    """One setting that would be ignored or fight with the placement."""

    path: tuple[str, ...]
    is_set: Callable[[Any], bool]
    """True for a value that conflicts; never called for a missing key."""
    why: str
    remedy: str


def _true(value: Any) -> bool:
    return value is True


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _non_empty(value: Any) -> bool:
    return bool(value)


def _offloads(value: Any) -> bool:
    return isinstance(value, dict) and value.get("device", "none") not in ("none", None)


_PLACEMENT_IS_OURS = "LazyTrain plans the place of every tensor itself"
_NOT_DATA_PARALLEL = "LazyTrain runs each rank on the whole model"

CONFLICTS = (
    Conflict(
        ("fp16", "enabled"),
        _true,
        "fp16 needs a loss scale, which LazyTrain does not keep",
        'use "bf16": {"enabled": true} (TrainingArguments: bf16=True)',
    ),
    Conflict(
        ("torch_autocast", "enabled"),
        _true,
        "autocast would make its own copies of streamed weights",
        'use "bf16": {"enabled": true}',
    ),
    Conflict(("zero_optimization", "offload_optimizer"), _offloads, _PLACEMENT_IS_OURS, "delete the section"),
    Conflict(("zero_optimization", "offload_param"), _offloads, _PLACEMENT_IS_OURS, "delete the section"),
    Conflict(
        ("zero_optimization", "offload_optimizer", "super_offload"), _true, _PLACEMENT_IS_OURS, "delete the section"
    ),
    Conflict(("zero_optimization", "cpu_offload"), _true, _PLACEMENT_IS_OURS, "delete the key"),
    Conflict(("zero_optimization", "cpu_offload_param"), _true, _PLACEMENT_IS_OURS, "delete the key"),
    Conflict(
        ("zero_optimization", "zenflow"),
        _non_empty,
        "ZenFlow updates weights with stale gradients; LazyTrain's overlapped update is exact",
        "delete the section",
    ),
    *(
        Conflict(
            ("zero_optimization", key), _true, "ZeRO++ does not apply to weights that LazyTrain places", "delete it"
        )
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    Conflict(
        ("zero_optimization", "zero_hpz_partition_size"),
        _above_one,
        "ZeRO++ does not apply to weights that LazyTrain places",
        "delete it",
    ),
    Conflict(("tensor_parallel", "autotp_size"), _above_one, _NOT_DATA_PARALLEL, "delete the section"),
    Conflict(("sequence_parallel_size",), _above_one, _NOT_DATA_PARALLEL, "delete the key"),
    Conflict(("expert_parallel", "enabled"), _true, _NOT_DATA_PARALLEL, "delete the section"),
    Conflict(
        ("hybrid_engine", "enabled"), _true, "the hybrid engine replaces the LazyTrain engine", "delete the section"
    ),
    Conflict(
        ("compile", "deepcompile"), _true, "DeepCompile inserts ZeRO-3 gathers into the graph", "delete the section"
    ),
    Conflict(
        ("checkpoint", "load_universal"),
        _true,
        "LazyTrain checkpoints load under any plan and need no conversion",
        "delete the key and resume from the checkpoint itself",
    ),
    Conflict(
        ("flops_profiler", "enabled"),
        _true,
        "its hooks would count what is recomputed, and LazyTrain never starts it",
        'delete the section (what each operation of a step takes: "lazytrain": {"trace": {"path": "trace.json"}})',
    ),
    Conflict(
        ("data_efficiency", "data_routing", "random_ltd", "enabled"),
        _true,
        "random layer token dropping changes layers while they train, and LazyTrain never starts it",
        "delete the section",
    ),
    Conflict(("prescale_gradients",), _true, "gradients are averaged in 32 bits and need no scaling", "delete the key"),
)

BESIDE_DEEPSPEED = ("enabled", "fidelity", "gradient_comm", "watchdog_s")
"""Keys of the block that mean something where DeepSpeed's own engine trains."""

CONFLICTS_BESIDE_DEEPSPEED = (
    Conflict(
        ("zero_optimization", "zenflow"), _non_empty, "ZenFlow reduces gradients in a way of its own", "delete it"
    ),
    Conflict(("compile", "deepcompile"), _true, "DeepCompile reduces gradients within its graph", "delete the section"),
    Conflict(
        ("sparse_gradients",), _true, "gradients of embeddings would go by another road than all others", "delete it"
    ),
)
"""What goes around the place where the gradient reduction is ours."""


def _stage(ds_config: dict) -> Any:
    zero = ds_config.get("zero_optimization")
    return zero.get("stage", 0) if isinstance(zero, dict) else None


def keeps_deepspeed_engine(ds_config: dict) -> bool:
    """Whether this config, which has an enabled block, asks for LazyTrain's gradient reduction and nothing else.

    That is ZeRO stage 0, 1 or 2 and a `gradient_comm` section that differs from the default: DeepSpeed's own engine
    trains.
    """
    section = ds_config[BLOCK].get("gradient_comm")
    asked = isinstance(section, dict) and any(value is not None for value in section.values())
    return _stage(ds_config) in (None, 0, 1, 2) and asked


def check_deepspeed_config(ds_config: dict) -> None:
    """Raises ConfigError if the DeepSpeed config around an enabled block conflicts with it.

    Values that are still `"auto"` pass: Trainer and Accelerate fill them in before the engine is made.
    """
    if BLOCK in ds_config and keeps_deepspeed_engine(ds_config):
        _check_conflicts(ds_config, CONFLICTS_BESIDE_DEEPSPEED)
        return
    stage = _stage(ds_config)
    if stage != 3:
        found = (
            "there is no zero_optimization section"
            if stage is None
            else f'"zero_optimization.stage" is {show_json(stage)}'
        )
        raise ConfigError(
            f"LazyTrain is declared as ZeRO stage 3 (that is what makes Accelerate and Trainer save through the "
            f'engine), but {found}; write "zero_optimization": {{"stage": 3}}. (With '
            '"gradient_comm": {"bits": 8} in the block, stages 0, 1 and 2 get LazyTrain\'s gradient reduction.)'
        )
    _check_conflicts(ds_config, CONFLICTS)


def _check_conflicts(ds_config: dict, conflicts: tuple[Conflict, ...]) -> None:
    for conflict in conflicts:
        value: Any = ds_config
        for key in conflict.path:
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            if conflict.is_set(value):
                raise ConfigError(
                    f'"{".".join(conflict.path)}" is set, but {conflict.why}; {conflict.remedy}, '
                    'or switch LazyTrain off with "lazytrain": {"enabled": false}.'
                )
