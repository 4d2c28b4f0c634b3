"""The host's launches in a step: the GPU waits for them where a micro-batch is small, and a plan says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazytrain_plugin.plan.greedy import leanest_plan
from lazytrain_plugin.plan.launches import BOUND_FRAC, OBSERVED_FACTOR, launches_are_slower, launches_of
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.program import build_program
from lazytrain_plugin.plan.replay import Judge
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import UnitPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.summary import summarize_plan
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.plan import builders


def problem_of(*, launch_s: float = 50e-6, tokens: int = 64, accumulation: int = 1, **layer) -> PlacementProblem:
    request = PlanRequest(max_tokens=tokens, accumulation_steps=accumulation)
    model = builders.model(3, num_operators=20, **layer)
    return build_problem(model, builders.hardware(launch_s=launch_s), request)


def resident(problem: PlacementProblem, activations=Activations.RECOMPUTE):
    """Everything on the GPU: no transfer, no worker."""
    plan = leanest_plan(problem)
    home = {"weights": Tier.GPU, "states": Tier.GPU, "updater": Updater.GPU}
    units = tuple(replace(unit, **home, activations=activations) for unit in plan.units)
    return replace(plan, units=units, stem=tuple(replace(unit, **home) for unit in plan.stem))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_of_few_tokens_takes_what_its_launches_take(accumulation):
    """By hand: 20 operators of 2 x 50 us and 10 of the executor a forward; 1.2 times that and 16 a backward, which
    runs a forward again; 12 an update, 40 for the head."""
    problem = problem_of(accumulation=accumulation)
    times = simulate(problem, resident(problem), steps=4)
    forward_s, backward_s = 20 * 100e-6 + 10 * 50e-6, 1.2 * 20 * 100e-6 + 16 * 50e-6
    passes_s = 3 * (2 * forward_s + backward_s) + 40 * 50e-6
    updates_s = 5 * 12 * 50e-6
    assert times.launching_s == pytest.approx(accumulation * passes_s + updates_s)
    assert times.step_s == pytest.approx(times.launching_s, rel=1e-9)
    assert times.launch_waits_s == pytest.approx(times.step_s - times.compute_s)


def test_a_step_of_many_tokens_is_as_long_as_without_launches():
    """The host runs ahead: only what is launched before the first computation, and behind the last, can be seen."""
    with_launches, without = problem_of(tokens=65536), problem_of(tokens=65536, launch_s=0.0)
    plan = resident(with_launches)
    longer_s = simulate(with_launches, plan).step_s - simulate(without, plan).step_s
    assert 0 <= longer_s < 5 * 12 * 50e-6
    assert simulate(without, plan).launching_s == simulate(without, plan).launch_waits_s == 0


def test_the_host_waits_for_a_unit_that_the_cpu_updates():
    """It launches nothing of the unit before, so the forward is at least the updates and the last unit's launches."""
    problem = problem_of()
    plan = leanest_plan(problem)
    times = simulate(problem, plan)
    updates_s = sum(cost.cpu_update_s for cost in (*problem.stem[:1], *problem.units))
    last = problem.units[-1]
    assert times.forward_s >= updates_s + launches_of(last, plan.units[-1])[0]


@pytest.mark.parametrize(("activations", "factor"), [("keep", 1), ("recompute", 1), ("matmuls", OBSERVED_FACTOR)])
def test_saving_single_operators_costs_launches(activations, factor):
    (cost, *_) = problem_of().units
    activations = Activations(activations)
    unit = UnitPlan(name=cost.name, weights=Tier.GPU, states=Tier.GPU, updater=Updater.GPU, activations=activations)
    forward_s, backward_s, _ = launches_of(cost, unit)
    assert forward_s == pytest.approx(factor * cost.forward_launch_s)
    again_s = 0 if activations == Activations.KEEP else forward_s
    assert backward_s == pytest.approx(cost.backward_launch_s + again_s)


def test_the_program_never_promises_a_step_that_cannot_be_launched():
    problem = problem_of()
    model, v = build_program(problem)
    model.run()
    best_s = model.getInfo().objective_function_value / 1e3
    plan = resident(problem)
    keeping = replace(plan, units=tuple(replace(unit, activations=Activations.KEEP) for unit in plan.units))
    steps = [simulate(problem, made).step_s for made in (plan, keeping, leanest_plan(problem))]
    assert steps[1] < steps[0], "what runs again is launched again"
    # The solver must not be better than what can be launched: all units kept, updates by the CPU.
    least_s = 3 * (problem.units[0].forward_launch_s + problem.units[0].backward_launch_s)
    assert least_s <= best_s <= min(steps)


def test_replays_in_a_hurry_give_the_same_numbers():
    problem = problem_of(accumulation=2)
    judge = Judge(problem)
    for plan in (leanest_plan(problem), resident(problem), resident(problem, Activations.KEEP)):
        assert judge.step_s(plan) == simulate(problem, plan).step_s


def test_a_plan_says_when_the_host_is_what_takes_the_time():
    problem = problem_of()
    plan = resident(problem)
    times = simulate(problem, plan)
    assert times.launch_waits_s > BOUND_FRAC * times.step_s
    text = summarize_plan(problem, plan, times)
    assert "host launches: 0.0" in text and "larger micro-batch or torch_compile" in text
    large = problem_of(tokens=65536)
    assert "host launches" not in summarize_plan(large, plan, simulate(large, plan))


def test_measured_launches_correct_the_machines():
    problem = problem_of()
    plan = resident(problem)
    measured = {cost.name: 1.6 * launches_of(cost, unit)[0] for cost, unit in zip(problem.units[:2], plan.units)}
    assert launches_are_slower(problem, plan, measured) == pytest.approx(1.6)
    assert launches_are_slower(problem, plan, {}) == 0
    assert launches_are_slower(problem_of(launch_s=0.0), plan, measured) == 0


def test_measured_layers_count_instead_of_their_operators():
    problem = problem_of(forward_launch_s=0.01, backward_launch_s=0.03)
    assert problem.units[0].forward_launch_s == pytest.approx(0.01 + 10 * 50e-6)
    assert problem.units[0].backward_launch_s == pytest.approx(0.03 + 16 * 50e-6)


def test_profiles_of_earlier_versions_load_and_plan_as_they_did():
    model, machine = builders.model(3, num_operators=20), builders.hardware(launch_s=50e-6)

    def without(text: str, *names: str) -> str:
        return "\n".join(line for line in text.splitlines() if not any(f'"{name}"' in line for name in names))

    old_machine = HardwareProfile.from_json(without(machine.to_json(), "launch_s"))
    old_model = ModelProfile.from_json(
        without(model.to_json(), "num_operators", "forward_launch_s", "backward_launch_s")
    )
    assert old_machine.launch_s == 0 and old_model.units[0].num_operators == 0
    assert (old_machine.digest, old_model.digest) != (machine.digest, model.digest)
    for one, other in ((old_model, machine), (model, old_machine)):
        problem = build_problem(one, other, PlanRequest(max_tokens=64))
        assert all(cost.forward_launch_s == 0 for cost in problem.units)
    assert old_machine.digest not in make_plan(model, machine, PlanRequest(max_tokens=64)).digests.values()
