"""What other systems do without a planner, as plans on the same simulator and the same accounting.

Each policy gets the same kernels, links and update rates as LazyTrain; only its rules differ. That flatters them: their
own executors also copy weights once more per step, keep a second set of weights in host memory, or block on each copy.

Sources: MegaTrain (arXiv 2604.05091, code at 919520f), ZeRO-Infinity (arXiv 2104.07857), LazyTrain's paper for the plan
of layer inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lazytrain_plugin.plan.choices import HOMES, allows_home
from lazytrain_plugin.plan.greedy import fits, leanest_plan
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import StepTimes, simulate
from lazytrain_plugin.vocab import Tier

REFILL_ACCESSES = 2
"""A refill reads updated weights and writes the pinned copy that is streamed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One fixed set of rules."""

    name: str
    place: Callable[[PlacementProblem], PlacementPlan]
    synchronous: bool
    """The next forward waits for every update."""
    recomputes_twice: bool = False
    """Backward runs each layer without gradients first, to find its input, and again for its gradients."""
    refills: bool = False
    """Updated weights are copied on the host before they can be streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """A policy on one problem."""

    policy: Policy
    plan: PlacementPlan
    fits: bool
    times: StepTimes


def evaluate(policy: Policy, problem: PlacementProblem, host_memory_bytes_per_s: float) -> PolicyOutcome:
    """Places, counts and replays. A plan that does not fit is replayed all the same.

    Args:
        host_memory_bytes_per_s: reads and writes together; what a refill takes.
    """
    plan = policy.place(problem)
    return PolicyOutcome(
        policy=policy,
        plan=plan,
        fits=fits(problem, plan),
        times=simulate(_under(policy, problem, host_memory_bytes_per_s), plan, synchronous=policy.synchronous),
    )


def _under(policy: Policy, problem: PlacementProblem, host_memory_bytes_per_s: float) -> PlacementProblem:
    """The problem with what the policy's executor does beyond ours."""

    def cost(unit: UnitCost) -> UnitCost:
        again_s = unit.forward_s if policy.recomputes_twice else 0.0
        trains = unit.num_trainable > 0
        refill_s = REFILL_ACCESSES * unit.weight_bytes / host_memory_bytes_per_s if policy.refills and trains else 0.0
        return replace(unit, backward_s=unit.backward_s + again_s, cpu_update_s=unit.cpu_update_s + refill_s)

    units, stem = tuple(map(cost, problem.units)), problem.stem
    if policy.refills:
        stem = tuple(replace(cost(unit), backward_s=unit.backward_s) for unit in stem)
    return replace(problem, units=units, stem=stem)


def everything_on_cpu(problem: PlacementProblem) -> PlacementPlan:
    """Weights and states on the host, everything recomputed; the lazy update of this engine."""
    return leanest_plan(problem)


def megatrain(problem: PlacementProblem) -> PlacementPlan:
    """Double-buffered streaming, layer inputs on the GPU."""
    return replace(leanest_plan(problem), weight_slots=2, gradient_slots=2)


def zero_infinity(problem: PlacementProblem) -> PlacementPlan:
    """Weights and states on the host, or on NVMe where there is one and the host is too small for them."""
    lean = leanest_plan(problem)
    if fits(problem, lean) or not problem.has_nvme:
        return lean
    candidates = [lean]
    for home in ("nvme_states", "nvme"):
        units = tuple(
            replace(unit, **HOMES[home]) if allows_home(problem, cost, home) else unit
            for cost, unit in zip(problem.units, lean.units, strict=True)
        )
        candidates.append(replace(lean, units=units))
    return next((plan for plan in candidates if fits(problem, plan)), candidates[-1])


def boundaries_only(problem: PlacementProblem) -> PlacementPlan:
    """Weights and states on the host; inputs of as many of the last layers as fit stay on the GPU, others leave it."""
    lean = leanest_plan(problem)
    if not problem.has_gpu:
        return lean

    def with_on_gpu(count: int) -> PlacementPlan:
        first = len(lean.units) - count
        units = (
            replace(unit, boundary=Tier.GPU if index >= first else Tier.CPU) for index, unit in enumerate(lean.units)
        )
        return replace(lean, units=tuple(units))

    low, high = 0, len(lean.units)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(problem, with_on_gpu(middle)) else (low, middle - 1)
    return with_on_gpu(low)


POLICIES = (
    Policy(name="all on the CPU, recompute all", place=everything_on_cpu, synchronous=False),
    Policy(name="MegaTrain", place=megatrain, synchronous=True, recomputes_twice=True, refills=True),
    Policy(name="ZeRO-Infinity", place=zero_infinity, synchronous=True),
    Policy(name="layer inputs only", place=boundaries_only, synchronous=True),
)
"""Fixed rules to compare a plan with."""
