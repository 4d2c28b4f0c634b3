"""As many units as possible of those that may be changed."""

from __future__ import annotations

from dataclasses import replace

from lazytrain_plugin.plan.replay import Judge
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan


def most_changed(
    judge: Judge, plan: PlacementPlan, changed: dict[int, UnitPlan], limit_s: float
) -> tuple[PlacementPlan, int]:
    """The most units changed, the first ones, with which the plan fits and is no slower than `limit_s`: all, or found
    by halving; and how many.

    Args:
        changed: place of a unit -> what it becomes, those first that shall be changed first.
    """
    places = list(changed)

    def with_first(count: int) -> PlacementPlan:
        chosen = frozenset(places[:count])
        units = (changed[u] if u in chosen else unit for u, unit in enumerate(plan.units))
        return replace(plan, units=tuple(units))

    low, high = 0, len(places)
    while low < high:
        middle = high if low == 0 and high == len(places) else (low + high + 1) // 2
        candidate = with_first(middle)
        if judge.fits(candidate) and judge.step_s(candidate) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return with_first(low) if low else plan, low
