"""Unit inputs in host memory: the same bits as on the device, whatever is late, and their memory is given back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lazytrain_plugin.runtime import activation_store
from lazytrain_plugin.vocab import Tier
from tests.runtime.rig import (
    DEVICES,
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


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)


def offloading(model: nn.Module, device: str, slots: int = 1, **options):
    plan = plan_for(model, device=device, **options)
    units = tuple(replace(unit, boundary=Tier.CPU) for unit in plan.units)
    return replace(plan, units=units, activation_slots=slots)


@devices
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("home", ["cpu", "gpu", "mixed"])
@pytest.mark.parametrize("keep", ["none", "mixed"])
@pytest.mark.parametrize("delay_s", [0.0, 0.003])
def test_same_bits_as_plain_torch(device, slots, home, keep, delay_s):
    torch.manual_seed(0)
    model = Model(num_layers=5).to(device)
    steps = [batches(2, device, seed=seed) for seed in range(3)]
    reference, expected_norms = train_plain(model, steps, max_norm=0.5)
    plan = offloading(model, device, slots, home=home, keep=keep)
    executor = make_executor(model, plan, device=device, transfer_delay_s=delay_s)
    norms = train(executor, steps, max_norm=0.5)
    executor.close()
    if device == "cpu":
        assert_same_weights(model, reference)
        assert norms == expected_norms
    else:  # torch updates many tensors at once there, and rounds differently: compare with inputs on the device
        torch.manual_seed(0)
        other = Model(num_layers=5).to(device)
        executor = make_executor(other, plan_for(other, device=device, home=home, keep=keep), device=device)
        assert train(executor, steps, max_norm=0.5) == norms
        executor.close()
        assert_same_weights(model, other)


@devices
def test_a_graph_can_be_differentiated_twice(device):
    torch.manual_seed(0)
    model = Model().to(device)
    executor = make_executor(model, offloading(model, device), device=device)
    (ids,) = batches(1, device)
    executor.begin_forward()
    executor.set_last_micro_batch(False)
    loss = model.loss(ids)
    loss.backward(retain_graph=True)
    loss.backward()
    twice = executor.step(0.0)[0].total
    executor.begin_forward()
    executor.close()
    torch.manual_seed(0)
    model = Model().to(device)
    executor = make_executor(model, plan_for(model, device=device), device=device)
    executor.begin_forward()
    executor.set_last_micro_batch(False)
    for _ in range(2):
        model.loss(ids).backward()
    assert executor.step(0.0)[0].total == twice
    executor.close()


@devices
def test_host_buffers_are_used_again(device):
    """A loss that is kept does not keep the buffers of its step; forwards without a backward give theirs back."""
    model = Model(num_layers=4).to(device)
    executor = make_executor(model, offloading(model, device), device=device)
    (ids,) = batches(1, device)
    held, losses = [], []
    for _ in range(3):
        losses.append(model.loss(ids))
        losses[-1].backward()
        executor.step(0.0)
        model.loss(ids)  # never differentiated
        executor.flush()
        held.append(executor.activations.tier.free_bytes)
    assert held[0] == held[1] == held[2] == 4 * 2 * 7 * 24 * 4
    executor.close()
    assert executor.activations.tier.free_bytes == 0


@devices
def test_what_all_units_share_stays_on_the_device(device):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x, scale):
            return self.block(x, scale)

    class WithScale(Model):
        def __init__(self):
            super().__init__([Shared() for _ in range(4)])
            self.scale = nn.Parameter(torch.rand(2, 7, 24))

        def run_layers(self, x):
            scale = self.scale * 2
            for layer in self.layers:
                x = layer(x, scale)
            return x

    torch.manual_seed(0)
    model = WithScale().to(device)
    steps = [batches(1, device, seed=seed) for seed in range(2)]
    reference, _ = train_plain(model, steps)
    executor = make_executor(model, offloading(model, device, home="gpu"), device=device)
    train(executor, steps)
    # Four inputs, and the scale once, for the first unit.
    assert executor.activations.tier.free_bytes == 5 * 2 * 7 * 24 * 4
    executor.close()
    assert_same_weights(model, reference)


@devices
def test_a_change_in_place_under_the_copy_is_an_error(device):
    class Changing(Model):
        def run_layers(self, x):
            for layer in self.layers:
                y = layer(x)
                x.data.add_(0)  # behind autograd's back
                x.add_(1)
                x = y
            return x

    model = Changing(num_layers=4).to(device)
    executor = make_executor(model, offloading(model, device), device=device)
    with pytest.raises(RuntimeError, match="changed in place"):
        model.loss(batches(1, device)[0]).backward()
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_falls_by_the_inputs():
    peaks = {}
    for name, make in (("gpu", plan_for), ("cpu", offloading)):
        torch.manual_seed(0)
        model = Model([Block() for _ in range(24)]).cuda()
        executor = make_executor(model, make(model, device="cuda"), device="cuda")
        ids = torch.randint(0, 50, (2048, 64), device="cuda")
        hidden_bytes = ids.numel() * 24 * 4
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            executor.begin_forward()
            model.run_layers(model.embedding(ids)).sum().backward()
            executor.step(0.0)
        executor.flush()
        peaks[name] = torch.cuda.max_memory_allocated()
        executor.close()
    assert peaks["gpu"] - peaks["cpu"] > 15 * hidden_bytes
