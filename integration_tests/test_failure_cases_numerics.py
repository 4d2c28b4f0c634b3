"""Gradients, clipping, scaling and optimizers: ways in which offload engines trained silently wrong."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from integration_tests import cases, harness, models
from integration_tests.harness import assert_bit_equal, assert_close_on_gpu, fresh_accelerate_state
from integration_tests.loops import (
    MIXED,
    RESIDENT,
    STREAMED,
    adamw,
    initialize,
    make_trainer,
    random_batches,
    run_engine,
    train_torch,
    weights_of,
)
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.runtime.update import ClientOptimizer, NativeAdamW

placements = pytest.mark.parametrize("placement", [STREAMED, RESIDENT, MIXED], ids=str)
STEPS = [[batch] for batch in random_batches(4)]


def llama() -> nn.Module:
    torch.manual_seed(3)
    return models.llama()


def plain_trainer(model: nn.Module, samples, folder: Path, device: str, **options) -> harness.Run:
    with harness.environment(dict.fromkeys(harness.LAUNCH_VARIABLES)), fresh_accelerate_state():
        return harness.finish(make_trainer(model, samples, folder, device, **options))


def lazy_trainer(model: nn.Module, samples, folder: Path, device: str, placement=MIXED, **options) -> harness.Run:
    with fresh_accelerate_state():
        run = harness.finish(make_trainer(model, samples, folder, device, placement=placement, **options))
        harness.close(run)
        return run


def assert_same_run(got: harness.Run, expected: harness.Run, device: str) -> None:
    """Losses, norms, learning rates and weights; bit for bit on the CPU."""
    assert got.learning_rates == expected.learning_rates
    if device == "cpu":
        assert got.losses == expected.losses
        assert got.grad_norms == expected.grad_norms
        assert_bit_equal(got.weights, expected.weights)
    else:
        assert got.losses == pytest.approx(expected.losses, rel=1e-5)
        assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
        assert_close_on_gpu(got.weights, expected.weights)


# S-18, S-21: accumulation and loss scaling.


@placements
def test_four_micro_batches_of_one_are_one_batch_of_four(placement, tmp_path):
    """Equal lengths: the update must not depend on how a batch is cut up."""
    rows = random_batches(16, rows=1)
    cut = [rows[i : i + 4] for i in range(0, 16, 4)]
    whole = [[{key: torch.cat([row[key] for row in step]) for key in step[0]}] for step in cut]
    results = []
    for steps in (cut, whole):
        model = llama()
        engine = initialize(
            model, adamw(model.parameters()), tmp_path, placement=placement, accumulation=len(steps[0]),
            micro_batch=len(steps[0][0]["input_ids"]),
        )  # fmt: skip
        results.append(run_engine(engine, steps))
        engine.destroy()
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    moved = weights_of(llama())
    for name, value in results[0][0].items():
        away = (value - results[1][0][name]).norm()
        assert away <= 1e-3 * (value - moved[name]).norm() + 1e-6, name


class OwnLoss(nn.Module):
    """A model that normalizes its loss per micro-batch by itself and takes no num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.llama()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids=input_ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def own_loss() -> nn.Module:
    torch.manual_seed(3)
    return OwnLoss()


def sum_over_tokens(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


LOSSES = {
    "the model's, per token of the step": (llama, {}),
    "the model's own mean": (own_loss, {}),
    "compute_loss_func": (llama, {"trainer_options": {"compute_loss_func": sum_over_tokens}}),
    "label smoothing": (llama, {"label_smoothing_factor": 0.1}),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_loss_norm_and_update_are_plain_trainers(loss, accumulation, device, tmp_path):
    """Token counts differ between micro-batches, and three layers could each divide by the accumulation."""
    make, options = LOSSES[loss]
    samples = models.make_samples("llama", 3 * 2 * accumulation)
    options = {"max_steps": 3, "gradient_accumulation_steps": accumulation, "max_grad_norm": 0.5, **options}
    expected = plain_trainer(make(), samples, tmp_path, device, **options)
    got = lazy_trainer(make(), samples, tmp_path, device, **options)
    assert len(got.losses) == 3
    assert_same_run(got, expected, device)


@pytest.mark.parametrize("placement", [STREAMED, MIXED], ids=str)
def test_short_last_window_of_an_epoch(placement, device, tmp_path):
    """S-23: 7 micro-batches per epoch in windows of 3, two epochs: the third window of each has one micro-batch."""
    samples = models.make_samples("llama", 14)
    options = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5}
    expected = plain_trainer(llama(), samples, tmp_path, device, **options)
    got = lazy_trainer(llama(), samples, tmp_path, device, placement, **options)
    assert len(got.losses) == 6
    assert_same_run(got, expected, device)


# S-22: clipping.


@placements
@pytest.mark.parametrize("implementation", ["torch", "native"])
def test_update_is_clipped_and_the_logged_norm_is_the_one_before(placement, implementation, tmp_path):
    """SGD-like proof: with eps far above the gradients AdamW moves in proportion to them, so the limit shows."""
    max_norm = 0.01

    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1.0, eps=1e3, weight_decay=0.0)

    expected, expected_norms = train_torch(llama(), STEPS, make_optimizer, max_norm=max_norm)
    unclipped, _ = train_torch(llama(), STEPS, make_optimizer)
    model = llama()
    engine = initialize(
        model, make_optimizer(model.parameters()), tmp_path, placement=placement, max_norm=max_norm,
        implementation=implementation,
    )  # fmt: skip
    got, norms = run_engine(engine, STEPS)
    assert type(engine.get_global_grad_norm()) is float
    engine.destroy()
    assert norms == pytest.approx(expected_norms, rel=1e-5) and min(norms) > 10 * max_norm
    start = weights_of(llama())
    moved = {name: (expected[name] - value).norm() for name, value in start.items()}
    assert all((unclipped[name] - value).norm() > 10 * moved[name] for name, value in start.items())
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 2e-3 * moved[name] + 1e-7, name


def test_clipping_set_in_one_place_is_enough(device, tmp_path):
    """max_grad_norm of the training arguments reaches a JSON that says "auto"."""
    samples = models.make_samples("llama", 4)
    expected = plain_trainer(llama(), samples, tmp_path, device, max_steps=2, max_grad_norm=0.01)
    assert min(expected.grad_norms) > 0.1
    got = lazy_trainer(llama(), samples, tmp_path, device, max_steps=2, max_grad_norm=0.01)
    assert_same_run(got, expected, device)
    assert all(type(norm) is float for norm in got.grad_norms)


# S-24: updates below bf16's resolution.


@pytest.mark.parametrize("implementation", ["native", "torch"])
@placements
def test_small_updates_of_bf16_weights_add_up(implementation, placement, tmp_path):
    """At lr 1e-6 one update is far below half a bf16 ulp of nearly every weight; the masters move as in fp32."""
    steps = [[batch] for batch in random_batches(20)]

    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0)

    model = llama()
    engine = initialize(
        model, make_optimizer(model.parameters()), tmp_path, placement=placement, implementation=implementation,
        bf16={"enabled": True},
    )  # fmt: skip
    got, _ = run_engine(engine, steps)
    state = engine.lazytrain
    masters = {r.name: state.read_master(r).view(r.shape).clone() for r in state.records}
    engine.destroy()
    start = weights_of(llama())
    expected, _ = train_torch(llama(), steps, make_optimizer)
    assert {value.dtype for value in got.values()} == {torch.bfloat16}
    for name, value in start.items():
        should, did = (expected[name] - value).flatten(), (masters[name] - value).flatten()
        assert should.abs().max() > 5e-6
        assert did.norm() == pytest.approx(should.norm().item(), rel=0.2), name
        assert torch.cosine_similarity(should, did, dim=0) > 0.8, name
    still = sum((got[name] == value.bfloat16()).sum().item() for name, value in start.items())
    assert still > 0.5 * sum(value.numel() for value in start.values()), "nothing of this would show in bf16 alone"


# S-54: weight decay.


@placements
@pytest.mark.parametrize("implementation", ["torch", "native"])
def test_decay_touches_the_tensors_of_its_group_only(placement, implementation, tmp_path):
    """A gradient of zero and decay 0.1: what shrinks is what decays, by exactly lr * decay a step."""

    def zero_loss(model, batch):
        return model(**batch)["loss"] * 0.0

    model = llama()
    decayed = {name for name, p in model.named_parameters() if p.ndim >= 2}
    for p in model.parameters():
        nn.init.uniform_(p, 0.5, 1.0)
    model.model.layers[0].requires_grad_(False)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0.0},
    ]
    before = weights_of(model)
    engine = initialize(
        model, torch.optim.AdamW(groups, lr=0.5), tmp_path, placement=placement, implementation=implementation
    )
    after, _ = run_engine(engine, STEPS[:1], loss=zero_loss)
    engine.destroy()
    for name, value in before.items():
        decays = name in decayed and "layers.0." not in name
        torch.testing.assert_close(after[name], value * 0.95 if decays else value, rtol=1e-6, atol=0)


def test_trainers_own_groups_decay_as_without_us(device, tmp_path):
    """Trainer's groups leave norms and biases out, by name and class: the names must be the ordinary ones."""
    samples = models.make_samples("gpt2", 6)

    def gpt2():
        torch.manual_seed(3)
        return models.gpt2()

    options = {"max_steps": 3, "weight_decay": 0.5}
    expected = plain_trainer(gpt2(), samples, tmp_path, device, **options)
    got = lazy_trainer(gpt2(), samples, tmp_path, device, **options)
    assert_same_run(got, expected, device)
    sizes = [sum(p.numel() for p in group["params"]) for group in got.trainer.optimizer.param_groups]
    assert sizes == [sum(p.numel() for p in group["params"]) for group in expected.trainer.optimizer.param_groups]


# S-52: the user's own optimizer.


class CountingLion(torch.optim.Optimizer):
    """Lion by hand, with a warm-up that counts steps in its groups and in the optimizer itself."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "k": 0})
        self.total_steps = 0
        self.scale = torch.tensor(1.0)

    @torch.no_grad()
    def step(self, closure=None):
        self.total_steps += 1
        self.scale.mul_(0.9)
        for group in self.param_groups:
            group["k"] += 1
            lr = group["lr"] * min(1.0, group["k"] / 3) / math.sqrt(self.total_steps) * self.scale.item()
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                p.mul_(1 - lr * group["weight_decay"])
                p.add_((momentum * beta1 + p.grad * (1 - beta1)).sign(), alpha=-lr)
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)
                state["steps"] = state.get("steps", 0) + 1


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "AMSGrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "Adafactor": lambda params: transformers.Adafactor(params, lr=None, relative_step=True, warmup_init=True),
    "Adafactor with momentum": lambda params: transformers.Adafactor(
        params, lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9, weight_decay=0.1
    ),
    "home-made": CountingLion,
    "AdamW with a tensor for lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", [STREAMED, MIXED], ids=str)
def test_any_optimizer_trains_as_in_torch(optimizer, placement, tmp_path, caplog):
    make_optimizer = OPTIMIZERS[optimizer]
    expected, _ = train_torch(llama(), STEPS, make_optimizer, max_norm=0.5)
    model = llama()
    client = make_optimizer(model.parameters())
    native = "AdamW with" in optimizer
    engine = initialize(
        model, client, tmp_path, placement=placement, max_norm=0.5, implementation="torch" if native else "native"
    )
    got, _ = run_engine(engine, STEPS)
    assert_bit_equal(got, expected)
    if optimizer == "home-made":
        assert client.total_steps == client.param_groups[0]["k"] == len(STEPS)
        assert client.scale.item() == pytest.approx(0.9 ** len(STEPS))
    if not native:
        told = [r for r in caplog.records if "has no native kernel" in r.getMessage() and r.levelno == logging.WARNING]
        assert len(told) == 1, "the slower path must say so, once"
    engine.destroy()


@pytest.mark.parametrize("implementation", ["native", "torch"])
def test_rate_in_a_tensor_is_the_steps_own_even_if_the_update_is_late(implementation, tmp_path, monkeypatch):
    """Schedulers change such a rate in place, right after step(), while the update may still wait."""
    for updater in (NativeAdamW, ClientOptimizer):

        def late(self, *args, update=updater.update):
            time.sleep(0.02)
            update(self, *args)

        monkeypatch.setattr(updater, "update", late)
    results = []
    for rate in (torch.tensor(1e-2), 1e-2):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25**step)
        engine = initialize(model, optimizer, tmp_path, implementation=implementation)
        for (batch,) in STEPS[:3]:
            engine.backward(engine(**batch)["loss"])
            engine.step()
            schedule.step()
        engine.flush()
        results.append(weights_of(model))
        engine.destroy()
    for name, value in results[1].items():
        torch.testing.assert_close(results[0][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["SGD with momentum", "Adafactor", "home-made"])
def test_any_optimizer_resumes_bit_equal(optimizer, tmp_path):
    make_optimizer = OPTIMIZERS[optimizer]
    expected, _ = train_torch(llama(), STEPS, make_optimizer)
    model = llama()
    engine = initialize(model, make_optimizer(model.parameters()), tmp_path)
    run_engine(engine, STEPS[:2])
    engine.save_checkpoint(str(tmp_path / "save"))
    engine.destroy()
    model = llama()
    client = make_optimizer(model.parameters())
    if optimizer == "home-made":  # attributes of one's own are no part of torch's state_dict either
        client.total_steps, client.scale = 2, torch.tensor(0.9).mul_(0.9)
    engine = initialize(model, client, tmp_path, placement=RESIDENT)
    engine.load_checkpoint(str(tmp_path / "save"))
    got, _ = run_engine(engine, STEPS[2:])
    engine.destroy()
    assert_bit_equal(got, expected)


class GlobalDistance(torch.optim.SGD):
    """Scales its step by something computed over all parameters, as D-Adaptation and Prodigy do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = float(sum(p.grad.abs().sum() for p in group["params"] if p.grad is not None))
        return super().step(closure)


def test_optimizer_that_looks_at_all_parameters_is_refused_not_changed(tmp_path):
    model = llama()
    engine = initialize(model, GlobalDistance(model.parameters(), lr=1e-2), tmp_path)
    with pytest.raises(RuntimeError, match=r"GlobalDistance computes its param_groups\[0\]\['d'\] over all parameters"):
        run_engine(engine, STEPS[:1])
    with pytest.raises(RuntimeError, match="over all parameters"):
        engine.destroy()


def test_optimizer_that_needs_a_closure_is_refused_at_the_start(tmp_path):
    model = llama()
    with pytest.raises(ConfigError, match=r"LBFGS.step needs closure.*use another optimizer"):
        initialize(model, torch.optim.LBFGS(model.parameters()), tmp_path)


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_torch"])
def test_optimizer_chosen_by_name_in_trainer(optim, device, tmp_path):
    samples = models.make_samples("llama", 8)
    options = {"max_steps": 4, "optim": optim, "learning_rate": 1e-3}
    expected = plain_trainer(llama(), samples, tmp_path, device, **options)
    got = lazy_trainer(llama(), samples, tmp_path, device, ds_config={"zero_allow_untested_optimizer": True}, **options)
    assert_same_run(got, expected, device)


def test_optimizer_class_given_to_trainer(device, tmp_path):
    """A home-made class. (Instances in `optimizers=` are dropped by transformers itself under DeepSpeed.)"""
    samples = models.make_samples("llama", 8)
    given = {"optimizer_cls_and_kwargs": (CountingLion, {"lr": 1e-3, "betas": (0.8, 0.9)})}
    options = {"max_steps": 4, "trainer_options": given}
    expected = plain_trainer(llama(), samples, tmp_path, device, **options)
    got = lazy_trainer(llama(), samples, tmp_path, device, **options)
    assert max(expected.learning_rates) == 1e-3
    assert_same_run(got, expected, device)


def test_optimizer_section_of_the_json(device, tmp_path):
    """An "AdamW" section filled in from the training arguments is Trainer's AdamW, without a kernel compiled for it."""
    samples = models.make_samples("llama", 8)
    automatic = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    options = {"max_steps": 4, "weight_decay": 0.0}  # a section has one group: decay would reach the norms too
    expected = plain_trainer(llama(), samples, tmp_path, device, **options)
    got = lazy_trainer(
        llama(), samples, tmp_path, device, ds_config={"optimizer": {"type": "AdamW", "params": automatic}}, **options
    )
    # The engine steps such a section's schedule, so Trainer logs each rate one step early: not compared.
    got.learning_rates = expected.learning_rates
    assert_same_run(got, expected, device)


def test_scheduler_section_of_the_json(tmp_path):
    """The engine steps it; each update uses the rate that the engine showed before the step."""
    model = llama()
    params = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear"}
    engine = initialize(
        model, None, tmp_path, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        scheduler={"type": "WarmupLR", "params": params},
    )  # fmt: skip
    rates = []
    for (batch,) in STEPS:
        engine.backward(engine(**batch)["loss"])
        rates.append(engine.get_lr()[0])
        engine.step()
    engine.flush()
    got = weights_of(model)
    engine.destroy()
    assert len(set(rates)) >= 3

    reference = llama()
    optimizer = adamw(reference.parameters())
    for (batch,), rate in zip(STEPS, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        reference(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_bit_equal(got, weights_of(reference))


# S-42: 8-bit states.


def test_8bit_states_and_gradients_stay_in_the_band_of_exact_ones(tmp_path):
    """200 steps over the same tokens: tensors smaller than a block, embedding and head included. S-26: so do gradients
    in codes, which this model's weights get in fp32."""
    steps = [[batch] for batch in random_batches(4, rows=2)] * 50

    def loss_after(state_bits: int, gradient_bits: int = 16) -> float:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        bits = {"state_bits": state_bits, "gradient_bits": gradient_bits}
        engine = initialize(model, optimizer, tmp_path, placement=MIXED, implementation="native", **bits)
        run_engine(engine, steps)
        with torch.no_grad():
            losses = [engine(**step[0])["loss"].item() for step in steps[:4]]
        engine.destroy()
        return sum(losses) / 4

    start, full, small = math.log(models.VOCAB), loss_after(32), loss_after(8)
    assert full < 0.2 * start, "the run must learn something, or the band means nothing"
    assert small < full + 0.05 * start
    assert loss_after(32, 8) < full + 0.05 * start
    assert loss_after(8, 8) < full + 0.05 * start


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_8bit_gradients_keep_dtypes_and_the_norm(dtype, device, tmp_path):
    """S-26: what is trained stays in its dtype, clipping sees the exact norm, and the curve stays in a band."""
    work = cases.Work(model="llama", dtype=dtype, implementation="native", max_norm=0.05)
    mixed = cases.Placement(homes="mixed", activations="keep")
    runs = [harness.run_lazytrain(work, mixed, tmp_path / str(bits), device, gradient_bits=bits) for bits in (16, 8)]
    for run in runs:
        harness.close(run)
    exact, coded = runs
    assert coded.grad_norms[0] == exact.grad_norms[0]
    assert coded.losses == pytest.approx(exact.losses, rel=5e-3)
    for name, weight in coded.weights.items():
        assert weight.dtype == exact.weights[name].dtype, name


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW"])
def test_8bit_optimizer_classes_default_to_adamws_arguments(name, tmp_path):
    """bitsandbytes' AdamW8bit has another default decay than torch's AdamW: what counts is the group's own value."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = llama()
    optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2, weight_decay=0.1)
    engine = initialize(model, optimizer, tmp_path, placement=None, implementation="native")
    bits = {unit.state_bits for unit in engine.lazytrain.executor.plan.units}
    assert bits == {8 if "8bit" in name else 32}
    got, _ = run_engine(engine, STEPS[:1])
    engine.destroy()
    expected, _ = train_torch(llama(), STEPS[:1])
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=2e-4 if "8bit" in name else 1e-5)


@pytest.mark.parametrize(
    ("block", "bits"),
    [
        ({"fidelity": "compact"}, (8, 8)),
        ({"gradients": {"bits": 8}}, (32, 8)),
        ({"gradients": {"bits": 8}, "optimizer": {"implementation": "torch"}}, (32, 8)),
    ],
    ids=["compact", "switch", "switch, torch optimizer"],
)
def test_lossy_features_are_planned_at_the_first_batch(block, bits, tmp_path):
    model = llama()
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=None, lazytrain=block)
    got, losses = run_engine(engine, STEPS[:3])
    units = (*engine.lazytrain.executor.plan.units, *engine.lazytrain.executor.plan.stem)
    exact_states = {unit.name for unit in units if unit.state_bits == 32} if bits[0] == 8 else set()
    assert all(name.startswith("stem.") for name in exact_states)  # the embedding, and what is tiny
    assert {(unit.state_bits, unit.gradient_bits) for unit in units if unit.name not in exact_states} == {bits}
    engine.destroy()
    expected, exact_losses = train_torch(llama(), STEPS[:3])
    assert losses[0] == pytest.approx(exact_losses[0], rel=1e-6)  # the band of later ones has its own test
    assert all(map(math.isfinite, losses))
    assert any(not torch.equal(got[name], expected[name]) for name in got)
