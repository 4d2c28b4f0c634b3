"""What a plan holds in each tier at its fullest moment, line by line. The only place that adds bytes up.

GPU memory peaks in one of these windows, and each is counted (docs/formulation.md, Eq. 4 and 5):
- the loss: all inputs and all kept activations, with the logits;
- the backward of unit u: inputs and kept activations of the units up to u (later ones are already freed), with u's
  recompute and gradients in the making.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazytrain_plugin.plan.problem import FRAGMENTATION_FRAC, PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.vocab import Activations, Tier, Updater


@dataclass(frozen=True, slots=True)
class Ledger:
    """Named lines of bytes per tier. Without a GPU all lines are host memory."""

    gpu: dict[str, int]
    cpu: dict[str, int]

    def total_bytes(self) -> dict[str, int]:
        return {"gpu": sum(self.gpu.values()), "cpu": sum(self.cpu.values())}


def unit_bytes(cost: UnitCost, unit: UnitPlan) -> tuple[int, int]:
    """(GPU, host) bytes of a unit's weights and states at rest."""
    if unit.weights == Tier.CPU:
        return 0, cost.weight_bytes + cost.state_bytes
    if not cost.num_trainable:
        return cost.weight_bytes, 0
    if unit.updater == Updater.GPU:
        return cost.weight_bytes + cost.state_bytes, 0
    # The update writes a host mirror of the weights; one copy then brings it to the GPU.
    return cost.weight_bytes, cost.weight_bytes + cost.state_bytes


def is_streamed(unit: UnitPlan) -> bool:
    return unit.weights == Tier.CPU


def sends_gradients(cost: UnitCost, unit: UnitPlan) -> bool:
    return unit.updater == Updater.CPU and cost.num_trainable > 0


def account(problem: PlacementProblem, plan: PlacementPlan) -> Ledger:
    """Peak bytes of `plan`; unit i of the plan is unit i of the problem."""
    gpu: dict[str, int] = {}
    cpu: dict[str, int] = {}
    for part, costs, units in (("units", problem.units, plan.units), ("stem", problem.stem, plan.stem)):
        rest = [unit_bytes(cost, unit) for cost, unit in zip(costs, units, strict=True)]
        gpu[f"{part}: weights and states"] = sum(gpu_bytes for gpu_bytes, _ in rest)
        cpu[f"{part}: weights and states"] = sum(cpu_bytes for _, cpu_bytes in rest)
    # A stem tensor's gradient is made by autograd in `.grad` before it goes to the host.
    gpu["stem: gradients on their way"] = sum(
        cost.gradient_bytes
        for cost, unit in zip(problem.stem, plan.stem)
        if sends_gradients(cost, unit) and unit.weights == Tier.GPU
    )
    streamed = [cost.weight_bytes for cost, unit in zip(problem.units, plan.units) if is_streamed(unit)]
    sending = [cost.gradient_bytes for cost, unit in zip(problem.units, plan.units) if sends_gradients(cost, unit)]
    # With fewer streamed units than slots the rest of the slots is not made.
    gpu["weight slots"] = min(plan.weight_slots, len(streamed) + 1) * max(streamed, default=0)
    gpu["gradient slots"] = plan.gradient_slots * max(sending, default=0)
    gpu.update(_activation_peak(problem, plan.units))
    gpu["reserve"] = problem.gpu_reserve_bytes
    cpu["reserve"] = problem.cpu_reserve_bytes
    if not problem.has_gpu:
        cpu = _merged(cpu, gpu)
        gpu = {}
    return Ledger(gpu={k: v for k, v in gpu.items() if v}, cpu={k: v for k, v in cpu.items() if v})


def backward_workspace_bytes(cost: UnitCost, activations: Activations) -> int:
    """What a unit's backward needs beyond its input and what it kept.

    Its recompute, unless kept. Its gradients are counted with the gradient slots, or with the states on the GPU.
    """
    kept = cost.kept_bytes if activations == Activations.KEEP else 0
    return cost.workspace_bytes - kept


def _activation_peak(problem: PlacementProblem, units: Sequence[UnitPlan]) -> dict[str, int]:
    """Lines of the fullest window, head-room included."""
    boundaries = kept = 0
    windows: list[tuple[int, int, int, str, int]] = []
    for cost, unit in zip(problem.units, units):
        boundaries += cost.boundary_bytes
        if unit.activations == Activations.KEEP:
            kept += cost.kept_bytes
        workspace = backward_workspace_bytes(cost, unit.activations)
        windows.append((boundaries + kept + workspace, boundaries, kept, "backward workspace", workspace))
    windows.append((boundaries + kept + problem.loss_bytes, boundaries, kept, "logits and loss", problem.loss_bytes))
    total, boundaries, kept, what, workspace = max(windows, key=lambda window: window[0])
    head_room = int(total * FRAGMENTATION_FRAC)
    return {"unit inputs": boundaries, "kept activations": kept, what: workspace, "head-room": head_room}


def _merged(cpu: dict[str, int], gpu: dict[str, int]) -> dict[str, int]:
    merged = dict(cpu)
    for line, num_bytes in gpu.items():
        merged[line] = merged.get(line, 0) + num_bytes
    return merged
