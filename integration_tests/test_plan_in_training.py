"""The plan while training goes on: kept for the next run, compared with what is measured, changed between two steps."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import transformers

from integration_tests import harness, models
from integration_tests.cases import Placement, Work
from integration_tests.harness import (
    InOrderTrainer,
    assert_bit_equal,
    fresh_accelerate_state,
    make_plan,
    run_lazytrain,
)
from integration_tests.loops import make_trainer
from lazytrain_plugin.config.schema import LazyTrainConfig
from lazytrain_plugin.errors import InfeasiblePlanError, LazyTrainError, PlanMismatchError
from lazytrain_plugin.integration import plan_watch, planning, training_request
from lazytrain_plugin.integration.plan_watch import ObservedStep
from lazytrain_plugin.integration.planning import Planner
from lazytrain_plugin.plan.bits import is_lossy, plan_error
from lazytrain_plugin.plan.choices import HOMES
from lazytrain_plugin.plan.explain_measured import planned_events
from lazytrain_plugin.plan.greedy import leanest_plan
from lazytrain_plugin.plan.launches import launches_of
from lazytrain_plugin.plan.measured import MeasuredTrace
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import RUNTIME_CAPABILITIES
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.timeline import timeline_page, with_measured
from lazytrain_plugin.profile.model import StrategyProfile
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.vocab import Activations
from tests.plan import builders

WORK = Work(model="llama", implementation="native", accumulation=2, max_norm=0.5)


@pytest.fixture(autouse=True)
def cache_of_this_test(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(folder, device, block=None, **options):
    model = harness.build_model(WORK.model, WORK.trained)
    samples = models.make_samples(WORK.model, 64)
    with fresh_accelerate_state():
        trainer = make_trainer(
            model, samples, folder, device, block={"optimizer": {"implementation": "native"}, **(block or {})},
            trainer_class=InOrderTrainer, gradient_accumulation_steps=2, max_grad_norm=0.5,
            **{"max_steps": 8, **options},
        )  # fmt: skip
        found = harness.finish(trainer)
        harness.close(found)
        return found


def test_weights_move_between_steps_and_no_bit_changes(device, tmp_path, monkeypatch, caplog):
    """Three plans in one run, each put in place while gradients of the step before are being applied."""
    expected = run(tmp_path / "plain", device)
    swaps = {3: ("gpu", "keep"), 5: ("cpu", "recompute"), 6: ("mixed", "keep")}
    windows = []

    def better_plan(self):
        windows.append(None)
        if len(windows) not in swaps:
            return None
        homes, activations = swaps[len(windows)]
        model = harness.build_model(WORK.model, WORK.trained)
        return make_plan(model, Placement(homes=homes, activations=activations))

    monkeypatch.setattr(Planner, "better_plan", better_plan)
    got = run(tmp_path / "swapping", device)
    assert len(windows) >= 7, "asked at the start of a window only, and of each"
    assert_bit_equal(got.weights, expected.weights)
    assert got.losses == expected.losses
    assert got.grad_norms == expected.grad_norms


def test_a_second_run_finds_its_plan_and_both_say_what_they_measure(device, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    texts = []
    for name in ("first", "second"):
        caplog.clear()
        run(tmp_path / name, device)
        texts.append(caplog.text)
    assert "plan for 24 tokens:\n" in texts[0]
    assert "plan for 24 tokens (with rates that earlier steps showed)" in texts[1]
    for text in texts:
        assert text.count("plan against measurement: step ") == 1
    caplog.clear()
    run(tmp_path / "third", device, block={"plan": {"cache": False}})
    assert "plan for 24 tokens:\n" in caplog.text


class SlowFrom(transformers.TrainerCallback):
    """The machine becomes slow: by the clock that steps are timed with, or really, where events of a GPU time them."""

    def __init__(self, first_step, device, monkeypatch):
        self.first_step, self.device, self.late_s = first_step, device, 0.0
        if device == "cpu":
            clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + self.late_s)
            monkeypatch.setattr(plan_watch, "time", clock)

    def on_step_begin(self, arguments, state, control, **more):
        if state.global_step >= self.first_step:
            if self.device == "cpu":
                self.late_s += 60
            else:
                time.sleep(1.0)


def test_a_drift_leads_to_another_plan_between_two_steps_and_no_bit_changes(device, tmp_path, monkeypatch, caplog):
    """A plan for the first measurement, and one for a drift that comes later."""
    caplog.set_level(logging.INFO)
    expected = run(tmp_path / "plain", device, block={"plan": {"adapt": False}}, max_steps=13)
    monkeypatch.setattr(training_request, "measure_hardware", lambda *args, **kwargs: builders.hardware())
    for name, value in (("WARM_UP_STEPS", 1), ("MEASURED_STEPS", 1), ("WINDOW_STEPS", 1), ("DRIFT_TIME_FRAC", 2.0)):
        monkeypatch.setattr(plan_watch, name, value)
    monkeypatch.setattr(planning, "SWAP_GAIN_FRAC", -1e9)
    placed = []

    class Search:
        """Finds something else at once: for the first measurement, and for a drift."""

        def __init__(self, model, hardware, request):
            self.question = model, hardware, request
            self.useful = not placed or "steps take" in caplog.text

        def poll(self):
            if not self.useful:
                raise LazyTrainError("nothing better")
            problem = build_problem(*self.question)
            placed.append(replace(leanest_plan(problem), max_tokens=problem.max_tokens))
            if len(placed) % 2 == 0:
                placed[-1] = placed[-1].with_units(**HOMES["resident"], activations=Activations.KEEP)
            return placed[-1]

        def cancel(self):
            pass

    monkeypatch.setattr(planning, "BackgroundSolve", Search)
    got = run(
        tmp_path / "drifting", device, max_steps=13, trainer_options={"callbacks": [SlowFrom(9, device, monkeypatch)]}
    )
    assert len(placed) >= 2 and "steps take" in caplog.text
    assert caplog.text.count("made again with measured rates") == len(placed)
    assert_bit_equal(got.weights, expected.weights)
    assert got.losses == expected.losses and got.grad_norms == expected.grad_norms


def made(monkeypatch, *, adapt=True, native=True, profile=None, tokens=512, state_bits=32, launch_s=0.0, **config):
    """A planner of a described machine, with a plan, and no model at all."""
    planner = object.__new__(Planner)
    hardware = builders.hardware(matmul_flop_per_s=1e11, launch_s=launch_s)
    planner.__dict__.update(
        _untimed_profile=builders.model(4), _timed_profile=profile or builders.model(4),
        _measured_hardware=hardware, _state_bits=state_bits, _observed={},
        _accumulation_steps=1, _search=None, _current=None, _swaps_left=2 if adapt else 0, request=None,
        _native=native, _ranks=None, _fixed=None, _planned_tokens=None, _compiled=False, _errors=None,
        _prices_are_new=False,
        _config=LazyTrainConfig(**{"gpu_memory_gib": builders.GPU_RESERVE_GIB + 0.1, **config}),
        _cache=planning.PlanCache(),
    )  # fmt: skip
    return planner, planner.plan_for(tokens)


@pytest.mark.parametrize("native", [True, False])
def test_states_are_streamed_for_the_native_kernels_only(monkeypatch, native):
    monkeypatch.setattr(training_request, "RUNTIME_CAPABILITIES", replace(RUNTIME_CAPABILITIES, streamed_states=True))
    planner, plan = made(monkeypatch, native=native)
    assert planner.request.capabilities.streamed_states == native
    assert native or not any(unit.streams_states for unit in (*plan.units, *plan.stem))


@pytest.mark.parametrize("adapt", [True, False])
def test_error_prices_of_this_model_change_the_bits_of_the_plan_in_place(monkeypatch, caplog, adapt):
    """Inputs turn out to be the sensitive ones: they get the bits, at the same placement and the same speed."""
    caplog.set_level(logging.INFO)
    saving = StrategyProfile(
        activations=Activations.MATMULS, saved_bytes_per_token=16 * 512, recompute_frac=0.1,
        attention_bytes_per_token=4 * 512,
    )  # fmt: skip
    layers = {"flop_per_token": 2.0 * 64 * 512**2, "boundary_bytes_per_token": 12 * 512, "kept_bytes_per_token": 0}
    profile = builders.model(12, strategies=(saving,), **layers)
    planner, plan = made(
        monkeypatch, adapt=adapt, profile=profile, tokens=8192, state_bits=8, fidelity="compact", gpu_memory_gib=2.3,
        cpu_memory_gib=3.0,
    )  # fmt: skip
    assert any(map(is_lossy, plan.units)) and planner.better_plan() is None
    low, high = ({bits: scale / 2**bits for bits in (4, 5, 6, 8)} for scale in (0.02, 3.0))
    planner.take_errors({"norm": high, "gemm": low, "swiglu": low})
    better = planner.better_plan()
    if not adapt:
        assert better is None and planner.wants_errors is False
        return
    before, after = (plan_error(p, planner.request.gradient_errors) for p in (plan, better))
    assert after < 0.9 * before and "its bits chosen by measured prices" in caplog.text
    assert better.predicted_step_s <= plan.predicted_step_s * 1.003
    placed = [[(unit.weights, unit.states, unit.updater, unit.boundary) for unit in p.units] for p in (plan, better)]
    assert placed[0] == placed[1]
    # No prices that are new, no other plan; and prices as they were before change nothing.
    assert planner.better_plan() is None
    planner.take_errors(planner.request.gradient_errors)
    assert planner.better_plan() is None and "bits of activations stay" in caplog.text


def finished(planner):
    while planner._search is not None and planner._search._process.wait():
        pass
    return planner.better_plan()


def test_rates_as_planned_start_no_search(monkeypatch):
    planner, plan = made(monkeypatch)
    predicted = planner.predicted(plan)
    planner.observe(ObservedStep(step_s=1.0, compute_s=predicted.compute_s * 1.05, update_parameters_per_s=None))
    assert planner._search is None and planner.better_plan() is None


def test_a_slow_worker_leads_to_a_plan_that_spares_it(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    planner, plan = made(monkeypatch)
    before = planner.predicted(plan)
    rate = planner.hardware.cpu_update_parameters_per_s(32) / 50
    planner.observe(ObservedStep(step_s=1.0, compute_s=before.compute_s, update_parameters_per_s=rate))
    assert "planning again in the background" in caplog.text
    better = finished(planner)
    on_cpu = lambda p: sum(unit.updater == "cpu" for unit in (*p.units, *p.stem))  # noqa: E731
    assert on_cpu(plan) > 0, "else the test asks for nothing"
    assert better is not None and on_cpu(better) < on_cpu(plan)
    assert planner.predicted(better).step_s < 0.97 * planner.predicted(plan).step_s
    # The next run of this model starts from what was measured.
    again, _ = made(monkeypatch)
    assert again.hardware.cpu_update_parameters_per_s(32) == pytest.approx(rate)
    planner.close()
    again.observe(ObservedStep(step_s=1.0, compute_s=before.compute_s, update_parameters_per_s=None))
    third, _ = made(monkeypatch)
    assert third.hardware.cpu_update_parameters_per_s(32) == pytest.approx(rate)
    again.close()


def test_a_slow_host_is_not_taken_for_slow_layers(monkeypatch):
    """Its launches are measured; the rest of a step, which is computed, takes as long as before."""
    profile = builders.model(4, num_operators=20, forward_s_per_token=1e-7, backward_s_per_token=1e-7)
    profile = replace(profile, units=tuple(replace(unit, forward_launch_s=2e-3) for unit in profile.units))
    planner, plan = made(monkeypatch, adapt=False, profile=profile, launch_s=20e-6)
    before = planner.predicted(plan)
    launches_s = {
        cost.name: 3 * launches_of(cost, unit)[0]
        for cost, unit in zip(planner.problem().units, plan.units, strict=True)
    }
    slow, frac = 60e-6, planner.hardware.layer_flop_frac
    planner._take_rates({"launch_s": slow})
    expected = planner.predicted(plan)
    assert expected.step_s > before.step_s and expected.launch_waits_s > 0, "else the test asks for nothing"
    planner._take_rates({})
    seen_s = expected.compute_s + expected.launch_waits_s
    measured = {"step_s": seen_s, "compute_s": seen_s, "update_parameters_per_s": None, "launches_s": launches_s}
    planner.observe(ObservedStep(**measured))
    assert planner.hardware.launch_s == pytest.approx(slow)
    assert planner.hardware.layer_flop_frac == pytest.approx(frac)
    assert planner.model_profile.units[0].forward_launch_s == pytest.approx(3 * 2e-3)
    assert planner.predicted(plan).step_s == pytest.approx(expected.step_s)
    again, _ = made(monkeypatch, adapt=False, profile=profile, launch_s=20e-6)
    assert again.hardware.launch_s == pytest.approx(slow), "kept for the next run"


def test_after_a_batch_that_does_not_fit_a_smaller_one_gets_a_plan_of_its_own(monkeypatch):
    """Code that catches the refusal and halves its batch: not the plan of before, nor the one for the large batch."""
    planner, plan = made(monkeypatch)
    predicted = planner.predicted(plan).step_s
    with pytest.raises(InfeasiblePlanError, match="Nearest remedies"):
        planner.plan_for(1 << 22)
    assert planner.predicted(plan).step_s == predicted
    assert planner.plan_for(512) is None, "the plan in place goes on"
    assert planner.plan_for(1024).max_tokens == 1024


@pytest.mark.parametrize("seconds_per_token", [None, 2e-6])
def test_what_steps_show_is_what_is_predicted_next(monkeypatch, seconds_per_token):
    """Also where layers were timed one by one: they keep their proportions."""
    model = builders.model(4)
    times = {"forward_s_per_token": seconds_per_token, "backward_s_per_token": seconds_per_token and 3e-6}
    model = replace(model, units=tuple(replace(unit, **times) for unit in model.units))
    planner, plan = made(monkeypatch, adapt=False, profile=model)
    compute_s = planner.predicted(plan).compute_s
    for factor in (2.0, 3.0, 1.5):
        planner.observe(ObservedStep(step_s=9.0, compute_s=factor * compute_s, update_parameters_per_s=None))
        # Updates on the GPU are a part of it that has a rate of its own.
        assert planner.predicted(plan).compute_s == pytest.approx(factor * compute_s, rel=0.01)
    again, plan = made(monkeypatch, adapt=False, profile=model)
    assert again.predicted(plan).compute_s == pytest.approx(1.5 * compute_s, rel=0.2), "kept between runs"


def test_adaptation_can_be_switched_off(monkeypatch):
    planner, plan = made(monkeypatch, adapt=False)
    compute_s = planner.predicted(plan).compute_s
    planner.observe(ObservedStep(step_s=1.0, compute_s=3 * compute_s, update_parameters_per_s=1.0))
    assert planner._search is None


def test_traced_steps_are_written_beside_the_plan_and_change_no_bit(device, tmp_path):
    expected = run(tmp_path / "plain", device, block={"plan": {"adapt": False}})
    path = tmp_path / "trace.json"
    block = {"plan": {"adapt": False}, "trace": {"path": str(path), "first_step": 4, "num_steps": 2}}
    got = run(tmp_path / "traced", device, block=block)
    assert_bit_equal(got.weights, expected.weights)
    trace = MeasuredTrace.load(path)
    assert [step.step for step in trace.steps] == [4, 5]
    plan = PlacementPlan.from_json(json.dumps(trace.plan))
    step = trace.typical
    planned, measured = planned_events(trace.planned), step.events
    for unit in plan.units:
        for phase in ("forward", "backward"):
            name = f"{phase} {unit.name}"
            counts = [sum(event.name == name for event in events) for events in (planned, measured)]
            assert counts == [2, 2], name  # two micro-batches, as planned
    computing = [event for event in measured if event.resource == "compute"]
    assert sum(event.end_s - event.start_s for event in computing) < step.step_s
    assert "forward" in timeline_page(with_measured(trace.planned, step))


def test_a_trace_that_cannot_be_written_does_not_end_the_run(device, tmp_path, monkeypatch, caplog):
    place = Executor.place

    def place_and_block(self, plan):
        (tmp_path / "trace.json").mkdir(exist_ok=True)  # the config was checked before
        place(self, plan)

    monkeypatch.setattr(Executor, "place", place_and_block)
    block = {"trace": {"path": str(tmp_path / "trace.json"), "first_step": 1, "num_steps": 1}}
    found = run(tmp_path / "traced", device, block=block)
    assert len(found.losses) == 8
    assert "can't be written" in caplog.text


def test_what_no_batch_fits_is_refused_before_weights_move(device, tmp_path, monkeypatch):
    """Without max_tokens, too: the first batch would be known only after everything had moved to host memory."""
    placed = []
    monkeypatch.setattr(Executor, "place", lambda self, plan: placed.append(plan))
    with pytest.raises(InfeasiblePlanError, match="host memory: need .*, have 512.0 MiB .*Nearest remedies"):
        run(tmp_path, device, block={"cpu_memory_gib": 0.5})
    assert not placed


def test_a_checkpoint_is_loaded_into_states_as_wide_as_those_of_the_first_batch(device, tmp_path, monkeypatch):
    """The embedding's 32-bit moments would lose their lower bits on the way."""
    placed, place = [], Executor.place
    monkeypatch.setattr(Executor, "place", lambda self, plan: (placed.append(plan), place(self, plan)))
    run(tmp_path, device, block={"fidelity": "balanced"}, max_steps=1)
    before, after = ({unit.name: unit.state_bits for unit in (*plan.units, *plan.stem)} for plan in placed[:2])
    assert before == after and {*before.values()} == {8, 32}


@pytest.mark.parametrize(
    ("bits", "switch"), [("state_bits", "optimizer.state_bits"), ("gradient_bits", "gradients.bits")]
)
def test_a_plan_file_with_fewer_bits_than_asked_for_is_refused(device, tmp_path, bits, switch):
    """Exactness would be lost without a word otherwise, and the log would say 32 bits."""
    work = Work(model="qwen2_tied", implementation="native")
    exact = {"optimizer": {"state_bits": 32}, "gradients": {"bits": 16}}
    with pytest.raises(PlanMismatchError, match=rf'in 8 bits, and this job asks for \d\d; set "{switch}"'):
        run_lazytrain(work, Placement(homes="cpu"), tmp_path, device, block=exact, **{bits: 8})
