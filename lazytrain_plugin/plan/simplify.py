"""Among plans that are as good as equally fast, the simplest: fewest bytes moved, least lossy, fewest special units.

A choice that saves less than a thousandth of a step saves nothing that a run could show, and has a price that the step
time doesn't: memory held, bytes on the links, a plan that is harder to read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from lazytrain_plugin.plan.accounting import is_streamed, nvme_written_bytes, offloaded_bytes, sends_gradients
from lazytrain_plugin.plan.choices import HOMES, STEM_HOMES, allows_home, home_of
from lazytrain_plugin.plan.halving import most_changed
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.replay import Judge
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.vocab import Activations, Tier

LEAST_GAIN_FRAC = 0.001
"""Of a step: plans this close are equally fast, and each group of choices must be worth this much."""
SPECIAL_HOMES = ("mirror", "mirror_update", "stream_update", "nvme_states", "nvme_gradients", "nvme", "nvme_all")
"""Homes other than plain streaming and plain residence, in the order in which they are given up."""
LESS_ON_NVME = {"nvme": ("nvme_states",), "nvme_gradients": ("nvme_states",), "nvme_all": ("nvme_states", "nvme")}


def simplest(
    problem: PlacementProblem, plans: Sequence[PlacementPlan], *, never_above_s: float = math.inf
) -> tuple[PlacementPlan, float]:
    """The simplest of the fastest plans, without the choices that it doesn't need, and its step time. Deterministic.

    Args:
        plans: at least one; all fit.
        never_above_s: what the result must not be slower than, unless all plans are.
    """
    judge = Judge(problem)
    timed = [(judge.step_s(plan), plan) for plan in plans]
    fastest_s = min(step_s for step_s, _ in timed)
    limit_s = max(fastest_s, min(fastest_s * (1 + LEAST_GAIN_FRAC), never_above_s))
    _, best = min(
        ((step_s, plan) for step_s, plan in timed if step_s <= limit_s),
        key=lambda item: (*complexity(problem, item[1]), item[0]),
    )
    return simplified(problem, judge, best, limit_s)


def complexity(problem: PlacementProblem, plan: PlacementPlan) -> tuple[int, int, int, int]:
    """(bytes that a step moves, units with lossy activations, special units, runs of equal units)."""
    pairs = [*zip(problem.units, plan.units), *zip(problem.stem, plan.stem)]
    moved = sum(_moved_bytes(problem, cost, unit) for cost, unit in pairs) + 2 * nvme_written_bytes(problem, plan)
    lossy = sum(min(unit.saved_bits, unit.boundary_bits) < 16 for unit in plan.units)
    return moved, lossy, sum(map(_is_special, plan.units)), sum(1 for _ in groupby(plan.units, key=decisions))


def decisions(unit: UnitPlan) -> tuple:
    """All that sets a unit's placement apart from its neighbour's."""
    return (home_of(unit), unit.activations, unit.saved, unit.boundary)


def _is_special(unit: UnitPlan) -> bool:
    return home_of(unit) in SPECIAL_HOMES or unit.activations != Activations.RECOMPUTE or unit.boundary != Tier.GPU


def _moved_bytes(problem: PlacementProblem, cost: UnitCost, unit: UnitPlan) -> int:
    """What crosses the links for a unit in a step, both ways."""
    micro_batches = problem.accumulation_steps
    moved = 2 * micro_batches * offloaded_bytes(cost, unit)
    if is_streamed(unit):
        moved += 2 * micro_batches * cost.weight_bytes
    elif sends_gradients(cost, unit):
        moved += cost.weight_bytes
    if sends_gradients(cost, unit):
        moved += micro_batches * cost.gradient_rest_bytes
    if unit.streams_states:
        moved += cost.streamed_in_bytes + cost.streamed_out_bytes
    return moved


def simplified(
    problem: PlacementProblem, judge: Judge, plan: PlacementPlan, limit_s: float
) -> tuple[PlacementPlan, float]:
    """The plan without the choices that a step of `limit_s` does without: of each group as many as can be spared."""
    for change in _simpler(problem):
        plan = _as_often_as_possible(judge, plan, change, limit_s)
    plan = _with_small_tensors_at_home(problem, judge, plan, limit_s)
    return plan, judge.step_s(plan)


def _with_small_tensors_at_home(
    problem: PlacementProblem, judge: Judge, plan: PlacementPlan, limit_s: float
) -> PlacementPlan:
    """States of the stem's small tensors (norms) beside their weights on the GPU, where that fits: some KiB."""
    for s, (cost, unit) in enumerate(zip(problem.stem, plan.stem)):
        if problem.has_gpu and cost.role == UnitRole.REST and sends_gradients(cost, unit):
            resident = replace(unit, **STEM_HOMES["gpu"])
            candidate = replace(plan, stem=(*plan.stem[:s], resident, *plan.stem[s + 1 :]))
            if judge.fits(candidate) and judge.step_s(candidate) <= limit_s:
                plan = candidate
    return plan


Change = Callable[[int, UnitPlan], UnitPlan | None]
"""A unit with a choice given up; None: it has nothing of the kind."""


def _simpler(problem: PlacementProblem) -> Iterator[Change]:
    """What may be given up, the dearest first."""
    yield (
        lambda u, unit: (
            replace(unit, activations=Activations.RECOMPUTE, saved=Tier.GPU, saved_bits=16, boundary_bits=16)
            if unit.saved != Tier.GPU and unit.activations != Activations.RECOMPUTE
            else None
        )
    )
    yield lambda u, unit: replace(unit, boundary=Tier.GPU) if unit.boundary in (Tier.CPU, Tier.NVME) else None
    if problem.capabilities.offloaded_saved:
        yield lambda u, unit: replace(unit, saved=Tier.CPU) if unit.saved == Tier.NVME else None
    if problem.capabilities.offloaded_boundaries:
        yield lambda u, unit: replace(unit, boundary=Tier.CPU) if unit.boundary == Tier.NVME else None
    for home in SPECIAL_HOMES:
        for plain in ("resident", "stream", *LESS_ON_NVME.get(home, ())):

            def change(u: int, unit: UnitPlan, home: str = home, plain: str = plain) -> UnitPlan | None:
                if home_of(unit) != home or not allows_home(problem, problem.units[u], plain):
                    return None
                return replace(unit, **HOMES[plain])

            yield change
    for activations in Activations:
        yield (
            lambda u, unit, activations=activations: (
                replace(unit, activations=Activations.RECOMPUTE, saved_bits=16, boundary_bits=16)
                if unit.activations == activations != Activations.RECOMPUTE
                else None
            )
        )


def _as_often_as_possible(judge: Judge, plan: PlacementPlan, change: Change, limit_s: float) -> PlacementPlan:
    changed = {u: new for u, unit in enumerate(plan.units) if (new := change(u, unit)) is not None}
    return most_changed(judge, plan, changed, limit_s)[0]
