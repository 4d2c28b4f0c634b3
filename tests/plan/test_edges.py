"""Dropped inputs in a plan: what is refused, what they free and cost, by hand."""

from dataclasses import replace

import pytest

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.plan.accounting import account, windows
from lazytrain_plugin.plan.edges import Edge, backward_order, edges
from lazytrain_plugin.plan.greedy import leanest_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import Resource, simulate
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Activations, Fidelity, Tier
from tests.plan import builders
from tests.plan.test_simulate import timed

GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME


def with_boundaries(plan: PlacementPlan, *boundaries: Tier | None) -> PlacementPlan:
    return replace(plan, units=tuple(replace(unit, boundary=b) for unit, b in zip(plan.units, boundaries, strict=True)))


def lean(num_units=4, **hardware):
    problem = build_problem(
        builders.model(num_units), builders.hardware(**hardware), PlanRequest(max_tokens=512, nvme_budget_bytes=GIB)
    )
    return problem, leanest_plan(problem)


def test_stretches_run_again_when_backward_reaches_their_last_unit():
    _, plan = lean(6)
    plan = with_boundaries(plan, GPU, None, None, CPU, GPU, None)
    assert edges(plan.units) == [Edge(0, 2), Edge(4, 5)]
    order = [(4, True), (5, False), (4, False), (3, False), (0, True), (1, True), (2, False), (1, False), (0, False)]
    assert list(backward_order(plan.units)) == order


def test_a_plan_file_says_which_inputs_are_dropped(tmp_path):
    plan = with_boundaries(lean()[1], GPU, None, CPU, None)
    plan.save(tmp_path / "plan.json")
    assert '"boundary": null' in (tmp_path / "plan.json").read_text()
    assert PlacementPlan.load(tmp_path / "plan.json") == plan


def test_inputs_that_cannot_be_found_again_are_refused():
    _, plan = lean(3)
    with pytest.raises(PlanMismatchError, match="layers.0: the input of the first unit is dropped"):
        with_boundaries(plan, None, GPU, GPU)
    kept = replace(plan, units=(replace(plan.units[0], activations=Activations.KEEP), *plan.units[1:]))
    with pytest.raises(PlanMismatchError, match="layers.1: its input is dropped, but layers.0"):
        with_boundaries(kept, GPU, None, GPU)
    with pytest.raises(PlanMismatchError, match="layers.0: its input is dropped, which activations keep"):
        with_boundaries(kept, None, GPU, GPU)
    coded = {"activations": Activations.MATMULS, "boundary_bits": 8}
    lossy = replace(plan, fidelity=Fidelity.COMPACT, units=(replace(plan.units[0], **coded), *plan.units[1:]))
    with pytest.raises(PlanMismatchError, match="kept in 8 bits"):
        with_boundaries(lossy, GPU, None, GPU)
    assert with_boundaries(kept, GPU, GPU, None).units[2].boundary is None


def test_memory_of_every_window():
    """Found inputs wait until backward has passed their units; one off the GPU comes back for the whole stretch."""
    problem, plan = lean()
    boundary, workspace = problem.units[0].boundary_bytes, problem.units[0].workspace_bytes
    plan = with_boundaries(plan, GPU, None, None, GPU)
    inputs = [window.inputs // boundary for window in windows(problem, plan)]
    assert inputs == [2, 2, 1 + 2, 1 + 1, 1, 0]  # the loss, units 3 to 0, the end
    off = with_boundaries(plan, CPU, None, None, GPU)
    assert [window.inputs // boundary for window in windows(problem, off)] == [1, 1, 1 + 2, 1 + 1, 0, 0]
    assert account(problem, off).cpu["offloaded activations"] == boundary
    # A wider unit that runs again counts while it does.
    wide = replace(problem, units=(replace(problem.units[0], workspace_bytes=3 * workspace), *problem.units[1:]))
    others = [window.other // workspace for window in windows(wide, plan)][1:-1]
    assert others == [1, 3, 1, 3]


def test_a_dropped_input_costs_a_forward_of_the_unit_before():
    problem = timed(4)  # 2 s forward, 4 s backward
    plan = leanest_plan(problem)
    kept_s = simulate(problem, plan).step_s
    for boundaries, again in (((GPU, None, GPU, GPU), 1), ((GPU, None, GPU, None), 2), ((GPU, None, None, None), 3)):
        assert simulate(problem, with_boundaries(plan, *boundaries)).step_s == pytest.approx(kept_s + again * 2)


def test_weights_come_again_for_stretches_longer_than_the_slots():
    """Two slots: unit 3's run needs 0, 1, 2 again, and leaves 2 and 3 in the slots, so 1 and 0 come once more."""
    problem = timed(4, h2d=0.1)
    plan = replace(leanest_plan(problem), weight_slots=2)

    def copied(boundaries):
        found = simulate(problem, with_boundaries(plan, *boundaries), record=True).events
        return [event.name for event in found if event.resource == Resource.H2D and "(forward)" not in event.name]

    # Without an edge 2 and 3 are still in their slots.
    assert copied((GPU,) * 4) == ["weights layers.1 (backward)", "weights layers.0 (backward)"]
    assert copied((GPU, None, None, None)) == [
        "weights layers.0 (again)",
        "weights layers.1 (again)",
        "weights layers.2 (again)",
        "weights layers.3 (backward)",
        "weights layers.1 (backward)",
        "weights layers.0 (backward)",
    ]


def test_activations_on_nvme_are_written_behind_and_read_ahead():
    """Bytes of both directions, and a slow disk is waited for; what is still in a buffer is not read."""
    problem, plan = lean(6, nvme_bytes=GIB, nvme_read_bytes_per_s=1e9, nvme_write_bytes_per_s=1e9)
    plan = with_boundaries(replace(plan, nvme_slots=2), NVME, NVME, NVME, NVME, GPU, GPU)
    times = simulate(problem, plan, record=True)
    boundary = problem.units[0].boundary_bytes
    assert times.busy_s["nvme_write"] == pytest.approx(4 * boundary / 1e9)
    assert times.busy_s["nvme_read"] == pytest.approx(2 * boundary / 1e9)
    slow = replace(problem, nvme_write_bytes_per_s=boundary / 10.0)
    # Two buffers take what the last two units leave; the writes before are waited for.
    assert simulate(slow, plan).step_s - times.step_s > 2 * 10 - 6
