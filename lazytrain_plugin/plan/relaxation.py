"""The program with fractions of choices: a bound in a fraction of a second, and the mixture that a good plan has.

The layers of a decoder are alike, so what the relaxation says about single units (a third of each home) means little,
but its sums over units say how many should have which home. Rounded, these counts start the search for patterns.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy

from lazytrain_plugin.plan.patterns import Family, Pattern
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.variables import Column, Variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """Values of the columns where choices may be fractions."""

    bound_ms: float
    values: list[float]

    def of(self, column: Column) -> float:
        """A column's value; 0 where the problem has no such choice."""
        return 0.0 if isinstance(column, int) else self.values[column.index]


INFEASIBLE = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


class RelaxationError(Exception):
    """HiGHS could not say whether the relaxation has a solution (numerical trouble): nothing is known from it."""


def relax(model: highspy.Highs) -> Relaxed | None:
    """Solves the relaxation; None: even fractions of units don't fit, so nothing does. The model stays as it is.

    Raises RelaxationError.
    """
    model.setOptionValue("solve_relaxation", True)
    try:
        return solve_relaxation(model)
    finally:
        model.setOptionValue("solve_relaxation", False)
        model.clearSolver()


def solve_relaxation(model: highspy.Highs) -> Relaxed | None:
    """One relaxation, from the basis that the model has; the option is set. None: infeasible.

    Raises RelaxationError.
    """
    model.run()
    for solver in ("simplex", "ipm"):
        if model.getModelStatus() in (highspy.HighsModelStatus.kOptimal, *INFEASIBLE):
            break
        model.clearSolver()  # a basis that leads into numerical trouble, or a method
        model.setOptionValue("solver", solver)
        model.run()
        model.setOptionValue("solver", "choose")
    status = model.getModelStatus()
    if status in INFEASIBLE:
        return None
    if status != highspy.HighsModelStatus.kOptimal:
        raise RelaxationError(model.modelStatusToString(status))
    return Relaxed(bound_ms=model.getInfo().objective_function_value, values=list(model.getSolution().col_value))


def rounded(problem: PlacementProblem, v: Variables, relaxed: Relaxed, lean: PlacementPlan) -> PlacementPlan:
    """The pattern whose counts are nearest to the relaxation's sums. It may be a little larger than the budgets."""
    family = Family(problem, lean)
    num_units = len(problem.units)
    sums = [sum(map(relaxed.of, v.homes[home])) for home in family.homes]
    homes = [int(total) for total in sums]
    by_fraction = sorted(range(len(sums)), key=lambda index: homes[index] - sums[index])
    for index in by_fraction[: num_units - sum(homes)]:
        homes[index] += 1
    saved = [sum(relaxed.of(choices.get(choice, 0)) for choices in v.saved) for choice in family.saving]
    stem = []
    for on_gpu, streams in zip(v.stem_on_gpu, v.stem_streams):
        shares = {"gpu": relaxed.of(on_gpu), "stream_update": relaxed.of(streams)}
        shares["cpu"] = 1 - sum(shares.values())
        stem.append(max(shares, key=lambda home: shares[home]))
    return family.place(
        Pattern(
            homes=tuple(homes),
            phases=(0.5,) * len(homes),
            saved=tuple(int(count) for count in saved),
            boundaries=round(sum(map(relaxed.of, v.boundary_on_cpu))),
            parked=round(sum(map(relaxed.of, v.boundary_on_nvme))),
            stem=tuple(stem),
        )
    )
