"""What is said about plan and measurement, and what is measured, on a clock that the test sets."""

from types import SimpleNamespace

import pytest

from lazytrain_plugin.integration import plan_watch
from lazytrain_plugin.integration.plan_watch import PlanWatch
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.runtime.streams import Trace
from lazytrain_plugin.units import GIB


class Rig:
    def __init__(self, monkeypatch, *, accumulation_steps=1, planned_s=1.0, planned_gib=100.0, ranks=None):
        self.now_s = 0.0
        monkeypatch.setattr(plan_watch.time, "perf_counter", lambda: self.now_s)
        memory = SimpleNamespace(
            memory_info=lambda: SimpleNamespace(rss=100 * GIB),
            memory_full_info=lambda: SimpleNamespace(pss=30 * GIB),
        )
        monkeypatch.setattr(plan_watch.psutil, "Process", lambda: memory)
        self.worker = SimpleNamespace(update_s=0.0, updated_parameters=0)
        self.streams = SimpleNamespace(is_cuda=False, trace=Trace())
        executor = SimpleNamespace(worker=self.worker, streams=self.streams, ranks=ranks)
        self.watch = PlanWatch(executor, accumulation_steps)
        plan = PlacementPlan(units=(), stem=(), predicted_bytes={"cpu": int(planned_gib * GIB)})
        self.watch.plan_changed(plan, SimpleNamespace(step_s=planned_s))

    def step(self, seconds=1.0, waited_s=0.25):
        self.now_s += seconds
        self.worker.update_s += 0.5
        self.worker.updated_parameters += 1000
        self.streams.trace.add_seconds("update", waited_s)
        self.streams.trace.end_step()
        return self.watch.step_ended()


def test_one_measurement_per_plan_after_the_warm_up(monkeypatch, caplog):
    caplog.set_level("INFO")
    rig = Rig(monkeypatch)
    found = [rig.step(seconds) for seconds in (9.0, 5.0, 1.1, 1.2, 1.0, 1.0)]
    assert [measured is not None for measured in found] == [False, False, False, True, False, False]
    assert found[3].step_s == pytest.approx(1.1)
    assert found[3].compute_s == pytest.approx(0.85)
    assert found[3].update_parameters_per_s == pytest.approx(2000)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "step 1.1 s (planned 1 s, +10%), host 100.0 GiB (planned 100.0 GiB, +0%)" in record.message
    rig.watch.plan_changed(PlacementPlan(units=(), stem=()), None)
    assert [rig.step() is not None for _ in range(5)].count(True) == 1


def test_launches_of_the_first_units_are_told_where_they_waited_for_nothing(monkeypatch):
    rig = Rig(monkeypatch)
    found = []
    for seconds in (9.0, 5.0, 1.0, 3.0):
        for unit in range(6):
            rig.streams.trace.launched(f"unit {unit}", seconds / 100, waited=unit == 1)
        found.append(rig.step())
    assert found[3].launches_s == {f"unit {unit}": pytest.approx(0.02) for unit in (0, 2, 3)}, "medians, warm-up apart"


def test_memory_of_several_ranks_is_the_nodes(monkeypatch, caplog):
    """What they have in common counts once."""
    caplog.set_level("INFO")
    rig = Rig(monkeypatch, ranks=SimpleNamespace(local_size=4))
    for _ in range(4):
        rig.step()
    assert "host 120.0 GiB (planned 100.0 GiB, +20%)" in caplog.text


def test_steps_with_a_save_or_an_evaluation_are_not_counted(monkeypatch):
    rig = Rig(monkeypatch)
    for seconds in (1.0, 1.0, 1.1):
        rig.step(seconds)
    rig.watch.disturb()
    assert rig.step(60.0) is None
    assert rig.step(1.2).step_s == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("planned_s", "planned_gib", "warning"),
    [(1.29, 100, ""), (0.78, 91.0, ""), (0.7, 100, "about time"), (2.0, 100, "time"), (1.0, 90, "about host memory"),
     (0.5, 50, "time and host memory"), (1.0, 300, "")],
)  # fmt: skip
def test_a_plan_that_is_far_off_is_a_warning(monkeypatch, caplog, planned_s, planned_gib, warning):
    rig = Rig(monkeypatch, planned_s=planned_s, planned_gib=planned_gib)
    caplog.set_level("INFO")
    for _ in range(4):
        rig.step()
    (record,) = caplog.records
    assert record.levelname == ("WARNING" if warning else "INFO")
    assert warning in record.message


def test_additions_of_micro_batches_are_no_update_rate(monkeypatch):
    rig = Rig(monkeypatch, accumulation_steps=4)
    measured = [rig.step() for _ in range(4)][-1]
    assert measured.update_parameters_per_s is None


def test_a_machine_that_gets_slower_is_told_once(monkeypatch, caplog):
    rig = Rig(monkeypatch)
    caplog.set_level("INFO")
    window = plan_watch.WINDOW_STEPS
    assert [rig.step(1.0) for _ in range(4)][-1] is not None
    # Noise, and a single disturbed window, are no drift.
    for seconds in (1.1, 0.9, 1.5, 1.0):
        assert [rig.step(seconds) for _ in range(window)] == [None] * window
    found = [rig.step(1.5, waited_s=0.5) for _ in range(2 * window)]
    assert [measured is not None for measured in found] == [False] * (2 * window - 1) + [True]
    assert found[-1].step_s == pytest.approx(1.5) and found[-1].compute_s == pytest.approx(1.0)
    assert found[-1].update_parameters_per_s == pytest.approx(2000)
    assert caplog.records[-1].message == "steps take 1.5 s now, they took 1 s (last 40)"
    # It stays so: nothing new. It becomes as it was: a drift again.
    assert not any(rig.step(1.55) for _ in range(5 * window))
    assert [rig.step(1.0) is not None for _ in range(2 * window)].count(True) == 1


def test_windows_that_are_off_to_both_sides_are_noise(monkeypatch):
    rig = Rig(monkeypatch)
    assert [rig.step(1.0) for _ in range(4)][-1] is not None
    for seconds in (1.4, 0.7, 1.4, 0.7):
        assert not any(rig.step(seconds) for _ in range(plan_watch.WINDOW_STEPS))


def test_a_few_outliers_do_not_move_a_window(monkeypatch):
    rig = Rig(monkeypatch)
    assert [rig.step(1.0) for _ in range(4)][-1] is not None
    assert not any(rig.step(30.0 if i % 5 == 0 else 1.0) for i in range(6 * plan_watch.WINDOW_STEPS))


def test_steps_of_fewer_tokens_are_not_compared(monkeypatch, caplog):
    caplog.set_level("INFO")
    rig = Rig(monkeypatch, accumulation_steps=2)
    rig.watch.plan_changed(PlacementPlan(units=(), stem=(), max_tokens=100), SimpleNamespace(step_s=1.0))

    def step(seconds, *tokens):
        for count in tokens:
            rig.watch.ran(count)
        return rig.step(seconds)

    assert not any(step(0.5, 100, 60) for _ in range(plan_watch.WINDOW_STEPS))
    (record,) = caplog.records
    assert "200 tokens" in record.message and "had 160" in record.message
    found = [step(seconds, *tokens) for seconds, *tokens in ((1.0, 100, 100), (0.4, 10, 10), (1.1, None, 95))]
    assert found[:2] == [None, None] and found[2].step_s == pytest.approx(1.0)
