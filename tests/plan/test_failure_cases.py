"""Failure cases of docs/failure-cases.md that a plan can prevent: S-06, 08, 11, 17, 38 and 53."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.check import check_plan, problem_of
from lazytrain_plugin.plan.greedy import greedy_plan, leanest_plan, plan_greedily
from lazytrain_plugin.plan.problem import SAVE_ELEMENTS, build_problem
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.units import GIB, MIB
from tests.plan import builders
from tests.plan.shapes import profile

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"


@pytest.mark.parametrize(("gpu_gib", "cpu_gib"), [(64, 2.3), (1.7, 16), (1.7, 2.5)])
def test_s06_too_little_memory_is_refused_with_what_is_short_and_that_much_more_does_fit(gpu_gib, cpu_gib):
    model, machine = builders.model(12, matrices=8), builders.hardware(gpu_gib=gpu_gib, cpu_gib=cpu_gib)
    request = PlanRequest(max_tokens=1 << 16)
    with pytest.raises(
        InfeasiblePlanError, match=r"(GPU|host) memory: need .* have .* \(short .*Nearest remedies: "
    ) as refused:
        greedy_plan(model, machine, request)
    units = {"MiB": MIB, "GiB": GIB}
    budgets = {}
    for tier, name, have in (("gpu", "GPU", machine.gpu_free_bytes), ("cpu", "host", machine.cpu_free_bytes)):
        found = re.search(rf"{name} memory: need [^;(]*\(short (\d+\.\d) (MiB|GiB);", str(refused.value))
        more = float(found[1]) * units[found[2]] + 0.1 * units[found[2]] if found else 0  # it is rounded to a decimal
        budgets[f"{tier}_budget_bytes"] = have + int(more)
    roomier = replace(request, **budgets)
    check_plan(greedy_plan(model, machine, roomier), model, machine, roomier)


@pytest.mark.parametrize(("state_bits", "bytes_per_parameter"), [(32, 14), (8, 8 + 2 / 64)])
def test_s08_host_memory_is_planned_to_the_byte_that_is_pinned(state_bits, bytes_per_parameter):
    """Weight, remainder, gradient and two moments; no size is rounded up to a power of two."""
    model = profile("7b")
    machine = HardwareProfile.load(HARDWARE / "h200_1x.json")
    problem = build_problem(model, machine, PlanRequest(max_tokens=1024, fidelity="balanced", state_bits=state_bits))
    planned = account(problem, leanest_plan(problem)).cpu["units: weights and states"]
    parameters = sum(unit.num_parameters for unit in model.units)
    assert planned == pytest.approx(bytes_per_parameter * parameters, rel=1e-3)


@pytest.mark.parametrize("budget_mib", [1812, 2112, 4512])
def test_s11_a_plan_for_the_longest_batch_holds_every_shorter_one(budget_mib):
    model, machine = builders.model(12), builders.hardware()
    request = PlanRequest(max_tokens=8192, gpu_budget_bytes=budget_mib * MIB)
    plan = greedy_plan(model, machine, request)
    longest = check_plan(plan, model, machine, request).need_bytes()
    before = longest
    for tokens in (8191, 4096, 777, 64, 1):
        need = check_plan(plan, model, machine, replace(request, max_tokens=tokens)).need_bytes()
        assert all(need[tier] <= before[tier] for tier in need)
        before = need
    with pytest.raises(InfeasiblePlanError):
        check_plan(plan, model, machine, replace(request, max_tokens=64 * 8192))


def test_s17_what_rests_on_nvme_takes_host_memory_for_its_slots_alone():
    """States of 20 units, 2.5 times the host budget: on disk, with three staging buffers in memory."""
    model = builders.model(40, matrices=24)
    machine = builders.hardware(gpu_gib=2.5, nvme_bytes=64 * GIB, nvme_read_bytes_per_s=3e9, nvme_write_bytes_per_s=2e9)
    request = PlanRequest(max_tokens=512, capabilities=Capabilities.everything())
    states = sum(cost.rest_state_bytes for cost in build_problem(model, machine, request).units)
    request = replace(request, cpu_budget_bytes=states // 2 + int(3.4 * GIB))
    plan = greedy_plan(model, machine, request)
    ledger = check_plan(plan, model, machine, request)
    on_disk = [unit for unit in plan.units if unit.states == "nvme"]
    assert on_disk, "else the test asks for nothing"
    problem = problem_of(plan, model, machine, request)
    largest = max(cost.rest_state_bytes + cost.weight_bytes for cost in problem.units)
    assert 0 < ledger.cpu["NVMe slots"] <= plan.nvme_slots * largest
    assert ledger.need_bytes()["cpu"] <= request.cpu_budget_bytes
    assert ledger.nvme["units: weights and states"] >= sum(
        cost.rest_state_bytes for cost, unit in zip(problem.units, plan.units) if unit.states == "nvme"
    )


def test_s38_memory_for_a_checkpoint_is_a_part_of_the_plan():
    """At the byte where training alone would fit, saving and resuming would not: refused now, not at the first save."""
    model, machine = builders.model(6), builders.hardware()
    problem = build_problem(model, machine, PlanRequest(max_tokens=64))
    ledger = account(problem, leanest_plan(problem))
    step, need = ledger.total_bytes()["cpu"], ledger.need_bytes()
    largest = max(tensor.numel for unit in (*model.units, *model.stem) for tensor in unit.tensors)
    assert largest < SAVE_ELEMENTS and need["cpu"] == step + 10 * largest  # both moments, in fp32 and in codes
    large = build_problem(builders.model(6, vocab=10**6), machine, PlanRequest(max_tokens=64))
    assert large.save_bytes == 10 * SAVE_ELEMENTS  # in pieces
    request = PlanRequest(max_tokens=64, gpu_budget_bytes=need["gpu"], cpu_budget_bytes=need["cpu"])
    check_plan(greedy_plan(model, machine, request), model, machine, request)
    with pytest.raises(InfeasiblePlanError):
        greedy_plan(model, machine, replace(request, cpu_budget_bytes=need["cpu"] - 1))


def test_s53_memory_follows_the_budget_in_small_steps():
    """From the leanest plan to everything on the GPU in tenths: each tenth is used, and none makes a step longer."""
    model, machine = builders.model(12), builders.hardware(gpu_gib=64)
    request = PlanRequest(max_tokens=2048)
    everything = plan_greedily(build_problem(model, machine, request)).predicted_bytes["gpu"]
    problem = build_problem(model, machine, request)
    least = account(problem, leanest_plan(problem)).need_bytes()["gpu"]
    unit_bytes = max(cost.weight_bytes + cost.state_bytes + cost.kept_bytes for cost in problem.units)
    used, steps_s = [], []
    for tenth in range(11):
        budget = least + (everything - least) * tenth // 10
        tight = build_problem(model, machine, replace(request, gpu_budget_bytes=budget))
        plan = plan_greedily(tight)
        used.append(plan.predicted_bytes["gpu"])
        steps_s.append(simulate(tight, plan).step_s)
        assert used[-1] <= budget
    assert steps_s == sorted(steps_s, reverse=True)
    jumps = [after - before for before, after in zip(used, used[1:])]
    assert max(jumps) <= (everything - least) / 10 + 2 * unit_bytes
    assert used[-1] > least + 0.9 * (everything - least)
