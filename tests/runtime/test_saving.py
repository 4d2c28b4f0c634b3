"""What a unit saves between forward and backward, and where: the same bits, less memory, and nothing run in vain."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
strategies = pytest.mark.parametrize("activations", list(Activations))
tiers = pytest.mark.parametrize("saved", [Tier.GPU, Tier.CPU])
HEAD_DIM = 8
"""The smallest that fused attention takes on every device."""


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)


class Layer(nn.Module):
    """A pre-norm decoder layer: grouped fused attention, SwiGLU, residuals."""

    def __init__(self, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, 3 * hidden + 5, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * hidden + 5, hidden, bias=False)
        self.dropout = dropout

    def attend(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + nn.functional.dropout(self.attend(self.norms[0](x)), self.dropout)
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def layered(count: int = 5, **options) -> Model:
    torch.manual_seed(0)
    return Model([Layer(**options) for _ in range(count)])


def plan_saving(model, device, activations, saved=Tier.GPU, boundary=Tier.GPU, slots=1, home="cpu"):
    plan = plan_for(model, device=device, home=home)
    changes = {"activations": activations, "saved": saved, "boundary": boundary}
    return replace(plan, units=tuple(replace(unit, **changes) for unit in plan.units), activation_slots=slots)


def trained(make, device, steps, plan_of, *, delay_s=0.0, max_norm=0.5, loss=Model.loss, seed=5):
    model = make().to(device)
    executor = make_executor(model, plan_of(model), device=device, transfer_delay_s=delay_s)
    torch.manual_seed(seed)
    norms = train(executor, steps, max_norm=max_norm, loss=loss)
    executor.close()
    assert executor.activations.tier.free_bytes == 0
    return model, norms


@devices
@strategies
@tiers
@pytest.mark.parametrize("boundary", [Tier.GPU, Tier.CPU])
@pytest.mark.parametrize(("home", "accumulation", "slots", "delay_s"), [("cpu", 2, 1, 0.003), ("mixed", 1, 2, 0.0)])
def test_same_bits(device, activations, saved, boundary, home, accumulation, slots, delay_s):
    data = batches(3 * accumulation, device)
    steps = [data[i : i + accumulation] for i in range(0, len(data), accumulation)]
    model, norms = trained(
        layered,
        device,
        steps,
        lambda m: plan_saving(m, device, activations, saved, boundary, slots, home),
        delay_s=delay_s,
    )
    if device == "cpu":
        reference, expected = train_plain(layered().to(device), steps, max_norm=0.5)
    else:
        reference, expected = trained(layered, device, steps, lambda m: plan_for(m, device=device, home=home))
    assert norms == expected
    assert_same_weights(model, reference)


@devices
@strategies
@tiers
def test_dropout_and_autocast_run_again_as_before(device, activations, saved):
    steps = [[ids] for ids in batches(3, device)]

    def loss(model, ids):
        with torch.autocast(device, dtype=torch.bfloat16):
            return model.loss(ids)

    make = lambda: layered(dropout=0.3)  # noqa: E731
    runs = [
        trained(make, device, steps, lambda m, a=a, s=s: plan_saving(m, device, a, s), loss=loss)
        for a, s in ((activations, saved), (Activations.KEEP, Tier.GPU))
    ]
    assert runs[0][1] == runs[1][1]
    assert_same_weights(runs[0][0], runs[1][0])


@torch.library.custom_op("lazytrain_test::noisy_attention", mutates_args=())
def noisy_attention(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.rand_like(x)
    return x * noise, noise


@noisy_attention.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x)


noisy_attention.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


@devices
@strategies
@tiers
def test_noise_after_a_saved_operator_that_drew_its_own(device, activations, saved):
    """A kernel of an extension draws random numbers; it does not run again, and what draws after it must not notice."""

    class Noisy(Block):
        def forward(self, x, scale=None):
            return super().forward(noisy_attention(x)[0])

    def make():
        torch.manual_seed(0)
        return Model([Noisy(dropout=0.4) for _ in range(3)])

    steps = [[ids] for ids in batches(3, device)]
    model, norms = trained(make, device, steps, lambda m: plan_saving(m, device, activations, saved))
    reference, expected = trained(make, device, steps, lambda m: plan_saving(m, device, Activations.KEEP))
    assert norms == expected
    assert_same_weights(model, reference)


class Changing(Block):
    """Writes into what its matrix products returned, and saves views of one storage."""

    def forward(self, x, scale=None):
        y = torch.relu_(self.up(self.norm(x)))
        a, b = y[..., :18], y[..., 19:].flip(-1)
        z = torch.cat([a * b, a, y[..., 36:]], -1) * y.transpose(0, 1).reshape(y.shape)
        return self.down(z).add_(x)


@devices
@strategies
@tiers
@pytest.mark.parametrize("boundary", [Tier.GPU, Tier.CPU])
def test_outputs_changed_in_place_and_views(device, activations, saved, boundary):
    def make():
        torch.manual_seed(0)
        return Model([Changing() for _ in range(4)])

    steps = [[ids] for ids in batches(3, device)]
    model, norms = trained(make, device, steps, lambda m: plan_saving(m, device, activations, saved, boundary))
    reference, expected = trained(make, device, steps, lambda m: plan_for(m, device=device))
    assert norms == expected
    assert_same_weights(model, reference)
    if device == "cpu":
        plain, expected = train_plain(make(), steps, max_norm=0.5)
        assert norms == expected
        assert_same_weights(model, plain)


class Twice(Model):
    def run_layers(self, x):
        for layer in (*self.layers, *self.layers[::-1]):
            x = layer(x)
        return x


@devices
@strategies
@tiers
def test_units_that_run_twice(device, activations, saved):
    def make():
        torch.manual_seed(0)
        return Twice([Layer() for _ in range(3)])

    steps = [[ids] for ids in batches(3, device)]
    model, norms = trained(make, device, steps, lambda m: plan_saving(m, device, activations, saved, Tier.CPU))
    reference, expected = trained(make, device, steps, lambda m: plan_for(m, device=device))
    assert norms == expected
    assert_same_weights(model, reference)


@devices
@strategies
@tiers
@pytest.mark.parametrize("layer", [Layer, Changing])
def test_a_graph_can_be_differentiated_twice(device, activations, saved, layer):
    ids = batches(1, device)[0]
    norms = []
    for once in (False, True):
        torch.manual_seed(0)
        model = Model([layer() for _ in range(3)]).to(device)
        executor = make_executor(model, plan_saving(model, device, activations, saved, Tier.CPU), device=device)
        executor.begin_forward()
        executor.set_last_micro_batch(False)
        if once:
            model.loss(ids).backward()
            model.loss(ids).backward()
        else:
            loss = model.loss(ids)
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        norms.append(executor.step(0.0)[0].total)
        executor.close()
    assert norms[0] == norms[1]


@devices
@strategies
def test_host_buffers_are_given_back(device, activations):
    """Also by forwards that never get a backward, by one that fails, and by a loss that is kept."""

    class Failing(Model):
        fails = False

        def run_layers(self, x):
            for layer in self.layers:
                x = layer(x)
            if self.fails:
                raise KeyError("on purpose")
            return x

    torch.manual_seed(0)
    model = Failing([Layer() for _ in range(4)]).to(device)
    executor = make_executor(model, plan_saving(model, device, activations, Tier.CPU, Tier.CPU), device=device)
    ids, held, losses = batches(1, device)[0], [], []
    for _ in range(3):
        losses.append(model.loss(ids))
        losses[-1].backward()
        executor.step(0.0)
        model.loss(ids)
        model.fails = True
        with pytest.raises(KeyError):
            model.loss(ids)
        model.fails = False
        gc.collect()
        executor.flush()
        held.append(executor.activations.tier.free_bytes)
    assert held[0] == held[1] == held[2] > 0
    executor.close()
    assert executor.activations.tier.free_bytes == 0


class Counting(TorchDispatchMode):
    """Counts operators; the bytes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def ran_in_backward(activations: Activations, device: str) -> tuple[int, int]:
    """Fused attention forwards and matrix products in the backward of one layer."""
    model = layered(1).to(device)
    executor = make_executor(model, plan_saving(model, device, activations), device=device)
    for _ in range(3):  # in the first two it is found out what need not run again
        hidden = model.layers[0](model.embedding(batches(1, device)[0]))
        with Counting() as counting:
            hidden.sum().backward()
    executor.close()
    attention = sum(n for name, n in counting.calls.items() if "attention" in name and not name.endswith("backward"))
    return attention, sum(counting.calls[f"aten::{name}"] for name in ("mm", "addmm", "bmm"))


@devices
def test_backward_runs_nothing_that_was_saved(device):
    counts = {activations: ran_in_backward(activations, device) for activations in Activations}
    attention = {activations: count for activations, (count, _) in counts.items()}
    products = {activations: count for activations, (_, count) in counts.items()}
    assert attention == {"recompute": 1, "attention": 0, "mlp": 1, "matmuls": 0, "keep": 0}
    # Backward's own are two per matrix. Of the layer's seven, the last one's value is needed by nobody.
    assert products[Activations.KEEP] == products[Activations.MATMULS] == 14
    assert products[Activations.RECOMPUTE] == products[Activations.ATTENTION] == 14 + 6
    assert products[Activations.MLP] == 14 + 3  # of what attention reads


@devices
def test_bytes_per_strategy(device):
    """Attention saves its output and logsumexp; matmuls the outputs of six matrices too, mlp of three of
    them alone, after attention; keep everything."""
    saved = {}
    batch, tokens, hidden = 3, 40, 32
    heads = hidden // HEAD_DIM
    for activations in Activations:
        model = layered(1, hidden=hidden).to(device)
        executor = make_executor(model, plan_saving(model, device, activations, Tier.CPU), device=device)
        x = torch.rand(batch, tokens, hidden, device=device, requires_grad=True)
        loss = model.layers[0](x).sum()
        executor.streams.synchronize()
        del loss
        executor.activations.trim(0)
        saved[activations] = executor.activations.tier.free_bytes / (4 * batch * tokens)
        executor.close()
    wide = 3 * hidden + 5
    assert saved[Activations.RECOMPUTE] == 0
    if device == "cpu":  # kernels of a GPU pad
        assert saved[Activations.ATTENTION] == hidden + heads
        assert saved[Activations.MATMULS] == 5 * hidden + heads + 2 * wide
        assert saved[Activations.MLP] == hidden + 2 * wide
    assert saved[Activations.ATTENTION] < saved[Activations.MATMULS] / 3
    assert saved[Activations.MATMULS] < saved[Activations.KEEP] / 1.4
    assert saved[Activations.KEEP] == bytes_saved_by_torch(Layer(hidden).to(device), x) / (4 * batch * tokens)


def bytes_saved_by_torch(layer: nn.Module, x: torch.Tensor) -> int:
    """Of each storage once, without the input and the weights."""
    storages = {}
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *layer.parameters())}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: storages.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
    ):
        output = layer(x)
    del output
    # A seed that lies on the CPU is no use of device memory.
    own = [tensor for address, tensor in storages.items() if address not in known and tensor.device == x.device]
    return sum(tensor.untyped_storage().nbytes() for tensor in own)


def test_small_tensors_and_weights_stay(monkeypatch):
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 4 * 14 * HIDDEN + 1)  # above the hidden states
    for home in ("cpu", "gpu"):
        model = layered(2)
        executor = make_executor(model, plan_saving(model, "cpu", Activations.KEEP, Tier.CPU, home=home))
        model.loss(batches(1, "cpu")[0]).backward()
        sizes = {nbytes for nbytes, _ in executor.activations.tier._pool._free}
        assert sizes == {4 * 14 * (3 * HIDDEN + 5)}  # the MLP's; matrices of 4 * 24 * 77 bytes are larger
        executor.close()


@devices
@tiers
def test_an_output_changed_after_the_layer_is_an_error(device, saved):
    class ChangesAfter(Block):
        def forward(self, x, scale=None):
            y = self.up(x)
            self.seen = y
            return self.down(y)

    torch.manual_seed(0)
    model = Model([ChangesAfter(), ChangesAfter()]).to(device)
    executor = make_executor(model, plan_saving(model, device, Activations.MATMULS, saved, slots=4), device=device)
    loss = model.loss(batches(1, device)[0])
    model.layers[0].seen.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
    model.layers[0].seen = model.layers[1].seen = None
    executor.close()


@devices
@strategies
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_layer_that_takes_another_way_the_second_time(device, activations, where):
    """A table is computed by a matrix product at first use only: seen at once, or after outputs were given back."""

    class Caching(Layer):
        table = None

        def turn(self, x):
            if self.table is None:
                self.table = torch.eye(HIDDEN, device=x.device) @ torch.eye(HIDDEN, device=x.device)
            return x @ self.table

        def forward(self, x):
            return super().forward(self.turn(x)) if where == "first" else self.turn(super().forward(x))

    def make():
        torch.manual_seed(0)
        return Model([Caching() for _ in range(2)])

    steps = [[ids] for ids in batches(3, device)]
    if where == "last" and activations in (Activations.ATTENTION, Activations.MLP, Activations.MATMULS):
        with pytest.raises(RuntimeError, match="another way"):
            trained(make, device, steps, lambda m: plan_saving(m, device, activations))
        return
    model, norms = trained(make, device, steps, lambda m: plan_saving(m, device, activations))
    reference, expected = trained(make, device, steps, lambda m: plan_saving(m, device, Activations.KEEP))
    assert norms == expected
    assert_same_weights(model, reference)


class Square(torch.autograd.Function):
    """Keeps a tensor where autograd doesn't see it."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach().clone()
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.x * gradient


@devices
@pytest.mark.parametrize("ending", ["function", "item", "hook", "inner graph"])
def test_a_last_product_that_is_needed_after_all_runs_again(device, ending):
    """See [Note: the tail] of runtime/selective.py."""
    seen = []

    class InnerGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                ctx.leaf, ctx.inner = leaf, (leaf * 2 + 1) @ weight.detach().clone() * 1
            return ctx.inner.detach().sin()

        @staticmethod
        def backward(ctx, gradient):
            return torch.autograd.grad(ctx.inner, ctx.leaf, gradient * ctx.inner.detach().cos())[0], None

    class Ending(Block):
        def forward(self, x, scale=None):
            if ending == "inner graph":
                return InnerGraph.apply(super().forward(x), self.up.weight.T @ self.up.weight)
            y = self.down(self.up(x))
            if ending == "function":
                return Square.apply(y)
            if ending == "item":
                return x + y * float(y.detach().abs().mean().item() > 0)
            return x + y

    def make():
        torch.manual_seed(0)
        model = Model([Ending() for _ in range(2)])
        if ending == "hook":
            model.layers[0].down.register_forward_hook(
                lambda module, args, output: seen.append(output.detach().clone())
            )
        return model

    steps = [[ids] for ids in batches(2, device)]
    model, norms = trained(make, device, steps, lambda m: plan_for(m, device=device))
    reference, expected = trained(make, device, steps, lambda m: plan_saving(m, device, Activations.KEEP))
    assert norms == expected
    assert_same_weights(model, reference)
    assert all(output.any() for output in seen)


@devices
@pytest.mark.parametrize("ending", ["function", "item", "hook", "saves", "longer", "own mode"])
def test_a_layer_that_ends_otherwise_from_some_step_on(device, ending):
    """Its last product was left out in the steps before, and is needed now; later it is not again."""
    seen, hooks = [], []

    class Changing(Layer):
        steps = 0

        def forward(self, x):
            y = super().forward(x)
            if not 4 <= self.steps < 6:
                return y
            if ending == "own mode":
                with Counting():
                    return super().forward(x)
            if ending == "function":
                return Square.apply(y)
            if ending == "item":
                return y * float(y.detach().abs().mean().item() > 0)
            if ending == "saves":
                return y * y
            return y + x if ending == "longer" else y

    def make():
        torch.manual_seed(0)
        return Model([Changing() for _ in range(2)])

    def loss(model, ids):
        for layer in model.layers:
            layer.steps += 1
        if ending == "hook" and layer.steps == 4:
            watch = lambda module, args, output: seen.append(output.detach().clone())  # noqa: E731
            hooks.append(layer.down.register_forward_hook(watch))
        elif ending == "hook" and layer.steps == 6:
            hooks.pop().remove()
        return model.loss(ids)

    steps = [[ids] for ids in batches(9, device)]
    model, norms = trained(make, device, steps, lambda m: plan_for(m, device=device), loss=loss)
    assert all(output.any() for output in seen)
    reference, expected = trained(make, device, steps, lambda m: plan_saving(m, device, Activations.KEEP), loss=loss)
    assert norms == expected
    assert_same_weights(model, reference)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("activations", [Activations.ATTENTION, Activations.MATMULS, Activations.KEEP])
def test_device_memory_falls_by_what_is_saved(activations, monkeypatch):
    monkeypatch.undo()
    peaks, host = {}, {}
    for tier in (Tier.GPU, Tier.CPU):
        model = layered(16, hidden=256).cuda()
        executor = make_executor(model, plan_saving(model, "cuda", activations, tier, tier), device="cuda")
        x = torch.rand(8, 512, 256, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            executor.begin_forward()
            model.run_layers(x).sum().backward()
            executor.step(0.0)
        executor.flush()
        peaks[tier], host[tier] = torch.cuda.max_memory_allocated(), executor.activations.tier.free_bytes
        executor.close()
    assert peaks[Tier.GPU] - peaks[Tier.CPU] > 0.7 * host[Tier.CPU]
