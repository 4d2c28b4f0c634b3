"""Several ranks of one machine: what its host memory holds once, and what each rank adds."""

from dataclasses import replace

import pytest

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.accounting import account, windows
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.choices import HOMES
from lazytrain_plugin.plan.greedy import greedy_plan, leanest_plan
from lazytrain_plugin.plan.memory_series import memory_series
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.summary import summarize_plan
from lazytrain_plugin.units import MIB
from lazytrain_plugin.vocab import Activations, Tier
from tests.plan import builders

TOKENS = 512


def problems(*, gpu_gib=8.0, **changes):
    """The same problem for one rank and for three."""
    machine, request = builders.hardware(gpu_gib=gpu_gib), PlanRequest(max_tokens=TOKENS, **changes)
    return [build_problem(builders.model(), machine, replace(request, local_ranks=count)) for count in (1, 3)]


def test_homes_are_there_once_and_everything_else_once_per_rank():
    one, three = problems()
    plan = leanest_plan(one).with_units(activations=Activations.KEEP, saved=Tier.CPU, boundary=Tier.CPU)
    alone, together = account(one, plan), account(three, plan)
    largest = max(unit.num_trainable for unit in (*one.units, *one.stem))
    means = 2 * max(unit.gradient_bytes for unit in (*one.units, *one.stem)) // 3
    assert together.gpu == alone.gpu | {"gradient exchange": 16 * largest + means}
    for line, num_bytes in alone.cpu.items():
        own = line in ("offloaded activations", "reserve")
        assert together.cpu[line] == (3 if own else 1) * num_bytes, line
    assert alone.cpu["offloaded activations"] > 0
    # One rank writes the checkpoint.
    one_saves, three_save = (ledger.outside_step["checkpoint"]["cpu"] for ledger in (alone, together))
    assert three_save - one_saves == 2 * alone.cpu["reserve"]


def test_without_a_gpu_each_rank_computes_in_host_memory():
    one, three = problems(gpu_gib=0)
    plan = leanest_plan(one)
    alone, together = account(one, plan).cpu, account(three, plan).cpu
    for line, num_bytes in alone.items():
        assert together[line] == (1 if line.endswith("weights and states") else 3) * num_bytes, line


@pytest.mark.parametrize("gpu_gib", [8, 0])
def test_the_picture_and_the_table_are_of_all_ranks(gpu_gib):
    _, three = problems(gpu_gib=gpu_gib)
    away = {"saved": Tier.CPU, "boundary": Tier.CPU} if gpu_gib else {}
    plan = leanest_plan(three).with_units(activations=Activations.KEEP, **away)
    times = simulate(three, plan, record=True)
    series = memory_series(three, plan, times.events, times.step_s)["cpu"]
    peak = max(map(sum, zip(*(line["bytes"] for line in series["lines"]), strict=True)))
    assert peak == pytest.approx(account(three, plan).total_bytes()["cpu"], rel=1e-3)
    assert "for 3 ranks" in summarize_plan(three, plan, times)


def test_activations_on_nvme_are_each_ranks_own():
    one, three = problems()
    plan = leanest_plan(one).with_units(boundary=Tier.NVME)
    assert account(three, plan).nvme == {"activations": 3 * account(one, plan).nvme["activations"]}


@pytest.mark.parametrize(
    ("planner", "gpu_gib", "room"),
    [(make_plan, builders.GPU_RESERVE_GIB + 0.7, 90), (make_plan, 0, 900), (greedy_plan, 0, 900)],
)
def test_plans_leave_room_for_every_rank(planner, gpu_gib, room):
    # Links so fast that saving in host memory is worth it.
    rates = ("h2d_shared_bytes_per_s", "d2h_shared_bytes_per_s", "host_memory_bytes_per_s")
    model, machine = builders.model(), builders.hardware(gpu_gib=gpu_gib, **dict.fromkeys(rates, 1e13))
    capabilities = Capabilities(offloaded_boundaries=True, offloaded_saved=True)
    request = PlanRequest(max_tokens=16384, capabilities=capabilities, local_ranks=3)
    problem = build_problem(model, machine, request)
    need = account(problem, leanest_plan(problem)).need_bytes()["cpu"]
    tight = replace(request, cpu_budget_bytes=need + room * MIB)
    plan = planner(model, machine, tight)
    check_plan(plan, model, machine, tight)
    alone = planner(model, machine, replace(tight, local_ranks=1))  # one rank may take more
    assert account(problem, alone).need_bytes()["cpu"] > tight.cpu_budget_bytes


def test_links_share_host_memory_and_gradients_are_divided():
    model = builders.model()
    fast = builders.hardware(host_memory_bytes_per_s=20e9)  # 3 x (1 + 1) GB/s fit
    slow = builders.hardware(host_memory_bytes_per_s=3e9)
    request = PlanRequest(max_tokens=TOKENS, local_ranks=3)
    alone = build_problem(model, fast, replace(request, local_ranks=1))
    roomy, narrow = (build_problem(model, machine, request) for machine in (fast, slow))
    assert roomy.h2d_bytes_per_s == alone.h2d_bytes_per_s == 2 * narrow.h2d_bytes_per_s
    assert narrow.units[0].weight_h2d_s == pytest.approx(2 * alone.units[0].weight_h2d_s)
    assert roomy.units[0].gradient_d2h_s == pytest.approx(alone.units[0].gradient_d2h_s / 3)
    assert roomy.units[0].cpu_update_s == alone.units[0].cpu_update_s


def test_no_ranks():
    with pytest.raises(ConfigError, match="local_ranks 0"):
        PlanRequest(local_ranks=0)


STREAMING = Capabilities(streamed_states=True)


def streaming(home, **costs):
    """The replayed step of three ranks whose units all stream their states."""
    _, three = problems(capabilities=STREAMING)
    three = replace(three, units=tuple(replace(unit, **costs) for unit in three.units))
    plan = leanest_plan(three)
    plan = plan.with_units(**HOMES[home])
    return three, plan, simulate(three, plan, record=True)


@pytest.mark.parametrize("home", ["stream_update", "mirror_update"])
def test_a_rank_streams_its_part_and_fetches_whole_weights_from_home(home):
    three, plan, times = streaming(home)
    cost = three.units[1]
    states = cost.rest_state_bytes + cost.gradient_bytes + cost.weight_bytes
    assert cost.streamed_in_bytes == states // 3
    events = {event.name: event for event in times.events}
    came, left = events[f"states {cost.name}"], events[f"states {cost.name} (back)"]
    assert came.num_bytes == states // 3
    assert left.num_bytes == pytest.approx((cost.rest_state_bytes + cost.weight_bytes) / 3, abs=2)
    fetched = events[f"weights {cost.name} (forward)" if home == "stream_update" else f"publish {cost.name}"]
    assert fetched.start_s >= left.end_s and fetched.num_bytes == cost.weight_bytes
    assert events[f"forward {cost.name}"].start_s >= fetched.end_s
    # States of the units after it don't wait for that.
    assert events[f"states {three.units[3].name}"].end_s <= fetched.start_s
    # The host has a copy of what rests on the GPU.
    host = account(three, plan).cpu["units: weights and states"]
    assert host == sum(unit.weight_bytes + unit.state_bytes for unit in three.units)


def test_the_program_plans_divided_updates():
    model = builders.model(6)
    # A slow worker, so that states had best pass the GPU.
    machine = builders.hardware(cpu_update_32bit_shared_parameters_per_s=1e7)
    request = PlanRequest(max_tokens=TOKENS, capabilities=STREAMING, local_ranks=2, state_slots=2)
    problem = build_problem(model, machine, request)
    need = account(problem, leanest_plan(problem)).need_bytes()
    room = {"gpu_budget_bytes": need["gpu"] + 20 * MIB, "cpu_budget_bytes": need["cpu"] + 400 * MIB}
    request = replace(request, **room)
    plan = make_plan(model, machine, request)
    check_plan(plan, model, machine, request)
    assert any(unit.streams_states for unit in (*plan.units, *plan.stem))
    problem = build_problem(model, machine, request)
    step_s, lean_s = (simulate(problem, found).step_s for found in (plan, leanest_plan(problem)))
    assert step_s < lean_s / 2
    assert plan.solver["gap_frac"] > -0.01  # the program's bound is not above the replay


DISK = {"nvme_bytes": 1 << 40, "nvme_read_bytes_per_s": 2e9, "nvme_write_bytes_per_s": 1e9}


def on_disk(home):
    """The same plan for one rank and for three: units on disk, with the replayed step."""
    able = Capabilities(nvme=True, nvme_gradients=True)
    machine, request = builders.hardware(**DISK), PlanRequest(max_tokens=TOKENS, capabilities=able)
    found = []
    for count in (1, 3):
        problem = build_problem(builders.model(), machine, replace(request, local_ranks=count))
        plan = leanest_plan(problem).with_units(**HOMES[home])
        found.append((problem, plan, simulate(problem, plan, record=True)))
    return found


@pytest.mark.parametrize("home", ["nvme_states", "nvme_gradients", "nvme", "nvme_all"])
def test_ranks_divide_states_on_disk_and_each_reads_whole_weights(home):
    (one, plan, alone), (three, _, together) = on_disk(home)
    ledgers = account(one, plan), account(three, plan)
    assert ledgers[0].nvme == ledgers[1].nvme  # once, for all
    cost = one.units[0]
    weights = cost.weight_bytes if home in ("nvme", "nvme_all") else 0
    divided = cost.rest_state_bytes + (cost.gradient_bytes if home in ("nvme_gradients", "nvme_all") else 0)
    slots = [ledger.cpu["NVMe slots"] for ledger in ledgers]
    assert slots[0] == one.nvme_slots * (divided + weights)
    assert slots[1] == pytest.approx(one.nvme_slots * (divided + 3 * weights), abs=100)
    events = [{event.name: event for event in times.events} for times in (alone, together)]
    durations = lambda name: [found[name].end_s - found[name].start_s for found in events]  # noqa: E731
    names = [f"read {cost.name}", f"write {cost.name}"]
    for name in [*names, f"write gradients {cost.name}"] if divided > cost.rest_state_bytes else names:
        assert durations(name)[0] == pytest.approx(durations(name)[1])
    if weights:
        fetched = durations(f"read {cost.name} (backward)")
        assert fetched[1] == pytest.approx(3 * fetched[0]) == pytest.approx(3 * weights / DISK["nvme_read_bytes_per_s"])


@pytest.mark.parametrize("gradients", [False, True])
def test_the_program_puts_on_disk_what_ranks_do_not_hold_in_memory(gradients):
    model = builders.model(8)
    machine = builders.hardware(**DISK)
    able = Capabilities(nvme=True, nvme_gradients=gradients)
    request = PlanRequest(max_tokens=TOKENS, capabilities=able, local_ranks=2)
    problem = build_problem(model, machine, request)
    lean = leanest_plan(problem)
    need = account(problem, lean).need_bytes()
    host = need["cpu"] - sum(cost.rest_state_bytes for cost in problem.units) // 3
    if gradients:  # what all states and weights on the disk would leave is too much
        without = account(problem, lean.with_units(**HOMES["nvme"])).need_bytes()["cpu"]
        host = without - sum(cost.gradient_bytes for cost in problem.units) // 4
    request = replace(request, gpu_budget_bytes=need["gpu"], cpu_budget_bytes=host)
    plan = make_plan(model, machine, request)
    check_plan(plan, model, machine, request)
    assert any(unit.states == Tier.NVME for unit in plan.units)
    assert any(unit.gradient_tier == Tier.NVME for unit in plan.units) == gradients
    assert plan.solver["gap_frac"] > -0.01  # the program's bound is not above the replay


def test_states_on_the_gpu_are_divided():
    one, three = problems()
    plan = leanest_plan(one).with_units(**HOMES["resident"])
    alone, together = (account(problem, plan) for problem in (one, three))
    states = sum(unit.rest_state_bytes for unit in one.units)
    units = "units: weights and states"
    assert alone.gpu[units] - together.gpu[units] == pytest.approx(states * 2 / 3, abs=len(one.units))
    # Of gradients each rank keeps its part; one unit's are whole while they are exchanged.
    whole, parts = (list(windows(problem, plan))[-1].gradients for problem in (one, three))
    gradients = sum(unit.gradient_bytes for unit in one.units)
    assert whole - parts == pytest.approx(gradients * 2 / 3 - one.units[0].gradient_bytes, abs=9)
    assert three.units[0].own_update_s == pytest.approx(one.units[0].own_update_s / 3)


def test_more_ranks_keep_more_states_on_their_gpus():
    model = builders.model(6)
    machine = builders.hardware(cpu_update_32bit_shared_parameters_per_s=1e7)
    counts = []
    for ranks in (1, 4):
        request = PlanRequest(max_tokens=TOKENS, capabilities=Capabilities(), local_ranks=ranks)
        problem = build_problem(model, machine, request)
        room = sum(unit.rest_state_bytes for unit in problem.units) // 2
        request = replace(request, gpu_budget_bytes=account(problem, leanest_plan(problem)).need_bytes()["gpu"] + room)
        plan = make_plan(model, machine, request)
        check_plan(plan, model, machine, request)
        counts.append(sum(unit.states == Tier.GPU for unit in plan.units))
        assert plan.solver["gap_frac"] > -0.01
    assert counts[0] < counts[1], counts
