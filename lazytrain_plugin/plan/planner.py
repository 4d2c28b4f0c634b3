"""The planner that callers use: the program where HiGHS is installed, the greedy family where it isn't."""

from __future__ import annotations

import importlib.util
import logging

from lazytrain_plugin.plan.greedy import greedy_plan
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile

logger = logging.getLogger(__name__)


def make_plan(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> PlacementPlan:
    """The best placement that this installation can find. Errors: as `greedy_plan`."""
    if importlib.util.find_spec("highspy") is None:
        logger.warning(
            "highspy is not installed: the plan comes from the greedy planner, whose steps take 1 to 33 % longer in "
            "the cases of docs/planner-results.md, without a proven gap (pip install highspy)"
        )
        return greedy_plan(model, hardware, request)
    from lazytrain_plugin.plan.solve import solve_plan

    return solve_plan(model, hardware, request)
