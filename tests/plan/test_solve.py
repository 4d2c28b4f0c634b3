"""The program against brute force, the simulator and the greedy planner."""

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

highspy = pytest.importorskip("highspy")

from lazytrain_plugin.errors import InfeasiblePlanError  # noqa: E402
from lazytrain_plugin.plan.accounting import account  # noqa: E402
from lazytrain_plugin.plan.check import check_plan  # noqa: E402
from lazytrain_plugin.plan.choices import HOMES as ALL_HOMES  # noqa: E402
from lazytrain_plugin.plan.cluster import Cluster  # noqa: E402
from lazytrain_plugin.plan.greedy import fits, greedy_plan, leanest_plan  # noqa: E402
from lazytrain_plugin.plan.problem import HOST_RESERVE_GPU_BYTES, build_problem  # noqa: E402
from lazytrain_plugin.plan.program import build_program  # noqa: E402
from lazytrain_plugin.plan.request import Capabilities, PlanRequest  # noqa: E402
from lazytrain_plugin.plan.simulate import simulate  # noqa: E402
from lazytrain_plugin.plan.solve import solve_plan, solve_problem  # noqa: E402
from lazytrain_plugin.units import GIB, MIB  # noqa: E402
from lazytrain_plugin.vocab import Activations, Tier, Updater  # noqa: E402
from tests.plan import builders  # noqa: E402

GOLDEN = Path(__file__).parent / "golden"
HOMES = {
    "stream": {"weights": Tier.CPU, "states": Tier.CPU, "updater": Updater.CPU},
    "resident": {"weights": Tier.GPU, "states": Tier.GPU, "updater": Updater.GPU},
    "mirror": {"weights": Tier.GPU, "states": Tier.CPU, "updater": Updater.CPU},
}


def every_plan(problem):
    """All placements of a tiny problem."""
    lean = leanest_plan(problem)
    unit_choices = list(itertools.product(HOMES, (Activations.RECOMPUTE, Activations.KEEP)))
    for choice in itertools.product(unit_choices, repeat=len(lean.units)):
        units = tuple(
            replace(unit, **HOMES[home], activations=activations)
            for unit, (home, activations) in zip(lean.units, choice)
        )
        for stem_homes in itertools.product(("mirror", "resident"), repeat=len(lean.stem)):
            stem = tuple(replace(unit, **HOMES[home]) for unit, home in zip(lean.stem, stem_homes))
            yield replace(lean, units=units, stem=stem)


def random_problem(seed, num_units=2):
    """A problem whose durations and sizes have nothing in common, with a budget that forces choices."""
    draw = random.Random(seed)
    accumulation = draw.choice([1, 1, 3])
    problem = build_problem(
        builders.model(num_units), builders.hardware(), PlanRequest(max_tokens=512, accumulation_steps=accumulation)
    )
    units = tuple(
        replace(
            unit,
            forward_s=draw.uniform(1, 5),
            backward_s=draw.uniform(2, 10),
            weight_h2d_s=draw.uniform(0, 6),
            gradient_d2h_s=draw.uniform(0, 6),
            cpu_update_s=draw.uniform(0, 12),
            gpu_update_s=draw.uniform(0, 0.5),
            accumulate_s=draw.uniform(0, 2) if accumulation > 1 else 0.0,
            kept_bytes=draw.randrange(5, 60) * MIB,
            workspace_bytes=60 * MIB,
        )
        for unit in problem.units
    )
    stem = tuple(
        replace(
            unit, cpu_update_s=draw.uniform(0, 8), weight_h2d_s=draw.uniform(0, 3), gradient_d2h_s=draw.uniform(0, 3)
        )
        for unit in problem.stem
    )
    budget = problem.gpu_reserve_bytes + draw.randrange(150, 320) * MIB
    return replace(problem, units=units, stem=stem, gpu_budget_bytes=budget)


@pytest.mark.parametrize("seed", range(12))
def test_two_units_by_brute_force(seed):
    problem = random_problem(seed)
    feasible = [plan for plan in every_plan(problem) if fits(problem, plan)]
    if not feasible:
        with pytest.raises(InfeasiblePlanError):
            solve_problem(problem)
        return
    best_s = min(simulate(problem, plan).step_s for plan in feasible)
    plan = solve_problem(problem, gap_frac=0.0)
    assert fits(problem, plan)
    assert simulate(problem, plan).step_s == pytest.approx(plan.predicted_step_s, abs=1e-5)
    # The program's slots count by position, the simulator's by use: never better, rarely worse.
    assert best_s - 1e-6 <= plan.predicted_step_s or plan.weight_slots != problem.weight_slots
    assert plan.predicted_step_s <= best_s * 1.02


def test_three_units_by_brute_force():
    problem = random_problem(100, num_units=3)
    best_s = min(simulate(problem, plan).step_s for plan in every_plan(problem) if fits(problem, plan))
    assert solve_problem(problem, gap_frac=0.0).predicted_step_s <= best_s * 1.02


@pytest.mark.parametrize(
    ("seed", "accumulation", "nodes", "shard"),
    [
        *((seed, steps, 1, "node") for seed in range(6) for steps in (1, 4)),
        *((0, 1, 3, "node"), (1, 4, 3, "node"), (2, 1, 3, "job"), (3, 4, 3, "job")),
    ],
)
def test_the_program_and_the_simulator_tell_the_same_time(seed, accumulation, nodes, shard):
    """The program's step time is that of the replay, and on the safe side where they differ."""
    draw = random.Random(seed)
    links = {"network_bytes_per_s": 3e8, "inside_bytes_per_s": 1e9, "wire_bytes_per_element": 2.3}
    links["shards_job"] = shard == "job"
    machine = builders.hardware(
        cpu_update_32bit_shared_parameters_per_s=draw.uniform(3e7, 3e8),
        h2d_shared_bytes_per_s=draw.uniform(5e8, 4e9),
        d2h_shared_bytes_per_s=draw.uniform(5e8, 4e9),
    )
    problem = build_problem(
        builders.model(10),
        machine,
        PlanRequest(
            max_tokens=2048,
            gpu_budget_bytes=builders.GPU_RESERVE_BYTES + draw.randrange(200, 500) * MIB,
            accumulation_steps=accumulation,
            nodes=nodes,
            shard=shard,
            cluster=Cluster(nodes=nodes, ranks_per_node=1, **links),
        ),
    )
    outcome = builders.solve_whole(problem, time_limit_s=100, gap_frac=0.01 if nodes == 1 else 0.05)
    replayed_s = simulate(problem, outcome.plan).step_s
    assert replayed_s * 0.995 <= outcome.step_s <= replayed_s * 1.05


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("extra_mib", [180, 300, 600])
def test_never_slower_than_greedy_and_within_budget(extra_mib, accumulation):
    model, machine = builders.model(8), builders.hardware()
    request = PlanRequest(
        max_tokens=2048,
        gpu_budget_bytes=builders.GPU_RESERVE_BYTES + extra_mib * MIB,
        accumulation_steps=accumulation,
        capabilities=Capabilities(offloaded_boundaries=True),
    )
    greedy, solved = (
        greedy_plan(model, machine, request),
        solve_plan(model, machine, request),
    )
    assert solved.predicted_step_s <= greedy.predicted_step_s * 1.0011
    ledger = check_plan(
        solved,
        model,
        machine,
        request,
    )
    assert ledger.total_bytes() == solved.predicted_bytes
    assert solved.solver["name"] == "highs" and 0 <= solved.solver["gap_frac"] <= 0.01


def test_the_same_inputs_give_the_same_plan():
    # A search that ends before its time does.
    fewer = Capabilities(offloaded_boundaries=True)
    request = PlanRequest(max_tokens=2048, gpu_budget_bytes=builders.GPU_RESERVE_BYTES + 300 * MIB, capabilities=fewer)
    first, second = (solve_plan(builders.model(8), builders.hardware(), request).to_json() for _ in range(2))
    assert first == second


def test_fewer_slots_are_the_last_memory_to_be_had():
    model = builders.model(4, matrices=40)
    problem = build_problem(model, builders.hardware(), PlanRequest(max_tokens=64))
    lean = leanest_plan(problem)
    fewest = replace(lean, weight_slots=2, gradient_slots=2)
    need_bytes = next(
        b
        for b in range(builders.GPU_RESERVE_BYTES, builders.GPU_RESERVE_BYTES + GIB, MIB)
        if fits(replace(problem, gpu_budget_bytes=b), fewest)
    )
    plan = solve_plan(model, builders.hardware(), PlanRequest(max_tokens=64, gpu_budget_bytes=need_bytes))
    assert (plan.weight_slots, plan.gradient_slots) == (2, 2)


def test_what_does_not_fit_is_refused_with_remedies():
    with pytest.raises(InfeasiblePlanError, match=r"need .* have .*remedies: .*micro-batch of"):
        solve_plan(builders.model(4), builders.hardware(gpu_gib=1.8), PlanRequest(max_tokens=32768))


def test_without_a_gpu_only_activations_are_decided():
    model, machine = builders.model(4), builders.hardware(gpu_gib=0)
    roomy = solve_plan(model, machine, PlanRequest(max_tokens=2048))
    assert {unit.weights for unit in (*roomy.units, *roomy.stem)} == {Tier.CPU}
    assert {unit.activations for unit in roomy.units} == {Activations.KEEP}
    tight_bytes = roomy.predicted_bytes["cpu"] - 30 * MIB
    tight = solve_plan(model, machine, PlanRequest(max_tokens=2048, cpu_budget_bytes=tight_bytes))
    assert [unit.activations for unit in tight.units].count(Activations.KEEP) == 2


@pytest.mark.parametrize("gpu_gib", [0, 8])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_model_without_units_has_a_plan_for_its_stem(gpu_gib, accumulation):
    model, machine = builders.model(0), builders.hardware(gpu_gib=gpu_gib)
    plan = solve_plan(model, machine, PlanRequest(max_tokens=2048, accumulation_steps=accumulation))
    assert plan.units == () and {unit.updater for unit in plan.stem} == {Updater.GPU if gpu_gib else Updater.CPU}


def test_short_host_memory_moves_units_to_the_gpu():
    model, machine = builders.model(8), builders.hardware()
    budget = HOST_RESERVE_GPU_BYTES + 70 * MIB
    plan = solve_plan(model, machine, PlanRequest(max_tokens=2048, cpu_budget_bytes=budget))
    assert plan.predicted_bytes["cpu"] <= budget
    assert any(unit.weights == Tier.GPU for unit in plan.units)


def test_slots_are_few_where_a_step_waits_for_the_disk():
    """Two slots of each kind leave room for a unit that would have its states on the disk with the usual ones."""
    machine = builders.hardware(nvme_bytes=1 << 40, nvme_read_bytes_per_s=2e8, nvme_write_bytes_per_s=1e8)
    problem = build_problem(
        builders.model(8), machine, PlanRequest(max_tokens=512, capabilities=Capabilities(nvme=True))
    )
    lean = leanest_plan(problem)
    six = replace(
        lean, units=tuple(replace(u, **ALL_HOMES["nvme_states"]) if i < 6 else u for i, u in enumerate(lean.units))
    )
    need = account(problem, six).need_bytes()
    plan = solve_problem(replace(problem, gpu_budget_bytes=need["gpu"], cpu_budget_bytes=need["cpu"]))
    assert sum(unit.states == Tier.NVME for unit in plan.units) <= 5 and plan.nvme_slots < problem.nvme_slots


def test_golden_program(tmp_path):
    """The whole program of two units, readable: a change of an equation shows as a diff of tests/plan/golden/."""
    problem = build_problem(
        builders.model(2),
        builders.hardware(),
        PlanRequest(max_tokens=512, accumulation_steps=2, capabilities=Capabilities()),
    )
    model, _ = build_program(problem)
    path = tmp_path / "program.lp"
    model.writeModel(str(path))
    assert readable(path.read_text()) == (GOLDEN / "two_units.lp").read_text()


def readable(lp_text: str) -> str:
    """Six digits instead of seventeen."""
    return re.sub(r"\d+\.\d+(e[-+]?\d+)?", lambda match: f"{float(match[0]):.6g}", lp_text)


def test_nothing_is_printed(capfd):
    solve_plan(builders.model(2), builders.hardware(), PlanRequest(max_tokens=64))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("fails", ["always", "first"])
def test_a_relaxation_that_highs_cannot_decide_costs_the_bound_not_the_plan(monkeypatch, fails):
    """Numerical trouble ends a run of the simplex method with "Unknown" now and then."""
    solve, calls = highspy.Highs.getModelStatus, []

    def status(model):
        if model.getOptionValue("solve_relaxation")[1] and (fails == "always" or not calls):
            calls.append(model)
            return highspy.HighsModelStatus.kUnknown
        return solve(model)

    request = PlanRequest(max_tokens=64, capabilities=Capabilities())
    expected = solve_plan(builders.model(3), builders.hardware(), request)
    monkeypatch.setattr(highspy.Highs, "getModelStatus", status)
    plan = solve_plan(builders.model(3), builders.hardware(), request)
    assert calls
    check_plan(plan, builders.model(3), builders.hardware(), request)
    assert plan.predicted_step_s == pytest.approx(expected.predicted_step_s, rel=0.01)
