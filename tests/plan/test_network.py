"""The step of several nodes against times worked out by hand, and what makes it faster or slower."""

from dataclasses import replace

import pytest

from lazytrain_plugin.errors import ConfigError, InfeasiblePlanError
from lazytrain_plugin.plan.choices import HOMES
from lazytrain_plugin.plan.greedy import greedy_plan, leanest_plan
from lazytrain_plugin.plan.network import Cluster, plan_for_cluster, predict_step
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
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
    assert times.step_s == pytest.approx(48 + 12) and times.wire_bytes == 2 * 3000
    slow = predict_step(problem, leanest_plan(problem), cluster(network=1000 / 30))
    assert slow.step_s == slow.network_s == pytest.approx(2 * 3 * 30)


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
    gathered = predict_step(problem, resident, job)
    assert gathered.exposed_s == pytest.approx(2 * 3 / 4)
    assert gathered.wire_bytes == gathered.network_s == 0


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


def test_the_planned_step_is_the_predicted_one():
    model, machine, request = builders.model(), builders.hardware(), PlanRequest(max_tokens=8)
    job = cluster(nodes=4, ranks=2, network=1e9, inside=1e10)
    plan, problem, times = plan_for_cluster(model, machine, request, job, planner=greedy_plan)
    assert plan.predicted_step_s == times.step_s == predict_step(problem, plan, job).step_s
    assert problem == build_problem(model, machine, replace(request, local_ranks=2, nodes=4))


def test_ranks_that_do_not_fit_a_node_are_refused():
    model, request = builders.model(), PlanRequest(max_tokens=8)
    with pytest.raises(InfeasiblePlanError, match="host memory"):
        plan_for_cluster(model, builders.hardware(), request, cluster(ranks=10_000), planner=greedy_plan)


def test_mistakes():
    with pytest.raises(ConfigError, match="bandwidth"):
        cluster(network=0)
    with pytest.raises(ConfigError, match="0 nodes"):
        cluster(nodes=0)
