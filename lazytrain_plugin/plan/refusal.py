"""What to say when nothing fits: need and have per tier, and the nearest changes that do fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.plan.accounting import Ledger, account
from lazytrain_plugin.plan.greedy import closest_plans, excess_frac, fits
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import GIB, format_bytes
from lazytrain_plugin.vocab import Shard

TIER_NAMES = {"gpu": "GPU memory", "cpu": "host memory", "nvme": "NVMe"}
BUDGET_KEYS = {"gpu": "gpu_memory_gib", "cpu": "cpu_memory_gib", "nvme": "nvme_gib"}
LINES_SHOWN = 3
"""Of what fills a tier that is too small."""


@dataclass(frozen=True, slots=True)
class Rebuilder:
    """Makes a problem again with some fields of its request changed."""

    model: ModelProfile
    hardware: HardwareProfile
    request: PlanRequest

    def __call__(self, **changes: Any) -> PlacementProblem:
        return build_problem(self.model, self.hardware, replace(self.request, **changes))

    def has_budget(self, tier: str) -> bool:
        """Whether the user set one; else it is what the machine has free."""
        return getattr(self.request, f"{tier}_budget_bytes") is not None


def infeasible(problem: PlacementProblem, rebuild: Rebuilder | None = None) -> InfeasiblePlanError:
    """Says need and have per tier, for the placement that comes closest, and the nearest changes that fit."""
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
    ledgers = (account(problem, plan) for plan in closest_plans(problem))
    ledger = min(ledgers, key=lambda ledger: excess_frac(ledger.need_bytes(), have))
    need = ledger.need_bytes()
    tiers = [tier for tier in ("gpu", "cpu", "nvme") if tier in need and (tier != "gpu" or problem.has_gpu)]
    short = [tier for tier in tiers if need[tier] > have[tier]]
    figures = "; ".join(
        f"{TIER_NAMES[tier]}: need {format_bytes(need[tier])}, have {format_bytes(have[tier])}"
        + (f" (short {format_bytes(need[tier] - have[tier])}; {_filled_by(ledger, tier)})" if tier in short else "")
        for tier in tiers
    )
    # Else a message about the batch would send the user to look for a smaller one.
    whatever_batch = rebuild is not None and bool(short) and not feasible(rebuild(max_tokens=1))
    if whatever_batch:
        small = " and ".join(TIER_NAMES[tier] for tier in short)
        what = (
            f"this model with {problem.state_bits}-bit optimizer states, whatever the micro-batch: too little {small}"
        )
    else:
        what = f"{problem.max_tokens} tokens per micro-batch with {problem.state_bits}-bit optimizer states"
    remedies = _remedies(problem, need, have, rebuild, smaller_batch=not whatever_batch)
    return InfeasiblePlanError(f"no placement fits {what}. {figures}. Nearest remedies: {'; '.join(remedies)}.")


def budget_gib(need_bytes: int) -> float:
    """The smallest budget of two decimals that holds so much."""
    return math.ceil(need_bytes / GIB * 100) / 100


def _filled_by(ledger: Ledger, tier: str) -> str:
    """What takes the most of a tier, in a step and in a moment between steps that needs more."""
    lines, need_bytes = dict(getattr(ledger, tier)), ledger.need_bytes()[tier]
    if (more := need_bytes - sum(lines.values())) > 0:
        moment = next(name for name, totals in ledger.outside_step.items() if totals.get(tier) == need_bytes)
        lines[f"more for {moment}"] = more
    largest = sorted(lines, key=lambda line: -lines[line])[:LINES_SHOWN]
    return ", ".join(f"{line} {format_bytes(lines[line])}" for line in largest)


def _remedies(
    problem: PlacementProblem,
    need: dict[str, int],
    have: dict[str, int],
    rebuild: Rebuilder | None,
    *,
    smaller_batch: bool,
) -> list[str]:
    remedies: list[str] = []
    if rebuild is not None:
        options = [(problem.state_bits, "a")] if smaller_batch else []
        options += [(8, "8-bit states and a")] if problem.state_bits == 32 else []
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
    for tier, name in (("gpu", "GPU memory"), ("cpu", "host memory"), ("nvme", "NVMe space")):
        short = need.get(tier, 0) - have[tier]
        if short > 0:
            was_set = rebuild is not None and rebuild.has_budget(tier)
            key = f' ("{BUDGET_KEYS[tier]}": {budget_gib(need[tier]):g})' if was_set else ""
            remedies.append(f"{format_bytes(short)} more {name}{key}")
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
