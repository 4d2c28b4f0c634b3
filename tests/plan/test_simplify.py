"""Choices that gain nothing are not made; those that do are kept."""

from dataclasses import replace

import pytest

from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.choices import HOMES
from lazytrain_plugin.plan.greedy import leanest_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.replay import Judge
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.simplify import LEAST_GAIN_FRAC, complexity, simplest
from lazytrain_plugin.profile.model import UnitProfile, UnitRole
from lazytrain_plugin.vocab import Activations, Tier
from tests.plan import builders


def problem(**hardware):
    return build_problem(builders.model(6), builders.hardware(**hardware), PlanRequest(max_tokens=1024))


def saving_all(plan, **changes):
    return plan.with_units(activations=Activations.KEEP, **changes)


def test_saving_is_given_up_where_copies_hide_the_recompute():
    slow_link = problem(d2h_shared_bytes_per_s=1e8, cpu_update_32bit_shared_parameters_per_s=1e12)
    lean = leanest_plan(slow_link)
    plan, step_s = simplest(slow_link, [saving_all(lean)])
    judge = Judge(slow_link)
    assert judge.step_s(saving_all(lean)) == pytest.approx(judge.step_s(lean), rel=LEAST_GAIN_FRAC)
    assert {unit.activations for unit in plan.units} == {Activations.RECOMPUTE}
    assert step_s == judge.step_s(plan) <= judge.step_s(saving_all(lean)) * (1 + LEAST_GAIN_FRAC)


def test_saving_that_spares_time_stays():
    fast = problem(
        d2h_shared_bytes_per_s=1e12, h2d_shared_bytes_per_s=1e12, cpu_update_32bit_shared_parameters_per_s=1e12
    )
    plan = saving_all(leanest_plan(fast))
    assert simplest(fast, [plan])[0] == plan


def test_only_as_much_is_given_up_as_changes_nothing():
    """The GPU waits for the link anyway until it has computed so much: the rest of the recompute counts."""
    middling = problem(d2h_shared_bytes_per_s=8e8, h2d_shared_bytes_per_s=1e12)
    kept = saving_all(leanest_plan(middling))
    plan, step_s = simplest(middling, [kept])
    judge = Judge(middling)
    fewest = [unit.activations for unit in plan.units].count(Activations.KEEP)
    assert step_s <= judge.step_s(kept) * (1 + LEAST_GAIN_FRAC)
    for u, unit in enumerate(plan.units):
        if unit.activations == Activations.KEEP:
            units = (*plan.units[:u], replace(unit, activations=Activations.RECOMPUTE), *plan.units[u + 1 :])
            assert judge.step_s(replace(plan, units=units)) > judge.step_s(kept) * (1 + LEAST_GAIN_FRAC)
            break
    else:
        assert fewest == 0


def test_of_equally_fast_plans_the_one_that_moves_least_is_taken():
    slow_updates = problem(cpu_update_32bit_shared_parameters_per_s=1e6)
    lean = leanest_plan(slow_updates)
    # The worker takes minutes; where inputs wait, and that one more unit's weights cross, changes nothing.
    offloading = lean.with_units(boundary=Tier.CPU, activations=Activations.KEEP, saved=Tier.CPU)
    first, second = (simplest(slow_updates, plans) for plans in ([offloading, lean], [lean, offloading]))
    assert first == second and first[0] == lean
    assert complexity(slow_updates, lean) < complexity(slow_updates, offloading)


def test_never_slower_than_what_must_not_be_beaten():
    """The tolerance ends at the plans that others would make."""
    one = problem()
    lean = leanest_plan(one)
    resident = replace(lean, units=(replace(lean.units[0], **HOMES["resident"]), *lean.units[1:]))
    judge = Judge(one)
    best_s = min(judge.step_s(plan) for plan in (lean, resident))
    assert simplest(one, [lean, resident], never_above_s=best_s)[1] == best_s


def test_states_of_small_tensors_rest_beside_them():
    """Some KiB, that would cross the link and come back for nothing."""
    model = builders.model(6)
    norm = UnitProfile(name="stem.rest", tensors=(builders.tensor("norm", 1),), role=UnitRole.REST)
    model = replace(model, stem=(norm, *model.stem))
    one = build_problem(model, builders.hardware(), PlanRequest(max_tokens=1024))
    plan, step_s = simplest(one, [leanest_plan(one)])
    assert [unit.states for unit in plan.stem] == [Tier.GPU, Tier.CPU, Tier.CPU]
    assert step_s <= Judge(one).step_s(leanest_plan(one))
    tight = replace(one, gpu_budget_bytes=account(one, leanest_plan(one)).need_bytes()["gpu"])
    assert simplest(tight, [leanest_plan(one)])[0].stem[0].states == Tier.CPU
