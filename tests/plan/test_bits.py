"""Which bits a plan chooses: those that cost the least error, lowered only where that buys time or memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.bits import ERROR_WORTH_FRAC, choose_bits, is_lossy, plan_error, unit_error
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.formats import GRADIENT_ERROR, TENSOR_CLASSES, stage_bits
from lazytrain_plugin.plan.greedy import fits, leanest_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.result import ACTIVATION_BITS, PlacementPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.solve import solve_plan
from lazytrain_plugin.profile.model import StrategyProfile
from lazytrain_plugin.vocab import Activations, Fidelity, Tier
from tests.plan.builders import hardware, model

TOKENS = 8192
WORK = {"flop_per_token": 2.0 * 64 * 512**2}
"""As much work per byte as real layers have."""
CODED = {"activations": Activations.MATMULS, "saved_bits": 4, "boundary_bits": 4}
WORSE = {bits: 0.3 / 2**bits for bits in (4, 5, 6, 8)}
BETTER = {bits: 0.003 / 2**bits for bits in (4, 5, 6, 8)}


def saving(*, width: int = 16, attention: int = 4, **changes) -> tuple[StrategyProfile, ...]:
    values = {"saved_bytes_per_token": width * 512, "recompute_frac": 0.1, "attention_bytes_per_token": attention * 512}
    return (StrategyProfile(activations=Activations.MATMULS, **{**values, **changes}),)


def coded(num_units: int = 8, *, prices=None, strategies=None, **layers):
    """A problem without a tight budget, and the plan in which all units save in 4 bits."""
    request = PlanRequest(max_tokens=TOKENS, fidelity="compact", gradient_errors=prices)
    profile = model(num_units, strategies=strategies or saving(), **{**WORK, **layers})
    problem = build_problem(profile, hardware(), request)
    plan = leanest_plan(problem)
    return problem, replace(plan, units=tuple(replace(unit, **CODED) for unit in plan.units))


def with_room(problem, plan: PlacementPlan, num_bytes: float):
    """The problem with so much GPU memory more than `plan` needs."""
    return replace(problem, gpu_budget_bytes=account(problem, plan).need_bytes()["gpu"] + int(num_bytes))


def chosen(problem, plan: PlacementPlan, **limits) -> PlacementPlan:
    found, step_s = choose_bits(problem, plan, simulate(problem, plan).step_s, **limits)
    assert fits(problem, found) and step_s == pytest.approx(simulate(problem, found).step_s)
    return found


def bits(plan: PlacementPlan, tensor: str) -> list[int]:
    return [getattr(unit, f"{tensor}_bits") for unit in plan.units]


def test_memory_buys_bits_back_to_the_last_unit_that_fits():
    problem, plan = coded(boundary_bytes_per_token=8)
    cost = problem.units[0]
    step = cost.saved_bytes(Activations.MATMULS, 5) - cost.saved_bytes(Activations.MATMULS, 4)
    problem = with_room(problem, plan, 3.3 * 1.02 * step)
    found = chosen(problem, plan)
    # The last units, whose memory backward frees first.
    raised = bits(found, "saved").count(5)
    assert bits(found, "saved") == [4] * (8 - raised) + [5] * raised and 2 <= raised <= 4
    one_more = (replace(unit, saved_bits=5) if i >= 7 - raised else unit for i, unit in enumerate(found.units))
    assert not fits(problem, replace(found, units=tuple(one_more)))


@pytest.mark.parametrize(
    ("cheap", "dear"), [(("swiglu", "gemm"), ("norm",)), (("norm", "gemm"), ("swiglu",))], ids=["input", "products"]
)
def test_the_tensor_whose_codes_cost_most_error_gets_its_bits_back_first(cheap, dear):
    """The same memory, other prices measured on the model: other bits."""
    prices = {**dict.fromkeys(cheap, BETTER), **dict.fromkeys(dear, WORSE)}
    problem, plan = coded(prices=prices, boundary_bytes_per_token=12 * 512)  # as many bytes as products have
    cost = problem.units[0]
    room = 4 * (cost.boundary_bytes_in(6) - cost.boundary_bytes_in(4))
    found = chosen(with_room(problem, plan, room), plan)
    first, last = ("boundary", "saved") if dear == ("norm",) else ("saved", "boundary")
    assert sum(bits(found, first)) >= sum(bits(found, last)) + 6
    assert plan_error(found, prices) < plan_error(plan, prices)


def test_no_other_choice_of_bits_in_that_memory_costs_much_less():
    """All choices of equal bits for the first and for the other units, tried one by one."""
    prices = {"norm": {4: 0.02, 5: 0.01, 6: 0.006, 8: 0.001}}
    problem, plan = coded(4, prices=prices)
    cost = problem.units[0]
    problem = with_room(problem, plan, 1.02 * 9 * (cost.boundary_bytes_in(5) - cost.boundary_bytes_in(4)))
    best = min(
        plan_error(other, prices)
        for a in ACTIVATION_BITS for b in ACTIVATION_BITS for c in ACTIVATION_BITS for d in ACTIVATION_BITS
        for split in range(1, 4)
        if fits(problem, other := replace(plan, units=tuple(
            replace(unit, saved_bits=a if u < split else c, boundary_bits=b if u < split else d)
            for u, unit in enumerate(plan.units)
        )))
    )  # fmt: skip
    assert best * 0.9999 <= plan_error(chosen(problem, plan), prices) <= 1.1 * best < plan_error(plan, prices)


def test_with_all_memory_nothing_is_lossy():
    problem, plan = coded()
    assert not any(map(is_lossy, chosen(problem, plan).units))
    assert plan_error(chosen(problem, plan)) == 0


def test_wider_formats_of_what_leaves_the_gpu_take_no_more_than_the_exchange_rate_of_the_links_time():
    problem, plan = coded()
    away = plan.with_units(saved=Tier.CPU, boundary=Tier.CPU)
    problem = replace(with_room(problem, away, 2**30), h2d_bytes_per_s=2e8, d2h_bytes_per_s=2e8)
    step_s = simulate(problem, away).step_s
    found = chosen(problem, away)
    assert step_s < simulate(problem, found).step_s <= step_s * (1 + ERROR_WORTH_FRAC)
    assert any(map(is_lossy, found.units)) and plan_error(found) < plan_error(away)
    held = chosen(problem, away, never_above_s=step_s)
    assert simulate(problem, held).step_s <= step_s
    # A link with time to spare takes all.
    idle = replace(problem, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12)
    assert not any(map(is_lossy, chosen(idle, away).units))


def test_a_unit_whose_codes_gain_no_time_computes_again_instead():
    """The step waits for the links anyway: what the units save in codes spares nothing, and costs error."""
    problem, plan = coded(6)
    units = tuple(replace(cost, weight_h2d_s=100 * cost.forward_s) for cost in problem.units)
    found = chosen(replace(with_room(problem, plan, 0), units=units), plan)
    assert {unit.activations for unit in found.units} == {Activations.RECOMPUTE}


@pytest.mark.parametrize("num_stages", [4])
def test_bits_of_pipeline_stages_are_the_papers(num_stages):
    """AGoQ's four stages of interleaved 1F1B hold 11, 9, 7 and 5 micro-batches; in the memory in which the first has 4
    bits, the planner finds 4, 5, 6 and 8 for them, and so does the closed rule."""
    problem, plan = coded(100, strategies=saving(attention=0), boundary_bytes_per_token=0)
    live = [3 * num_stages - 2 * stage + 1 for stage in range(1, num_stages + 1)]
    first_bytes = sum(cost.saved_bytes(Activations.MATMULS, 4) for cost in problem.units)
    found = []
    for count in live:
        room = 1.02 * first_bytes * (live[0] / count - 1)
        stage = chosen(with_room(problem, plan, room), plan)
        found.append(Counter(bits(stage, "saved")).most_common(1)[0][0])
    assert tuple(found) == stage_bits(num_stages) == (4, 5, 6, 8)


def test_the_closed_rule_for_other_numbers_of_stages():
    assert stage_bits(1) == (4,)
    assert stage_bits(8)[0] == 4 and stage_bits(8)[-1] >= 8
    assert list(stage_bits(8)) == sorted(stage_bits(8))


def test_errors_of_a_unit_add_as_squares_and_those_of_a_plan_are_averaged():
    _, plan = coded(4)
    unit = plan.units[0]
    largest = {t: max(GRADIENT_ERROR[name][4] for name in classes) for t, classes in TENSOR_CLASSES.items()}
    assert unit_error(unit) == pytest.approx((largest["saved"] ** 2 + largest["boundary"] ** 2) ** 0.5)
    assert unit_error(replace(unit, boundary_bits=16)) == pytest.approx(largest["saved"])
    half = replace(plan, units=(*plan.units[:2], *leanest_plan(coded(4)[0]).units[2:]))
    assert plan_error(half) == pytest.approx(unit_error(unit) / 2**0.5)


@pytest.mark.parametrize("gpu_gib", [2.3, 8.0])
def test_plans_are_lossy_only_where_that_wins(gpu_gib):
    """The whole planner: a compact plan against the best one without codes of activations."""
    profile, machine = model(12, strategies=saving(), **WORK, boundary_bytes_per_token=8 * 512), hardware()
    request = PlanRequest(
        max_tokens=TOKENS, fidelity=Fidelity.COMPACT, gpu_budget_bytes=int(gpu_gib * 2**30),
        capabilities=Capabilities(strategies=frozenset({Activations.RECOMPUTE, Activations.MATMULS})),
    )  # fmt: skip
    plan = solve_plan(profile, machine, request, time_limit_s=1)
    check_plan(plan, profile, machine, request)
    exact = solve_plan(profile, machine, replace(request, activation_bits=16), time_limit_s=1)
    if any(map(is_lossy, plan.units)):
        assert plan.predicted_step_s < exact.predicted_step_s * (1 - ERROR_WORTH_FRAC)
    else:
        assert plan.predicted_step_s <= exact.predicted_step_s * (1 + ERROR_WORTH_FRAC)
    assert any(map(is_lossy, plan.units)) == (gpu_gib < 8)
