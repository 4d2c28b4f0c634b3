"""When a plan is made in training: before the first batch if its size is known, else at it; again for a larger one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lazytrain_plugin.config.schema import LazyTrainConfig
from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.kernels.adamw import AdamWStep, Moment8, adamw_8bit, adamw_fp32
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.profile.extract import extract_model_profile
from lazytrain_plugin.profile.measure import measure_hardware
from lazytrain_plugin.runtime.discovery import Discovery
from lazytrain_plugin.runtime.nvme.io import SLOW_AFTER_S
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.units import GIB, format_bytes
from lazytrain_plugin.vocab import Activations, Fidelity, Tier, Updater

logger = logging.getLogger(__name__)


class Planner:
    """Makes plans for one model on this machine, or follows the one that the user fixed."""

    def __init__(
        self,
        config: LazyTrainConfig,
        model: nn.Module,
        discovery: Discovery,
        device: torch.device,
        *,
        dtypes: dict[nn.Parameter, torch.dtype],
        state_bits: int,
        accumulation_steps: int,
        micro_batch_size: int,
    ) -> None:
        self._config = config
        self._discovery = discovery
        self._device = device
        self._state_bits = state_bits
        self._accumulation_steps = accumulation_steps
        self._planned_tokens: int | None = None
        self._fixed = self._load_fixed_plan()
        if self._fixed is None:
            self._model_profile = extract_model_profile(
                model,
                [(unit.name, unit.module) for unit in discovery.units],
                [(unit.name, [p for _, p in unit.parameters]) for unit in discovery.stem],
                fused_kernels=config.fused_kernels and device.type == "cuda",
                dtypes=dtypes,
            )
            self._hardware = measure_hardware(device, cpu_update_parameters_per_s=measure_update_rate)

    def _load_fixed_plan(self) -> PlacementPlan | None:
        path = self._config.plan.path
        if path is None:
            return None
        plan = PlacementPlan.load(path)
        found = {unit.name for unit in (*self._discovery.units, *self._discovery.stem)}
        planned = {unit.name for unit in (*plan.units, *plan.stem)}
        if found != planned:
            missing, extra = sorted(found - planned), sorted(planned - found)
            raise PlanMismatchError(
                f"{path} is not a plan of this model: it lacks {missing[:3]} and has {extra[:3]}; "
                "make one with `lazytrain plan`"
            )
        return plan

    def first_plan(self) -> PlacementPlan:
        """What holds before the first batch is known."""
        if self._fixed is not None:
            return self._fixed
        if self._config.max_tokens is not None:
            return self._plan(self._config.max_tokens)
        return self._everything_on_the_cpu()

    def plan_for(self, num_tokens: int | None) -> PlacementPlan | None:
        """A new plan if a batch of `num_tokens` needs one."""
        if self._fixed is not None or num_tokens is None:
            return None
        if self._planned_tokens is not None and num_tokens <= self._planned_tokens:
            return None
        if self._planned_tokens is not None:
            logger.info(
                "a batch of %d tokens is larger than the %d that the plan is for: planning again "
                '(set "max_tokens" to plan once)',
                num_tokens,
                self._planned_tokens,
            )
        return self._plan(num_tokens)

    def _plan(self, num_tokens: int) -> PlacementPlan:
        config = self._config
        plan = make_plan(
            self._model_profile,
            self._hardware,
            PlanRequest(
                max_tokens=num_tokens,
                gpu_budget_bytes=_bytes(config.gpu_memory_gib),
                cpu_budget_bytes=_bytes(config.cpu_memory_gib),
                fidelity=Fidelity(config.fidelity),
                state_bits=self._state_bits,
                accumulation_steps=self._accumulation_steps,
            ),
        )
        self._planned_tokens = num_tokens
        resident = sum(unit.weights == Tier.GPU for unit in plan.units)
        kept = sum(unit.activations == Activations.KEEP for unit in plan.units)
        logger.info(
            "plan for %d tokens: %d of %d units on the GPU, %d keep their activations; peak %s",
            num_tokens,
            resident,
            len(plan.units),
            kept,
            ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in plan.predicted_bytes.items()),
        )
        return plan

    def _everything_on_the_cpu(self) -> PlacementPlan:
        stem_home = Tier.GPU if self._device.type == "cuda" else Tier.CPU
        unit = lambda found, weights: UnitPlan(  # noqa: E731
            name=found.name, weights=weights, states=Tier.CPU, updater=Updater.CPU, state_bits=self._state_bits
        )
        return PlacementPlan(
            units=tuple(unit(found, Tier.CPU) for found in self._discovery.units),
            stem=tuple(unit(found, stem_home) for found in self._discovery.stem),
        )


def measure_update_rate(state_bits: int) -> float:
    """Parameters per second of the CPU update kernel on this machine, with bf16 weights."""
    numel = 1 << 24
    zeros = lambda dtype, count=numel: torch.zeros(count, dtype=dtype)  # noqa: E731
    weight, remainder, gradient = zeros(torch.bfloat16), zeros(torch.int16), zeros(torch.bfloat16)
    scalars = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
    if state_bits == 8:
        moments = [Moment8(codes=zeros(torch.uint8), scales=zeros(torch.float32, numel // 256)) for _ in range(2)]
        update = lambda: adamw_8bit(weight, remainder, gradient, *moments, scalars, noise_key=0)  # noqa: E731
    else:
        moments = [zeros(torch.float32) for _ in range(2)]
        update = lambda: adamw_fp32(weight, remainder, gradient, *moments, scalars)  # noqa: E731
    update()
    start_s = time.perf_counter()
    update()
    return numel / (time.perf_counter() - start_s)


def nvme_tier(config: LazyTrainConfig) -> NvmeTier | None:
    """The tier of the configured folders, None if there are none; nothing is made there before something goes there."""
    if not config.nvme_paths:
        return None
    slow_after_s = min(SLOW_AFTER_S, config.watchdog_s) if config.watchdog_s else math.inf
    return NvmeTier(config.nvme_paths, limit_bytes=_bytes(config.nvme_gib), slow_after_s=slow_after_s)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def count_tokens(inputs: tuple, kwargs: Mapping[str, Any]) -> int | None:
    """Tokens (batch x sequence) of a model call: from `input_ids` or `inputs_embeds`, else the first 2-D argument."""
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids"):
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            return value.shape[0] * value.shape[1]
    for value in (*inputs, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            return value.shape[0] * value.shape[1]
    return None
