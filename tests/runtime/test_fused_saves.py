"""Codes that fused operators make and read on their way: the same bits as passes of their own, and fewer of them."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.elementwise import NormRounding, rms_norm, swiglu
from lazytrain_plugin.kernels.fused_saves import FusedSaves
from lazytrain_plugin.runtime import activation_store
from lazytrain_plugin.vocab import Activations, Fidelity, Tier
from tests.runtime.rig import DEVICES, make_executor, plan_for

HIDDEN, FFN, VOCAB = 128, 200, 50

devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)


class Layer(nn.Module):
    """`looks`: another operator reads what the gated product alone is said to read."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.looks = looks

    def forward(self, x):
        y = rms_norm(x, self.norm, 1e-6, NormRounding.BEFORE_WEIGHT)
        gate, up = self.gate(y), self.up(y)
        seen = torch.tanh(gate).sum(-1, keepdim=True) if self.looks else 0.0
        return x + self.down(swiglu(gate, up, consume=not self.looks, private=True)) + seen


class Model(nn.Module):
    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer(looks) for _ in range(3)])
        self.head = nn.Linear(HIDDEN, VOCAB)

    def loss(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def gradients(
    device,
    *,
    activations=Activations.MATMULS,
    bits=4,
    boundary_bits=4,
    tier=Tier.GPU,
    looks=False,
    backwards=1,
    dtype=torch.bfloat16,
):
    torch.manual_seed(0)
    model = Model(looks).to(device, dtype)
    plan = plan_for(model, device=device)
    changes = {"saved_bits": bits, "boundary_bits": boundary_bits, "saved": tier, "boundary": tier}
    units = tuple(replace(unit, activations=activations, **changes) for unit in plan.units)
    plan = replace(plan, units=units, activation_slots=1, fidelity=Fidelity.COMPACT)
    executor = make_executor(model, plan, device=device)
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    executor.begin_forward()
    loss = model.loss(ids)
    for i in range(backwards):
        loss.backward(retain_graph=i + 1 < backwards)
    state = [loss.detach().float().cpu()]
    for unit in executor.all_units:
        for tensor, arrival in unit.arrived.items():
            executor.flush()
            gradient = unit.home.accumulated(tensor) if arrival.name == "SUMMED" else unit.home.gradient(tensor)
            state.append(gradient.float().cpu().clone())
    executor.close()
    return state


def without_fusing(monkeypatch, *args, **options):
    with monkeypatch.context() as patch:
        patch.setattr(FusedSaves, "codes_of_private", lambda self, *tensors: None)
        patch.setattr(FusedSaves, "codes_of_input", lambda self, tensor: None)
        return gradients(*args, **options)


@devices
@pytest.mark.parametrize("tier", [Tier.GPU, Tier.CPU])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_bits_are_those_of_separate_passes(monkeypatch, device, tier, bits):
    ours = gradients(device, bits=bits, boundary_bits=bits, tier=tier)
    theirs = without_fusing(monkeypatch, device, bits=bits, boundary_bits=bits, tier=tier)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and len(ours) > 15
    exact = gradients(device, bits=16, boundary_bits=16)
    assert torch.equal(ours[0], exact[0])
    assert not all(torch.equal(a, b) for a, b in zip(ours, exact, strict=True))  # something was coded


@devices
def test_nothing_is_encoded_apart_where_products_after_attention_are_saved(monkeypatch, device):
    original, passes = blockwise.quantize, []
    monkeypatch.setattr(blockwise, "quantize", lambda *args, **kwargs: passes.append(1) or original(*args, **kwargs))
    gradients(device, activations=Activations.MLP, boundary_bits=16)
    assert not passes


@devices
def test_another_reader_gets_the_values(monkeypatch, device):
    ours, theirs = gradients(device, looks=True), without_fusing(monkeypatch, device, looks=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@devices
def test_a_graph_can_be_differentiated_twice(monkeypatch, device):
    ours, theirs = gradients(device, backwards=2), without_fusing(monkeypatch, device, backwards=2)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@devices
def test_nothing_is_read_once_more_to_be_encoded_or_written_to_be_decoded(monkeypatch, device):
    passes = []

    def counted(name):
        original = getattr(blockwise, name)

        def run(*args, **options):
            passes.append(name)
            return original(*args, **options)

        monkeypatch.setattr(blockwise, name, run)

    counted("quantize"), counted("dequantize")
    if device == "cpu":  # plain torch decodes within the operator, as an oracle
        monkeypatch.setattr("lazytrain_plugin.kernels.coded_elementwise.blockwise", _Uncounted())
    gradients(device)
    # Layers' inputs are decoded for the residual beside the norm, and nothing else is.
    assert passes == 3 * ["dequantize"]


class _Uncounted:
    quantize_reference = staticmethod(blockwise.quantize_reference)

    @staticmethod
    def dequantize(quantized, dtype=None):
        out = torch.empty(quantized.shape, dtype=dtype or quantized.dtype)
        blockwise.dequantize_reference(quantized, out.view(-1))
        return out


@devices
def test_nothing_outlives_the_step(device):
    gradients(device)
    gc.collect()
    from lazytrain_plugin.kernels import fused_saves

    assert fused_saves.running() is None


def test_an_input_that_is_changed_while_its_codes_are_awaited_is_refused():
    class Changes(Layer):
        def forward(self, x):
            y = super().forward(x)
            with torch.no_grad():
                x.detach().mul_(2)
            return y

    torch.manual_seed(0)
    model = Model().bfloat16()
    model.layers[1] = Changes().bfloat16()
    plan = plan_for(model)
    units = tuple(replace(unit, activations=Activations.MATMULS, saved_bits=4, boundary_bits=4) for unit in plan.units)
    executor = make_executor(model, replace(plan, units=units, fidelity=Fidelity.COMPACT))
    executor.begin_forward()
    with pytest.raises(RuntimeError, match=r"layers\.1: its input .* was changed in place"):
        model.loss(torch.zeros(2, 9, dtype=torch.long))
    executor.close()
