"""A plan in a few lines of a log: memory per tier, the step's time by part, what happens to how many units, and why."""

from __future__ import annotations

from collections import Counter

from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.explain import TIER_NAMES
from lazytrain_plugin.plan.launches import launch_remark
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import Resource, StepTimes
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Activations, Tier

MOST_KINDS = 6
"""Lines of units; the rest is told in one."""
RESOURCE_NAMES = {
    Resource.COMPUTE: "compute",
    Resource.H2D: "host to GPU",
    Resource.D2H: "GPU to host",
    Resource.WORKER: "CPU updates",
    Resource.NVME_READ: "NVMe reads",
    Resource.NVME_WRITE: "NVMe writes",
    Resource.EXCHANGE: "exchange between ranks",
}


def summarize_plan(problem: PlacementProblem, plan: PlacementPlan, times: StepTimes) -> str:
    """Lines without a final newline, indented, to stand under a headline."""
    return "\n".join(f"  {line}" for line in (*_memory(problem, plan), *_time(plan, times), *_units(plan)))


def _memory(problem: PlacementProblem, plan: PlacementPlan) -> list[str]:
    ledger = account(problem, plan)
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
    lines = []
    for tier, need_bytes in ledger.need_bytes().items():
        if not need_bytes:
            continue
        largest = sorted(getattr(ledger, tier).items(), key=lambda line: -line[1])[:3]
        most = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in largest)
        need = f"need {format_bytes(need_bytes):>9}, have {format_bytes(have[tier]):>9}"
        if tier != "gpu" and problem.local_ranks > 1:
            need += f" for {problem.local_ranks} ranks"
        lines.append(f"{TIER_NAMES[tier] + ':':<6}{need} ({most})")
    if problem.shards_job:
        num_ranks = problem.nodes * problem.local_ranks
        lines.append(f"optimizer states are divided over all {num_ranks} ranks: a node has 1/{problem.nodes} of them")
    return lines


def _time(plan: PlacementPlan, times: StepTimes) -> list[str]:
    waits_s = max(0.0, times.step_s - times.compute_s)
    line = (
        f"step: {times.step_s:.3g} s, forward {times.forward_s:.3g} s, backward {times.backward_s:.3g} s; "
        f"compute waits {waits_s:.2g} s of it"
    )
    gap = plan.solver.get("gap_frac") if plan.solver else None
    if gap is not None:
        line += f"; at most {gap:.1%} above the best"
    busy = ", ".join(
        f"{RESOURCE_NAMES[resource]} {times.busy_s[resource]:.3g} s"
        for resource in Resource
        if times.busy_s.get(resource)
    )
    remark = launch_remark(times.launching_s, times.launch_waits_s, times.step_s)
    return [line, f"busy: {busy}", *([remark] if remark else [])]


def _units(plan: PlacementPlan) -> list[str]:
    kinds = Counter(map(_kind, plan.units))
    reasons: dict[str, str] = {}
    for unit in plan.units:
        reasons.setdefault(_kind(unit), unit.reason)
    lines = [f"{count} x {kind}" + _because(reasons[kind]) for kind, count in kinds.most_common(MOST_KINDS)]
    rest = sum(kinds.values()) - sum(count for _, count in kinds.most_common(MOST_KINDS))
    if rest:
        lines.append(f"{rest} x other combinations (`lazytrain explain` lists all)")
    stem = Counter(f"states {_states(unit)}" for unit in plan.stem)
    if stem:
        lines.append("stem: " + ", ".join(f"{count} x {states}" for states, count in stem.most_common()))
    return lines


def _kind(unit: UnitPlan) -> str:
    saves = unit.activations.value
    if unit.activations != Activations.RECOMPUTE and unit.saved != Tier.GPU:
        saves += f" in {TIER_NAMES[unit.saved]}"
    kind = f"weights {TIER_NAMES[unit.weights]}, states {_states(unit)}, {saves}"
    if unit.boundary is None:
        return f"{kind}, input computed again"
    return kind if unit.boundary == Tier.GPU else f"{kind}, input {TIER_NAMES[unit.boundary]}"


def _states(unit: UnitPlan) -> str:
    return f"{TIER_NAMES[unit.states]} {unit.state_bits} bit" + (
        " (streamed to the GPU)" if unit.streams_states else ""
    )


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
