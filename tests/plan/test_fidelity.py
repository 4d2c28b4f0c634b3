"""What a plan says of its lossy choices, and of a lower fidelity that would win."""

from dataclasses import replace

import pytest

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.check import check_plan, problem_of
from lazytrain_plugin.plan.fidelity import advise, lossy_choices
from lazytrain_plugin.plan.greedy import greedy_plan, leanest_plan
from lazytrain_plugin.plan.planner import make_plan, plan_without_solver
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.model import StrategyProfile, UnitRole
from lazytrain_plugin.vocab import Activations, Fidelity
from tests.plan import builders

SLOW_LINK = {"d2h_bytes_per_s": 2e9, "d2h_shared_bytes_per_s": 2e9}


def planned(fidelity: str, *, layers: int = 6, tokens: int = 64, **hardware):
    model, machine = builders.model(layers), builders.hardware(**hardware)
    request = PlanRequest(max_tokens=tokens, fidelity=fidelity)
    return greedy_plan(model, machine, request), model, machine, request


def test_an_exact_plan_has_no_lossy_choice():
    assert lossy_choices(*planned("exact")) == []


def test_each_lossy_choice_is_compared_with_the_same_placement_without_it():
    model, machine = builders.model(7), builders.hardware(**SLOW_LINK)
    request = PlanRequest(max_tokens=64, fidelity="compact")
    plan = leanest_plan(build_problem(model, machine, request))
    plan = replace(
        plan,
        units=tuple(replace(unit, gradient_bits=8) for unit in plan.units),
        stem=tuple(replace(unit, gradient_bits=8) for unit in plan.stem),
    )
    states, gradients = lossy_choices(plan, model, machine, request)
    assert "states" in states.what and states.num_units == 8  # all but the embedding
    assert "gradients" in gradients.what and gradients.num_units == 9

    exact = replace(
        plan,
        units=tuple(replace(unit, gradient_bits=16) for unit in plan.units),
        stem=tuple(replace(unit, gradient_bits=16) for unit in plan.stem),
    )
    problems = [problem_of(p, model, machine, request) for p in (plan, exact)]
    step_s = [simulate(problem, p).step_s for problem, p in zip(problems, (plan, exact), strict=True)]
    host = [account(problem, p).total_bytes()["cpu"] for problem, p in zip(problems, (plan, exact), strict=True)]
    assert gradients.saved_s == pytest.approx(step_s[1] - step_s[0]) and gradients.saved_s > 0
    assert gradients.saved_bytes["cpu"] == host[1] - host[0] > 0
    assert "0.6%" in str(gradients) and "host memory" in str(states) and "ms less per step" in str(gradients)


def test_what_keeps_a_plan_within_its_budget_is_called_needed():
    model, machine = builders.model(6), builders.hardware()
    roomy = PlanRequest(max_tokens=64, fidelity="compact")
    plan = greedy_plan(model, machine, roomy)
    need = check_plan(plan, model, machine, roomy).need_bytes()
    tight = replace(roomy, gpu_budget_bytes=need["gpu"], cpu_budget_bytes=need["cpu"])
    assert any(choice.needed for choice in lossy_choices(plan, model, machine, tight))
    assert not any(
        choice.needed
        for choice in lossy_choices(leanest_plan(build_problem(model, machine, roomy)), model, machine, roomy)
    )


def test_a_lower_fidelity_is_named_where_it_wins_more_than_5_percent():
    plan, model, machine, request = planned("exact", layers=10, gpu_gib=1.56, **SLOW_LINK)
    advice = advise(plan, model, machine, request)
    assert advice is not None and advice.fidelity in (Fidelity.BALANCED, Fidelity.COMPACT)
    lower = plan_without_solver(
        model,
        machine,
        replace(request, fidelity=advice.fidelity, state_bits=8, gradient_bits=None, activation_bits=None),
    )
    assert advice.speedup == pytest.approx(plan.predicted_step_s / lower.predicted_step_s, rel=1e-4)
    assert advice.speedup > 1.05
    assert f"{advice.speedup:.2f}x" in str(advice)
    # Nothing is lower than compact.
    assert advise(*planned("compact", layers=10, gpu_gib=1.56, **SLOW_LINK)) is None


def test_nothing_is_advised_where_compute_alone_decides():
    assert advise(*planned("exact", tokens=65536, gpu_gib=80)) is None


@pytest.mark.parametrize("bits", [{"gradient_bits": 8}, {"activation_bits": 4}])
def test_exact_fidelity_excludes_lossy_bits(bits):
    with pytest.raises(ConfigError, match="excludes"):
        PlanRequest(max_tokens=64, fidelity="exact", **bits)


def test_a_compact_plan_carries_its_bits_and_survives_its_file():
    plan, model, machine, request = planned("compact")
    assert {unit.gradient_bits for unit in (*plan.units, *plan.stem)} == {8}
    assert PlacementPlan.from_json(plan.to_json()) == plan
    ledger = check_plan(plan, model, machine, request)
    assert ledger.total_bytes() == plan.predicted_bytes
    assert check_plan(plan, model, machine).total_bytes() == plan.predicted_bytes


@pytest.mark.parametrize("planner", [greedy_plan, make_plan])
def test_the_embedding_keeps_32_bit_states_unless_it_is_asked_for(planner):
    model, machine = builders.model(2), builders.hardware()
    for embedding_bits in (None, 8):
        request = PlanRequest(max_tokens=64, fidelity="balanced", embedding_state_bits=embedding_bits)
        plan = planner(model, machine, request)
        bits = {unit.name: unit.state_bits for unit in (*plan.units, *plan.stem)}
        embedding = next(unit.name for unit in model.stem if unit.role == UnitRole.EMBEDDING)
        assert bits.pop(embedding) == (embedding_bits or 32)
        assert set(bits.values()) == {8}
        # The checker's problem, made from the plan alone, has the planner's bytes.
        assert check_plan(plan, model, machine).total_bytes() == plan.predicted_bytes


def test_measured_error_prices_replace_those_of_a_small_model():
    saving = StrategyProfile(activations=Activations.MATMULS, saved_bytes_per_token=8192, recompute_frac=0.1)
    model, machine = builders.model(2, strategies=(saving,)), builders.hardware()
    measured = {"norm": {4: 0.31, 5: 0.2, 6: 0.1, 8: 0.02}}
    texts = []
    for errors in (None, measured):
        request = PlanRequest(max_tokens=64, fidelity="compact", gradient_errors=errors)
        plan = leanest_plan(build_problem(model, machine, request))
        units = tuple(replace(u, activations=Activations.MATMULS, saved_bits=4, boundary_bits=4) for u in plan.units)
        choices = lossy_choices(replace(plan, units=units), model, machine, request)
        texts.append(next(choice.error for choice in choices if "activations" in choice.what))
    assert "up to 11.4%" in texts[0] and "not yet measured on this one" in texts[0]
    assert "up to 31.0%" in texts[1] and "norm 31.0%, gemm 11.4%" in texts[1] and "measured on this model" in texts[1]
