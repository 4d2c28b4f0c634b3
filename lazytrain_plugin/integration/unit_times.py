"""Times of a model's layers on the device that will train it, measured once and kept, before its weights move.

A plan from FLOP and one rate for all layers is off by what a layer's own shapes cost. One layer of each kind runs with
random weights, forward and backward, in less than a second each; the model itself is not touched.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from lazytrain_plugin.errors import first_line
from lazytrain_plugin.integration.fused import apply_fused_kernels
from lazytrain_plugin.integration.plan_cache import PlanCache
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.profile.unit_timing import kind_of, measure_units, meta_copy
from lazytrain_plugin.runtime.discovery import Discovery
from lazytrain_plugin.units import format_bytes

logger = logging.getLogger(__name__)

MOST_TOKENS = 8192
"""Beyond, a token costs what it costs there, and the activations of a layer take gigabytes."""
MOST_KINDS = 4
BUDGET_FRAC = 0.5
"""Of the GPU's budget, for one layer."""


def timed_profile(
    profile: ModelProfile,
    model: nn.Module,
    discovery: Discovery,
    device: torch.device,
    *,
    machine: HardwareProfile,
    cache: PlanCache,
    dtypes: dict[nn.Parameter, torch.dtype],
    fused_kernels: bool,
    num_tokens: int,
    sequence_length: int,
    budget_bytes: int,
) -> ModelProfile:
    """`profile` with measured seconds for its units; as it was where that can't be had, which is said.

    Args:
        model: with its modules' own forwards; only its structure is looked at.
        num_tokens: of a micro-batch.
        budget_bytes: memory of `device` that may be used.
    """
    batch_size = max(1, min(num_tokens, MOST_TOKENS) // sequence_length)
    conditions = [machine.name, batch_size, sequence_length, fused_kernels, torch.__version__]
    times = cache.load_unit_times(profile, conditions)
    if times is None:
        reason = _why_not(profile, batch_size * sequence_length, budget_bytes)
        if reason is not None:
            logger.info("times of layers are derived from their FLOP: %s", reason)
            return profile
        prepare = (lambda unit: apply_fused_kernels(unit, device)) if fused_kernels else None
        try:
            times = _measure(profile, model, discovery, device, dtypes, batch_size, sequence_length, prepare)
        except Exception as error:  # whatever a model's own code raises on random inputs: training need not
            logger.info("times of layers are derived from their FLOP: %s", first_line(error)[:200])
            return profile
        cache.store_unit_times(profile, conditions, times)
    units = tuple(
        replace(
            unit,
            forward_s_per_token=forward_s,
            backward_s_per_token=backward_s,
            forward_launch_s=forward_launch_s or None,
            backward_launch_s=backward_launch_s or None,
        )
        for unit, (forward_s, backward_s, forward_launch_s, backward_launch_s) in zip(profile.units, times, strict=True)
    )
    return replace(profile, units=units)


def scaled(profile: ModelProfile, factor: float, launch_factor: float = 1.0) -> ModelProfile:
    """The same units, slower by `factor`, and by another for the host's launches, where their times were measured."""

    def scale(seconds: float | None, factor: float = factor) -> float | None:
        return None if seconds is None else seconds * factor

    units = tuple(
        replace(
            unit,
            forward_s_per_token=scale(unit.forward_s_per_token),
            backward_s_per_token=scale(unit.backward_s_per_token),
            forward_launch_s=scale(unit.forward_launch_s, launch_factor),
            backward_launch_s=scale(unit.backward_launch_s, launch_factor),
        )
        for unit in profile.units
    )
    return replace(profile, units=units)


def _why_not(profile: ModelProfile, num_tokens: int, budget_bytes: int) -> str | None:
    kinds = len({kind_of(unit) for unit in profile.units})
    if not 0 < kinds <= MOST_KINDS:
        return f"there are {kinds} kinds of layers, and timing is for {MOST_KINDS} at most"
    need = max(
        # Weights and gradients; all activations, the layer's output and its gradient.
        2 * unit.weight_bytes
        + num_tokens * (unit.kept_bytes_per_token + unit.workspace_bytes_per_token + 3 * unit.boundary_bytes_per_token)
        for unit in profile.units
    )
    if need > BUDGET_FRAC * budget_bytes:
        return f"one layer needs {format_bytes(need)} to be timed, too much of {format_bytes(budget_bytes)}"
    return None


def _measure(
    profile: ModelProfile,
    model: nn.Module,
    discovery: Discovery,
    device: torch.device,
    dtypes: dict[nn.Parameter, torch.dtype],
    batch_size: int,
    sequence_length: int,
    prepare: Callable[[nn.Module], object] | None,
) -> list[tuple[float, float, float, float]]:
    """Of each unit, see `PlanCache.load_unit_times`."""
    copied = meta_copy(model, dtypes)
    modules = dict(copied.named_modules())
    units = [(unit.name, modules[unit.name]) for unit in discovery.units]
    try:
        timed = measure_units(
            profile, copied, units, device, batch_size=batch_size, sequence_length=sequence_length, prepare=prepare
        )
    finally:
        del copied, modules, units
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return [
        (
            unit.forward_s_per_token,
            unit.backward_s_per_token,
            unit.forward_launch_s or 0.0,
            unit.backward_launch_s or 0.0,
        )
        for unit in timed.units
    ]
