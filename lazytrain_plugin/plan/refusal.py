"""What to say when nothing fits: need and have per tier, and the nearest changes that do fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.greedy import closest_plans, excess_frac, fits
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Shard


def infeasible(problem: PlacementProblem, rebuild=None) -> InfeasiblePlanError:
    """Says need and have per tier, for the placement that comes closest, and the nearest changes that fit."""
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
    needs = (account(problem, plan).need_bytes() for plan in closest_plans(problem))
    need = min(needs, key=lambda need: excess_frac(need, have))
    tiers = [tier for tier in ("gpu", "cpu", "nvme") if tier in need and (tier != "gpu" or problem.has_gpu)]
    names = {"gpu": "GPU memory", "cpu": "host memory", "nvme": "NVMe"}
    figures = "; ".join(
        f"{names[tier]}: need {format_bytes(need[tier])}, have {format_bytes(have[tier])}"
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
        options = [(problem.state_bits, "a")] + ([(8, "8-bit states and a")] if problem.state_bits == 32 else [])
        for state_bits, tokens_text in options:
            if state_bits != problem.state_bits and feasible(rebuild(state_bits=state_bits)):
                remedies.append('8-bit optimizer states ("fidelity": "balanced")')
                break
            tokens = _most_tokens(lambda tokens, bits=state_bits: rebuild(max_tokens=tokens, state_bits=bits), problem)
            if tokens:
                remedies.append(f"{tokens_text} micro-batch of {tokens} tokens, with more gradient accumulation")
        if problem.nodes > 1 and not problem.shards_job:
            if feasible(rebuild(shard=Shard.JOB, cluster=None)):
                remedies.append(f'optimizer states divided over all {problem.nodes} nodes ("shard": "job")')
    for tier, name in (("gpu", "GPU"), ("cpu", "host"), ("nvme", "NVMe")):
        short = need.get(tier, 0) - have[tier]
        if short > 0:
            remedies.append(f"{format_bytes(short)} more {name} {'space' if tier == 'nvme' else 'memory'}")
    if need["cpu"] > have["cpu"] and (on_disk := _bytes_on_disk(problem)):
        remedies.append(f'up to {format_bytes(on_disk)} on an NVMe disk ("nvme_path")')
    return remedies


def _most_tokens(rebuilt: Callable[[int], PlacementProblem], problem: PlacementProblem) -> int | None:
    """The largest half, quarter, ... of the micro-batch that fits, of at least 64 tokens; None: not even that."""
    halvings = []
    while problem.max_tokens >> (len(halvings) + 1) >= 64:
        halvings.append(problem.max_tokens >> (len(halvings) + 1))
    # Fewer tokens never need more.
    if not halvings or not feasible(rebuilt(halvings[-1])):
        return None
    low, high = 0, len(halvings) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(rebuilt(halvings[middle])) else (middle + 1, high)
    return halvings[low]


def _bytes_on_disk(problem: PlacementProblem) -> int:
    """What a disk would have to hold for the rest to fit; 0: a disk is no help, or is there already."""
    if problem.has_nvme or not problem.has_gpu:
        return 0
    endless = replace(
        problem, capabilities=replace(problem.capabilities, nvme=True), nvme_budget_bytes=1 << 60,
        nvme_write_bytes_per_day=None,
    )  # fmt: skip
    fitting = (account(endless, plan).need_bytes() for plan in closest_plans(endless) if fits(endless, plan))
    return min((need.get("nvme", 0) for need in fitting), default=0)


def feasible(problem: PlacementProblem) -> bool:
    """Whether any placement of the greedy family fits."""
    return any(fits(problem, plan) for plan in closest_plans(problem))


def rebuilder(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> Callable[..., PlacementProblem]:
    """Makes the same problem with some fields of the request changed."""
    return lambda **changes: build_problem(model, hardware, replace(request, **changes))
