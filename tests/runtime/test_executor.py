"""The executor against plain torch: the same parameters, bit for bit on the CPU, under every plan."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import threading
import time
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lazytrain_plugin.errors import UnsupportedModelError
from lazytrain_plugin.runtime.pending import PendingParameter
from lazytrain_plugin.runtime.update import ClientOptimizer
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

PLANS = [("cpu", "none"), ("cpu", "all"), ("gpu", "none"), ("gpu", "all"), ("mixed", "mixed")]
NATIVE_PLANS = [*PLANS, ("streamed", "all"), ("every kind", "mixed")]
plans = pytest.mark.parametrize(("home", "keep"), PLANS)


def make(model_class=Model, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return model_class(**kwargs)


def check_parity(model: nn.Module, home: str, keep: str, steps, loss=Model.loss, max_norm: float = 0.0) -> None:
    """Trains copies of `model` plainly and under the executor on the CPU, and wants the same bits."""
    reference, reference_norms = train_plain(model, steps, max_norm=max_norm, loss=loss)
    executor = make_executor(model, plan_for(model, home=home, keep=keep))
    norms = train(executor, steps, max_norm=max_norm, loss=loss)
    assert_same_weights(model, reference)
    assert norms == reference_norms
    executor.close()


@plans
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_parity(home, keep, accumulation, max_norm):
    data = batches(4 * accumulation, "cpu")
    steps = [data[i : i + accumulation] for i in range(0, len(data), accumulation)]
    check_parity(make(), home, keep, steps, max_norm=max_norm)


@plans
def test_dropout_is_recomputed_with_the_same_noise(home, keep):
    model = make(dropout=0.4)
    data = [[ids] for ids in batches(3, "cpu")]
    torch.manual_seed(5)
    reference, _ = train_plain(model, data)
    executor = make_executor(model, plan_for(model, home=home, keep=keep))
    torch.manual_seed(5)
    train(executor, data)
    assert_same_weights(model, reference)
    executor.close()


class TwiceModel(Model):
    """A shared block: the second layer runs twice, and every other step the third does not run."""

    def run_layers(self, x):
        first, second, third = self.layers
        x = second(first(second(x)))
        return third(x) if x.shape[0] == 2 else x


TWO, THREE = batches(2, "cpu"), [torch.arange(21).reshape(3, 7), torch.arange(21, 42).reshape(3, 7)]


@plans
def test_unit_used_twice_or_not_at_all(home, keep):
    check_parity(make(TwiceModel), home, keep, [TWO[:1], THREE[:1], TWO[1:]])


@plans
def test_unit_used_twice_while_accumulating(home, keep):
    """torch adds a backward's two gradients to each other first, we add each to the window's sum: a rounding apart."""
    model, steps = make(TwiceModel), [TWO, THREE, [TWO[1], THREE[0]]]
    reference, norms = train_plain(model, steps)
    executor = make_executor(model, plan_for(model, home=home, keep=keep))
    assert train(executor, steps) == pytest.approx(norms, rel=1e-6)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=3e-6)  # lr 1e-2 and Adam: an ulp of gradient is at most this
    executor.close()


class Routed(nn.Module):
    """An expert layer in which a fixed expert gets no token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x):
        return x + self.experts[0](x) + self.experts[2](x[:, :1])


@plans
def test_expert_without_tokens_is_untouched(home, keep):
    model = make(layers=[Routed(), Block(), Routed()])
    idle = copy.deepcopy(model.layers[0].experts[1].weight)
    check_parity(model, home, keep, [[ids] for ids in batches(3, "cpu")])
    assert torch.equal(model.layers[0].experts[1].weight, idle)


class Output(NamedTuple):
    x: torch.Tensor
    extra: torch.Tensor


@dataclasses.dataclass
class DataclassOutput:
    x: torch.Tensor
    note: str
    nested: dict


class Structured(Block):
    """A layer that takes and returns nested things."""

    kind = "namedtuple"

    def forward(self, x, scale=None):
        y = super().forward(x)
        match self.kind:
            case "namedtuple":
                return Output(y, y.detach() * 2)
            case "dict":
                return {"x": y, "list": [y * 3, None, "text"]}
            case "dataclass":
                return DataclassOutput(y, "note", {"again": (y * 2,)})


@plans
@pytest.mark.parametrize("kind", ["namedtuple", "dict", "dataclass"])
def test_structured_outputs(home, keep, kind):
    class StructuredModel(Model):
        def run_layers(self, x):
            for layer in self.layers:
                layer.kind = kind
                out = layer(x)
                match kind:
                    case "namedtuple":
                        assert isinstance(out, Output) and not out.extra.requires_grad
                        x = out.x
                    case "dict":
                        assert out["list"][1:] == [None, "text"]
                        x = out["x"] + out["list"][0]
                    case "dataclass":
                        assert isinstance(out, DataclassOutput) and out.note == "note"
                        x = out.x + out.nested["again"][0]
            return x

    check_parity(make(StructuredModel, layers=[Structured() for _ in range(3)]), home, keep, [batches(1, "cpu")] * 2)


@plans
def test_frozen_first_half(home, keep):
    model = make(num_layers=4)
    for module in (model.embedding, model.layers[0], model.layers[1]):
        module.requires_grad_(False)
    before = copy.deepcopy(model.layers[0].state_dict())
    check_parity(model, home, keep, [[ids] for ids in batches(3, "cpu")])
    assert all(torch.equal(before[key], value) for key, value in model.layers[0].state_dict().items())


class ReadsHead(Block):
    """A layer that uses a stem weight which it does not hold."""

    def forward(self, x, scale=None):
        return super().forward(x) + 0.1 * torch.nn.functional.linear(x, self.reader())[..., :HIDDEN]


@plans
def test_stem_weight_used_inside_a_unit(home, keep):
    class ReadsHeadModel(Model):
        def run_layers(self, x):
            self.layers[1].reader = lambda: self.head.weight
            return super().run_layers(x)

    check_parity(
        make(ReadsHeadModel, layers=[Block(), ReadsHead(), Block()]), home, keep, [[ids] for ids in batches(3, "cpu")]
    )


def test_unknown_leaf_is_refused_by_name():
    class Leaky(Block):
        def forward(self, x, scale=None):
            return super().forward(x) * self.__dict__["hidden"]

    model = make(layers=[Block(), Leaky()])
    model.layers[1].__dict__["hidden"] = torch.ones(1, requires_grad=True)
    executor = make_executor(model, plan_for(model))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1 .* gradient would be lost"):
        train(executor, [batches(1, "cpu")])
    executor.close()


@plans
def test_two_backwards_through_one_graph(home, keep):
    def loss(model, ids):
        first = Model.loss(model, ids)
        first.backward(retain_graph=True)
        return first * 0.5

    check_parity(make(), home, keep, [[ids] for ids in batches(2, "cpu")], loss=loss)


@plans
def test_evaluation_inside_a_step_changes_nothing(home, keep):
    def loss(model, ids):
        value = Model.loss(model, ids)
        with torch.no_grad():
            Model.loss(model, ids.flip(0))
        return value

    check_parity(make(), home, keep, [[ids] for ids in batches(2, "cpu")], loss=loss)


@plans
def test_strided_weights_keep_their_layout(home, keep):
    model = make()
    model.layers[1].up.weight = nn.Parameter(torch.randn(HIDDEN, 37).t() * 0.1)
    stride = model.layers[1].up.weight.stride()
    check_parity(model, home, keep, [[ids] for ids in batches(2, "cpu")])
    assert model.layers[1].up.weight.stride() == stride


def test_failing_layer_leaves_everything_at_home():
    class Failing(Block):
        fail = False

        def forward(self, x, scale=None):
            if self.fail:
                raise KeyboardInterrupt
            return super().forward(x)

    model = make(layers=[Block(), Failing(), Block()])
    data = [[ids] for ids in batches(3, "cpu")]
    reference, _ = train_plain(model, data)
    executor = make_executor(model, plan_for(model))
    homes = [p.data_ptr() for p in model.layers.parameters()]
    train(executor, data[:1])
    Failing.fail = True
    with pytest.raises(KeyboardInterrupt):
        model.loss(data[1][0])
    Failing.fail = False
    assert [p.data_ptr() for p in model.layers.parameters()] == homes
    train(executor, data[1:])
    assert_same_weights(model, reference)
    executor.close()


def test_changed_output_is_an_error_not_a_wrong_gradient():
    class InPlaceModel(Model):
        def run_layers(self, x):
            for layer in self.layers:
                x = layer(x)
                x.mul_(2)  # the layer saved its output for backward
            return x

    class SavesOutput(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            return torch.tanh(self.up(x))

    model = make(InPlaceModel, layers=[SavesOutput(), SavesOutput()])
    executor = make_executor(model, plan_for(model, keep="all"))
    with pytest.raises(RuntimeError, match=r"layers\.\d: .*changed in place"):
        train(executor, [batches(1, "cpu")])
    executor.close()


class SlowUpdates(ClientOptimizer):
    """Makes the window between `step()` and the update wide enough to look into."""

    def update(self, *args):
        time.sleep(0.05)
        super().update(*args)


READS = {
    "captured list": lambda model, captured: [p.detach().clone() for p in captured],
    "state_dict": lambda model, captured: [v.clone() for v in model.state_dict().values()],
    "deepcopy": lambda model, captured: list(copy.deepcopy(model).parameters()),
    "torch.save": lambda model, captured: list(_saved_and_loaded(model).values()),
    "arithmetic": lambda model, captured: [p * 1 for p in captured],
    "numpy": lambda model, captured: [torch.from_numpy(p.detach().cpu().numpy().copy()) for p in captured],
    "dlpack": lambda model, captured: [torch.from_dlpack(p.detach()).clone() for p in captured],
    "list of lists": lambda model, captured: [torch.cat([p.flatten(), p.flatten()])[: p.numel()] for p in captured],
}


def _saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("read", READS)
def test_nobody_sees_a_weight_before_its_update(read):
    model = make()
    data = [batches(1, "cpu")]
    reference, _ = train_plain(model, data)
    executor = make_executor(model, plan_for(model))
    executor.updater = SlowUpdates(executor.optimizer)
    captured = list(model.parameters())
    model.loss(data[0][0]).backward()
    executor.step(0.0)
    assert any(type(p) is PendingParameter for p in captured)
    values = READS[read](model, captured)
    for value, expected in zip(values, reference.parameters(), strict=True):
        assert torch.equal(value.reshape(expected.shape), expected)
    executor.close()


def test_metadata_does_not_wait_for_an_update():
    model = make()
    executor = make_executor(model, plan_for(model))
    release = threading.Event()

    class Blocked(ClientOptimizer):
        def update(self, *args):
            release.wait()
            super().update(*args)

    executor.updater = Blocked(executor.optimizer)
    model.loss(batches(1, "cpu")[0]).backward()
    executor.step(0.0)
    for parameter in model.parameters():
        assert parameter.shape and parameter.dtype and parameter.requires_grad and parameter.numel()
        assert parameter.grad is None
        parameter.grad = None
        assert isinstance(parameter, nn.Parameter)
    release.set()
    executor.close()


def test_failed_update_is_raised_where_it_is_needed():
    model = make()
    executor = make_executor(model, plan_for(model))

    class Broken(ClientOptimizer):
        def update(self, *args):
            raise OSError("disk on fire")

    executor.updater = Broken(executor.optimizer)
    ids = batches(1, "cpu")[0]
    model.loss(ids).backward()
    executor.step(0.0)
    with pytest.raises(RuntimeError, match="optimizer update of .* disk on fire"):
        model.loss(ids)
    with pytest.raises(RuntimeError, match="disk on fire"):
        executor.close()


@pytest.mark.parametrize(("home", "keep"), NATIVE_PLANS)
def test_non_finite_gradient_skips_the_step_and_names_the_tensor(home, keep, caplog):
    model = make()
    executor = make_executor(model, plan_for(model, home=home, keep=keep), native=True)
    data = batches(2, "cpu")
    train(executor, [data[:1]])
    before = copy.deepcopy(model.state_dict())
    handle = model.layers[1].register_forward_hook(lambda module, args, output: output * float("inf"))
    model.loss(data[0]).backward()
    _, applied = executor.step(1.0)
    handle.remove()
    executor.flush()
    assert not applied and "non-finite gradients" in caplog.text and "layers.0" in caplog.text
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    train(executor, [data[1:]])
    assert all(value.isfinite().all() for value in model.state_dict().values())
    executor.close()


@plans
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("when", ["before the window's second batch", "before the step"])
def test_gradients_move_with_a_new_plan(home, keep, accumulation, when):
    """A batch larger than any before plans again, and may come in the middle of a window."""
    model, data = make(), batches(2 * accumulation, "cpu")
    steps = [data[:accumulation], data[accumulation:]]
    reference, _ = train_plain(model, steps, max_norm=0.05)
    other = {"cpu": "gpu", "gpu": "mixed", "mixed": "cpu"}[home]
    executor = make_executor(model, plan_for(model, home=home, keep=keep))
    move_at = min(1, accumulation - 1) if when == "before the window's second batch" else accumulation
    for micro_batches in steps:
        for i, ids in enumerate(micro_batches):
            if i == move_at:
                executor.place(plan_for(model, home=other, keep="all"))
            executor.begin_forward()
            executor.set_last_micro_batch(i == accumulation - 1)
            Model.loss(model, ids).backward()
        if move_at == accumulation:
            executor.place(plan_for(model, home=other, keep="all"))
        executor.step(0.05)
    executor.flush()
    assert_same_weights(model, reference)
    executor.close()


@plans
@pytest.mark.parametrize("last", [True, False])
def test_discarded_gradients_leave_no_trace(home, keep, last):
    model, data = make(), batches(3, "cpu")
    reference, _ = train_plain(model, [[data[1]], [data[2]]], max_norm=0.05)
    executor = make_executor(model, plan_for(model, home=home, keep=keep))
    for _ in range(2):
        executor.begin_forward()
        executor.set_last_micro_batch(last)
        Model.loss(model, data[0]).backward()
    executor.discard_gradients()
    train(executor, [[data[1]], [data[2]]], max_norm=0.05)
    assert_same_weights(model, reference)
    executor.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_are_bit_equal(device, state_bits, dtype):
    """Homes, activations and a move in the middle change nothing in the native updates."""
    results = []
    for home, keep in NATIVE_PLANS:
        model = make().to(device)
        plan = plan_for(model, home=home, keep=keep, state_bits=state_bits, device=device)
        executor = make_executor(model, plan, device=device, native=True, dtype=dtype)
        data = batches(8, device)
        train(executor, [data[:2], data[2:4]], max_norm=0.1)
        executor.place(plan_for(model, home="mixed", keep="none", state_bits=state_bits, device=device))
        train(executor, [data[4:6], data[6:7]], max_norm=0.1)
        masters = [executor.owner[p][0].home.read_master(executor.owner[p][1]) for p in model.parameters()]
        results.append(masters)
        executor.close()
    for masters in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(masters, results[0], strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_late_transfers_change_nothing(device):
    """Every transfer is made late: a missing wait would read an old weight or lose a gradient."""
    outcomes = []
    for delay_s in (0.0, 0.003):
        model = make(num_layers=5).to(device)
        executor = make_executor(
            model, plan_for(model, device=device), device=device, native=True, transfer_delay_s=delay_s
        )
        train(executor, [[ids] for ids in batches(12, device)], max_norm=0.1)
        outcomes.append([p.detach().clone() for p in model.parameters()])
        executor.close()
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_close_gives_everything_back():
    model = make()
    forward = type(model.layers[0]).forward
    threads = threading.active_count()
    executor = make_executor(model, plan_for(model))
    train(executor, [batches(1, "cpu")])
    executor.close()
    executor.close()
    assert threading.active_count() == threads
    assert type(model.layers[0]) is Block and type(model.layers[0]).forward is forward
    model.loss(batches(1, "cpu")[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_managed_model_refuses_another_dtype_and_ignores_devices():
    model = make()
    executor = make_executor(model, plan_for(model))
    model.layers[0].to("cpu")
    with pytest.raises(UnsupportedModelError, match="can't be changed from torch.float32 to torch.float16"):
        model.layers[0].half()
    executor.close()


@pytest.mark.parametrize("keep", ["none", "all"])
def test_a_loss_that_lives_on_holds_no_activations(keep):
    """Most loops keep the last loss until the next forward is over: its graph must be empty by then."""
    model = make()
    executor = make_executor(model, plan_for(model, keep=keep))
    seen = []
    handles = [
        layer.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0].untyped_storage())))
        for layer in model.layers
    ]
    loss = model.loss(batches(1, "cpu")[0])
    assert any(storage() is not None for storage in seen)
    loss.backward()
    gc.collect()
    assert [storage() for storage in seen] == [None] * len(model.layers)
    assert loss.isfinite()
    for handle in handles:
        handle.remove()
    executor.close()


def test_interrupted_leases_end_with_the_next_forward():
    """A second Ctrl-C can strike while the first one's lease is being given back."""
    model = make()
    data = [[ids] for ids in batches(3, "cpu")]
    reference, _ = train_plain(model, data)
    executor = make_executor(model, plan_for(model))
    train(executor, data[:1])
    unit = executor.units[1]
    slot = executor._slots.acquire(unit, "weights", None)
    unit.point_to(slot)
    train(executor, data[1:])
    assert_same_weights(model, reference)
    assert all(unit.slot is None for unit in executor.units)
    executor.close()


def test_a_layer_thawed_after_the_start_is_refused_by_name():
    model = make()
    model.layers[0].requires_grad_(False)
    executor = make_executor(model, plan_for(model))
    train(executor, [batches(1, "cpu")])
    model.layers[0].requires_grad_(True)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.norm\.weight was frozen when the engine was made"):
        train(executor, [batches(1, "cpu")])
    executor.close()


def test_a_unit_can_be_copied_and_pickled():
    model = make()
    executor = make_executor(model, plan_for(model))
    train(executor, [batches(1, "cpu")])
    for copied in (copy.deepcopy(model.layers[1]), pickle.loads(pickle.dumps(model.layers[1]))):
        assert type(copied) is Block
        x = torch.randn(2, HIDDEN)
        with torch.no_grad():
            assert torch.equal(copied(x), model.layers[1](x))
    executor.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("before", "after"), [("cpu", "gpu"), ("gpu", "cpu"), ("cpu", "mixed")])
def test_units_may_move_between_a_kept_forward_and_its_backward(before, after, device):
    """A longer batch plans again: the graph of a forward that waits for its backward must find its weights."""
    model = make().to(device)
    executor = make_executor(model, plan_for(model, home=before, keep="all", device=device), device=device)
    reference = make().to(device)
    ids = batches(1, device)[0]
    reference.loss(ids).backward()
    loss = model.loss(ids)
    executor.place(plan_for(model, home=after, keep="all", device=device))
    arrived = {}
    deliver = executor.deliver
    executor.deliver = lambda unit, gradients: (
        arrived.update({t.name: g.clone() for t, g in gradients}),
        deliver(unit, gradients),
    )
    loss.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if name.startswith("layers")}
    assert arrived.keys() == wanted.keys()
    for name, gradient in arrived.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-7)
    executor.close()
