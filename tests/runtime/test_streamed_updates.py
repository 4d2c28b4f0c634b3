"""Units whose states rest in host memory and are updated by the GPU: the same bits as under every other plan."""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.runtime import state_slots, streamed_updates
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.layout import lay_out
from lazytrain_plugin.runtime.pending import PendingParameter
from lazytrain_plugin.runtime.state_slots import cut
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.train_state import ExecutorState
from lazytrain_plugin.runtime.update import NativeAdamW
from tests.runtime.rig import (
    DEVICES,
    Model,
    batches,
    make_executor,
    plan_for,
    train,
)
from tests.runtime.test_executor import READS, Routed, TwiceModel

devices = pytest.mark.parametrize("device", DEVICES)
STREAMED = ["streamed", "streamed from gpu", "every kind"]
homes = pytest.mark.parametrize("home", STREAMED)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """Units of the tests pass in several chunks."""
    monkeypatch.setattr(streamed_updates, "STEM_STAGING_BYTES", 12 << 10)


def make(**kwargs) -> Model:
    torch.manual_seed(0)
    return Model(**kwargs)


def contents(executor) -> dict[str, torch.Tensor]:
    """Masters and states of every parameter, as a checkpoint sees them."""
    state, found = ExecutorState(executor), {}
    state.flush()
    for record in state.records:
        found[record.name] = state.read_master(record).clone()
        for key, value in state.read_state(record).items():
            found[f"{record.name} {key}"] = torch.as_tensor(value).clone()
    return found


def assert_same_contents(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [key for key in got if not torch.equal(got[key], expected[key])]
    assert not different


@functools.cache
def trained(home: str, accumulation: int, *, device="cpu", state_bits=32, dtype=None, max_norm=0.0, delay_s=0.0):
    """Contents after training under `home`, and the norms."""
    data = batches(3 * accumulation, device)
    model = make(num_layers=5).to(device)
    plan = plan_for(model, home=home, state_bits=state_bits, device=device)
    executor = make_executor(model, plan, device=device, native=True, dtype=dtype, transfer_delay_s=delay_s)
    steps = [data[i : i + accumulation] for i in range(0, len(data), accumulation)]
    norms = train(executor, steps, max_norm=max_norm)
    found = contents(executor)
    executor.close()
    return found, norms


@devices
@homes
@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_bit_equal_to_updates_by_the_cpu_and_to_resident_states(device, home, state_bits, accumulation, max_norm):
    for dtype in (torch.bfloat16, torch.float32):
        options = {"device": device, "state_bits": state_bits, "dtype": dtype, "max_norm": max_norm}
        got, norms = trained(home, accumulation, **options)
        for other in ("cpu", "gpu"):
            expected, expected_norms = trained(other, accumulation, **options)
            assert norms == expected_norms
            assert_same_contents(got, expected)


@devices
@homes
def test_late_transfers_change_nothing(device, home):
    """On a GPU every transfer and update is made late: a missing wait would take an old value."""
    got, _ = trained(home, 1, device=device, dtype=torch.bfloat16, state_bits=8, delay_s=0.002)
    assert_same_contents(got, trained("cpu", 1, device=device, dtype=torch.bfloat16, state_bits=8)[0])


def both(home: str, run, *, make_model=make, device="cpu", dtype=torch.bfloat16):
    """What `run(model, executor)` leaves under `home` and under updates by the CPU must be the same."""
    found = []
    for kind in (home, "cpu"):
        model = make_model().to(device)
        plan = plan_for(model, home=kind, state_bits=8, device=device)
        executor = make_executor(model, plan, device=device, native=True, dtype=dtype)
        run(model, executor)
        found.append(contents(executor))
        executor.close()
    assert_same_contents(*found)


@devices
@homes
@pytest.mark.parametrize("read", READS)
def test_nobody_sees_a_weight_before_its_update(device, home, read):
    seen = []

    def run(model, executor):
        captured = list(model.parameters())
        for ids in batches(2, device):
            model.loss(ids).backward()
            executor.step(0.0)
            if executor.plan.units[0].streams_states:
                assert any(type(p) is PendingParameter for p in captured)
            seen.append([value.float().cpu() for value in READS[read](model, captured)])

    both(home, run, make_model=lambda: make(num_layers=5), device=device, dtype=torch.float32)
    for one, other in zip([*seen[0], *seen[1]], [*seen[2], *seen[3]], strict=True):
        assert torch.equal(one, other)


WRITES = {
    "in place": lambda p: p.clamp_(-0.05, 0.05),
    "through data": lambda p: p.data.clamp_(-0.05, 0.05),
    "through detach": lambda p: p.detach().clamp_(-0.05, 0.05),
}


@devices
@pytest.mark.parametrize("home", [*STREAMED, "mirror", "gpu"])
@pytest.mark.parametrize(
    ("write", "when"),
    # What is written through .data between a forward and its step may go unseen where weights are mirrored.
    [(write, when) for write in WRITES for when in ("pending", "flushed")] + [("in place", "after the forward")],
)
def test_weights_changed_by_hand_are_where_training_goes_on(device, home, write, when):
    def run(model, executor):
        for ids in batches(3, device):
            executor.begin_forward()
            loss = model.loss(ids)
            loss.backward()
            if when == "after the forward":
                change(model)
            executor.step(0.1)
            if when == "flushed":
                executor.flush()
            if when != "after the forward":
                change(model)

    def change(model):
        with torch.no_grad():
            for p in model.parameters():
                WRITES[write](p)

    both(home, run, device=device)


@devices
@homes
def test_a_skipped_step_leaves_everything(device, home):
    def run(model, executor):
        data = batches(3, device)
        train(executor, [[data[0]]])
        before = contents(executor)
        (model.loss(data[1]) * float("inf")).backward()
        assert not executor.step(1.0)[1]
        assert_same_contents(contents(executor), before)
        train(executor, [[data[2]]])

    both(home, run, device=device)


@homes
@pytest.mark.parametrize("accumulation", [1, 2])
def test_units_that_run_twice_or_not_at_all(home, accumulation):
    torch.manual_seed(0)
    two, three = batches(4, "cpu"), [torch.arange(21).reshape(3, 7), torch.arange(21, 42).reshape(3, 7)]
    data = [three[0], two[0], three[1], two[1], two[2], two[3]]
    steps = [data[i : i + accumulation] for i in range(0, len(data), accumulation)]
    both(home, lambda model, executor: train(executor, steps, max_norm=0.1), make_model=lambda: _made(TwiceModel))


def _made(model_class, **kwargs):
    torch.manual_seed(0)
    return model_class(**kwargs)


@homes
def test_tensors_without_a_gradient_are_untouched(home):
    """A frozen tensor in a trained unit, an expert without tokens, a frozen stem."""

    def make_model():
        torch.manual_seed(0)
        model = Model(layers=[Routed(), Routed(), Routed()])
        model.layers[1].experts[0].bias.requires_grad_(False)
        model.embedding.requires_grad_(False)
        return model

    idle = make_model().layers[0].experts[1].weight.detach().bfloat16()

    def run(model, executor):
        train(executor, [[ids] for ids in batches(3, "cpu")])
        assert torch.equal(model.layers[0].experts[1].weight, idle)

    both(home, run, make_model=make_model)


@homes
def test_a_frozen_weight_that_changes_during_an_update_keeps_its_change(home):
    """Only what was updated goes home: a frozen neighbour may be written at any time."""

    def make_model():
        model = make()
        for layer in model.layers:
            layer.up.weight.requires_grad_(False)
        return model

    def run(model, executor):
        for ids in batches(3, "cpu"):
            executor.begin_forward()
            model.loss(ids).backward()
            executor.step(0.1)
            for layer in model.layers:
                layer.up.weight.mul_(0.5)

    both(home, run, make_model=make_model)


@homes
@pytest.mark.parametrize("other", ["cpu", "gpu", "streamed", "streamed from gpu"])
def test_plans_may_change_at_any_time(home, other):
    """Between steps with updates under way, and in the middle of a window."""

    def run(model, executor):
        data = batches(6, "cpu")
        first, second = executor.plan, plan_for(model, home=other, state_bits=8)
        for i, ids in enumerate(data):
            executor.begin_forward()
            executor.set_last_micro_batch(i % 2 == 1)
            model.loss(ids).backward()
            if i == 2:
                executor.place(second)
            if i % 2 == 1:
                executor.step(0.1)
            if i == 3:
                executor.place(first)

    both(home, run)


@homes
@pytest.mark.parametrize("state_bits", [32, 8])
def test_checkpoints_go_from_and_to_every_home(home, state_bits):
    data = batches(4, "cpu")

    def executor_under(kind):
        model = make()
        plan = plan_for(model, home=kind, state_bits=state_bits)
        return make_executor(model, plan, native=True, dtype=torch.bfloat16)

    def saved(executor):
        state = ExecutorState(executor)
        state.flush()
        return {r.name: (state.read_master(r).clone(), state.read_state(r)) for r in state.records}

    straight = executor_under("cpu")
    train(straight, [[ids] for ids in data], max_norm=0.1)
    expected = contents(straight)
    for before, after in ((home, "cpu"), ("cpu", home), (home, home)):
        first, second = executor_under(before), executor_under(after)
        train(first, [[ids] for ids in data[:2]], max_norm=0.1)
        checkpoint, state = saved(first), ExecutorState(second)
        train(second, [[data[3]]])  # something to overwrite
        state.flush()
        for record in state.records:
            state.write_master(record, checkpoint[record.name][0])
            state.write_state(record, checkpoint[record.name][1])
        train(second, [[ids] for ids in data[2:]], max_norm=0.1)
        assert_same_contents(contents(second), expected)
        first.close()
        second.close()
    straight.close()


@homes
def test_an_interrupted_update_goes_on_where_it_stopped(home, monkeypatch):
    load, calls = state_slots.StateSlot.load, []

    def interrupted(self, *args):
        calls.append(self)
        if len(calls) in (2, 9, 14):
            raise KeyboardInterrupt
        return load(self, *args)

    def run(model, executor):
        for ids in batches(4, "cpu"):
            while True:
                try:
                    executor.begin_forward()
                    loss = model.loss(ids)
                    break
                except KeyboardInterrupt:
                    pass
            loss.backward()
            with contextlib.suppress(KeyboardInterrupt):
                executor.step(0.1)
        executor.flush()

    with monkeypatch.context() as patch:
        patch.setattr(state_slots.StateSlot, "load", interrupted)
        both(home, run)
    assert len(calls) > 14


def test_the_clients_own_optimizer_is_refused():
    model = make()
    with pytest.raises(PlanMismatchError, match=r"layers\.0: states that pass the GPU .* \"native\""):
        make_executor(model, plan_for(model, home="streamed"))


@pytest.mark.parametrize("max_blocks", [1, 2, 3, 7, 1000])
def test_chunks_cover_what_arrived_once(max_blocks):
    sizes = [256, 1, 255, 257, 0, 1000, 513, 7, 256]
    parameters = [nn.Parameter(torch.empty(n, dtype=torch.bfloat16 if n % 2 else torch.float32)) for n in sizes]
    layout = lay_out(
        [(str(i), p) for i, p in enumerate(parameters)], {p: p.dtype for p in parameters}, lambda p: len(p) != 7
    )
    arrived = {
        tensor: Arrival.SUMMED if tensor.name == "3" else Arrival.WHOLE
        for tensor in layout.trained
        if tensor.name != "5"
    }
    covered = {tensor: torch.zeros(tensor.numel, dtype=torch.int) for tensor in arrived}
    for chunk in cut(arrived, layout, max_blocks):
        assert chunk.numel <= 256 * max_blocks and chunk.first_element % 256 == 0
        for span in chunk.spans:
            assert span.start % 256 == 0 and arrived[span.tensor] == chunk.arrival
            covered[span.tensor][span.start : span.start + span.numel] += 1
    assert all((count == 1).all() for count in covered.values())


def test_each_weight_comes_once_though_the_updates_of_others_are_late(monkeypatch):
    """Between units that the CPU updates late lie units that the GPU updates early, in slots that must stay theirs."""
    model = make(num_layers=8)
    plan = replace(plan_for(model, home="streamed"), weight_slots=3)
    late = plan_for(model, home="cpu").units
    plan = replace(plan, units=tuple(late[i] if i % 2 == 0 else unit for i, unit in enumerate(plan.units)))
    executor = make_executor(model, plan, native=True)
    monkeypatch.setattr(NativeAdamW, "update", _late(NativeAdamW.update))
    fetched = []
    for unit in executor.units:
        read = unit.home.host_buffer.read_into
        monkeypatch.setattr(
            unit.home.host_buffer, "read_into", lambda out, read=read, unit=unit: (fetched.append(unit.name), read(out))
        )
    first, second = batches(2, "cpu")
    executor.begin_forward()
    model.loss(first).backward()
    fetched.clear()
    executor.step(0.0)
    executor.begin_forward()
    model.loss(second)
    assert sorted(fetched) == [unit.name for unit in executor.units]
    executor.flush()
    executor.close()


def _late(update):
    def wrapped(self, *arguments):
        time.sleep(0.02)
        return update(self, *arguments)

    return wrapped


def test_slots_of_the_next_plan_take_the_streams_of_the_last_one(monkeypatch):
    """Streams share the few queues of a GPU: with new ones for each plan, some waited for copies of others."""
    made, taken = [], []
    original = state_slots.StateSlot.__init__

    def init(self, nbytes, streams, stream, **options):
        taken.append(stream)
        original(self, nbytes, streams, stream, **options)

    monkeypatch.setattr(state_slots.StateSlot, "__init__", init)
    monkeypatch.setattr(Streams, "slot_stream", lambda self: made.append(1) or len(made))
    model = make(num_layers=3)
    executor = make_executor(model, plan_for(model, home="streamed"), native=True)
    for count in (4, 3):
        executor.place(replace(plan_for(model, home="streamed"), state_slots=count))
    executor.close()
    assert taken == [1, 2, 1, 2, 3, 4, 1, 2, 3]
