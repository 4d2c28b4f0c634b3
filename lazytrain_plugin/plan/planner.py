"""The planner that callers use: with the program's bound where HiGHS is installed, the same search without it else."""

from __future__ import annotations

import importlib.util
import logging

from lazytrain_plugin.plan.greedy import explained, plan_greedily
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.refusal import Rebuilder, infeasible
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.search import search_patterns
from lazytrain_plugin.plan.simplify import simplest
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile

logger = logging.getLogger(__name__)


TRIES_FRAC = 0.5
"""Of the tries of a search: with the greedy planner a second or two, whatever the model's depth."""


def make_plan(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> PlacementPlan:
    """The best placement that this installation can find.

    Raises:
        InfeasiblePlanError: nothing fits; need and have per tier and the nearest remedies are in the message.
    """
    if importlib.util.find_spec("highspy") is None:
        logger.warning(
            "highspy is not installed: the plan comes from the greedy planner and a search from there, without "
            "a proven gap; its steps may take some percent longer (docs/planner-results.md; pip install highspy)"
        )
        return plan_without_solver(model, hardware, request)
    from lazytrain_plugin.plan.solve import solve_plan

    return solve_plan(model, hardware, request)


def plan_without_solver(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> PlacementPlan:
    """The greedy placement, improved by one search for patterns. Deterministic. Errors: as `make_plan`."""
    problem = build_problem(model, hardware, request)
    greedy = plan_greedily(problem)
    if greedy is None:
        raise infeasible(problem, Rebuilder(model, hardware, request))
    found = search_patterns(problem, greedy, tries_frac=TRIES_FRAC) if problem.units else None
    step_s = greedy.predicted_step_s
    plan, step_s = simplest(problem, [greedy, found] if found else [greedy], never_above_s=step_s)
    return explained(problem, plan, step_s, never_above_s=greedy.predicted_step_s)
