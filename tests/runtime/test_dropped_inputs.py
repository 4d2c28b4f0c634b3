"""Recompute edges: the same bits as with every input kept, each unit of a stretch run again once, memory let go of."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lazytrain_plugin.runtime import activation_store
from lazytrain_plugin.vocab import Activations, Tier
from tests.runtime.rig import (
    DEVICES,
    HIDDEN,
    Block,
    Model,
    assert_same_weights,
    batches,
    make_executor,
    plan_for,
    train,
    train_plain,
)

devices = pytest.mark.parametrize("device", DEVICES)
GPU, CPU = Tier.GPU, Tier.CPU
STRETCHES = {
    "every other": (GPU, None, GPU, None, GPU, None),
    "one long": (GPU, None, None, None, None, None),
    "from the host": (CPU, None, None, CPU, None, GPU),
}


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def dropping(model: nn.Module, boundaries, device="cpu", **options):
    plan = plan_for(model, device=device, **options)
    units = (replace(unit, boundary=boundary) for unit, boundary in zip(plan.units, boundaries, strict=True))
    return replace(plan, units=tuple(units))


def keeping(model: nn.Module, boundaries, device="cpu", **options):
    return plan_for(model, device=device, **options)


def trained(make, plan_of, boundaries, device, *, steps, loss=Model.loss, seed=5, **options):
    torch.manual_seed(0)
    model = make().to(device)
    executor = make_executor(model, plan_of(model, boundaries, device, **options), device=device)
    torch.manual_seed(seed)
    norms = train(executor, steps, max_norm=0.5, loss=loss)
    executor.close()
    return model, norms


def check_same(make, boundaries, device="cpu", *, plain=True, accumulation=1, loss=Model.loss, **options):
    """Bit-equal to the plan that keeps every input, and on the CPU to plain torch."""
    data = batches(2 * accumulation, device)
    steps = [data[i : i + accumulation] for i in range(0, len(data), accumulation)]
    model, norms = trained(make, dropping, boundaries, device, steps=steps, loss=loss, **options)
    kept, kept_norms = trained(make, keeping, boundaries, device, steps=steps, loss=loss, **options)
    assert_same_weights(model, kept)
    assert norms == kept_norms
    if device == "cpu" and plain:
        torch.manual_seed(0)
        start = make()
        torch.manual_seed(5)
        reference, expected = train_plain(start, steps, max_norm=0.5, loss=loss)
        assert_same_weights(model, reference)
        assert norms == expected


@devices
@pytest.mark.parametrize(("stretch", "home"), [(stretch, "cpu") for stretch in STRETCHES] + [("one long", "mixed")])
def test_same_bits_with_dropout_and_accumulation(device, stretch, home):
    make = lambda: Model(num_layers=6, dropout=0.3)  # noqa: E731
    check_same(make, STRETCHES[stretch], device, accumulation=2, home=home)


@devices
def test_same_bits_under_autocast(device):
    def loss(model, ids):
        with torch.autocast(device, dtype=torch.bfloat16):
            return Model.loss(model, ids)

    check_same(lambda: Model(num_layers=6, dropout=0.3), STRETCHES["one long"], device, plain=False, loss=loss)


class Counting(Block):
    """Counts how often its forward runs."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("stretch", "expected"),
    [
        ("one long", [3, 3, 3, 3, 3, 2]),  # forward, once again for the stretch, recompute; the last needs no output
        ("every other", [3, 2, 3, 2, 3, 2]),
    ],
)
def test_each_unit_of_a_stretch_runs_again_once(stretch, expected):
    model = Model([Counting() for _ in range(6)])
    executor = make_executor(model, dropping(model, STRETCHES[stretch]))
    train(executor, [batches(1, "cpu")])
    executor.close()
    assert [layer.runs for layer in model.layers] == expected


class Watched(Block):
    """Remembers what it was given, without holding it."""

    def forward(self, x):
        if not hasattr(self, "given"):
            self.given = StorageWeakRef(x.untyped_storage())
        return super().forward(x)


@devices
def test_inputs_are_freed_between_forward_and_backward(device):
    model = Model([Watched() for _ in range(6)]).to(device)
    executor = make_executor(model, dropping(model, STRETCHES["from the host"], device), device=device)
    executor.begin_forward()
    loss = model.loss(batches(1, device)[0])
    executor.activations.trim(0)  # what leaves for the host has arrived there
    gc.collect()
    assert [not layer.given.expired() for layer in model.layers] == [index == 5 for index in range(6)]
    loss.backward()
    executor.step(0.0)
    executor.close()


def test_two_backwards_through_one_graph():
    def loss(model, ids):
        first = Model.loss(model, ids)
        first.backward(retain_graph=True)
        return first * 0.5

    check_same(lambda: Model(num_layers=6, dropout=0.3), STRETCHES["from the host"], loss=loss)


def freeze(model: nn.Module, *indices: int) -> nn.Module:
    for index in indices:
        model.layers[index].requires_grad_(False)
    return model


@pytest.mark.parametrize("frozen", [(2, 3), (0, 1)])
def test_frozen_units_in_and_before_a_stretch(frozen, caplog):
    check_same(lambda: freeze(Model(num_layers=6), *frozen), STRETCHES["one long"])
    assert not caplog.records


class TiedModel(Model):
    """The head is the embedding, and two layers share a matrix."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.head.weight = self.embedding.weight
        self.layers[4].up.weight = self.layers[2].up.weight


def test_tied_weights():
    check_same(lambda: TiedModel(num_layers=6, dropout=0.3), STRETCHES["one long"])


def test_what_is_saved_beside_dropped_inputs():
    """Any strategy but keep: attention and matrix products are saved, and the input is computed again."""
    torch.manual_seed(0)
    results = []
    for boundaries in ((GPU,) * 6, STRETCHES["one long"]):
        torch.manual_seed(0)
        model = Model(num_layers=6, dropout=0.3)
        plan = dropping(model, boundaries).with_units(activations=Activations.MATMULS, saved=CPU)
        executor = make_executor(model, plan)
        torch.manual_seed(5)
        results.append((train(executor, [batches(2, "cpu")]), model))
        executor.close()
    assert results[0][0] == results[1][0]
    assert_same_weights(results[0][1], results[1][1])


class Crossing(Block):
    """A decoder layer: cross-attends to what an encoder made, and hands a bias on to the next one."""

    def forward(self, x, encoded, bias=None):
        if bias is None:
            bias = self.up.bias[:HIDDEN] * 2
        return super().forward(x + encoded * 0.1) + bias, bias


class EncoderDecoder(Model):
    """Encoder, then decoder, in one list of layers; all decoder layers read what the encoder made."""

    def __init__(self, **kwargs) -> None:
        super().__init__([*(Block(dropout=0.3) for _ in range(3)), *(Crossing(dropout=0.3) for _ in range(3))])

    def run_layers(self, x):
        encoded = x
        for layer in self.layers[:3]:
            encoded = layer(encoded)
        x = x + 0.5
        bias = None
        for layer in self.layers[3:]:
            x, bias = layer(x, encoded, bias)
        return x


def test_encoder_decoder(caplog):
    """The first decoder layer's input is no layer's output: it is kept, and said so once. What the encoder made is kept
    for all; the bias is dropped with the layers' inputs."""
    check_same(EncoderDecoder, (GPU, None, None, None, None, None), plain=False)
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("layers.3: its input is kept though the plan drops it, which takes 2.6 KiB more")
    assert "not simply what the unit before returned" in said


class ChangedBetween(Model):
    """Something between the layers touches what they return."""

    how = "scaled"

    def run_layers(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 2:
                if self.how == "scaled":
                    x = x * 1.5
                else:
                    with torch.no_grad():
                        x.mul_(1.5)
        return x


@pytest.mark.parametrize(
    ("how", "says"), [("scaled", "not simply what"), ("in place", "changed in place after layers.2")]
)
def test_an_input_that_is_not_the_output_before_is_kept(how, says, caplog):
    def make():
        model = ChangedBetween(num_layers=6)
        model.how = how
        return model

    check_same(make, STRETCHES["one long"])
    assert [says in record.message and record.message.startswith("layers.3") for record in caplog.records] == [True]
