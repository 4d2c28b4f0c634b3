"""Bits of saved activations in a plan: bytes, room that buys bits back, and the rule for pipeline stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.plan import formats
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.greedy import fits, greedy_plan
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.search import polished, search_patterns
from lazytrain_plugin.profile.model import StrategyProfile
from lazytrain_plugin.runtime.quantized_saves import FORMATS
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import LEAST_ACTIVATION_BITS, Activations, Fidelity, Tier
from tests.plan.builders import hardware, model

TOKENS = 8192
SAVING = (
    StrategyProfile(
        activations=Activations.MATMULS,
        saved_bytes_per_token=16 * 512,
        recompute_frac=0.1,
        attention_bytes_per_token=4 * 512,
    ),
)
WORK = {"strategies": SAVING, "flop_per_token": 2.0 * 64 * 512**2}
"""As much work per byte as real layers have."""
CAPABILITIES = Capabilities(strategies=frozenset({Activations.RECOMPUTE, Activations.MATMULS}))


def request(fidelity: Fidelity, gpu_gib: float = 8) -> PlanRequest:
    return PlanRequest(
        max_tokens=TOKENS, fidelity=fidelity, capabilities=CAPABILITIES, gpu_budget_bytes=int(gpu_gib * GIB)
    )


def test_bytes_are_those_of_the_codes():
    numel = 128 * 77
    for bits, name in FORMATS.items():
        assert formats.coded_bytes(2 * numel, 2, bits) == blockwise.block_format(name).storage_bytes(numel)
        assert formats.coded_bytes(4 * numel, 4, bits) == blockwise.block_format(name).storage_bytes(numel)
    assert formats.coded_bytes(2 * numel, 2, 16) == 2 * numel


def test_the_planner_counts_codes_and_leaves_attention_exact():
    problem = build_problem(model(**WORK), hardware(), request(Fidelity.COMPACT))
    cost = problem.units[0]
    attention, rest = 4 * 512 * TOKENS, 12 * 512 * TOKENS
    assert cost.planned_bits(Activations.MATMULS) == 4
    assert cost.saved_bytes(Activations.MATMULS) == attention + rest * 4.125 / 16
    assert cost.saved_bytes(Activations.MATMULS, 16) == attention + rest
    exact = build_problem(model(**WORK), hardware(), request(Fidelity.EXACT)).units[0]
    assert exact.saved_bytes(Activations.MATMULS) == attention + rest
    # Coding takes time: reading and writing 2 x (exact + coded) bytes.
    assert cost.recompute_s(Activations.MATMULS) > exact.recompute_s(Activations.MATMULS)


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_memory_left_over_buys_bits_back(fidelity):
    """With plenty of room all is exact; with less, bits fall; never below what the fidelity allows."""
    least = {}
    for gpu_gib in (8, 2.1, 2.0, 1.9, 1.85, 1.8, 1.75):
        plan = greedy_plan(model(8, **WORK), hardware(), request(fidelity, gpu_gib))
        bits = [unit.saved_bits for unit in plan.units if unit.activations == Activations.MATMULS]
        least[gpu_gib] = min(bits, default=16)
        assert min(bits, default=16) >= LEAST_ACTIVATION_BITS[fidelity]
        check_plan(plan, model(8, **WORK), hardware(), request(fidelity, gpu_gib))
        # No unit is two formats ahead of another.
        ladder = sorted({*bits})
        assert len(ladder) <= 2
    assert least[8] == 16
    if fidelity == Fidelity.COMPACT:
        assert min(least.values()) < 16


def test_slack_is_spent_to_the_last_unit_that_fits():
    problem = build_problem(model(8, **WORK), hardware(), request(Fidelity.COMPACT))
    units = greedy_plan(model(8, **WORK), hardware(), request(Fidelity.COMPACT)).with_units(saved_bits=4)
    room = account(problem, units).total_bytes()["gpu"]
    step = problem.units[0].saved_bytes(Activations.MATMULS, 5) - problem.units[0].saved_bytes(Activations.MATMULS, 4)
    tight = replace(problem, gpu_budget_bytes=room + int(3.3 * step * 1.02), evaluation_bytes=0)
    spent = formats.spend_slack(tight, units, fits)
    bits = [unit.saved_bits for unit in spent.units]
    assert bits == sorted(bits) and set(bits) == {4, 5}
    assert fits(tight, spent)
    one_more = bits.count(4) - 1
    raised = (replace(unit, saved_bits=5) if i >= one_more else unit for i, unit in enumerate(spent.units))
    assert not fits(tight, replace(spent, units=tuple(raised)))
    # What rests in host memory is not made wider: that would take the link's time.
    away = units.with_units(saved=Tier.CPU)
    assert formats.spend_slack(problem, away, fits) == away


def test_inputs_in_codes_make_room_for_more_units_that_save():
    """A budget that is tight for codes of saved tensors alone: the plan codes inputs too, and is faster for it."""
    found = 0
    for gpu_gib in (2.25, 2.3, 2.4, 2.5):
        wanted = request(Fidelity.COMPACT, gpu_gib)
        profile = model(12, **WORK, boundary_bytes_per_token=8 * 512)
        plan = greedy_plan(profile, hardware(), wanted)
        check_plan(plan, profile, hardware(), wanted)
        coded = [unit for unit in plan.units if unit.boundary_bits < 16]
        found += bool(coded)
        for unit in coded:
            assert unit.activations == Activations.MATMULS and unit.boundary_bits == unit.saved_bits
    assert found


def test_exact_plans_with_codes_are_refused():
    plan = greedy_plan(model(**WORK), hardware(), request(Fidelity.COMPACT, 1.8))
    with pytest.raises(PlanMismatchError, match="fidelity"):
        replace(plan.with_units(saved_bits=8), fidelity=Fidelity.EXACT)


def test_bits_of_pipeline_stages_are_the_papers():
    assert formats.stage_bits(4) == (4, 5, 6, 8)
    assert formats.stage_bits(1) == (4,)
    assert formats.stage_bits(8)[0] == 4 and formats.stage_bits(8)[-1] >= 8
    assert list(formats.stage_bits(8)) == sorted(formats.stage_bits(8))


def test_errors_fall_with_bits():
    for by_bits in formats.GRADIENT_ERROR.values():
        assert by_bits[4] > by_bits[5] > by_bits[6] > by_bits[8] > 0
    assert formats.gradient_error(16) == 0


@pytest.mark.parametrize("gpu_gib", [2.3, 2.5])
def test_a_search_goes_on_from_a_plan_with_inputs_in_codes(gpu_gib):
    """Other ways to save than the coded ones can't have such an input."""
    profile = model(12, **WORK, boundary_bytes_per_token=8 * 512)
    wanted = replace(request(Fidelity.COMPACT, gpu_gib), capabilities=Capabilities.everything())
    greedy = greedy_plan(profile, hardware(), wanted)
    assert any(unit.boundary_bits < 16 for unit in greedy.units)
    problem = build_problem(profile, hardware(), wanted)
    for found in (search_patterns(problem, greedy, tries_frac=0.1), polished(problem, greedy)):
        assert fits(problem, found)
    plan = make_plan(profile, hardware(), wanted)
    assert plan.predicted_step_s <= greedy.predicted_step_s
    check_plan(plan, profile, hardware(), wanted)
