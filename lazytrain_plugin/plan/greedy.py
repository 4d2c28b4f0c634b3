"""A planner without a solver: a small family of placements, the fastest of those that fit.

The family, in the order in which GPU memory is worth most (each claim is checked by the simulator, not believed):
1. stem states on the GPU, the embedding's first: nothing of a forward can run before the embedding is updated;
2. R units rest on the GPU with their states, so that the CPU updates and the links carry less;
3. what is left keeps activations of the last units, which saves their recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.plan.accounting import account, unit_bytes
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile, UnitRole
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Activations, Tier, Updater

COARSE_COUNTS = 16
WORTHWHILE_FRAC = 0.002
"""A placement that takes more GPU memory must be faster by this much."""


def greedy_plan(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> PlacementPlan:
    """The fastest placement of the family above, by the simulator. Deterministic.

    Raises:
        InfeasiblePlanError: nothing fits; the message has need and have per tier and the nearest remedies.
    """
    problem = build_problem(model, hardware, request)
    return plan_greedily(problem, rebuilder(model, hardware, request))


def plan_greedily(problem: PlacementProblem, rebuild=None) -> PlacementPlan:
    """As `greedy_plan`, from a problem. `rebuild(max_tokens=..., state_bits=...)` makes the variants that the error
    message looks at; None: no remedies are computed."""
    best = _search(problem)
    if best is None:
        raise infeasible(problem, rebuild)
    return explained(problem, *best)


def fits(problem: PlacementProblem, plan: PlacementPlan) -> bool:
    total = account(problem, plan).total_bytes()
    return total["gpu"] <= problem.gpu_budget_bytes and total["cpu"] <= problem.cpu_budget_bytes


def leanest_plan(problem: PlacementProblem) -> PlacementPlan:
    """The placement with the least GPU memory: all units and stem states on the CPU, everything recomputed."""
    return _plan(problem, stem_on_gpu=0, resident=frozenset())


def _search(problem: PlacementProblem) -> tuple[PlacementPlan, float] | None:
    """The fastest of the family that fits and its step time; None: nothing fits.

    The number of resident units is searched coarsely first, then by one around the best: step time has no narrow dips.
    """
    if not problem.has_gpu:
        # One tier: only activations are left to decide.
        plan = _keep_what_fits(problem, leanest_plan(problem))
        return (plan, simulate(problem, plan).step_s) if fits(problem, plan) else None
    best: tuple[PlacementPlan, float] | None = None
    num_units = len(problem.units)
    stride = max(1, num_units // COARSE_COUNTS)
    for stem_on_gpu in range(len(problem.stem) + 1):
        best_count, best_count_s = None, float("inf")
        coarse = {*range(0, num_units + 1, stride), num_units}
        for counts in (coarse, None):
            if counts is None:
                if best_count is None:
                    break
                counts = set(range(max(0, best_count - stride), min(num_units, best_count + stride) + 1)) - coarse
            for count in sorted(counts):
                for layout in dict.fromkeys((_first(count), _spread(count, num_units))):
                    plan = _plan(problem, stem_on_gpu=stem_on_gpu, resident=layout)
                    if not fits(problem, plan):
                        continue
                    plan = _keep_what_fits(problem, plan)
                    step_s = simulate(problem, plan).step_s
                    if step_s < best_count_s:
                        best_count, best_count_s = count, step_s
                    if best is None or step_s < best[1] * (1 - WORTHWHILE_FRAC):
                        best = (plan, step_s)
    return best


def _first(count: int) -> frozenset[int]:
    """Resident units at the start of the forward order give the worker the longest start.

    Unit i's update may take until the forwards before it are done, so moving a resident unit forward never makes
    another unit's update late.
    """
    return frozenset(range(count))


def _spread(count: int, num_units: int) -> frozenset[int]:
    """Spread evenly they serve the link: with few slots it can't run ahead while resident units compute."""
    return frozenset(index * num_units // count for index in range(count)) if count else frozenset()


def _plan(problem: PlacementProblem, *, stem_on_gpu: int, resident: frozenset[int]) -> PlacementPlan:
    """`stem_on_gpu`: how many stem units have their states on the GPU: small tensors first, then the embedding."""
    priority = {UnitRole.REST: 0, UnitRole.EMBEDDING: 1, UnitRole.HEAD: 2, UnitRole.LAYER: 3}
    order = sorted(range(len(problem.stem)), key=lambda index: (priority[problem.stem[index].role], index))
    on_gpu = frozenset(order[:stem_on_gpu])
    stem_home = Tier.GPU if problem.has_gpu else Tier.CPU
    return PlacementPlan(
        units=tuple(
            _unit(cost.name, problem, gpu_states=index in resident, weights=Tier.GPU if index in resident else Tier.CPU)
            for index, cost in enumerate(problem.units)
        ),
        stem=tuple(
            _unit(cost.name, problem, gpu_states=index in on_gpu, weights=stem_home)
            for index, cost in enumerate(problem.stem)
        ),
        weight_slots=problem.weight_slots,
        gradient_slots=problem.gradient_slots,
        fidelity=problem.fidelity,
        max_tokens=problem.max_tokens,
        digests=problem.digests,
    )


def _unit(name: str, problem: PlacementProblem, *, gpu_states: bool, weights: Tier) -> UnitPlan:
    return UnitPlan(
        name=name,
        weights=weights,
        states=Tier.GPU if gpu_states else Tier.CPU,
        updater=Updater.GPU if gpu_states else Updater.CPU,
        state_bits=problem.state_bits,
    )


def _keep_what_fits(problem: PlacementProblem, plan: PlacementPlan) -> PlacementPlan:
    """Keeps activations of as many units as fit, from the last on: backward frees those first, so that the widest
    recompute of the others finds their memory again."""
    low, high = 0, len(plan.units)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(problem, _keeping(plan, middle)):
            low = middle
        else:
            high = middle - 1
    return _keeping(plan, low)


def _keeping(plan: PlacementPlan, count: int) -> PlacementPlan:
    first = len(plan.units) - count
    return replace(
        plan,
        units=tuple(
            replace(unit, activations=Activations.KEEP if index >= first else Activations.RECOMPUTE)
            for index, unit in enumerate(plan.units)
        ),
    )


def explained(problem: PlacementProblem, plan: PlacementPlan, step_s: float) -> PlacementPlan:
    """`plan` with its predictions and a reason per unit."""
    return replace(
        plan,
        units=tuple(_with_reason(problem, cost, unit) for cost, unit in zip(problem.units, plan.units)),
        stem=tuple(_with_reason(problem, cost, unit) for cost, unit in zip(problem.stem, plan.stem)),
        predicted_bytes=account(problem, plan).total_bytes(),
        predicted_step_s=round(step_s, 6),
    )


def _with_reason(problem: PlacementProblem, cost, unit: UnitPlan) -> UnitPlan:
    if not problem.has_gpu:
        place = "no GPU: everything is in host memory"
    elif unit.weights == Tier.CPU:
        place = f"streamed: {format_bytes(cost.weight_bytes + cost.state_bytes)} of weights and states stay off the GPU"
    elif not cost.num_trainable:
        place = "frozen, on the GPU: no states"
    elif unit.updater == Updater.GPU:
        gpu_bytes, _ = unit_bytes(cost, unit)
        update_ms = 1e3 * cost.cpu_update_s
        place = f"on the GPU ({format_bytes(gpu_bytes)}): spares its copies and {update_ms:.0f} ms of CPU update"
    else:
        place = f"states on the CPU: {format_bytes(cost.state_bytes)} of GPU memory are worth more elsewhere"
    if cost.kept_bytes and unit.activations == Activations.KEEP:
        place += f"; keeps {format_bytes(cost.kept_bytes)} to save {1e3 * cost.forward_s:.0f} ms of recompute"
    elif cost.kept_bytes:
        place += f"; recomputes ({1e3 * cost.forward_s:.0f} ms) instead of keeping {format_bytes(cost.kept_bytes)}"
    return replace(unit, reason=place)


def infeasible(problem: PlacementProblem, rebuild=None) -> InfeasiblePlanError:
    """Says need and have per tier, for the placement that comes closest, and the nearest changes that fit."""
    lean = leanest_plan(problem)
    candidates = [lean]
    if problem.has_gpu:
        for count in range(1, len(problem.units) + 1):
            candidates.append(_plan(problem, stem_on_gpu=len(problem.stem), resident=_first(count)))
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes}

    def missing(plan: PlacementPlan) -> int:
        total = account(problem, plan).total_bytes()
        return sum(max(0, total[tier] - have[tier]) for tier in have)

    closest = min(candidates, key=missing)
    need = account(problem, closest).total_bytes()
    tiers = ("gpu", "cpu") if problem.has_gpu else ("cpu",)
    figures = "; ".join(
        f"{'GPU' if tier == 'gpu' else 'host'} memory: need {format_bytes(need[tier])}, have {format_bytes(have[tier])}"
        + (f" (short {format_bytes(need[tier] - have[tier])})" if need[tier] > have[tier] else "")
        for tier in tiers
    )
    remedies = _remedies(problem, need, have, rebuild)
    return InfeasiblePlanError(
        f"no placement fits {problem.max_tokens} tokens per micro-batch with {problem.state_bits}-bit optimizer "
        f"states. {figures}. Nearest remedies: {'; '.join(remedies)}."
    )


def _remedies(problem: PlacementProblem, need: dict[str, int], have: dict[str, int], rebuild) -> list[str]:
    remedies: list[str] = []
    if rebuild is not None:
        for state_bits, tokens_text in ((problem.state_bits, "a"), (8, "8-bit states and a")):
            if state_bits == 8 and problem.state_bits == 32 and feasible(rebuild(state_bits=8)):
                remedies.append('8-bit optimizer states ("fidelity": "balanced")')
                break
            tokens = problem.max_tokens // 2
            while tokens >= 64 and not feasible(rebuild(max_tokens=tokens, state_bits=state_bits)):
                tokens //= 2
            if tokens >= 64:
                remedies.append(f"{tokens_text} micro-batch of {tokens} tokens, with more gradient accumulation")
    for tier, name in (("gpu", "GPU"), ("cpu", "host")):
        short = need[tier] - have[tier]
        if short > 0:
            remedies.append(f"{format_bytes(short)} more {name} memory")
    return remedies


def feasible(problem: PlacementProblem) -> bool:
    """Whether any placement of the family fits."""
    if fits(problem, leanest_plan(problem)):
        return True
    counts: Sequence[int] = range(1, len(problem.units) + 1) if problem.has_gpu else ()
    return any(
        fits(problem, _plan(problem, stem_on_gpu=stem, resident=_first(count)))
        for count in counts
        for stem in range(len(problem.stem) + 1)
    )


def rebuilder(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> Callable[..., PlacementProblem]:
    """Makes the same problem with some fields of the request changed."""
    return lambda **changes: build_problem(model, hardware, replace(request, **changes))
