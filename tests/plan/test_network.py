"""The step of several nodes against times worked out by hand, and what makes it faster or slower."""

from dataclasses import replace

import pytest

from lazytrain_plugin.errors import ConfigError, InfeasiblePlanError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.greedy import greedy_plan, leanest_plan
from lazytrain_plugin.plan.network import Cluster, node_host_bytes, plan_for_cluster, predict_step, shard_problem
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.simulate import simulate
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


def test_gradients_cross_once_per_step():
    problem = with_elements(timed(accumulation=2), 1000)
    times = predict_step(problem, leanest_plan(problem), cluster(network=1000 / 8))
    assert times.step_s == pytest.approx(48 + 12)


def test_frozen_units_send_nothing():
    problem = with_elements(timed(), 0)
    assert predict_step(problem, leanest_plan(problem), cluster()).wire_bytes == 0


def test_each_rank_copies_its_share():
    problem = with_elements(timed(6, h2d=7.0, forward=2.0), 0)  # alone, copies are slower than computing
    plan = leanest_plan(problem)
    alone, shared = (predict_step(problem, plan, cluster(nodes=1, ranks=ranks)).step_s for ranks in (1, 4))
    assert alone == simulate(problem, plan).step_s
    assert alone > 60 and shared == pytest.approx(6 * 2 + 6 * 6)  # 7 / 4 s hide behind computing
    (unit, *_) = problem.units
    gathered = shard_problem(problem, cluster(ranks=4, inside=unit.weight_bytes)).units[0]
    assert gathered.weight_h2d_s == pytest.approx(7 / 4 + 3 / 4)


def test_codes_and_faster_links_shorten_the_step():
    problem = with_elements(timed(), 1000)
    plan = leanest_plan(problem)
    steps = [
        predict_step(problem, plan, cluster(nodes=8, network=network, wire=wire, latency_s=0.01)).step_s
        for network, wire in [(200, 4), (200, 148 / 64), (2000, 4), (2000, 148 / 64)]
    ]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 4
    # bound by the network, the ratio of the parts that the network takes is that of the bytes
    assert (steps[0] - 12) / (steps[1] - 12) == pytest.approx(64 * 4 / 148, rel=0.01)


def test_homes_are_in_a_node_once():
    model, machine, request = builders.model(), builders.hardware(), PlanRequest(max_tokens=8)
    problem = build_problem(model, machine, request)
    plan = greedy_plan(model, machine, request)
    rank = account(problem, plan)
    own = rank.cpu["reserve"] + rank.cpu.get("offloaded activations", 0)
    assert node_host_bytes(problem, plan, cluster(ranks=4)) == rank.need_bytes()["cpu"] + 3 * own


def test_the_planned_step_is_the_predicted_one():
    model, machine, request = builders.model(), builders.hardware(), PlanRequest(max_tokens=8)
    job = cluster(nodes=4, ranks=2, network=1e9, inside=1e10)
    plan, problem, times = plan_for_cluster(model, machine, request, job, planner=greedy_plan)
    assert plan.predicted_step_s == times.step_s == predict_step(problem, plan, job).step_s
    other = greedy_plan(model, machine, request)
    assert times.step_s <= predict_step(problem, other, job).step_s


def test_ranks_that_do_not_fit_a_node_are_refused():
    model, request = builders.model(), PlanRequest(max_tokens=8)
    with pytest.raises(InfeasiblePlanError, match="host memory"):
        plan_for_cluster(model, builders.hardware(), request, cluster(ranks=10_000), planner=greedy_plan)


def test_mistakes():
    with pytest.raises(ConfigError, match="bandwidth"):
        cluster(network=0)
    with pytest.raises(ConfigError, match="0 nodes"):
        cluster(nodes=0)
