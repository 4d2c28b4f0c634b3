"""Decides units' inputs alone: the program with every home and every strategy as a placement has them.

With weights and states on the host and everything recomputed this is the problem that LazyTrain's paper solves: which
layer boundaries are kept, in which tier, and which are computed again.
"""

from __future__ import annotations

from dataclasses import replace

import highspy

from lazytrain_plugin.plan.choices import home_of
from lazytrain_plugin.plan.greedy import fits
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.program import Outcome, build_program, configure, run_program
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.variables import Variables
from lazytrain_plugin.vocab import Tier


def decide_inputs(
    problem: PlacementProblem, plan: PlacementPlan, *, time_limit_s: float, gap_frac: float
) -> tuple[Outcome, PlacementPlan | None]:
    """Where the inputs of `plan`, which need not fit, rest in the fastest step, or which are dropped.

    Returns:
        What the solver said, and the placement; None: none was found that fits.
    """
    problem = replace(problem, weight_slots=plan.weight_slots, gradient_slots=plan.gradient_slots)
    model, v = build_program(problem)
    configure(model)
    _fix_all_but_inputs(model, v, plan)
    start = plan if fits(problem, plan) else None
    outcome = run_program(problem, model, v, start=start, time_limit_s=time_limit_s, gap_frac=gap_frac)
    if outcome.plan is None:
        return outcome, None
    # Whatever else a plan says, the bits of its activations for one, stays.
    units = zip(plan.units, outcome.plan.units)
    decided = replace(plan, units=tuple(replace(unit, boundary=found.boundary) for unit, found in units))
    return outcome, decided if fits(problem, decided) else None


def _fix_all_but_inputs(model: highspy.Highs, v: Variables, plan: PlacementPlan) -> None:
    fixed: list[tuple[object, bool]] = []
    for u, unit in enumerate(plan.units):
        home = home_of(unit)
        fixed += [(columns[u], name == home) for name, columns in v.homes.items()]
        fixed += [(column, key == (unit.activations, unit.saved)) for key, column in v.saved[u].items()]
    for s, unit in enumerate(plan.stem):
        fixed += [(v.stem_on_gpu[s], unit.states == Tier.GPU), (v.stem_streams[s], unit.streams_states)]
    for column, value in fixed:
        if not isinstance(column, int):
            model.changeColBounds(column.index, float(value), float(value))
