"""The step of several nodes against times worked out by hand, and what makes it faster or slower."""

from dataclasses import replace

import pytest

from lazytrain_plugin.errors import ConfigError, InfeasiblePlanError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.choices import HOMES
from lazytrain_plugin.plan.cluster import Cluster
from lazytrain_plugin.plan.greedy import greedy_plan, leanest_plan
from lazytrain_plugin.plan.network import predict_step
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.summary import summarize_plan
from lazytrain_plugin.units import GIB, MIB
from tests.plan import builders
from tests.plan.test_simulate import timed


def cluster(nodes=2, ranks=1, network=1.0, inside=1e30, wire=2.0, **options):
    """Reduces an element per second over a link of 1 byte/s between two nodes."""
    return Cluster(
        nodes=nodes,
        ranks_per_node=ranks,
        network_bytes_per_s=network,
        inside_bytes_per_s=inside,
        wire_bytes_per_element=wire,
        **options,
    )


def with_elements(problem, num_trainable):
    return replace(problem, units=tuple(replace(unit, num_trainable=num_trainable) for unit in problem.units))


# forward 3 x 2, then backward 3 x (2 recompute + 4): gradients are final at 12, 18 and 24 s
@pytest.mark.parametrize(
    ("reduce_s", "exposed_s"), [(1, 1), (6, 6), (8, 12 + 3 * 8 - 24), (0, 0)], ids=["hidden", "just", "bound", "none"]
)
def test_the_network_works_beside_backward(reduce_s, exposed_s):
    problem = with_elements(timed(), 1000)
    times = predict_step(problem, leanest_plan(problem), cluster(network=1000 / max(reduce_s, 1e-9)))
    assert times.exposed_s == pytest.approx(exposed_s, abs=1e-5)
    assert times.step_s == pytest.approx(24 + exposed_s, abs=1e-5)
    assert times.network_s == pytest.approx(3 * reduce_s, abs=1e-5) and times.wire_bytes == 3000


def test_gradients_cross_in_every_micro_batch():
    problem = with_elements(timed(accumulation=2), 1000)
    times = predict_step(problem, leanest_plan(problem), cluster(network=1000 / 8))
    # Of the first micro-batch, 28 to 36 s is hidden by the next forward; backward waits for slots in between.
    assert times.step_s == pytest.approx(28 + 36) and times.wire_bytes == 2 * 3000
    slow = predict_step(problem, leanest_plan(problem), cluster(network=1000 / 30))
    # Nothing is under way from step to the first gradient.
    assert slow.step_s == pytest.approx(12 + slow.network_s) and slow.network_s == pytest.approx(2 * 3 * 30)


def test_frozen_units_send_nothing():
    problem = with_elements(timed(), 0)
    assert predict_step(problem, leanest_plan(problem), cluster()).wire_bytes == 0


def test_parts_meet_inside_the_node_beside_backward():
    problem = with_elements(timed(), 1000)
    (unit, *_) = problem.units
    plan = leanest_plan(problem)
    # 3/4 of a unit's gradients leave a rank, in as many seconds; they are final at 12, 18 and 24 s.
    job = cluster(nodes=1, ranks=4, inside=unit.gradient_bytes)
    assert predict_step(problem, plan, job).step_s == pytest.approx(24 + 3 / 4)
    resident = plan.with_units(**HOMES["resident"])
    # As much to bring the updated weights of the first unit to all ranks; those of the next come beside its forward.
    gathered = predict_step(problem, resident, job)
    assert gathered.exposed_s == pytest.approx(2 * 3 / 4)
    assert gathered.rank.busy_s["exchange"] == 0
    assert gathered.wire_bytes == gathered.network_s == 0


def test_codes_and_faster_links_shorten_the_step():
    problem = with_elements(timed(), 1000)
    plan = leanest_plan(problem)
    steps = [
        predict_step(problem, plan, cluster(nodes=8, network=network, wire=wire, latency_s=0.01)).step_s
        for network, wire in [(200, 8), (200, 148 / 64), (2000, 8), (2000, 148 / 64)]
    ]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 4
    # bound by the network, the ratio of the parts that the network takes is that of the bytes
    assert (steps[0] - 12) / (steps[1] - 12) == pytest.approx(64 * 8 / 148, rel=0.01)


@pytest.mark.parametrize("planner", [greedy_plan, make_plan])
def test_the_planned_step_is_the_predicted_one(planner):
    model, machine, request = builders.model(), builders.hardware(), PlanRequest(max_tokens=8)
    job = cluster(nodes=4, ranks=2, network=1e9, inside=1e10)
    request = replace(request, local_ranks=2, nodes=4, cluster=job)
    plan, problem = planner(model, machine, request), build_problem(model, machine, request)
    times = predict_step(problem, plan, job)
    assert plan.predicted_step_s == pytest.approx(times.step_s, rel=1e-3)
    assert times.exposed_s > 0 and times.step_s == simulate(problem, plan).step_s


def test_ranks_that_do_not_fit_a_node_are_refused():
    model, request = builders.model(), PlanRequest(max_tokens=8)
    with pytest.raises(InfeasiblePlanError, match="host memory"):
        greedy_plan(model, builders.hardware(), replace(request, local_ranks=10_000))


def test_mistakes():
    with pytest.raises(ConfigError, match="bandwidth"):
        cluster(network=0)
    with pytest.raises(ConfigError, match="0 nodes"):
        cluster(nodes=0)


def test_a_network_changes_what_is_worth_its_memory():
    """Where the exchange takes longer than all that computing could, nothing is kept for computing's sake."""
    model, machine = builders.model(6), builders.hardware()
    request = PlanRequest(max_tokens=2048, local_ranks=1, nodes=2)
    fast, slow = (replace(request, cluster=cluster(network=rate)) for rate in (1e15, 1e6))
    plans = [make_plan(model, machine, asked) for asked in (fast, slow)]
    kept = [sum(unit.activations != "recompute" for unit in plan.units) for plan in plans]
    assert kept[0] == 6 and kept[1] == 0
    problem = build_problem(model, machine, slow)
    assert simulate(problem, plans[1]).step_s < 1.01 * simulate(problem, plans[0]).step_s
    assert plans[1].solver["gap_frac"] < 0.02, "the program's bound knows the network"


def test_small_units_travel_in_fp32():
    job = cluster(nodes=4, network=100.0, wire=1.0, latency_s=0.5, fp32_below_elements=10, fp32_bytes_per_s=50.0)
    assert job.reduce_s(10) == pytest.approx(0.5 + 3 / 4 * 10 / 100)
    assert job.reduce_s(9) == pytest.approx(0.5 + 3 / 4 * 9 * 8 / 50)
    assert job.reduce_s(0) == 0 and job.wire_bytes(9) == 3 / 4 * 9 * 8


def test_links_are_those_of_the_request():
    with pytest.raises(ConfigError, match="the links are those of 2 nodes of 1 ranks"):
        PlanRequest(max_tokens=8, nodes=3, cluster=cluster())


def over_the_job(nodes=4, ranks=2, **changes):
    """Problems of a model whose states each node has, and of one whose states are divided over all ranks."""
    request = PlanRequest(max_tokens=512, local_ranks=ranks, nodes=nodes, **changes)
    machine = builders.hardware(gpu_gib=builders.GPU_RESERVE_GIB + 0.5)
    return [build_problem(builders.model(6), machine, replace(request, shard=shard)) for shard in ("node", "job")]


def test_states_divided_over_the_job_take_a_part_of_each_nodes_memory():
    of_node, of_job = over_the_job(accumulation_steps=2)
    plan = leanest_plan(of_node)
    lines = [account(problem, plan) for problem in (of_node, of_job)]
    weights = sum(cost.weight_bytes for cost in of_node.units)
    states = [ledger.cpu["units: weights and states"] - weights for ledger in lines]
    assert states[1] == pytest.approx(states[0] / 4, rel=1e-3), "states, gradients at rest, sums"
    resident = plan.with_units(**HOMES["resident"])
    states = [account(problem, resident).gpu["units: weights and states"] - weights for problem in (of_node, of_job)]
    assert states[1] == pytest.approx(states[0] / 4, rel=1e-3)
    assert of_job.units[0].cpu_update_s == of_node.units[0].cpu_update_s / 4
    means = [2 * max(cost.gradient_bytes for cost in (*of_node.units, *of_node.stem)) // parts for parts in (2, 8)]
    of_weights = of_job.exchange_bytes - means[1] - (of_node.exchange_bytes - means[0])
    assert of_weights == 40 * MIB, "what 4 nodes send at a time, and a rank's own"


def test_updated_weights_cross_the_network_before_they_are_used():
    """Forward 3 x 2, backward 3 x 6 s: new weights of the first unit, then one more in each unit's forward."""
    problem = with_elements(timed(), 1000)
    plan, bytes_of_unit = leanest_plan(problem), problem.units[0].gradient_bytes
    job = cluster(network=bytes_of_unit / 2, shards_job=True, wire=0.0)
    times = predict_step(problem, plan, job)
    assert times.exposed_s == pytest.approx(1) and times.weight_bytes == 3 * bytes_of_unit / 2
    slow = predict_step(problem, plan, replace(job, weights_bytes_per_s=bytes_of_unit / 10))
    assert slow.exposed_s == pytest.approx(3 * 5 - 2 * 2), "the last unit waits for all of them"
    resident = predict_step(problem, plan.with_units(**HOMES["resident"]), job)
    assert resident.exposed_s == pytest.approx(1)


def test_bytes_of_states_divided_over_the_job():
    of_node, of_job = (cluster(nodes=8, wire=148 / 64), cluster(nodes=8, wire=66 / 64, shards_job=True))
    assert of_node.spread_bytes(100) == 0 and of_job.spread_bytes(200) == 7 / 8 * 200
    assert of_job.wire_bytes(64) == 7 / 8 * 66 and of_node.wire_bytes(64) == 7 / 8 * 148
    small = replace(of_job, fp32_below_elements=100)
    assert small.wire_bytes(64) == 7 / 8 * 64 * 4


def test_what_one_node_cannot_hold_a_job_can():
    model, machine = builders.model(8), builders.hardware(gpu_gib=builders.GPU_RESERVE_GIB + 0.3)
    needs = {}
    for shard in ("node", "job"):
        links = cluster(nodes=4, ranks=2, network=1e10, inside=1e11, wire=4.0, shards_job=shard == "job")
        request = PlanRequest(max_tokens=256, local_ranks=2, nodes=4, shard=shard, cluster=links)
        problem = build_problem(model, machine, request)
        needs[shard] = account(problem, leanest_plan(problem)).need_bytes()
    least_bytes = [needs["job"][tier] + 8 * MIB for tier in ("gpu", "cpu")]
    tight = replace(request, gpu_budget_bytes=least_bytes[0], cpu_budget_bytes=least_bytes[1])
    plan = greedy_plan(model, machine, tight)
    assert plan.shard == "job"
    check_plan(plan, model, machine, tight)
    assert "divided over all 8 ranks" in summarize_plan(problem, plan, simulate(problem, plan))
    with pytest.raises(InfeasiblePlanError, match='divided over all 4 nodes \\("shard": "job"\\)'):
        greedy_plan(model, machine, replace(tight, shard="node", cluster=None))


@pytest.mark.parametrize("planner", [greedy_plan, make_plan])
def test_weights_of_a_job_do_not_rest_on_disk(planner):
    """Weights that were updated on several nodes meet in memory."""
    model = builders.model(16)
    disk = {"nvme_bytes": 64 * GIB, "nvme_read_bytes_per_s": 2e9, "nvme_write_bytes_per_s": 2e9}
    machine = builders.hardware(**disk)
    request = PlanRequest(max_tokens=256, local_ranks=2, nodes=2, shard="job", capabilities=Capabilities.everything())
    problem = build_problem(model, machine, request)
    lean = leanest_plan(problem)
    without_states = account(problem, lean.with_units(**HOMES["nvme_states"])).need_bytes()["cpu"]
    request = replace(request, gpu_budget_bytes=account(problem, lean).need_bytes()["gpu"] + 8 * MIB)
    tight = replace(request, cpu_budget_bytes=without_states + 8 * MIB)
    plan = planner(model, machine, tight)
    check_plan(plan, model, machine, tight)
    assert any(unit.states == "nvme" for unit in plan.units)
    assert not any(unit.weights == "nvme" for unit in plan.units)


def test_requests_that_contradict_themselves():
    with pytest.raises(ConfigError, match="divides states otherwise"):
        PlanRequest(max_tokens=8, nodes=2, shard="job", cluster=cluster())
    # On one node there is nothing to divide further.
    assert not PlanRequest(max_tokens=8, shard="job", capabilities=Capabilities.everything()).shards_job
