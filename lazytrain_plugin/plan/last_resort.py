"""Where nothing else fits: inputs are dropped and computed again, as few of them as must be.

An input in host memory costs a copy, one that is dropped a forward, and keeping activations of fewer units frees more
for less: so the planner drops inputs only where both memories are full without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lazytrain_plugin.plan.choices import drops_boundaries, offloads_boundaries
from lazytrain_plugin.plan.greedy import closest_plans, fits
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.request import Capabilities
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.vocab import Tier


def without_dropping(problem: PlacementProblem) -> PlacementProblem:
    """The problem as the search sees it: columns for what is a last resort would cost it time in every plan."""
    capabilities: Capabilities = replace(problem.capabilities, dropped_boundaries=False, nvme_boundaries=False)
    return replace(problem, capabilities=capabilities)


def dropping_plan(problem: PlacementProblem) -> PlacementPlan | None:
    """The fastest placement found that drops inputs and fits, without a solver; None: even that does not fit."""
    if not drops_boundaries(problem):
        return None
    found = [plan for plan in _with_most_dropped(problem) if fits(problem, plan)]
    fewer = [_with_fewer_dropped(problem, plan) for plan in found]
    return min(fewer, key=lambda plan: simulate(problem, plan, steps=2).step_s, default=None)


def _with_most_dropped(problem: PlacementProblem) -> Iterator[PlacementPlan]:
    """Of the placements that need least, those in which one unit of each `weight_slots` keeps its input."""
    tiers = [Tier.GPU, Tier.CPU] if offloads_boundaries(problem) else [Tier.GPU]
    for plan in closest_plans(problem):
        for tier in tiers:
            units = (
                replace(unit, boundary=None if u % plan.weight_slots else tier) for u, unit in enumerate(plan.units)
            )
            yield replace(plan, units=tuple(units))


def _with_fewer_dropped(problem: PlacementProblem, plan: PlacementPlan) -> PlacementPlan:
    """Keeps as many inputs as fit, from the last on: backward frees those first."""
    tiers = [Tier.GPU, Tier.CPU] if offloads_boundaries(problem) else [Tier.GPU]
    for u in reversed(range(len(plan.units))):
        if plan.units[u].boundary is not None:
            continue
        for tier in tiers:
            units = (*plan.units[:u], replace(plan.units[u], boundary=tier), *plan.units[u + 1 :])
            kept = replace(plan, units=units)
            if fits(problem, kept):
                plan = kept
                break
    return plan
