"""What a training job asks of the planner: this machine, its disk, budgets, and what the runtime can do here."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from lazytrain_plugin.config.schema import BLOCK, LazyTrainConfig
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.integration.measure_nvme import nvme_fields
from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.adamw import AdamWStep, Moment8, adamw_8bit, adamw_fp32
from lazytrain_plugin.plan.request import RUNTIME_CAPABILITIES, PlanRequest
from lazytrain_plugin.profile.capacity import host_capacity
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.measure import best_wall_s, measure_hardware
from lazytrain_plugin.runtime.nvme.io import SLOW_AFTER_S
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.quantized_saves import FORMATS
from lazytrain_plugin.units import GIB, gib_to_bytes
from lazytrain_plugin.vocab import Fidelity

logger = logging.getLogger(__name__)

CODING_SAMPLES = 5

UPDATE_SAMPLES = 5
"""Of the CPU update, the fastest counts: threads that just woke up made a single one up to 40 % slow."""


def training_machine(
    config: LazyTrainConfig, device: torch.device, *, native: bool, local_world_size: int = 1
) -> HardwareProfile:
    """This machine as training finds it, with the disk of the configured folders if plans may use it.

    Args:
        local_world_size: ranks among which its memory and cores are divided.

    Errors: as `nvme_fields`, and ConfigError for a budget larger than the machine.
    """
    machine = measure_hardware(
        device,
        update_parameters_per_s=measure_update_rate,
        coding_bytes_per_s=measure_coding_rates,
        local_world_size=local_world_size,
    )
    _check_budgets(config, machine)
    if not _uses_nvme(config, native):
        return machine
    if not machine.has_gpu:
        logger.warning("nvme_path is not used: plans put something on a disk only where a GPU computes")
        return machine
    return replace(machine, **nvme_fields(config.nvme_paths, limit_bytes=gib_to_bytes(config.nvme_gib)))


def _check_budgets(config: LazyTrainConfig, machine: HardwareProfile) -> None:
    """A plan that fills memory which isn't there would end in an out-of-memory kill (and megabytes look like this)."""
    have_bytes = {"cpu_memory_gib": host_capacity().total_bytes}  # of all ranks here
    if machine.has_gpu:
        have_bytes["gpu_memory_gib"] = machine.gpu_bytes
    for key, available in have_bytes.items():
        budget_gib = getattr(config, key)
        if budget_gib is not None and gib_to_bytes(budget_gib) > available:
            raise ConfigError(
                f'"{BLOCK}.{key}" is {budget_gib:g}, in GiB, but there are {available / GIB:.1f} GiB here; lower it, '
                "or write null to use what is free."
            )


def training_request(
    config: LazyTrainConfig, max_tokens: int, *, state_bits: int, accumulation_steps: int, native: bool
) -> PlanRequest:
    """The request of a job.

    Args:
        native: whether the update kernels keep the states. The client's own optimizer keeps them where it updates.
    """
    fidelity = Fidelity(config.fidelity)
    gradient_bits, activation_bits = config.resting_gradient_bits, config.activation_bits
    if (state_bits == 8 or min(gradient_bits, activation_bits) < 16) and fidelity == Fidelity.EXACT:
        fidelity = Fidelity.BALANCED  # asked for one by one, or by the optimizer's class
    return PlanRequest(
        max_tokens=max_tokens,
        gpu_budget_bytes=gib_to_bytes(config.gpu_memory_gib),
        cpu_budget_bytes=gib_to_bytes(config.cpu_memory_gib),
        nvme_budget_bytes=gib_to_bytes(config.nvme_gib),
        nvme_write_bytes_per_day=gib_to_bytes(config.nvme_write_gib_per_day),
        evaluation_tokens=config.plan.evaluation_tokens,
        fidelity=fidelity,
        state_bits=state_bits,
        embedding_state_bits=max(state_bits, config.optimizer.embedding_state_bits),
        gradient_bits=gradient_bits,
        activation_bits=activation_bits,
        accumulation_steps=accumulation_steps,
        capabilities=replace(
            RUNTIME_CAPABILITIES,
            streamed_states=RUNTIME_CAPABILITIES.streamed_states and native,
            nvme=_uses_nvme(config, native),
        ),
    )


def _uses_nvme(config: LazyTrainConfig, native: bool) -> bool:
    return native and bool(config.nvme_paths)


def measure_update_rate(state_bits: int, device: torch.device) -> float:
    """Parameters per second of the update kernel on the CPU or a GPU, with bf16 weights."""
    numel = 1 << (24 if device.type == "cpu" else 26)  # on a GPU long beside a launch
    zeros = lambda dtype, count=numel: torch.zeros(count, dtype=dtype, device=device)  # noqa: E731
    weight, remainder, gradient = zeros(torch.bfloat16), zeros(torch.int16), zeros(torch.bfloat16)
    scalars = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
    if state_bits == 8:
        moments = [Moment8(codes=zeros(torch.uint8), scales=zeros(torch.float32, numel // 256)) for _ in range(2)]
        update = lambda: adamw_8bit(weight, remainder, gradient, *moments, scalars, noise_key=0)  # noqa: E731
    else:
        moments = [zeros(torch.float32) for _ in range(2)]
        update = lambda: adamw_fp32(weight, remainder, gradient, *moments, scalars)  # noqa: E731

    def run() -> None:
        update()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return numel / best_wall_s(run, repeats=UPDATE_SAMPLES)


def measure_coding_rates(device: torch.device) -> tuple[float, float]:
    """Bytes that making 4-bit codes of bf16 values on a device reads and writes in a second, and making values of them,
    each in a pass of its own."""
    numel = 1 << (14 if device.type == "cpu" else 26)  # on a GPU long beside a launch, and larger than its cache
    values = torch.randn(numel, dtype=torch.bfloat16, device=device)
    codes = blockwise.quantize(values, FORMATS[4])

    def rate(run: Callable[[], object]) -> float:
        def whole() -> None:
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        moved_bytes = values.nbytes + codes.format.storage_bytes(numel)
        return moved_bytes / best_wall_s(whole, repeats=CODING_SAMPLES)

    with torch.no_grad():
        quantize_bytes_per_s = rate(lambda: blockwise.quantize(values, FORMATS[4], out=codes))
        return quantize_bytes_per_s, rate(lambda: blockwise.dequantize(codes))


def nvme_tier(config: LazyTrainConfig, *, local_world_size: int = 1) -> NvmeTier | None:
    """The tier of the configured folders, None if there are none; nothing is made there before something goes there.

    Args:
        local_world_size: ranks among which the space is divided; each has a folder of its own there.
    """
    if not config.nvme_paths:
        return None
    slow_after_s = min(SLOW_AFTER_S, config.watchdog_s) if config.watchdog_s else math.inf
    limit_bytes = gib_to_bytes(config.nvme_gib)
    if limit_bytes is not None:
        limit_bytes //= local_world_size
    return NvmeTier(config.nvme_paths, limit_bytes=limit_bytes, slow_after_s=slow_after_s)
