"""The page of a step: what it draws is the replay and the ledger, whole and once."""

import json
import re

import pytest

from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.greedy import leanest_plan, plan_greedily
from lazytrain_plugin.plan.measured import MeasuredStep
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.simulate import Event, Resource, simulate
from lazytrain_plugin.plan.timeline import build_timeline, compute_waits, timeline_page, with_measured
from lazytrain_plugin.units import GIB, MIB
from tests.plan import builders


def problem_and_plan(*, accumulation_steps=1, gpu_gib=8.0, budget=builders.GPU_RESERVE_BYTES + 300 * MIB, **changes):
    request = PlanRequest(
        max_tokens=2048,
        gpu_budget_bytes=budget if gpu_gib else None,
        accumulation_steps=accumulation_steps,
        capabilities=Capabilities.everything(),
    )
    problem = build_problem(builders.model(7), builders.hardware(gpu_gib=gpu_gib, **changes), request)
    return problem, plan_greedily(problem)


def offloading():
    """Everything that a plan can move is moved."""
    problem, _ = problem_and_plan()
    return problem, leanest_plan(problem).with_units(boundary="cpu", activations="keep", saved="cpu")


CASES = {
    "one micro-batch": problem_and_plan,
    "accumulation": lambda: problem_and_plan(accumulation_steps=3),
    "all resident": lambda: problem_and_plan(budget=8 * GIB),
    "no GPU": lambda: problem_and_plan(gpu_gib=0),
    "offloaded activations": offloading,
}


@pytest.mark.parametrize("case", CASES)
def test_memory_is_at_its_fullest_what_the_ledger_says(case):
    problem, plan = CASES[case]()
    data = build_timeline(problem, plan, title="test")
    totals = account(problem, plan).total_bytes()
    assert {memory["tier"] for memory in data["memory"]} == {tier for tier, size in totals.items() if size}
    for memory in data["memory"]:
        count = len(memory["times_s"]) - 1
        assert all(len(line["bytes"]) == count for line in memory["lines"])
        assert memory["times_s"] == sorted(memory["times_s"])
        assert all(size >= 0 for line in memory["lines"] for size in line["bytes"])
        levels = [sum(line["bytes"][i] for line in memory["lines"]) for i in range(count)]
        assert max(levels) == pytest.approx(totals[memory["tier"]], abs=2)  # head-room is rounded down per window


@pytest.mark.parametrize("case", CASES)
def test_lanes_hold_every_operation_once_and_waits_fill_the_compute_lane(case):
    problem, plan = CASES[case]()
    data = build_timeline(problem, plan, title="test")
    times = simulate(problem, plan, record=True)
    drawn = [event[0] for lane in data["lanes"] for event in lane["events"]]
    assert sorted(drawn) == sorted(event.name for event in times.events)
    for lane in data["lanes"]:
        ends = [event[2] for event in lane["events"]]
        assert all(event[1] >= end - 1e-9 for event, end in zip(lane["events"][1:], ends))  # nothing overlaps
    waited_s = sum(wait["end_s"] - wait["start_s"] for wait in data["waits"])
    assert waited_s == pytest.approx(times.step_s - times.compute_s, abs=2e-3 * times.step_s)


def test_copies_carry_their_bytes():
    problem, plan = offloading()
    data = build_timeline(problem, plan, title="test")
    lanes = {lane["resource"]: lane["events"] for lane in data["lanes"]}
    by_name = {event[0]: event[3] for events in lanes.values() for event in events}
    cost = problem.units[3]
    assert by_name[f"gradients {cost.name}"] == cost.gradient_bytes
    assert by_name[f"activations {cost.name} (backward)"] == cost.boundary_bytes + cost.kept_bytes
    assert by_name[f"forward {cost.name}"] == 0


def test_a_wait_is_blamed_on_what_began_it():
    compute, h2d, worker = Resource.COMPUTE, Resource.H2D, Resource.WORKER
    events = [
        Event("forward a", compute, 0.0, 1.0),
        Event("update b", worker, 0.0, 4.0),
        Event("weights b (forward)", h2d, 4.0, 5.0),
        Event("forward b", compute, 5.0, 6.0),
        Event("gradients a", Resource.D2H, 1.0, 1.5),
        Event("weights c (forward)", h2d, 5.5, 7.0),
        Event("forward c", compute, 7.0, 8.0),
    ]
    first, second, last = compute_waits(events, 9.0)
    assert (first["start_s"], first["end_s"], first["before"]) == (1.0, 5.0, "forward b")
    assert (first["for"], first["through"]) == ("update b", "weights b (forward)")
    assert (second["for"], second["through"]) == ("weights c (forward)", "")
    assert (last["start_s"], last["end_s"], last["for"]) == (8.0, 9.0, "")


def test_the_page_stands_alone():
    problem, plan = problem_and_plan()
    measured = MeasuredStep(
        step=4,
        step_s=1.0,
        events=(Event("forward </script><b>", Resource.COMPUTE, 0.0, 0.5),),
        waits_s={},
        peak_bytes={"gpu": GIB},
    )
    page = timeline_page(with_measured(build_timeline(problem, plan, title="a & b"), measured))
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", page)
    body = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1)
    data = json.loads(body)
    assert data["title"] == "a & b" and data["measured"]["lanes"][0]["events"][0][0] == "forward </script><b>"
    assert page.count("</script>") == 2
