"""Measured operations of real steps: all of them, in order, in the replay's words; and nothing when nobody asks."""

from itertools import groupby

import pytest
import torch

from lazytrain_plugin.plan.simulate import Event, Resource
from lazytrain_plugin.runtime import recorder as recorder_module
from lazytrain_plugin.runtime.recorder import StepRecorder
from lazytrain_plugin.vocab import Tier
from tests.runtime import rig

devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
        ),
    ],
)


def recorded(device, *, home="cpu", first_step=1, num_steps=2, steps=4, micro_batches=1, **options):
    torch.manual_seed(0)
    model = rig.Model()
    executor = rig.make_executor(model, rig.plan_for(model, home=home, device=device), device=device, **options)
    found = []
    executor.streams.trace.recorder = StepRecorder(
        torch.device(device), first_step=first_step, num_steps=num_steps, finished=found.append
    )
    ids = rig.batches(steps * micro_batches, device)
    rig.train(executor, [ids[i * micro_batches : (i + 1) * micro_batches] for i in range(steps)])
    return executor, found


def computed(step, kind: str) -> list[str]:
    """Names in order. A backward that waits for a gradient slot of the GPU was recorded in pieces: once here."""
    events = (event.name for event in step.events if event.resource == Resource.COMPUTE)
    return [name for name, _ in groupby(name for name in events if name.startswith(kind))]


@devices
def test_each_operation_of_the_chosen_steps_is_there(device):
    executor, found = recorded(device)
    (steps,) = found  # handed over once
    assert [step.step for step in steps] == [1, 2]
    for step in steps:
        names = [event.name for event in step.events]
        for unit in executor.units:
            for kind in ("forward", "update", "gradients"):
                assert names.count(f"{kind} {unit.name}") == 1, (kind, unit.name)
        forward = [name for name in names if name.startswith("forward")]
        backward = computed(step, "backward")
        assert [name.split()[1] for name in forward] == [unit.name for unit in executor.units]
        assert [name.split()[1] for name in backward] == [unit.name for unit in reversed(executor.units)]
        by_name = {event.name: event for event in step.events}
        for unit in executor.units:
            weights = by_name[f"weights {unit.name} (forward)"]
            assert weights.num_bytes == unit.layout.weight_bytes and weights.resource == Resource.H2D
            assert weights.end_s <= by_name[f"forward {unit.name}"].start_s + 1e-4
            assert by_name[f"update {unit.name}"].end_s <= weights.start_s + 1e-4
            begun_s = min(event.start_s for event in step.events if event.name == f"backward {unit.name}")
            assert by_name[f"gradients {unit.name}"].start_s >= begun_s
        assert by_name["loss"].start_s >= by_name[forward[-1]].end_s - 1e-6
        assert all(0 <= event.start_s < step.step_s and event.end_s > event.start_s for event in step.events)
        assert step.peak_bytes["cpu"] > 0
    executor.close()


@devices
def test_updates_and_states_on_the_gpu(device):
    executor, found = recorded(device, home="every kind", native=True)
    names = {event.name for step in found[0] for event in step.events}
    streamed = executor.units[0].name
    assert {f"states {streamed}", f"update {streamed}", f"states {streamed} (back)"} <= names
    executor.close()


@devices
def test_several_micro_batches_are_one_step(device):
    executor, found = recorded(device, micro_batches=3)
    step = found[0][0]
    names = [event.name for event in step.events]
    unit = executor.units[1].name
    assert computed(step, "forward").count(f"forward {unit}") == 3
    assert computed(step, "backward").count(f"backward {unit}") == 3
    assert names.count(f"accumulate {unit}") == 3 and names.count(f"update {unit}") == 1
    executor.close()


@devices
def test_activations_on_their_way(device):
    torch.manual_seed(0)
    model = rig.Model()
    plan = rig.plan_for(model, device=device).with_units(boundary=Tier.CPU)
    executor = rig.make_executor(model, plan, device=device)
    found = []
    executor.streams.trace.recorder = StepRecorder(
        torch.device(device), first_step=1, num_steps=1, finished=found.append
    )
    ids = torch.randint(0, rig.VOCAB, (8, 100), device=device)  # inputs of 75 KiB
    rig.train(executor, [[ids], [ids]])
    sizes = {event.name: event.num_bytes for event in found[0][0].events if event.name.startswith("activations")}
    nbytes = 8 * 100 * rig.HIDDEN * 4
    assert sizes["activations (forward)"] == nbytes
    assert sizes["activations (backward)"] == nbytes
    executor.close()


@devices
def test_recording_changes_no_bit(device):
    weights = []
    for first_step in (1, 100):
        executor, _ = recorded(device, first_step=first_step)
        weights.append([parameter.detach().cpu().clone() for parameter in executor.model.parameters()])
        executor.close()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_run_that_ends_early_keeps_its_whole_steps():
    executor, found = recorded("cpu", first_step=2, num_steps=50)
    assert found == []
    executor.streams.trace.recorder.finish()
    executor.streams.trace.recorder.finish()
    assert [[step.step for step in steps] for steps in found] == [[2, 3]]
    executor.close()


def test_nothing_is_kept_before_and_after():
    executor, found = recorded("cpu", first_step=1, num_steps=1)
    recorder = executor.streams.trace.recorder
    assert len(found) == 1 and not recorder.active and recorder._spans == []
    executor.close()


def test_profiler_ranges_carry_unit_and_phase():
    model = rig.Model()
    executor = rig.make_executor(model, rig.plan_for(model))
    (ids,) = rig.batches(1, "cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        rig.train(executor, [[ids]])
    names = {event.key for event in profiler.key_averages()}
    unit = executor.units[0].name
    assert {f"forward {unit}", f"backward {unit}", f"weights {unit} (forward)", f"gradients {unit}"} <= names
    executor.close()


def test_waits_inside_a_computation_are_not_its_time():
    compute = Resource.COMPUTE
    events = [
        Event("backward a", compute, 1.0, 5.0),
        Event("weights b", Resource.H2D, 1.0, 5.0, 7),
        Event("update c", compute, 2.2, 2.8),  # what was waited for
    ]
    pieces = recorder_module._without_waits(events, [("gradients", 4.5, 6.0), ("gradients", 2.0, 3.0)])
    spans = [(event.start_s, event.end_s) for event in pieces if event.resource == compute]
    assert spans == [(1.0, 2.0), (3.0, 4.5), (2.2, 2.8)]
    assert events[1] in pieces
