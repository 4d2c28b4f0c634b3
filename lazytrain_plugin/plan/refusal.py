"""What to say when nothing fits: need and have per tier, and the nearest changes that do fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.greedy import closest_plans, fits
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import format_bytes


def infeasible(problem: PlacementProblem, rebuild=None) -> InfeasiblePlanError:
    """Says need and have per tier, for the placement that comes closest, and the nearest changes that fit."""
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
    needs = (account(problem, plan).need_bytes() for plan in closest_plans(problem))
    need = min(needs, key=lambda need: sum(max(0, need[tier] - have[tier]) for tier in need))
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
    """Whether any placement of the greedy family fits."""
    return any(fits(problem, plan) for plan in closest_plans(problem))


def rebuilder(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> Callable[..., PlacementProblem]:
    """Makes the same problem with some fields of the request changed."""
    return lambda **changes: build_problem(model, hardware, replace(request, **changes))
