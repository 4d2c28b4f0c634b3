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

MOST_STARTS = 3
"""Placements from which fewer dropped inputs are looked for."""


def without_dropping(problem: PlacementProblem) -> PlacementProblem:
    """The problem as the search sees it: columns for what is a last resort would cost it time in every plan."""
    capabilities: Capabilities = replace(problem.capabilities, dropped_boundaries=False)
    return replace(problem, capabilities=capabilities)


def dropping_plan(problem: PlacementProblem) -> PlacementPlan | None:
    """The fastest placement found that drops inputs and fits, without a solver; None: even that does not fit."""
    if not drops_boundaries(problem):
        return None
    most = [other for plan in closest_plans(problem) for other in _most_dropped(problem, plan)]
    best = sorted(most, key=lambda plan: simulate(problem, plan, steps=2).step_s)[:MOST_STARTS]
    return _fastest(problem, [other for plan in best for other in _fewer_dropped(problem, plan)])


def _most_dropped(problem: PlacementProblem, plan: PlacementPlan) -> list[PlacementPlan]:
    """One unit of each `weight_slots` keeps its input, on the GPU or on the host; those that fit."""
    found = []
    for tier in _tiers(problem):
        units = (replace(unit, boundary=None if u % plan.weight_slots else tier) for u, unit in enumerate(plan.units))
        found.append(replace(plan, units=tuple(units)))
    return [other for other in found if fits(problem, other)]


def _fewer_dropped(problem: PlacementProblem, plan: PlacementPlan) -> Iterator[PlacementPlan]:
    """Keeps as many inputs as fit, from the last on, which backward frees first; on the GPU as long as there is room,
    or in host memory: what leaves takes slots."""
    tiers = _tiers(problem)
    for order in dict.fromkeys((tuple(tiers), tuple(reversed(tiers)))):
        fewer = plan
        for u in reversed(range(len(plan.units))):
            for tier in order if plan.units[u].boundary is None else ():
                units = (*fewer.units[:u], replace(fewer.units[u], boundary=tier), *fewer.units[u + 1 :])
                kept = replace(fewer, units=units)
                if fits(problem, kept):
                    fewer = kept
                    break
        yield fewer


def _tiers(problem: PlacementProblem) -> list[Tier]:
    return [Tier.GPU, Tier.CPU] if offloads_boundaries(problem) else [Tier.GPU]


def _fastest(problem: PlacementProblem, plans: list[PlacementPlan]) -> PlacementPlan | None:
    return min(plans, key=lambda plan: simulate(problem, plan, steps=2).step_s, default=None)
