"""Bits of saved activations in a plan: bytes, time, and room that buys bits back (which: test_bits.py)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.plan import formats
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.greedy import fits, greedy_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.program import build_program, configure, run_program
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.search import polished, search_patterns
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.solve import solve_plan
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


def test_exact_plans_with_codes_are_refused():
    plan = greedy_plan(model(**WORK), hardware(), request(Fidelity.COMPACT, 1.8))
    with pytest.raises(PlanMismatchError, match="fidelity"):
        replace(plan.with_units(saved_bits=8), fidelity=Fidelity.EXACT)


def test_errors_fall_with_bits():
    for by_bits in formats.GRADIENT_ERROR.values():
        assert by_bits[4] > by_bits[5] > by_bits[6] > by_bits[8] > 0
    for tensor in formats.TENSOR_CLASSES:
        assert formats.tensor_error(tensor, 16) == 0


@pytest.mark.parametrize("gpu_gib", [2.2, 2.3])
def test_a_search_goes_on_from_a_plan_with_inputs_in_codes(gpu_gib):
    """Other ways to save than the coded ones can't have such an input."""
    profile = model(12, **WORK, boundary_bytes_per_token=8 * 512)
    wanted = replace(request(Fidelity.COMPACT, gpu_gib), capabilities=Capabilities.everything())
    greedy = greedy_plan(profile, hardware(), wanted)
    assert any(unit.boundary_bits < 16 for unit in greedy.units)
    problem = build_problem(profile, hardware(), wanted)
    for found in (search_patterns(problem, greedy, tries_frac=0.1), polished(problem, greedy)):
        assert fits(problem, found)
    plan = solve_plan(profile, hardware(), wanted, time_limit_s=1)
    assert plan.predicted_step_s <= greedy.predicted_step_s
    check_plan(plan, profile, hardware(), wanted)


def test_coding_takes_what_is_read_and_written_at_the_devices_rates():
    """By hand: products that a fused operator codes cost their codes alone, others and the input two passes."""
    fused = replace(SAVING[0], fused_bytes_per_token=8 * 512)  # 4 of attention, 8 fused, 4 in passes of their own
    profile = model(**{**WORK, "strategies": (fused,)}, boundary_bytes_per_token=2 * 512, fused_input=True)
    machine = hardware(quantize_bytes_per_s=1e9, dequantize_bytes_per_s=2e9)
    cost = build_problem(profile, machine, request(Fidelity.COMPACT)).units[0]
    exact_s = cost.again_s(Activations.MATMULS, 16, 16)
    assert exact_s == pytest.approx(0.1 * cost.forward_s)
    share = 4.125 / 16
    alone, on_the_way, own = 4 * 512 * TOKENS, 8 * 512 * TOKENS, 2 * 512 * TOKENS
    products_s = alone * (1 + share) * (1 / 1e9 + 1 / 2e9) + on_the_way * share / 1e9
    assert cost.again_s(Activations.MATMULS, 4, 16) - exact_s == pytest.approx(products_s)
    input_s = own * share / 1e9 + own * (1 + share) / 2e9
    assert cost.again_s(Activations.MATMULS, 16, 4) - exact_s == pytest.approx(input_s)
    away_s = own * (1 + share) * (1 / 1e9 + 1 / 2e9)  # before it leaves a pass of its own makes its codes
    assert cost.again_s(Activations.MATMULS, 16, 4, input_leaves=True) - exact_s == pytest.approx(away_s)
    assert cost.recompute_s(Activations.MATMULS) - exact_s == pytest.approx(products_s + input_s)
    # Where none is given, rates follow from the memory's.
    assert hardware().coding_bytes_per_s == (0.5 * 500e9, 0.75 * 500e9)
    assert machine.coding_bytes_per_s == (1e9, 2e9)


def test_the_program_counts_inputs_in_codes_as_the_accounting_does():
    """Its bound is one: no plan in codes is faster, with inputs on the GPU and off it."""
    for gpu_gib, capabilities in ((2.0, CAPABILITIES), (1.9, replace(CAPABILITIES, offloaded_boundaries=True))):
        wanted = replace(request(Fidelity.COMPACT, gpu_gib), capabilities=capabilities)
        profile = model(3, **WORK, boundary_bytes_per_token=8 * 512)
        problem = build_problem(profile, hardware(), wanted)
        program, columns = build_program(problem)
        configure(program)
        outcome = run_program(problem, program, columns, start=None, time_limit_s=5, gap_frac=1e-4)
        assert outcome.plan is not None and fits(problem, outcome.plan)
        assert any(unit.boundary_bits < 16 for unit in outcome.plan.units)
        choices = [
            {"activations": activations, "saved_bits": bits, "boundary_bits": bits, "boundary": boundary}
            for activations, bits in ((Activations.RECOMPUTE, 16), (Activations.MATMULS, 4))
            for boundary in (Tier.GPU, Tier.CPU)[: 1 + capabilities.offloaded_boundaries]
        ]
        for units in itertools.product(choices, repeat=3):
            plan = replace(
                outcome.plan, units=tuple(map(lambda unit, c: replace(unit, **c), outcome.plan.units, units))
            )
            if fits(problem, plan):
                assert simulate(problem, plan).step_s >= outcome.bound_s * (1 - 1e-3)
