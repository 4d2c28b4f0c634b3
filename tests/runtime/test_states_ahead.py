"""States that come to the GPU before `step()`: earlier, the same bits, and dropped wherever they would be old ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime import streamed_updates
from lazytrain_plugin.runtime.recorder import StepRecorder
from lazytrain_plugin.runtime.state_slots import StateSlot
from lazytrain_plugin.runtime.streamed_updates import StreamedUpdates
from lazytrain_plugin.runtime.train_state import ExecutorState
from tests.runtime.rig import DEVICES, HIDDEN, Model, batches, make_executor, plan_for, train
from tests.runtime.test_streamed_updates import assert_same_contents, contents

devices = pytest.mark.parametrize("device", DEVICES)
SLOTS = 6


class Branches(nn.Module):
    """A layer of which one part may get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.leaves_out = False

    def forward(self, x):
        x = x + torch.tanh(self.one(x))
        return x if self.leaves_out else x + torch.tanh(self.other(x))


class Skipping(Model):
    """Layers may be left out."""

    skipped = ()

    def run_layers(self, x):
        for i, layer in enumerate(self.layers):
            x = x if i in self.skipped else layer(x)
        return x


def made(device: str, home: str, *, state_bits: int = 8, **options):
    torch.manual_seed(0)
    model = Skipping([Branches() for _ in range(3)]).to(device)
    plan = replace(plan_for(model, home=home, state_bits=state_bits, device=device), state_slots=SLOTS)
    return model, make_executor(model, plan, device=device, native=True, dtype=torch.bfloat16, **options)


def run_backward(model, executor, ids, *, last: bool = True) -> None:
    executor.begin_forward()
    executor.set_last_micro_batch(last)
    model.loss(ids).backward()


@devices
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_first_states_come_before_the_step(device, micro_batches, monkeypatch):
    monkeypatch.setattr(streamed_updates, "STEM_STAGING_BYTES", 12 << 10)  # units pass in several chunks
    model, executor = made(device, "streamed")
    found = []
    executor.streams.trace.recorder = StepRecorder(
        torch.device(device), first_step=1, num_steps=1, finished=found.append
    )
    data = batches(3 * micro_batches, device)
    train(executor, [data[i : i + micro_batches] for i in range(0, len(data), micro_batches)])
    ((step,),) = found  # from one `step()` to the next
    came = [event for event in step.events if event.name.endswith("(ahead)")]
    units = [event.name.split()[1] for event in came]
    assert len(came) == SLOTS and units[0] == executor.update_order[0].name and len(set(units)) > 1
    last_s = max(event.start_s for event in step.events if event.name == f"forward {executor.units[0].name}")
    assert all(event.resource == Resource.H2D and event.start_s > last_s for event in came)
    # What came ahead does not come again.
    passed = [event for event in step.events if event.name == f"states {units[0]}"]
    assert passed and sum(event.num_bytes for event in passed) < sum(e.num_bytes for e in came if units[0] in e.name)
    executor.close()


def change_states(model, executor, ids) -> None:
    """As loading a checkpoint does."""
    state = ExecutorState(executor)
    for record in state.records:
        values = {"step": 7.0, "exp_avg": torch.full((record.numel,), 0.01)}
        state.write_state(record, values | {"exp_avg_sq": torch.full((record.numel,), 0.02)})


def change_masters(model, executor, ids) -> None:
    """Remainders are states too."""
    state = ExecutorState(executor)
    for record in state.records:
        state.write_master(record, torch.linspace(-0.1, 0.1, record.numel))


def skip_a_step(model, executor, ids) -> None:
    executor.discard_gradients()
    executor.begin_forward()
    (model.loss(ids) * float("inf")).backward()
    assert not executor.step(1.0)[1]
    run_backward(model, executor, ids)


def discard_a_window(model, executor, ids) -> None:
    executor.discard_gradients()
    run_backward(model, executor, ids)


def change_the_plan(model, executor, ids) -> None:
    plan = executor.plan
    executor.place(replace(plan_for(model, home="gpu", state_bits=8, device=executor.device.type)))
    executor.place(plan)


def leave_a_unit_out(model, executor, ids) -> None:
    """Its slot goes to another one, and its states stay."""
    executor.discard_gradients()
    model.skipped = (0,)
    run_backward(model, executor, ids)
    executor.step(0.1)
    model.skipped = ()
    run_backward(model, executor, ids)


def leave_a_tensor_out(model, executor, ids) -> None:
    """Its unit passes in other chunks than expected."""
    executor.discard_gradients()
    model.skipped, model.layers[1].leaves_out = (0,), True  # and takes the slot of the one before it
    run_backward(model, executor, ids)
    executor.step(0.1)
    model.skipped, model.layers[1].leaves_out = (), False
    run_backward(model, executor, ids)


def add_a_micro_batch(model, executor, ids) -> None:
    """What came was expected to be the window's last."""
    run_backward(model, executor, ids)


def read_the_last_weight(model, executor, ids) -> None:
    """Updates begin in another order."""
    executor.step(0.1)
    model.layers[2].one.weight.sum()
    run_backward(model, executor, ids)


def save(model, executor, ids) -> None:
    contents(executor)


MEANWHILE = (
    change_states,
    change_masters,
    skip_a_step,
    discard_a_window,
    change_the_plan,
    leave_a_unit_out,
    leave_a_tensor_out,
    add_a_micro_batch,
    read_the_last_weight,
    save,
)


@devices
@pytest.mark.parametrize(("home", "slot_bytes"), [("streamed", 1 << 20), ("streamed from gpu", 12 << 10)])
@pytest.mark.parametrize("meanwhile", MEANWHILE, ids=lambda action: action.__name__)
def test_the_same_bits_as_without_whatever_happens_between_backward_and_step(
    device, home, slot_bytes, meanwhile, monkeypatch
):
    monkeypatch.setattr(streamed_updates, "STEM_STAGING_BYTES", slot_bytes)
    bring, brought = StateSlot.bring, []
    monkeypatch.setattr(StateSlot, "bring", lambda self, *args: (brought.append(self), bring(self, *args)))

    def trained(*, ahead: bool) -> dict[str, torch.Tensor]:
        with monkeypatch.context() as patch:
            if not ahead:
                patch.setattr(StreamedUpdates, "bring_ahead", lambda self: None)
            model, executor = made(device, home, transfer_delay_s=0.001)
            data = batches(4, device)
            train(executor, [[data[0]]])
            run_backward(model, executor, data[1])
            meanwhile(model, executor, data[2])
            executor.step(0.1)
            train(executor, [[data[3]], [data[0]]], max_norm=0.1)
            found = contents(executor)
            executor.close()
            return found

    expected = trained(ahead=False)
    assert not brought
    assert_same_contents(trained(ahead=True), expected)
    assert brought
