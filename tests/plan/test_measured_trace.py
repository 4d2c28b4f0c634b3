"""Traces: a round trip, sums that overlap and gap, and what is said of a file that is none."""

import pytest

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.measured import MeasuredStep, MeasuredTrace, busy_s, compare_kinds, compare_resources
from lazytrain_plugin.plan.simulate import Event, Resource

COMPUTE, H2D = Resource.COMPUTE, Resource.H2D


def step(number: int, step_s: float, *events: Event) -> MeasuredStep:
    return MeasuredStep(step=number, step_s=step_s, events=events, waits_s={"weights": 0.1}, peak_bytes={"gpu": 5})


def test_round_trip():
    trace = MeasuredTrace(steps=(step(3, 1.5, Event("weights a", H2D, -0.25, 1.75, 1 << 40)),), device="GPU", plan={})
    assert MeasuredTrace.from_json(trace.to_json()) == trace


def test_the_typical_step_is_the_median_the_lower_of_two():
    steps = [step(i, seconds) for i, seconds in enumerate((3.0, 1.0, 9.0, 2.0))]
    assert MeasuredTrace(steps=tuple(steps)).typical.step == 3
    assert MeasuredTrace(steps=tuple(steps[:3])).typical.step == 0
    with pytest.raises(ConfigError, match="holds no step"):
        MeasuredTrace(steps=())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1, "steps": [{}]}', '{"schema_version": 99}'])
def test_other_files_are_refused_with_how_to_make_one(text, tmp_path):
    with pytest.raises(ConfigError, match="trace"):
        MeasuredTrace.from_json(text)
    with pytest.raises(ConfigError, match="can't be read"):
        MeasuredTrace.load(tmp_path / "none.json")


def test_working_time_counts_what_overlaps_once():
    events = [Event("b", COMPUTE, 2.0, 3.0), Event("a", COMPUTE, 0.0, 2.5), Event("c", COMPUTE, 5.0, 6.0)]
    assert busy_s(events) == pytest.approx(4.0) and busy_s([]) == 0.0


def test_planned_against_measured_by_resource_and_by_kind():
    planned = [
        Event("forward a", COMPUTE, 0.0, 1.0),
        Event("backward a", COMPUTE, 1.0, 3.0),
        Event("weights a (forward)", H2D, 0.0, 1.0, 100),
    ]
    measured = [
        Event("forward a", COMPUTE, 0.0, 1.5),
        Event("backward a", COMPUTE, 2.0, 4.0),
        Event("backward a", COMPUTE, 4.5, 5.0),  # a wait lay between
        Event("update a", Resource.WORKER, 0.0, 0.5),
    ]
    resources = {row.resource: row for row in compare_resources(planned, measured)}
    assert set(resources) == {COMPUTE, H2D, Resource.WORKER}
    assert (resources[COMPUTE].planned_busy_s, resources[COMPUTE].measured_busy_s) == (3.0, 4.0)
    assert (resources[H2D].planned_bytes, resources[H2D].measured_bytes) == (100, 0)
    kinds = {row.kind: row for row in compare_kinds(planned, measured)}
    assert (kinds["backward"].planned_s, kinds["backward"].measured_s, kinds["backward"].count) == (2.0, 2.5, 2)
    assert (kinds["weights"].planned_s, kinds["weights"].count) == (1.0, 0)
