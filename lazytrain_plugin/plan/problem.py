"""`PlacementProblem`: what one step costs, per unit and choice, in bytes and seconds. The planner's only input.

Everything the greedy planner, the program, the checker and the simulator know comes from here, so that all four speak
of the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile, UnitProfile, UnitRole
from lazytrain_plugin.units import GIB, MIB
from lazytrain_plugin.vocab import Fidelity

# The program is scaled to coefficients around 1..10^4: MiB and milliseconds. Nothing else is.
MIB_PER_BYTE = 1 / MIB
MS_PER_S = 1e3

GPU_RESERVE_BYTES = GIB
"""CUDA context, library workspaces, the allocator's small blocks."""
HOST_RESERVE_GPU_BYTES = 3 * GIB
"""Interpreter, torch and its CUDA libraries in host memory."""
HOST_RESERVE_CPU_BYTES = GIB
"""Interpreter and torch without CUDA."""
FRAGMENTATION_FRAC = 0.06
"""Head-room on memory that comes and goes (activations, workspace, logits); flats and states are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """Bytes and seconds of one unit at the planned micro-batch."""

    name: str
    role: UnitRole
    num_trainable: int
    weight_bytes: int
    gradient_bytes: int
    remainder_bytes: int
    moment_bytes: int
    accumulator_bytes: int
    """fp32 sums over micro-batches; 0 without accumulation."""
    boundary_bytes: int = 0
    kept_bytes: int = 0
    workspace_bytes: int = 0
    """Recompute and its backward at their fullest, beyond the input."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Without the recompute, which costs `forward_s`."""
    weight_h2d_s: float = 0.0
    gradient_d2h_s: float = 0.0
    cpu_update_s: float = 0.0
    gpu_update_s: float = 0.0
    accumulate_s: float = 0.0
    """Host time to add one micro-batch's gradients; 0 without accumulation."""

    @property
    def state_bytes(self) -> int:
        """Remainder, moments, gradients and accumulators: what rests at the updater's side beside the weights."""
        return self.remainder_bytes + self.moment_bytes + self.gradient_bytes + self.accumulator_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """Sets, parameters and budgets; `docs/formulation.md` gives each its symbol."""

    units: tuple[UnitCost, ...]
    stem: tuple[UnitCost, ...]
    has_gpu: bool
    """False: the CPU computes, and everything counts against host memory."""
    gpu_budget_bytes: int
    cpu_budget_bytes: int
    gpu_reserve_bytes: int
    cpu_reserve_bytes: int
    loss_bytes: int
    """Logits and their gradients at the fullest moment of the loss."""
    max_tokens: int
    accumulation_steps: int
    state_bits: int
    fidelity: Fidelity
    weight_slots: int
    gradient_slots: int
    digests: dict[str, str]

    @property
    def has_accumulation(self) -> bool:
        return self.accumulation_steps > 1


def build_problem(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> PlacementProblem:
    """Bytes and seconds of `model` on `hardware` for what `request` asks.

    Raises:
        ConfigError: the request has no `max_tokens`.
    """
    if request.max_tokens is None:
        raise ConfigError("a plan needs max_tokens: the tokens (batch x sequence) of the largest micro-batch")

    def cost(unit: UnitProfile) -> UnitCost:
        return _unit_cost(unit, hardware, request.max_tokens, request.state_bits, request.accumulation_steps)

    return PlacementProblem(
        units=tuple(cost(unit) for unit in model.units),
        stem=tuple(cost(unit) for unit in model.stem),
        has_gpu=hardware.has_gpu,
        gpu_budget_bytes=(request.gpu_budget_bytes or hardware.gpu_free_bytes) if hardware.has_gpu else 0,
        cpu_budget_bytes=request.cpu_budget_bytes or hardware.cpu_free_bytes,
        gpu_reserve_bytes=GPU_RESERVE_BYTES if hardware.has_gpu else 0,
        cpu_reserve_bytes=HOST_RESERVE_GPU_BYTES if hardware.has_gpu else HOST_RESERVE_CPU_BYTES,
        loss_bytes=model.loss_bytes(request.max_tokens),
        max_tokens=request.max_tokens,
        accumulation_steps=request.accumulation_steps,
        state_bits=request.state_bits,
        fidelity=request.fidelity,
        weight_slots=request.weight_slots,
        gradient_slots=request.gradient_slots,
        digests={"hardware": hardware.digest, "model": model.digest},
    )


def _unit_cost(
    unit: UnitProfile, hardware: HardwareProfile, tokens: int, state_bits: int, accumulation_steps: int
) -> UnitCost:
    if unit.forward_s_per_token is not None:
        forward_s = unit.forward_s_per_token * tokens
    else:
        forward_s = unit.flop_per_token * tokens / hardware.layer_flop_per_s
    # Gradients with respect to the input cost a forward; with respect to weights another, for the trainable ones.
    trainable_share = unit.num_trainable / unit.num_parameters if unit.num_parameters else 0.0
    accumulates = accumulation_steps > 1 and unit.num_trainable > 0
    gpu = hardware.has_gpu
    return UnitCost(
        name=unit.name,
        role=unit.role,
        num_trainable=unit.num_trainable,
        weight_bytes=unit.weight_bytes,
        gradient_bytes=unit.gradient_bytes,
        remainder_bytes=unit.remainder_bytes,
        moment_bytes=unit.moment_bytes(state_bits),
        accumulator_bytes=4 * unit.state_numel if accumulates else 0,
        boundary_bytes=unit.boundary_bytes_per_token * tokens,
        kept_bytes=unit.kept_bytes_per_token * tokens,
        workspace_bytes=unit.workspace_bytes_per_token * tokens,
        forward_s=forward_s,
        backward_s=forward_s * (1 + trainable_share),
        weight_h2d_s=unit.weight_bytes / hardware.h2d_shared_bytes_per_s if gpu else 0.0,
        gradient_d2h_s=unit.gradient_bytes / hardware.d2h_shared_bytes_per_s if gpu else 0.0,
        cpu_update_s=unit.num_trainable / hardware.cpu_update_parameters_per_s(state_bits, shared=gpu),
        gpu_update_s=unit.num_trainable / hardware.gpu_update_parameters_per_s if gpu else 0.0,
        # Reads the gradient and the sum, writes the sum.
        accumulate_s=(unit.gradient_bytes + 8 * unit.state_numel) / hardware.host_memory_bytes_per_s
        if accumulates
        else 0.0,
    )
