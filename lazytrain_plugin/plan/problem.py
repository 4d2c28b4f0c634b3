"""`PlacementProblem`: what one step costs, per unit and choice, in bytes and seconds. The planner's only input.

Everything the greedy planner, the program, the checker and the simulator know comes from here, so that all four speak
of the same step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.cluster import on_cluster
from lazytrain_plugin.plan.formats import CodingRates, GradientErrors
from lazytrain_plugin.plan.launches import launch_costs
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.unit_cost import STEM_STAGING_BYTES, StrategyCost, UnitCost
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile, StrategyProfile, UnitProfile
from lazytrain_plugin.units import GIB, MIB
from lazytrain_plugin.vocab import MAY_BE_CODED, Activations, Fidelity

GPU_RESERVE_BYTES = int(1.44 * GIB)
"""CUDA context, library workspaces, what the allocator holds whatever the plan."""
HOST_RESERVE_GPU_BYTES = int(2.4 * GIB)
"""Interpreter, torch and its CUDA libraries in host memory: 1.7 to 2.3 GiB beside plans of 3B to 14B."""
HOST_RESERVE_CPU_BYTES = GIB
"""Interpreter and torch without CUDA."""
FRAGMENTATION_FRAC = 0.17
"""Head-room on memory that comes and goes all the time (workspace, gradients, logits): what the allocator reserves
beyond what is allocated. Flats and states are exact."""
SAVED_FRAGMENTATION_FRAC = 0.02
"""The same on what stays from forward to backward (inputs, saved activations, their buffers), which hardly fragments.
Measured at 3B and 7B (tests/plan/test_measured.py)."""
EXCHANGE_ELEMENTS = 2**25
EXCHANGE_BYTES_PER_ELEMENT = 16
"""Of a gradient that ranks exchange: at most so many elements are under way (some chunks), with what is sent, received,
coded and summed up (runtime/gradient_exchange.py)."""
WEIGHTS_EXCHANGE_BYTES = 32 * MIB
"""Of updated weights that nodes exchange: what is under way at once, of all nodes; what a rank sends is beside."""


SAVE_ELEMENTS = 2**24
"""A checkpoint is written in pieces of so many elements of a tensor, ..."""
SAVE_BYTES_PER_ELEMENT = 10
"""... of which each takes so much host memory meanwhile."""


# The program is scaled to coefficients around 1..10^4: MiB and milliseconds. Nothing else is.


def mib(num_bytes: float) -> float:
    """Bytes in the program's unit."""
    return num_bytes / MIB


def ms(seconds: float) -> float:
    """Seconds in the program's unit."""
    return seconds * 1e3


GRADIENT_CODE_BLOCK = 64
"""Elements that share a step in a gradient's codes (kernels/gradient_codes.py)."""


OFFLOAD_DELAYS_UPDATE_BYTES_PER_S = 27e9
"""The CPU update loses a second per so many bytes of activations that leave the GPU in its forward. Measured on an H200
with 16 cores: 6.1 GiB of unit inputs cost 0.24 s, in fp32 and in 8 bit, far more than their share of DRAM bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """Sets, parameters and budgets; `docs/formulation.md` gives each its symbol."""

    units: tuple[UnitCost, ...]
    stem: tuple[UnitCost, ...]
    has_gpu: bool
    """False: the CPU computes, and everything counts against host memory."""
    gpu_budget_bytes: int
    cpu_budget_bytes: int
    nvme_budget_bytes: int
    """0: nothing rests on NVMe."""
    gpu_reserve_bytes: int
    cpu_reserve_bytes: int
    """Of all ranks of the machine."""
    loss_bytes: int
    """Logits and their gradients at the fullest moment of the loss."""
    evaluation_bytes: int
    """Whole logits of an evaluation batch; 0: none is planned for."""
    save_bytes: int
    """Host memory that writing a checkpoint takes beside everything at rest."""
    tied: bool
    """The head is the embedding: its gradient from the loss waits for the embedding's."""
    max_tokens: int
    accumulation_steps: int
    state_bits: int
    gradient_bits: int
    fidelity: Fidelity
    weight_slots: int
    gradient_slots: int
    state_slots: int
    activation_slots: int
    nvme_slots: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float
    nvme_read_shared_bytes_per_s: float
    """While the disk writes too, all it can."""
    nvme_write_shared_bytes_per_s: float
    nvme_write_bytes_per_day: float | None
    capabilities: Capabilities
    digests: dict[str, str]
    exchange_bytes: int = 0
    """GPU memory through which ranks exchange gradients."""
    gradient_errors: GradientErrors | None = None
    """Measured on the model; None: those of plan/formats.py."""
    local_ranks: int = 1
    """Ranks of the machine. Costs and GPU memory are one rank's, host memory and NVMe all ranks' together."""
    nodes: int = 1
    """Machines like this one."""
    shards_job: bool = False
    """States are divided over all ranks of all machines."""

    @property
    def has_accumulation(self) -> bool:
        return self.accumulation_steps > 1

    @property
    def divides_updates(self) -> bool:
        """Each of several ranks updates a part of every unit; new weights meet in host memory."""
        return self.local_ranks > 1 or self.shards_job

    @property
    def spreads(self) -> bool:
        """Updated weights in host memory go to the other nodes, on links that are known."""
        return any(cost.spread_s for cost in (*self.units, *self.stem))

    @property
    def exchanges(self) -> bool:
        """Gradients meet those of other ranks, on links that are known."""
        return any(cost.exchange_s or cost.gather_s for cost in (*self.units, *self.stem))

    @property
    def has_nvme(self) -> bool:
        return self.capabilities.nvme and self.nvme_budget_bytes > 0

    def h2d_s(self, num_bytes: float) -> float:
        """One copy to the GPU at the shared rate; 0 without a GPU."""
        return num_bytes / self.h2d_bytes_per_s if self.has_gpu else 0.0

    def d2h_s(self, num_bytes: float) -> float:
        return num_bytes / self.d2h_bytes_per_s if self.has_gpu else 0.0

    def update_delay_s(self, offloaded_bytes: float) -> float:
        """By how much the worker's updates get slower while activations cross to host memory beside them."""
        return self.local_ranks * offloaded_bytes / OFFLOAD_DELAYS_UPDATE_BYTES_PER_S if self.has_gpu else 0.0

    def nvme_read_s(self, num_bytes: float, *, each: bool = False) -> float:
        """0 without NVMe. `each`: every rank reads as much, instead of its part of it; they share the disk."""
        num_bytes = self.local_ranks * num_bytes if each else num_bytes
        return num_bytes / self.nvme_read_bytes_per_s if self.nvme_read_bytes_per_s else 0.0

    def nvme_write_s(self, num_bytes: float, *, each: bool = False) -> float:
        """As `nvme_read_s`."""
        num_bytes = self.local_ranks * num_bytes if each else num_bytes
        return num_bytes / self.nvme_write_bytes_per_s if self.nvme_write_bytes_per_s else 0.0

    def nvme_read_delay_s(self, written_bytes: float, *, each: bool = False) -> float:
        """What writing so much takes from the disk's time to read.

        A disk reads alone at one rate, and beside writes at another. Between the two it shares its time: while it
        writes y at the shared rate w, in y / w, it reads r instead of R bytes per second, so y / w (1 - r / R) is lost.
        One that takes turns loses the whole time of the write, one that does both at full rate nothing.
        """
        if not self.nvme_write_shared_bytes_per_s:
            return 0.0
        kept_frac = min(1.0, self.nvme_read_s(self.nvme_read_shared_bytes_per_s))
        written_bytes = self.local_ranks * written_bytes if each else written_bytes
        return written_bytes / self.nvme_write_shared_bytes_per_s * (1 - kept_frac)

    def nvme_write_delay_s(self, read_bytes: float, *, each: bool = False) -> float:
        """What reading so much takes from the disk's time to write."""
        if not self.nvme_read_shared_bytes_per_s:
            return 0.0
        kept_frac = min(1.0, self.nvme_write_s(self.nvme_write_shared_bytes_per_s))
        read_bytes = self.local_ranks * read_bytes if each else read_bytes
        return read_bytes / self.nvme_read_shared_bytes_per_s * (1 - kept_frac)


def build_problem(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> PlacementProblem:
    """Bytes and seconds of `model` on `hardware` for what `request` asks.

    Raises:
        ConfigError: the request has no `max_tokens`.
    """
    if request.max_tokens is None:
        raise ConfigError("a plan needs max_tokens: the tokens (batch x sequence) of the largest micro-batch")
    ranks, machine, hardware = request.local_ranks, hardware, _seen_by_a_rank(hardware, request.local_ranks)

    def cost(unit: UnitProfile) -> UnitCost:
        saving = functools.partial(
            _strategy_cost,
            bits=request.activation_bits,
            element_bytes=model.activation_bytes,
            tokens=request.max_tokens,
            coding=CodingRates(*hardware.coding_bytes_per_s),
        )
        bits = request.state_bits_of(unit.role)
        cost = _unit_cost(unit, hardware, request.max_tokens, bits, request.accumulation_steps, saving)
        cost = _with_codes(cost, unit, hardware, request)
        sharing_nodes = request.nodes if request.shards_job else 1
        return cost if ranks * sharing_nodes == 1 else cost.divided(ranks, sharing_nodes)

    problem = PlacementProblem(
        units=tuple(cost(unit) for unit in model.units),
        stem=tuple(cost(unit) for unit in model.stem),
        has_gpu=hardware.has_gpu,
        gpu_budget_bytes=(request.gpu_budget_bytes or hardware.gpu_free_bytes) if hardware.has_gpu else 0,
        cpu_budget_bytes=request.cpu_budget_bytes or hardware.cpu_free_bytes,
        gpu_reserve_bytes=GPU_RESERVE_BYTES if hardware.has_gpu else 0,
        cpu_reserve_bytes=ranks * (HOST_RESERVE_GPU_BYTES if hardware.has_gpu else HOST_RESERVE_CPU_BYTES),
        nvme_budget_bytes=_nvme_budget_bytes(hardware, request),
        loss_bytes=model.loss_bytes(request.max_tokens),
        evaluation_bytes=model.evaluation_bytes(request.evaluation_tokens) if request.evaluation_tokens else 0,
        save_bytes=_save_bytes(model),
        tied=model.tied,
        max_tokens=request.max_tokens,
        accumulation_steps=request.accumulation_steps,
        state_bits=request.state_bits,
        gradient_bits=request.gradient_bits,
        fidelity=request.fidelity,
        gradient_errors=request.gradient_errors,
        weight_slots=request.weight_slots,
        gradient_slots=request.gradient_slots,
        state_slots=request.state_slots,
        activation_slots=request.activation_slots,
        nvme_slots=request.nvme_slots,
        h2d_bytes_per_s=hardware.h2d_shared_bytes_per_s,
        d2h_bytes_per_s=hardware.d2h_shared_bytes_per_s,
        nvme_read_bytes_per_s=hardware.nvme_read_bytes_per_s,
        nvme_write_bytes_per_s=hardware.nvme_write_bytes_per_s,
        nvme_read_shared_bytes_per_s=hardware.nvme_read_shared_bytes_per_s or hardware.nvme_read_bytes_per_s / 2,
        nvme_write_shared_bytes_per_s=hardware.nvme_write_shared_bytes_per_s or hardware.nvme_write_bytes_per_s / 2,
        nvme_write_bytes_per_day=request.nvme_write_bytes_per_day,
        capabilities=request.capabilities,
        digests={"hardware": machine.digest, "model": model.digest},
        local_ranks=ranks,
        nodes=request.nodes,
        shards_job=request.shards_job,
        exchange_bytes=_exchange_bytes(model, request),
    )
    return problem if request.cluster is None else on_cluster(problem, request.cluster)


def _exchange_bytes(model: ModelProfile, request: PlanRequest) -> int:
    if request.local_ranks * request.nodes == 1:
        return 0
    units = (*model.units, *model.stem)
    largest = max((unit.num_trainable for unit in units), default=0)
    # Of two units this rank's part of the mean: one is made while one is on its way home.
    parts = request.local_ranks * (request.nodes if request.shards_job else 1)
    means = 2 * max((unit.gradient_bytes for unit in units), default=0) // parts
    weights = WEIGHTS_EXCHANGE_BYTES * (request.nodes + 1) // request.nodes if request.shards_job else 0
    return EXCHANGE_BYTES_PER_ELEMENT * min(EXCHANGE_ELEMENTS, largest) + means + weights


def _seen_by_a_rank(hardware: HardwareProfile, ranks: int) -> HardwareProfile:
    """The rates that one of several ranks finds, when all of them work alike.

    Each has a GPU and links of its own, but all links end in the same host memory, which bounds their sum. The CPU
    updates take as long as alone: a part of the elements by a part of the cores.
    """
    if ranks == 1:
        return hardware
    links_bytes_per_s = ranks * (hardware.h2d_shared_bytes_per_s + hardware.d2h_shared_bytes_per_s)
    share = min(1.0, hardware.host_memory_bytes_per_s / links_bytes_per_s) if links_bytes_per_s else 1.0
    return replace(
        hardware,
        h2d_shared_bytes_per_s=hardware.h2d_shared_bytes_per_s * share,
        d2h_shared_bytes_per_s=hardware.d2h_shared_bytes_per_s * share,
    )


def _nvme_budget_bytes(hardware: HardwareProfile, request: PlanRequest) -> int:
    """0 where there is no disk, or no measured rate for it."""
    if not hardware.nvme_bytes or not hardware.nvme_read_bytes_per_s or not hardware.nvme_write_bytes_per_s:
        return 0
    return hardware.nvme_bytes if request.nvme_budget_bytes is None else request.nvme_budget_bytes


def _save_bytes(model: ModelProfile) -> int:
    """Pieces of one tensor at a time: both moments decoded beside their codes, which is more than the fp32 master."""
    numels = [tensor.numel for unit in (*model.units, *model.stem) for tensor in unit.tensors if tensor.trainable]
    return SAVE_BYTES_PER_ELEMENT * min(max(numels, default=0), SAVE_ELEMENTS)


def _with_codes(cost: UnitCost, unit: UnitProfile, hardware: HardwareProfile, request: PlanRequest) -> UnitCost:
    """The same unit with gradients in the request's bits. Memory on the GPU while they are made stays as it was."""
    if request.gradient_bits == 16 or not unit.num_trainable:
        return cost
    numel = unit.state_numel
    codes, sums = coded_gradient_bytes(numel, 8), coded_gradient_bytes(numel, 16)
    accumulates = cost.accumulator_bytes > 0
    return replace(
        cost,
        gradient_code_bytes=codes,
        accumulator_bytes=sums if accumulates else 0,
        staged_bytes=cost.rest_state_bytes + sums,
        state_slot_bytes=min(STEM_STAGING_BYTES, cost.rest_state_bytes + sums),
        gradient_d2h_s=codes / hardware.d2h_shared_bytes_per_s if hardware.has_gpu else 0.0,
        accumulate_s=(codes + 2 * sums) / hardware.host_memory_bytes_per_s if accumulates else 0.0,
    )


def coded_gradient_bytes(numel: int, bits: int) -> int:
    """Bytes of `numel` gradient elements in codes of 8 or 16 bits, with a bf16 step for each block of 64."""
    return numel * bits // 8 + 2 * -(-numel // GRADIENT_CODE_BLOCK)


def _unit_cost(
    unit: UnitProfile,
    hardware: HardwareProfile,
    tokens: int,
    state_bits: int,
    accumulation_steps: int,
    saving: Callable[..., StrategyCost],
) -> UnitCost:
    if unit.forward_s_per_token is not None:
        forward_s = unit.forward_s_per_token * tokens
    else:
        forward_s = unit.flop_per_token * tokens / hardware.layer_flop_per_s
    # Gradients with respect to the input cost a forward; with respect to weights another, for the trainable ones.
    trainable_share = unit.num_trainable / unit.num_parameters if unit.num_parameters else 0.0
    if unit.backward_s_per_token is not None:
        backward_s = unit.backward_s_per_token * tokens
    else:
        backward_s = forward_s * (1 + trainable_share)
    accumulates = accumulation_steps > 1 and unit.num_trainable > 0
    gpu = hardware.has_gpu
    # A slot has room for an fp32 sum of gradients in any case, as the runtime makes it.
    staged_bytes = unit.remainder_bytes + unit.moment_bytes(state_bits) + 4 * unit.state_numel
    return UnitCost(
        name=unit.name,
        role=unit.role,
        state_bits=state_bits,
        num_trainable=unit.num_trainable,
        weight_bytes=unit.weight_bytes,
        gradient_bytes=unit.gradient_bytes,
        remainder_bytes=unit.remainder_bytes,
        moment_bytes=unit.moment_bytes(state_bits),
        accumulator_bytes=4 * unit.state_numel if accumulates else 0,
        staged_bytes=staged_bytes,
        state_slot_bytes=min(STEM_STAGING_BYTES, staged_bytes),
        state_chunks=max(1, -(-staged_bytes // STEM_STAGING_BYTES)),
        boundary_bytes=unit.boundary_bytes_per_token * tokens,
        fused_input=unit.fused_input,
        kept_bytes=unit.kept_bytes_per_token * tokens,
        workspace_bytes=unit.workspace_bytes_per_token * tokens,
        forward_s=forward_s,
        backward_s=backward_s,
        **launch_costs(unit, hardware),
        weight_h2d_s=unit.weight_bytes / hardware.h2d_shared_bytes_per_s if gpu else 0.0,
        gradient_d2h_s=unit.gradient_bytes / hardware.d2h_shared_bytes_per_s if gpu else 0.0,
        cpu_update_s=unit.num_trainable / hardware.cpu_update_parameters_per_s(state_bits, shared=gpu),
        gpu_update_s=unit.num_trainable / hardware.gpu_update_parameters_per_s(state_bits) if gpu else 0.0,
        # Reads the gradient and the sum, writes the sum.
        accumulate_s=(unit.gradient_bytes + 8 * unit.state_numel) / hardware.host_memory_bytes_per_s
        if accumulates
        else 0.0,
        strategies={
            strategy.activations: saving(strategy)
            for strategy in unit.strategies
            if strategy.activations != Activations.KEEP
        },
    )


def _strategy_cost(
    strategy: StrategyProfile, *, tokens: int, element_bytes: int, bits: int, coding: CodingRates
) -> StrategyCost:
    return StrategyCost(
        saved_bytes=strategy.saved_bytes_per_token * tokens,
        recompute_frac=strategy.recompute_frac,
        attention_bytes=strategy.attention_bytes_per_token * tokens,
        fused_bytes=strategy.fused_bytes_per_token * tokens,
        element_bytes=element_bytes,
        bits=bits if strategy.activations in MAY_BE_CODED else 16,
        coding=coding,
    )
