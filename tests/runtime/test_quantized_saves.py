"""Activations that wait for backward in fewer bits: what is coded, what stays exact, and what gradients make of it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.runtime import activation_store, node, quantized_saves
from lazytrain_plugin.vocab import Activations, Fidelity, Tier
from tests.runtime.rig import DEVICES, HIDDEN, Model, assert_same_weights, batches, make_executor, plan_for, train
from tests.runtime.test_saving import HEAD_DIM, Layer, layered

devices = pytest.mark.parametrize("device", DEVICES)
strategies = pytest.mark.parametrize("activations", [Activations.MLP, Activations.MATMULS, Activations.KEEP])
FFN = 3 * HIDDEN + 5


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)


@pytest.fixture
def encoded(monkeypatch):
    """(shape, bits, reason it stayed exact or None) of everything that a unit offered, in order."""
    seen = []
    original = quantized_saves.Encoder.encode

    def encode(self, tensor, bits, send=None, *, exact_because=None):
        codes = original(self, tensor, bits, send, exact_because=exact_because)
        seen.append((tuple(tensor.shape), bits, exact_because if codes is None else None, codes))
        return codes

    monkeypatch.setattr(quantized_saves.Encoder, "encode", encode)
    return seen


def plan_coded(model, device, activations, bits, boundary_bits=16, saved=Tier.GPU, boundary=Tier.GPU, **options):
    plan = plan_for(model, device=device, **options)
    if activations == Activations.MLP:
        boundary_bits = 16  # attention runs again from it
    changes = {
        "activations": activations, "saved_bits": bits, "boundary_bits": boundary_bits, "saved": saved,
        "boundary": boundary,
    }  # fmt: skip
    units = tuple(replace(unit, **changes) for unit in plan.units)
    return replace(plan, units=units, activation_slots=1, fidelity=Fidelity.COMPACT)


def gradients(model, device, plan, ids, loss=Model.loss, backwards=1):
    """Loss and every weight's gradient (under the executor when there is a plan)."""
    if plan is None:
        value = loss(model, ids)
        value.backward()
        return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}
    found = {}
    executor = make_executor(model, plan, device=device)
    deliver = executor.deliver

    def delivering(unit, pairs):
        found.update({target.name: gradient.detach().clone() for target, gradient in pairs})
        deliver(unit, pairs)

    executor.deliver = delivering
    executor.begin_forward()
    value = loss(model, ids)
    for i in range(backwards):
        value.backward(retain_graph=i < backwards - 1)
    executor.close()
    return value.detach(), found


def error(found, exact) -> float:
    """Normalised L2 error over all weights."""
    off = sum(((found[name] - exact[name]).double() ** 2).sum() for name in found)
    return float((off / sum((exact[name].double() ** 2).sum() for name in found)) ** 0.5)


@devices
@strategies
@pytest.mark.parametrize("saved", [Tier.GPU, Tier.CPU])
def test_the_loss_is_exact_and_gradients_are_as_good_as_the_bits(device, activations, saved):
    (ids,) = batches(1, device)
    value, exact = gradients(layered().to(device), device, None, ids)
    errors = {}
    for bits in (16, 8, 6, 5, 4):
        model = layered().to(device)
        loss, found = gradients(model, device, plan_coded(model, device, activations, bits, bits, saved, saved), ids)
        assert torch.equal(loss, value)
        assert len(found) == 5 * 12  # norms, projections and biases of every layer
        errors[bits] = error(found, exact)
    assert errors[16] == 0
    assert 0 < errors[8] < errors[6] < errors[5] < errors[4] < 0.2
    assert errors[8] < 0.012


class Normed(Layer):
    """Norms of queries and keys and a rotation in a Function of its own stand between products and attention."""

    def __init__(self, hidden: int = HIDDEN, written_out: bool = False) -> None:
        super().__init__(hidden)
        self.q_norm = nn.RMSNorm(HEAD_DIM)
        self.written_out = written_out

    def attend(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = Rotation.apply(self.q_norm(q)), Rotation.apply(self.q_norm(k))
        if self.written_out:
            y = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.new_tensor(x.detach().numpy() * 2) if x.device.type == "cpu" else x * 2  # no operator links the two

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy + 0 * ctx.saved_tensors[0]


@pytest.mark.parametrize("layer", ["plain", "normed", "written out", "frozen keys", "frozen all but adapters"])
def test_attention_stays_exact_under_matmuls(layer, encoded):
    """Coded are the outputs of o, gate and up, and nothing else; what the last product returns isn't saved at all."""
    torch.manual_seed(0)
    make = {"plain": Layer, "frozen keys": Layer, "frozen all but adapters": Adapted}.get(layer)
    make = make or (lambda: Normed(written_out=layer == "written out"))
    model = Model([make() for _ in range(2)])
    if layer.startswith("frozen"):
        frozen = (
            model.named_parameters() if "all" in layer else ((n, p) for n, p in model.named_parameters() if "k." in n)
        )
        for name, parameter in frozen:
            parameter.requires_grad_("adapter" in name or name.startswith("head"))
    (ids,) = batches(1, "cpu")
    gradients(model, "cpu", plan_coded(model, "cpu", Activations.MATMULS, 4), ids)
    coded = [shape for shape, _, _, codes in encoded if codes is not None]
    tokens = ids.numel()
    per_layer = [(tokens, HIDDEN), (tokens, FFN), (tokens, FFN)]
    # In the first of two frozen layers autograd sees no product before the adapter's: all stays as it is.
    if layer == "frozen all but adapters":
        assert set(coded) <= set(per_layer)
        assert coded[-3:] == per_layer
    else:
        assert coded == 2 * per_layer


class Adapted(Layer):
    """A low-rank adapter on the queries only."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter_a, self.adapter_b = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)

    def attend(self, x):
        q, k, v = (f(x) for f in (self.q, self.k, self.v))
        q = q + 2 * self.adapter_b(self.adapter_a(x))
        q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for y in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("written_out", [False, True])
def test_attention_stays_exact_under_keep(written_out, encoded):
    torch.manual_seed(0)
    model = Model([Normed(written_out=written_out) for _ in range(2)])
    (ids,) = batches(1, "cpu")
    gradients(model, "cpu", plan_coded(model, "cpu", Activations.KEEP, 4), ids)
    heads = {shape for shape, _, _, codes in encoded if codes is not None and len(shape) == 4}
    assert heads == set()
    widths = [shape[-1] for shape, _, _, codes in encoded if codes is not None]
    assert FFN in widths and HIDDEN in widths
    assert all(codes is None for shape, _, _, codes in encoded if shape[-1] == 1)  # statistics


@devices
def test_keep_is_plain_torch_with_saved_tensors_rounded(device):
    """Gradients are those of plain torch whose saved tensors went through the codes, bit for bit."""
    (ids,) = batches(1, device)
    make = lambda: Model([NoAttention() for _ in range(2)])  # noqa: E731
    torch.manual_seed(0)
    model = make().to(device)
    reference = make().to(device)
    reference.load_state_dict(model.state_dict())
    _, found = gradients(model, device, plan_coded(model, device, Activations.KEEP, 4, 8), ids)

    def rounding(x):
        def pack(tensor):
            if tensor.requires_grad and tensor.is_leaf or tensor.numel() < ids.numel() * HIDDEN / 8:
                return tensor
            is_weight = any(tensor.untyped_storage().data_ptr() == p.data_ptr() for p in reference.parameters())
            if is_weight:
                return tensor
            bits = "int8" if tensor.data_ptr() == x.data_ptr() else "fp4"
            return blockwise.dequantize(blockwise.quantize(tensor.detach(), bits))

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    class Rounded(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            with rounding(x):
                return self.layer(x)

    layers = reference.layers
    reference.layers = nn.ModuleList([Rounded(layer) for layer in layers])
    _, expected = gradients(reference, device, None, ids)
    expected = {name.replace(".layer.", "."): gradient for name, gradient in expected.items()}
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, FFN), nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.tanh(self.gate(y)) * self.up(y))


@devices
@strategies
def test_off_the_device_it_is_the_same(device, activations):
    """Codes that rest on the host, late, and codes that rest here give the same weights after three steps."""
    steps = [batches(2, device, seed) for seed in range(3)]
    models = []
    for saved, boundary, delay_s, slots in (
        (Tier.GPU, Tier.GPU, 0.0, 1),
        (Tier.CPU, Tier.GPU, 0.003, 1),
        (Tier.CPU, Tier.CPU, 0.003, 2),
        (Tier.GPU, Tier.CPU, 0.003, 1),
    ):
        model = layered().to(device)
        plan = plan_coded(model, device, activations, 4, 8, saved, boundary, home="mixed")
        executor = make_executor(model, replace(plan, activation_slots=slots), device=device, transfer_delay_s=delay_s)
        train(executor, steps, max_norm=0.5)
        executor.close()
        assert executor.activations.tier.free_bytes == 0
        models.append(model)
    for model in models[1:]:
        assert_same_weights(model, models[0])


@devices
@strategies
def test_a_graph_can_be_differentiated_twice(device, activations):
    (ids,) = batches(1, device)
    once, twice = layered().to(device), layered().to(device)
    plan = plan_coded(once, device, activations, 4, 4, Tier.CPU, Tier.CPU)
    _, first = gradients(once, device, plan, ids)
    _, second = gradients(twice, device, plan, ids, backwards=2)
    for name, gradient in first.items():
        assert torch.equal(second[name], gradient), name


@devices
def test_bits_change_between_two_steps(device):
    """Other bits by prices measured in the run: the same homes, and from the next forward on the new bits."""
    ids, more = batches(2, device)
    model, again = layered().to(device), layered().to(device)
    narrow, wide = (plan_coded(model, device, Activations.MATMULS, *bits) for bits in ((4, 4), (6, 8)))
    executor = make_executor(model, narrow, device=device)
    homes, found, deliver = [unit.home for unit in executor.units], {}, executor.deliver

    def delivering(unit, pairs):
        found.update({target.name: gradient.detach().clone() for target, gradient in pairs})
        deliver(unit, pairs)

    for batch, plan in ((ids, narrow), (more, wide)):
        if executor.plan is not plan:
            executor.place(plan)
            again.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        executor.deliver = delivering
        executor.begin_forward()
        Model.loss(model, batch).backward()
        executor.step(1.0)
        executor.flush()
    assert [unit.home for unit in executor.units] == homes
    executor.close()
    _, expected = gradients(again, device, wide, more)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


class SavesTwice(nn.Module):
    """One value is saved by two operators, as views of other shapes; memory of a value that died is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        y = self.first(x)
        turned = y.transpose(1, 2)
        z = torch.sin(turned) + y.transpose(1, 2).flatten(1).cos().view_as(turned)  # a copy: another memory
        part = torch.sin(y[..., ::2]).sum() + torch.sin(y.view(-1)).sum()
        # Two temporaries that live one after the other, often at one address.
        for i in range(2):
            z = z + torch.sin((x * (i + 2)).transpose(1, 2).contiguous())
        return x + self.second(z.transpose(1, 2)) + 1e-3 * part


@devices
@pytest.mark.parametrize("saved", [Tier.GPU, Tier.CPU])
def test_saved_twice_views_and_reused_memory_under_matmuls(device, saved):
    """What products return is given back in place of the same call's output, whatever address it had."""
    (ids,) = batches(1, device)
    torch.manual_seed(0)
    make = lambda: Model([SavesTwice() for _ in range(2)])  # noqa: E731
    model, reference = make().to(device), make().to(device)
    reference.load_state_dict(model.state_dict())
    _, exact = gradients(reference, device, None, ids)
    for bits, input_bits, worst in ((8, 4, 0.5), (4, 8, 0.5), (8, 8, 0.03), (16, 8, 0.03), (8, 16, 0.03)):
        plan = plan_coded(model, device, Activations.MATMULS, bits, input_bits, saved, saved)
        _, found = gradients(model, device, plan, ids)
        off = error({n: g for n, g in found.items() if "layers" in n}, exact)
        assert worst / 100 < off < worst


@devices
@pytest.mark.parametrize("saved", [Tier.GPU, Tier.CPU])
def test_saved_twice_views_and_reused_memory(device, saved, encoded):
    (ids,) = batches(1, device)
    torch.manual_seed(0)
    make = lambda: Model([SavesTwice() for _ in range(2)])  # noqa: E731
    model, reference = make().to(device), make().to(device)
    reference.load_state_dict(model.state_dict())
    _, exact = gradients(reference, device, None, ids)
    _, found = gradients(model, device, plan_coded(model, device, Activations.KEEP, 8, 8, saved), ids)
    assert error({n: g for n, g in found.items() if "layers" in n}, exact) < 0.02
    first_unit = [entry for entry in encoded[: len(encoded) // 2] if entry[3] is not None]
    memory = [id(codes.memory) for *_, codes in first_unit]
    whole = [id(c.memory) for shape, _, _, c in first_unit if c.numel == ids.numel() * HIDDEN and c.shape == shape]
    # y is saved as it lies, turned, and flat: one set of codes. Its half is another; so are the copies.
    assert max(memory.count(m) for m in memory) >= 2
    assert len(set(whole)) < len(whole)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        y = self.first(x)
        z = torch.sin(y)
        if self.training:
            y.mul_(3.0)
        return x + self.second(z)


def test_a_change_after_saving_is_an_error():
    model = Model([InPlace() for _ in range(2)])
    (ids,) = batches(1, "cpu")
    executor = make_executor(model, plan_coded(model, "cpu", Activations.KEEP, 4))
    executor.begin_forward()
    with pytest.raises(RuntimeError, match="changed in place"):
        model.loss(ids).backward()
    executor.close()


@devices
@strategies
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_outliers_zeros_and_infinities(device, activations, dtype):
    """Dtypes are kept; an outlier costs its block, not the step; nothing infinite is hidden."""
    (ids,) = batches(1, device)

    class Spoiling(Layer):
        spoil = None

        def forward(self, x):
            y = self.norms[1](x)
            gate = self.gate(y)
            if self.spoil is not None:
                gate = gate * self.spoil
            return x + self.down(nn.functional.silu(gate) * self.up(y))

    for factor, is_finite in ((0.0, True), (1e4, True), (float("inf"), False), (float("nan"), False)):
        torch.manual_seed(0)
        model = Model([Spoiling() for _ in range(2)]).to(device, dtype)
        spoil = torch.ones(FFN, device=device, dtype=dtype)
        spoil[3 if factor else slice(None)] = factor
        model.layers[0].spoil = spoil
        _, found = gradients(model, device, plan_coded(model, device, activations, 4, 4), ids)
        layer = {name: g for name, g in found.items() if name.startswith("layers.0")}
        assert {gradient.dtype for gradient in found.values()} == {dtype}
        if dtype != torch.float16 or not is_finite:
            assert all(g.isfinite().all() for g in layer.values()) == is_finite, factor


@devices
def test_a_hundred_steps_stay_near_the_exact_ones(device):
    """Training with 4-bit activations and 8-bit states learns what exact training learns (one batch, by heart)."""
    (ids,) = batches(1, device)
    finals = []
    for bits, state_bits in ((16, 32), (4, 8)):
        model = layered(1).to(device)
        plan = plan_coded(model, device, Activations.MATMULS, bits, bits, state_bits=state_bits)
        executor = make_executor(model, plan, device=device, native=True)
        train(executor, [[ids]] * 100, max_norm=1.0)
        executor.close()
        finals.append(model.to(device).loss(ids).item())
    assert finals[0] < 0.2
    assert abs(finals[1] - finals[0]) < 0.1, finals


def test_what_stayed_exact_is_said_once(caplog):
    model = layered(4)
    executor = make_executor(model, plan_coded(model, "cpu", Activations.MATMULS, 4, 4))
    with caplog.at_level(logging.INFO, logger=quantized_saves.__name__):
        for ids in batches(2, "cpu"):
            executor.begin_forward()
            model.loss(ids).backward()
            executor.step(0.0)
    executor.close()
    lines = [record.getMessage() for record in caplog.records if "activations in 4 bits" in record.getMessage()]
    assert len(lines) == 1
    assert "of attention (never below 16 bits)" in lines[0]


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_bytes_of_a_layer_in_units_of_its_input(kv_heads, monkeypatch):
    """Beside the paper's 7.75 U for 8 heads: a bf16 decoder layer with a gated MLP of 4 x hidden holds 6.6 U."""
    hidden, heads = 256, 8
    reports = []
    monkeypatch.setattr(node, "log_once", lambda name, bits, report, said: reports.append(report))

    class Grouped(Layer):
        def __init__(self):
            super().__init__(hidden)
            self.k, self.v = (nn.Linear(hidden, hidden * kv_heads // heads) for _ in range(2))
            self.gate, self.up = (nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(4 * hidden, hidden, bias=False)

        def attend(self, x):
            q, k, v = (f(x).unflatten(-1, (-1, hidden // heads)).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads < heads)
            return self.o(y.transpose(1, 2).flatten(2))

    class Wide(Model):
        def __init__(self):
            super().__init__([Grouped() for _ in range(2)])
            self.embedding, self.head = nn.Embedding(50, hidden), nn.Linear(hidden, 50)

    model = Wide().bfloat16()
    (ids,) = batches(1, "cpu")
    gradients(model, "cpu", plan_coded(model, "cpu", Activations.MATMULS, 4, 4), ids)
    unit_bytes = ids.numel() * hidden * 2
    coded = 4.125 / 16
    expected = coded * (1 + 1 + 8) + 2 + 2 * kv_heads / heads  # input, o, gate and up; q, k, v and attention's output
    for report in reports:
        held = (report.coded_bytes + sum(report.left.values())) / unit_bytes
        statistics = 4 * heads / (2 * hidden)  # the logsumexp
        assert held == pytest.approx(expected + statistics, rel=0.01)


def test_compiled_layers_stay_exact(caplog, monkeypatch):
    """Operators inside are hidden, and attention with them; said once."""
    model, reference = layered(2), layered(2)
    (ids,) = batches(1, "cpu")
    _, exact = gradients(reference, "cpu", None, ids)
    compiled = nn.Linear(1, 1)
    compiled._compiled_call_impl = compiled.forward  # what `compiled.compile()` leaves, without seconds of imports
    assert quantized_saves.is_compiled(nn.Sequential(compiled))
    assert not quantized_saves.is_compiled(model)
    monkeypatch.setattr(node, "is_compiled", lambda module: True)
    with caplog.at_level(logging.WARNING, logger=quantized_saves.__name__):
        _, found = gradients(model, "cpu", plan_coded(model, "cpu", Activations.KEEP, 4, 4), ids)
    assert all(torch.equal(gradient, exact[name]) for name, gradient in found.items())
    assert len([r for r in caplog.records if "is compiled" in r.getMessage()]) == 1


def test_the_plan_says_it_and_exact_refuses_it():
    model = layered(2)
    plan = plan_coded(model, "cpu", Activations.MATMULS, 4, 5)
    assert PlacementPlan.from_json(plan.to_json()) == plan
    old = plan_for(model).to_json().replace(' "saved_bits": 16,\n', "").replace('"boundary_bits": 16,', "")
    assert PlacementPlan.from_json(old) == plan_for(model)
    with pytest.raises(PlanMismatchError, match="4-bit activations .*compact"):
        replace(plan, fidelity=Fidelity.EXACT)
    with pytest.raises(PlanMismatchError, match="16, 8, 6, 5, 4"):
        replace(plan.units[0], saved_bits=3)
    with pytest.raises(PlanMismatchError, match="attention would be computed again"):
        replace(plan.units[0], activations=Activations.ATTENTION)
