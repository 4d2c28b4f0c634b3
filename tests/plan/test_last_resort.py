"""Inputs are dropped where nothing fits otherwise, and nowhere else."""

from dataclasses import replace

import pytest

highspy = pytest.importorskip("highspy")

from lazytrain_plugin.errors import InfeasiblePlanError  # noqa: E402
from lazytrain_plugin.plan.accounting import account  # noqa: E402
from lazytrain_plugin.plan.explain_unit import alternatives  # noqa: E402
from lazytrain_plugin.plan.greedy import fits, greedy_plan, leanest_plan  # noqa: E402
from lazytrain_plugin.plan.last_resort import dropping_plan, without_dropping  # noqa: E402
from lazytrain_plugin.plan.problem import HOST_RESERVE_GPU_BYTES, build_problem  # noqa: E402
from lazytrain_plugin.plan.request import Capabilities, PlanRequest  # noqa: E402
from lazytrain_plugin.plan.solve import solve_plan, solve_problem  # noqa: E402
from lazytrain_plugin.vocab import Tier  # noqa: E402
from tests.plan import builders  # noqa: E402

MODEL, MACHINE = builders.model(6), builders.hardware()
REQUEST = PlanRequest(max_tokens=8192, capabilities=Capabilities(dropped_boundaries=True))


def full(num_inputs):
    """A GPU that holds the leanest placement but for so many inputs."""
    problem = build_problem(MODEL, MACHINE, REQUEST)
    need = account(problem, leanest_plan(problem)).need_bytes()
    room = int(num_inputs * problem.units[0].boundary_bytes)
    return replace(REQUEST, gpu_budget_bytes=need["gpu"] - room, cpu_budget_bytes=need["cpu"])


def num_dropped(plan):
    return sum(unit.boundary is None for unit in plan.units)


@pytest.mark.parametrize("planner", [solve_plan, greedy_plan])
def test_full_memories_hold_a_plan_that_computes_inputs_again(planner):
    request = full(num_inputs=1.5)
    problem = build_problem(MODEL, MACHINE, request)
    plain = without_dropping(problem)
    with pytest.raises(InfeasiblePlanError):
        solve_problem(plain, time_limit_s=1)
    plan = planner(MODEL, MACHINE, request)
    assert fits(problem, plan)
    # Head-room makes an input more than its bytes; what slots are spared is less than one.
    assert 2 <= num_dropped(plan) <= 3
    dropped = next(unit for unit in plan.units if unit.boundary is None)
    assert "is not kept: the unit before runs once more" in dropped.reason
    assert plan.predicted_bytes["gpu"] <= request.gpu_budget_bytes


def test_what_no_dropping_helps_is_refused_as_before():
    request = replace(full(num_inputs=3), cpu_budget_bytes=HOST_RESERVE_GPU_BYTES)
    assert dropping_plan(build_problem(MODEL, MACHINE, request)) is None
    with pytest.raises(InfeasiblePlanError, match="host memory: need"):
        solve_plan(MODEL, MACHINE, request, time_limit_s=2)


def test_a_plan_that_fits_otherwise_drops_nothing():
    problem = build_problem(MODEL, MACHINE, full(num_inputs=0))
    plan = solve_problem(problem, time_limit_s=1)
    assert {unit.boundary for unit in plan.units} == {Tier.GPU}


def test_what_other_choices_would_change_is_explained():
    """Also beside units whose inputs are dropped, where some choices are none."""
    problem = build_problem(MODEL, MACHINE, REQUEST)
    lean = leanest_plan(problem)
    units = (replace(unit, boundary=None if u == 2 else Tier.GPU) for u, unit in enumerate(lean.units))
    plan = replace(lean, units=tuple(units))
    texts = {u: [other.text for other in alternatives(problem, plan, f"layers.{u}")] for u in (1, 2)}
    assert "save keep" in texts[2] and "input waits on the GPU" in texts[2]
    assert "save keep" not in texts[1]
