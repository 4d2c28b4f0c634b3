"""What a plan holds in each tier at its fullest moment, line by line. The only place that adds bytes up.

GPU memory peaks in one of these windows of a step, and each is counted (docs/formulation.md, Eq. 7 and 8):
- the loss: all inputs and all saved activations, with the logits;
- the backward of unit u: inputs and saved activations of the units up to u (later ones are already freed), u's
  recompute, inputs that were dropped and are computed again, and the gradients of the units from u on that rest on the
  GPU or are on their way off it;
- the end of backward: all those gradients, with the embedding's.
An evaluation and the writing of a checkpoint are no part of a step; they must fit all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lazytrain_plugin.plan.edges import edges
from lazytrain_plugin.plan.problem import FRAGMENTATION_FRAC, SAVED_FRAGMENTATION_FRAC, PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.vocab import Tier, Updater

TIERS = ("gpu", "cpu", "nvme")
SECONDS_PER_DAY = 86400


@dataclass(frozen=True, slots=True)
class Ledger:
    """Named lines of bytes per tier. Without a GPU all its lines are host memory."""

    gpu: dict[str, int]
    cpu: dict[str, int]
    nvme: dict[str, int] = field(default_factory=dict)
    outside_step: dict[str, dict[str, int]] = field(default_factory=dict)
    """Moments that are no part of a step -> total bytes per tier."""

    def total_bytes(self) -> dict[str, int]:
        """Peak of a training step per tier."""
        return {tier: sum(getattr(self, tier).values()) for tier in TIERS if tier != "nvme" or self.nvme}

    def need_bytes(self) -> dict[str, int]:
        """What a budget must hold: the step, and what happens between steps."""
        need = self.total_bytes()
        for moment in self.outside_step.values():
            for tier, num_bytes in moment.items():
                need[tier] = max(need[tier], num_bytes)
        return need


@dataclass(frozen=True, slots=True)
class Window:
    """What comes and goes in one window of a step, in bytes of GPU memory."""

    inputs: int
    saved: int
    gradients: int
    other: int
    other_name: str

    @property
    def total(self) -> int:
        return self.inputs + self.saved + self.gradients + self.other

    @property
    def head_room(self) -> int:
        """What the allocator reserves beyond that."""
        return head_room_bytes(lasting=self.inputs + self.saved, passing=self.gradients + self.other)


def head_room_bytes(*, lasting: int, passing: int) -> int:
    """What the allocator reserves beyond `lasting` (from forward to backward) and `passing` bytes."""
    return int(SAVED_FRAGMENTATION_FRAC * lasting + FRAGMENTATION_FRAC * passing)


def reserved_bytes(*, lasting: int = 0, passing: int = 0) -> int:
    """What the allocator reserves for them in all."""
    return lasting + passing + head_room_bytes(lasting=lasting, passing=passing)


def excess_frac(need: dict[str, int], have: dict[str, int]) -> float:
    """How far a need is from the budgets: each tier's excess as a share of its budget, since a GiB of a small tier is
    the harder to find."""
    return sum(max(0, num_bytes - have[tier]) / max(have[tier], 1) for tier, num_bytes in need.items())


def unit_bytes(cost: UnitCost, unit: UnitPlan) -> dict[str, int]:
    """Bytes per tier of a unit's weights and states at rest. Gradients that stay on the GPU are counted by window."""
    rest = dict.fromkeys(TIERS, 0)
    rest[unit.weights] += cost.weight_bytes
    if not cost.num_trainable:
        return rest
    # Sums over micro-batches rest where the gradients do.
    off_gpu = Tier.NVME if unit.gradients == Tier.NVME else Tier.CPU
    if unit.states == Tier.GPU:
        rest[Tier.GPU] += cost.resident_state_bytes
    else:
        rest[unit.states] += cost.rest_state_bytes
        rest[off_gpu] += cost.accumulator_bytes
    if sends_gradients(cost, unit):
        rest[off_gpu] += cost.gradient_rest_bytes
    if unit.weights == Tier.GPU and (unit.updater == Updater.CPU or updates_meet_at_home(cost, unit)):
        # The update writes a host mirror of the weights; one copy then brings it to the GPU.
        rest["cpu"] += cost.weight_bytes
    return rest


def is_streamed(unit: UnitPlan) -> bool:
    """The weights rest off the GPU."""
    return unit.weights != Tier.GPU


def updates_meet_at_home(cost: UnitCost, unit: UnitPlan) -> bool:
    """Several ranks update a part each while the states pass their GPUs; new weights are fetched from the host."""
    return cost.parts > 1 and unit.streams_states and cost.num_trainable > 0


def sends_gradients(cost: UnitCost, unit: UnitPlan) -> bool:
    """The gradients leave the GPU."""
    return unit.states != Tier.GPU and cost.num_trainable > 0


def takes_gradient_slot(cost: UnitCost, unit: UnitPlan) -> bool:
    """The gradients leave where autograd made them: off the GPU, or for those of other ranks."""
    return cost.num_trainable > 0 and (unit.states != Tier.GPU or cost.parts > 1)


def offloaded_bytes(cost: UnitCost, unit: UnitPlan, tiers: Sequence[Tier] = (Tier.CPU, Tier.NVME)) -> int:
    """What leaves the GPU for `tiers` after a unit's forward and comes back for its backward."""
    boundary = cost.boundary_bytes_in(unit.boundary_bits) if unit.boundary in tiers else 0
    return boundary + (cost.saved_bytes(unit.activations, unit.saved_bits) if unit.saved in tiers else 0)


def again_s(cost: UnitCost, unit: UnitPlan) -> float:
    """What a unit computes again in backward, and what coding takes."""
    leaves = unit.boundary in (Tier.CPU, Tier.NVME)
    return cost.again_s(unit.activations, unit.saved_bits, unit.boundary_bits, input_leaves=leaves)


def workspace_bytes(cost: UnitCost, unit: UnitPlan) -> int:
    """What the backward of a unit holds at its fullest, beyond its input as it waited: an input in codes is decoded."""
    return cost.workspace_bytes + (cost.boundary_bytes if unit.boundary_bits < 16 else 0)


Staging = tuple[str, int, int]
"""What passes through a rank's host memory on its way to NVMe or back: kind, bytes of a buffer for it, the most buffers
that a unit fills at a time."""


def nvme_staging(cost: UnitCost, unit: UnitPlan) -> Iterator[Staging]:
    """Buffers of each kind serve all units. Whole weights pass, and a rank's part of the rest, states in pieces."""
    if unit.weights == Tier.NVME:
        yield "weights", cost.weight_bytes, 1
    if not cost.num_trainable:
        return
    if unit.states == Tier.NVME:
        yield "states", cost.nvme_piece_bytes, cost.nvme_pieces
    if unit.gradients == Tier.NVME:
        yield "gradients", -(-cost.gradient_rest_bytes // cost.ranks), 1
        if cost.accumulator_bytes:
            yield "sums", -(-cost.accumulator_bytes // cost.ranks), 1


def staged_bytes(staging: Iterable[Staging], slots: int) -> int:
    """A rank's buffers: of each kind as many as there are slots, if that many are filled, as large as the largest."""
    largest: dict[str, int] = {}
    filled: dict[str, int] = {}
    for kind, num_bytes, count in staging:
        largest[kind] = max(largest.get(kind, 0), num_bytes)
        filled[kind] = filled.get(kind, 0) + count
    return sum(min(slots, filled[kind]) * num_bytes for kind, num_bytes in largest.items())


def nvme_gradient_bytes(cost: UnitCost, unit: UnitPlan) -> int:
    """What each backward writes to NVMe of a unit's gradients, and the update reads: them, or their sums."""
    if unit.gradients != Tier.NVME or not cost.num_trainable:
        return 0
    return cost.accumulator_bytes or cost.gradient_rest_bytes


def nvme_updated_bytes(cost: UnitCost, unit: UnitPlan) -> int:
    """What an update changes on NVMe: states, and weights."""
    weights = cost.weight_bytes if unit.weights == Tier.NVME else 0
    return (weights + (cost.rest_state_bytes if unit.states == Tier.NVME else 0)) if cost.num_trainable else 0


def nvme_bytes_allowed_per_step(problem: PlacementProblem) -> float:
    """What the disk's wear allows to write in a step. Counts with the fastest step there can be, that of computing
    alone, so that no plan wears the disk faster."""
    if problem.nvme_write_bytes_per_day is None:
        return float("inf")
    costs = (*problem.units, *problem.stem)
    fastest_s = problem.accumulation_steps * sum(cost.forward_s + cost.backward_s for cost in costs)
    return problem.nvme_write_bytes_per_day * fastest_s / SECONDS_PER_DAY


def nvme_written_bytes(problem: PlacementProblem, plan: PlacementPlan) -> int:
    """What one step writes to NVMe: new weights and states of what rests there, gradients, and every forward's
    activations."""
    pairs = (*zip(problem.units, plan.units), *zip(problem.stem, plan.stem))
    activations = problem.accumulation_steps * _offloaded_to(list(zip(problem.units, plan.units)), Tier.NVME)
    activations *= problem.local_ranks
    return activations + sum(
        nvme_updated_bytes(cost, unit) + problem.accumulation_steps * nvme_gradient_bytes(cost, unit)
        for cost, unit in pairs
    )


def state_slot_bytes(problem: PlacementProblem, plan: PlacementPlan) -> int:
    """Size of a staging buffer on the GPU for streamed states: the largest unit's, which pass in chunks."""
    pairs = (*zip(problem.units, plan.units), *zip(problem.stem, plan.stem))
    return max((cost.state_slot_bytes for cost, unit in pairs if unit.streams_states), default=0)


def account(problem: PlacementProblem, plan: PlacementPlan) -> Ledger:
    """Peak bytes of `plan`; unit i of the plan is unit i of the problem."""
    lines: dict[str, dict[str, int]] = {tier: {} for tier in TIERS}
    gpu, cpu = lines["gpu"], lines["cpu"]
    for part, costs, units in (("units", problem.units, plan.units), ("stem", problem.stem, plan.stem)):
        rest = [unit_bytes(cost, unit) for cost, unit in zip(costs, units, strict=True)]
        for tier in TIERS:
            lines[tier][f"{part}: weights and states"] = sum(num_bytes[tier] for num_bytes in rest)
    pairs = list(zip(problem.units, plan.units))
    streamed = [cost.weight_bytes for cost, unit in pairs if is_streamed(unit)]
    # With fewer streamed units than slots the rest of the slots is not made.
    gpu["weight slots"] = min(plan.weight_slots, len(streamed) + 1) * max(streamed, default=0)
    gpu["state slots"] = plan.state_slots * state_slot_bytes(problem, plan)
    at_rest = sum(gpu.values()) - gpu["state slots"] + problem.gpu_reserve_bytes
    gpu["gradient exchange"] = problem.exchange_bytes

    ring = plan.activation_slots * max((offloaded_bytes(cost, unit) for cost, unit in pairs), default=0)
    fullest = lambda window: window.total + window.head_room  # noqa: E731
    window = max(windows(problem, plan), key=fullest, default=Window(0, 0, 0, 0, "logits and loss"))
    gpu["activation slots"] = ring
    gpu["unit inputs"] = window.inputs
    gpu["saved activations"] = window.saved
    gpu["gradients"] = window.gradients
    gpu[window.other_name] = window.other
    gpu["head-room"] = window.head_room + head_room_bytes(lasting=ring, passing=0)
    gpu["reserve"] = problem.gpu_reserve_bytes

    # Homes are there once for all ranks of the machine; each has its own activations, buffers and process.
    ranks = problem.local_ranks
    for tier, name in (("cpu", "offloaded activations"), ("nvme", "activations")):
        lines[tier][name] = ranks * _offloaded_to(pairs, Tier(tier))
    staging = [kind for pair in (*pairs, *zip(problem.stem, plan.stem)) for kind in nvme_staging(*pair)]
    passing = [_offloaded_to([pair], Tier.NVME) for pair in pairs] if lines["nvme"]["activations"] else []
    staging += [("activations", num_bytes, 1) for num_bytes in passing if num_bytes]
    cpu["NVMe slots"] = ranks * staged_bytes(staging, plan.nvme_slots)
    cpu["reserve"] = problem.cpu_reserve_bytes
    saving = sum(cpu.values()) + problem.save_bytes - cpu["offloaded activations"]
    outside = {"checkpoint": {"cpu": saving}}
    evaluating = at_rest + reserved_bytes(passing=problem.evaluation_bytes)
    if not problem.has_gpu:
        outside["checkpoint"]["cpu"] += ranks * at_rest
        evaluating = ranks * evaluating + sum(cpu.values())
        lines["cpu"] = _merged(cpu, {line: ranks * num_bytes for line, num_bytes in gpu.items()})
        lines["gpu"] = {}
    if problem.evaluation_bytes:
        outside["evaluation"] = {"gpu" if problem.has_gpu else "cpu": evaluating}
    lines = {tier: {line: num_bytes for line, num_bytes in lines[tier].items() if num_bytes} for tier in TIERS}
    return Ledger(**lines, outside_step=outside)


def windows(problem: PlacementProblem, plan: PlacementPlan) -> Iterator[Window]:
    """The windows of a step in the order of time: the loss, backward from the last unit to the first, its end."""
    pairs = list(zip(problem.units, plan.units))
    on_gpu = [cost.boundary_bytes_in(unit.boundary_bits) if unit.boundary == Tier.GPU else 0 for cost, unit in pairs]
    saved = [
        cost.saved_bytes(unit.activations, unit.saved_bits) if unit.saved == Tier.GPU else 0 for cost, unit in pairs
    ]
    yield Window(sum(on_gpu), sum(saved), 0, problem.loss_bytes, "logits and loss")

    slot = max((cost.gradient_bytes for cost, unit in pairs if takes_gradient_slot(cost, unit)), default=0)
    head = sum(_head_gradient_bytes(problem, plan, always=True))
    resting = 0
    inputs, kept = sum(on_gpu), sum(saved)
    found, widest = _found_again(problem, plan)
    for later, (u, (cost, unit)) in enumerate(reversed(list(enumerate(pairs)))):
        own = 0 if sends_gradients(cost, unit) else cost.resident_gradient_bytes
        if not problem.has_accumulation:
            resting += own
            own = 0
        kept -= saved[u]
        going = (1 + min(plan.gradient_slots - 1, later)) * slot
        if later < plan.gradient_slots - 1:
            going += sum(_head_gradient_bytes(problem, plan, always=False))
        yield Window(inputs + found[u], kept, head + resting + own + going, widest[u], "backward workspace")
        inputs -= on_gpu[u]
    embedding = sum(c.gradient_bytes for c in problem.stem if c.role != UnitRole.HEAD)
    yield Window(0, 0, head + resting + (plan.gradient_slots - 1) * slot + embedding, 0, "backward workspace")


def _found_again(problem: PlacementProblem, plan: PlacementPlan) -> tuple[list[int], list[int]]:
    """For each unit's backward: inputs that an edge has computed again or brought back and that are still needed, and
    the widest workspace, that of the units which run again for it included."""
    found = [0] * len(plan.units)
    widest = [workspace_bytes(cost, unit) for cost, unit in zip(problem.units, plan.units)]
    for edge in edges(plan.units):
        source, total = plan.units[edge.source], 0
        if source.boundary != Tier.GPU:
            total = problem.units[edge.source].boundary_bytes_in(source.boundary_bits)
        for u in range(edge.source + 1, edge.last + 1):
            total += problem.units[u].boundary_bytes
            found[u] = total
        widest[edge.last] = max(widest[edge.source : edge.last + 1])
    return found, widest


def _head_gradient_bytes(problem: PlacementProblem, plan: PlacementPlan, *, always: bool) -> Iterator[int]:
    """The head's gradient after the loss: `always` what stays through backward, else what is on its way off the GPU."""
    for cost, unit in zip(problem.stem, plan.stem):
        if problem.tied and cost.role == UnitRole.EMBEDDING:
            yield cost.gradient_bytes if always else 0
        elif cost.role == UnitRole.HEAD:
            leaves, stays = takes_gradient_slot(cost, unit), not sends_gradients(cost, unit)
            if always:
                yield cost.resident_gradient_bytes if stays and not problem.has_accumulation else 0
            else:
                yield cost.gradient_bytes if leaves else 0


def _offloaded_to(pairs: Sequence[tuple[UnitCost, UnitPlan]], tier: Tier) -> int:
    return sum(offloaded_bytes(cost, unit, (tier,)) for cost, unit in pairs)


def _merged(cpu: dict[str, int], gpu: dict[str, int]) -> dict[str, int]:
    merged = dict(cpu)
    for line, num_bytes in gpu.items():
        merged[line] = merged.get(line, 0) + num_bytes
    return merged
