"""Chooses in how many bits saved activations wait: those that cost the least error, at the planned placement.

The planner looks for placements with the fewest bits that the fidelity allows, since only they make room for more
layers that save. Here bits are bought back with what is left: memory of a tier, time of a link. Each tensor that may be
in codes has an error price (plan/formats.py), measured on the model where it has trained before; the price of a plan is

    sqrt( mean over layers of  error(products in their bits)^2 + error(input in its bits)^2 )

and the wider format that lowers its square most per byte comes first. Errors about halve with every bit, so all layers
get the next wider format before any gets the one after it; a tensor whose price is low on this model waits for the
others.

Exchange rate: the step may become slower by `ERROR_WORTH_FRAC`, whatever error that spares. No bit is given up for
less: a choice that gains nothing (neither time nor memory that is needed) is never lossy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lazytrain_plugin.plan.formats import TENSOR_CLASSES, GradientErrors, tensor_error
from lazytrain_plugin.plan.halving import most_changed
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.replay import Judge
from lazytrain_plugin.plan.result import ACTIVATION_BITS, PlacementPlan, UnitPlan
from lazytrain_plugin.vocab import Activations, Tier

ERROR_WORTH_FRAC = 0.002
"""Of a step: what codes gain less than this, they aren't worth their error."""
LADDER = tuple(sorted(ACTIVATION_BITS))


def is_lossy(unit: UnitPlan) -> bool:
    """Whether anything of a unit's activations waits in fewer bits."""
    return unit.activations != Activations.RECOMPUTE and min(unit.saved_bits, unit.boundary_bits) < 16


def unit_error(unit: UnitPlan, measured: GradientErrors | None = None) -> float:
    """What codes put a unit's gradients off by, as a share of their norm: roots of summed squares over its tensors."""
    if not is_lossy(unit):
        return 0.0
    return math.hypot(*(tensor_error(tensor, bits_of(unit, tensor), measured) for tensor in TENSOR_CLASSES))


def plan_error(plan: PlacementPlan, measured: GradientErrors | None = None) -> float:
    """The same of a plan: root mean square over its units, exact ones included."""
    squares = [unit_error(unit, measured) ** 2 for unit in plan.units]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def bits_of(unit: UnitPlan, tensor: str) -> int:
    """Of a tensor (a key of `TENSOR_CLASSES`, which is also the field that says where it rests)."""
    return getattr(unit, f"{tensor}_bits")


def may_code(problem: PlacementProblem) -> bool:
    """Whether the fidelity allows activations in fewer bits."""
    return any(strategy.bits < 16 for cost in problem.units for strategy in cost.strategies.values())


def without_codes(problem: PlacementProblem) -> PlacementProblem:
    """The problem of a planner that knows no codes of activations."""

    def exact(cost: UnitCost) -> UnitCost:
        return replace(cost, strategies={name: replace(s, bits=16) for name, s in cost.strategies.items()})

    return replace(problem, units=tuple(map(exact, problem.units)))


def choose_bits(
    problem: PlacementProblem, plan: PlacementPlan, step_s: float, *, never_above_s: float = math.inf
) -> tuple[PlacementPlan, float]:
    """The same placement with the bits that cost the least error, and its step time. Deterministic.

    Args:
        plan: with the fewest bits wherever activations wait in codes; it fits.
        step_s: of `plan`.
        never_above_s: what the result must not be slower than, unless `plan` is.
    """
    if not any(map(is_lossy, plan.units)):
        return plan, step_s
    chooser = _Chooser(problem, max(step_s, min(step_s * (1 + ERROR_WORTH_FRAC), never_above_s)))
    plan = chooser.without_saving(plan)
    plan = chooser.with_wider_formats(plan)
    return plan, chooser.judge.step_s(plan)


def choose_bits_again(problem: PlacementProblem, plan: PlacementPlan) -> PlacementPlan:
    """The same placement with its bits chosen by the problem's prices, which have changed since; no slower than the
    exchange rate allows."""

    def fewest(cost: UnitCost, unit: UnitPlan) -> UnitPlan:
        if not is_lossy(unit) or cost.planned_bits(unit.activations) == 16:
            return unit
        return replace(unit, **cost.planned_formats(unit.activations))

    units = tuple(fewest(cost, unit) for cost, unit in zip(problem.units, plan.units, strict=True))
    judge, least = Judge(problem), replace(plan, units=units)
    if not judge.fits(least):  # codes of an input take room to decode it
        return plan
    return choose_bits(problem, least, judge.step_s(least))[0]


class _Chooser:
    def __init__(self, problem: PlacementProblem, limit_s: float) -> None:
        self._problem, self._limit_s, self.judge = problem, limit_s, Judge(problem)
        self._same: dict[tuple[int, UnitPlan], UnitPlan] = {}
        """Equal units are one object, so that judging them is quick."""

    def without_saving(self, plan: PlacementPlan) -> PlacementPlan:
        """Units compute again what they saved in codes where the step has the time for it: the first ones, which hold
        it longest."""
        lossy = [u for u, unit in enumerate(plan.units) if is_lossy(unit) and unit.boundary is not None]
        exact = {"activations": Activations.RECOMPUTE, "saved": Tier.GPU, "saved_bits": 16, "boundary_bits": 16}
        return self._as_often_as_possible(plan, lossy, lambda unit: replace(unit, **exact))[0]

    def with_wider_formats(self, plan: PlacementPlan) -> PlacementPlan:
        """Ladders of formats, one for each tensor and place where it rests; the next step of one is the next wider
        format for all units that are on it. Steps are taken by the error that they spare per byte; where one is not
        taken to its end, neither are those above it."""
        ended: set[tuple[str, Tier]] = set()
        while True:
            steps = {}
            for tensor in TENSOR_CLASSES:
                for place in dict.fromkeys(getattr(unit, tensor) for unit in plan.units if is_lossy(unit)):
                    if (tensor, place) not in ended and (step := self._next_step(plan, tensor, place)) is not None:
                        steps[tensor, place] = step
            if not steps:
                return plan
            ladder = max(steps, key=lambda ladder: steps[ladder][0])  # the first of equals
            _, waiting, wide = steps[ladder]
            field = f"{ladder[0]}_bits"
            wider = lambda unit, field=field, wide=wide: replace(unit, **{field: wide})  # noqa: E731
            # The last ones first: backward frees their memory first.
            plan, count = self._as_often_as_possible(plan, waiting[::-1], wider)
            if count < len(waiting):
                ended.add(ladder)

    def _next_step(self, plan: PlacementPlan, tensor: str, place: Tier) -> tuple[float, list[int], int] | None:
        """(error spared per byte, units, their next bits); None: all have 16 bits."""
        on_ladder = [
            (bits_of(unit, tensor), u)
            for u, unit in enumerate(plan.units)
            if is_lossy(unit) and getattr(unit, tensor) == place and bits_of(unit, tensor) < 16
        ]
        if not on_ladder:
            return None
        narrow = min(bits for bits, _ in on_ladder)
        wide = LADDER[LADDER.index(narrow) + 1]
        waiting = [u for bits, u in on_ladder if bits == narrow]
        errors = (tensor_error(tensor, bits, self._problem.gradient_errors) for bits in (narrow, wide))
        spared = next(errors) ** 2 - next(errors) ** 2
        cost, unit = self._problem.units[waiting[-1]], plan.units[waiting[-1]]
        more_bytes = _tensor_bytes(cost, unit, tensor, wide) - _tensor_bytes(cost, unit, tensor, narrow)
        return spared / max(1, more_bytes), waiting, wide

    def _as_often_as_possible(
        self, plan: PlacementPlan, places: list[int], change: Callable[[UnitPlan], UnitPlan]
    ) -> tuple[PlacementPlan, int]:
        """The most of `places`, the first ones, changed with which the plan fits and is in time; and how many."""
        changed = {}
        for u in places:
            unit = change(plan.units[u])
            changed[u] = self._same.setdefault((u, unit), unit)
        return most_changed(self.judge, plan, changed, self._limit_s)


def _tensor_bytes(cost: UnitCost, unit: UnitPlan, tensor: str, bits: int) -> int:
    return cost.boundary_bytes_in(bits) if tensor == "boundary" else cost.saved_bytes(unit.activations, bits)
