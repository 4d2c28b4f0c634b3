"""What users do around training: own loops, evaluation, generation, saving in callbacks, resuming, sweeping."""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path

import peft
import psutil
import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

from integration_tests import harness, models
from integration_tests.harness import InOrderTrainer, assert_bit_equal, assert_close_on_gpu, fresh_accelerate_state
from integration_tests.loops import (
    MIXED,
    STREAMED,
    adamw,
    initialize,
    make_trainer,
    model_loss,
    random_batches,
    run_engine,
    train_torch,
    weights_of,
)
from lazytrain_plugin import LazyTrainPlugin
from lazytrain_plugin.config.schema import OptimizerConfig, PlanConfig
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.integration.accelerate_plugin import DEEPSPEED_CONFIG
from lazytrain_plugin.runtime.outside_changes import OutsideChanges
from lazytrain_plugin.runtime.update import ClientOptimizer

placements = pytest.mark.parametrize("placement", [STREAMED, MIXED], ids=str)


def llama() -> nn.Module:
    torch.manual_seed(3)
    return models.llama()


def plain_run(model, samples, folder, device, drive=harness.finish, **options):
    """`drive` gets a plain Trainer."""
    with harness.environment(dict.fromkeys(harness.LAUNCH_VARIABLES)), fresh_accelerate_state():
        return drive(make_trainer(model, samples, folder, device, **options))


def lazy_run(model, samples, folder, device, drive=harness.finish, placement=MIXED, **options):
    """`drive` gets a Trainer under a plan."""
    with fresh_accelerate_state():
        trainer = make_trainer(model, samples, folder, device, placement=placement, **options)
        result = drive(trainer)
        trainer.model_wrapped.destroy()
        return result


def assert_same_weights(got, expected, device):
    if device == "cpu":
        assert_bit_equal(got, expected)
    else:
        assert_close_on_gpu(got, expected)


# S-23 and plain Accelerate loops.


def accumulate_loop(accelerator: Accelerator, model: nn.Module, batches, *, clip: bool = True):
    """Seven batches an epoch in windows of three, with a scheduler, over two epochs."""
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    loader = torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=lambda items: items[0])
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, rates = [], []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model_loss(model, batch)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(schedule.get_last_lr()[0])
    unwrapped = accelerator.unwrap_model(model)
    return model, weights_of(unwrapped), losses, rates


@pytest.mark.parametrize("accumulation", [1, 3])
def test_accelerate_loop_with_a_short_last_window(accumulation, device, tmp_path):
    batches = random_batches(7)
    with harness.environment(dict.fromkeys(harness.LAUNCH_VARIABLES)), fresh_accelerate_state():
        accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=accumulation)
        _, expected, expected_losses, expected_rates = accumulate_loop(accelerator, llama(), batches)
    with fresh_accelerate_state():
        model = llama()
        harness.make_plan(model, MIXED).save(tmp_path / "plan.json")
        plugin = LazyTrainPlugin(
            plan=PlanConfig(path=str(tmp_path / "plan.json")), optimizer=OptimizerConfig(implementation="torch")
        ).deepspeed(gradient_accumulation_steps=accumulation, gradient_clipping=0.5)
        accelerator = Accelerator(deepspeed_plugin=plugin)
        engine, got, losses, rates = accumulate_loop(accelerator, model, batches)
        engine.destroy()
    assert losses == pytest.approx(expected_losses, rel=0 if device == "cpu" else 1e-4)
    assert rates == expected_rates
    assert_same_weights(got, expected, device)


# S-36: generation.


@placements
def test_generate_between_steps_then_training_goes_on_on_parity(placement, tmp_path):
    batches = random_batches(4)
    prompts = batches[0]["input_ids"][:, :4]

    def train(model, step):
        texts = []
        for batch in batches:
            step(batch)
            model.eval()
            with torch.no_grad():
                for length in (3, 6):
                    texts.append(model.generate(prompts, max_new_tokens=length, do_sample=False, pad_token_id=0))
            model.train()
        return texts, weights_of(model)

    plain = llama()
    optimizer = adamw(plain.parameters())

    def plain_step(batch):
        model_loss(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    expected_texts, expected = train(plain, plain_step)
    model = llama()
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=placement)

    def engine_step(batch):
        engine.backward(model_loss(engine, batch))
        engine.step()

    texts, weights = train(model, engine_step)
    engine.destroy()
    for got, want in zip(texts, expected_texts, strict=True):
        assert torch.equal(got, want)
    assert_bit_equal(weights, expected)


# S-35: two models.


def log_probability(logits, ids):
    return -nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def preference_loss(reference):
    """DPO: the trained model runs twice a step, `reference` without gradients."""

    def loss(model, batch):
        chosen, rejected = batch["input_ids"].chunk(2)
        margin = [
            log_probability(model(input_ids=ids).logits, ids) - log_probability(reference(ids), ids)
            for ids in (chosen, rejected)
        ]
        return -nn.functional.logsigmoid(0.1 * (margin[0] - margin[1]))

    return loss


def distillation_loss(teacher):
    def loss(model, batch):
        ids = batch["input_ids"]
        student = model(input_ids=ids).logits.log_softmax(-1)
        return nn.functional.kl_div(student, teacher(ids).log_softmax(-1), log_target=True)

    return loss


@pytest.mark.parametrize("kind", ["plain", "engine", "precomputed"])
@pytest.mark.parametrize("make_loss", [distillation_loss, preference_loss])
def test_a_frozen_teacher_or_reference_beside_the_trained_model(make_loss, kind, tmp_path):
    """S-35: as a module of its own, under an engine of its own, or asked before training."""
    batches = random_batches(3)
    torch.manual_seed(8)
    second = models.llama().requires_grad_(False).eval()
    before = weights_of(second)

    def frozen(ids):
        with torch.no_grad():
            return second(input_ids=ids).logits

    expected, expected_norms = train_torch(llama(), [[batch] for batch in batches], loss=make_loss(frozen))
    asked, own_engine = frozen, None
    if kind == "precomputed":
        known = {
            part: frozen(part) for batch in batches for ids in [batch["input_ids"]] for part in (ids, *ids.chunk(2))
        }
        asked = lambda ids: next(v for part, v in known.items() if part.shape == ids.shape and (part == ids).all())  # noqa: E731
    if kind == "engine":
        own_engine = initialize(second, None, tmp_path / "second")
        own_engine.eval()

        def asked(ids):
            with torch.no_grad():
                return own_engine(input_ids=ids).logits.clone()

    model = llama()
    engine = initialize(model, adamw(model.parameters()), tmp_path / "first", placement=MIXED)
    got, norms = run_engine(engine, [[batch] for batch in batches], loss=make_loss(asked))
    engine.destroy()
    if own_engine is not None:
        assert not any(unit.trained for unit in own_engine.lazytrain.executor.all_units)
        own_engine.destroy()
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    assert_bit_equal(got, expected)
    assert_bit_equal(weights_of(second), before)


class InOrderSeq2SeqTrainer(transformers.Seq2SeqTrainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def test_t5_trains_and_evaluates_with_generation(device, tmp_path):
    """predict_with_generate in the middle of training: the same texts, metrics and final weights."""
    samples = models.make_samples("t5", 12)
    texts = []

    def metrics(prediction):
        texts.append(prediction.predictions.tolist())
        return {"length": float((prediction.predictions > 0).sum())}

    def make():
        torch.manual_seed(3)
        return models.t5()

    def drive(trainer):
        trainer.eval_dataset = samples[:4]
        run = harness.finish(trainer)
        return run, [entry["eval_length"] for entry in trainer.state.log_history if "eval_length" in entry]

    options = {
        "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "predict_with_generate": True,
        "generation_max_length": 6, "arguments_class": transformers.Seq2SeqTrainingArguments,
        "trainer_class": InOrderSeq2SeqTrainer,
        "trainer_options": {"compute_metrics": metrics, "eval_dataset": samples[:4]},
    }  # fmt: skip
    run, lengths = plain_run(make(), samples, tmp_path, device, drive, **options)
    expected_texts = list(texts)
    texts.clear()
    got, got_lengths = lazy_run(make(), samples, tmp_path, device, drive, **options)
    assert got_lengths == lengths and len(lengths) == 2
    assert texts == expected_texts
    # A bias that feeds every layer of a stack is summed in another order (integration_tests/models.py).
    assert got.losses == pytest.approx(run.losses, rel=1e-5)


# Evaluation without training, before it, and training twice.


def test_evaluate_only_without_an_optimizer(device, tmp_path):
    samples = models.make_samples("llama", 8)

    def drive(trainer):
        return trainer.evaluate(samples)["eval_loss"], trainer.predict(samples).predictions

    expected_loss, expected_logits = plain_run(llama(), samples, tmp_path, device, drive)
    loss, logits = lazy_run(llama(), samples, tmp_path, device, drive)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert abs(logits - expected_logits).max() <= 1e-5


def test_evaluate_train_evaluate_train_again(device, tmp_path):
    """A base line before training, more training after: one Trainer each, and nobody destroys an engine.

    (One Trainer can't: under DeepSpeed, with or without us, its second run finds no engine.)
    """
    samples = models.make_samples("llama", 8)

    def run(model, **placement):
        scores = []
        for doing in ("evaluate", "train", "evaluate", "train", "evaluate"):
            trainer = make_trainer(model, samples, tmp_path, device, max_steps=3, **placement)
            if doing == "evaluate":
                scores.append(trainer.evaluate(samples)["eval_loss"])
            else:
                trainer.train()
        if placement:
            trainer.model_wrapped.destroy()
        return scores, weights_of(model)

    with harness.environment(dict.fromkeys(harness.LAUNCH_VARIABLES)), fresh_accelerate_state():
        expected_scores, expected = run(llama())
    with fresh_accelerate_state():
        scores, weights = run(llama(), placement=MIXED)
    assert scores == pytest.approx(expected_scores, rel=1e-6) and len(set(scores)) == 3
    assert_same_weights(weights, expected, device)


def test_a_second_engine_over_a_model_takes_it_over(tmp_path):
    """Without destroy() in between, as auto_find_batch_size and sweeps do."""
    model = llama()
    for _ in range(3):
        engine = initialize(model, adamw(model.parameters()), tmp_path)
        before = weights_of(model)
        run_engine(engine, [[batch] for batch in random_batches(2)])
        assert any(not torch.equal(value, before[name]) for name, value in weights_of(model).items())
    plain = copy.deepcopy(model)
    engine.destroy()
    batch = random_batches(1)[0]
    assert model_loss(model, batch).item() == model_loss(plain, batch).item()
    assert type(model.model.layers[0]).forward is transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward


@pytest.mark.parametrize("how", ["zero_grad", "load_checkpoint"])
def test_gradients_of_a_window_that_was_given_up_are_forgotten(how, tmp_path):
    """After an error in backward, say: the batch is dropped, or the run goes back to its checkpoint."""
    first, given_up, last = random_batches(3)
    model = llama()
    expected, norms = train_torch(model, [[first], [last]], max_norm=0.5)
    engine = initialize(model, adamw(model.parameters()), tmp_path, max_norm=0.5)
    run_engine(engine, [[first]])
    engine.save_checkpoint(tmp_path / "checkpoints")
    engine.backward(model_loss(engine, given_up))
    if how == "zero_grad":
        engine.optimizer.zero_grad()
    else:
        engine.load_checkpoint(tmp_path / "checkpoints")
    got, got_norms = run_engine(engine, [[last]])
    engine.destroy()
    assert_bit_equal(got, expected)
    assert got_norms == norms[1:]


def test_longer_batches_in_the_middle_of_a_window(tmp_path):
    """Without `max_tokens` a longer batch plans again; what its window has gathered before counts."""
    steps = [
        [random_batches(1, length=length, seed=seed)[0] for length in lengths]
        for seed, lengths in enumerate([(8, 12), (10, 24), (32, 16)])
    ]
    model = llama()
    expected, norms = train_torch(model, steps, max_norm=0.5)
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=None, accumulation=2, max_norm=0.5)
    got, got_norms = run_engine(engine, steps)
    engine.destroy()
    assert_bit_equal(got, expected)
    assert got_norms == norms


# S-37, S-41: saving.


class SaveInCallback(transformers.TrainerCallback):
    """Saves by every road right after a step, while its updates may be pending."""

    def on_step_end(self, args, state, control, model, **kwargs):
        folder = Path(args.output_dir) / f"step-{state.global_step}"
        model.save_pretrained(folder / "pretrained", max_shard_size="20KB")
        self.trainer.save_model(str(folder / "trainer"))
        torch.save(model.state_dict(), folder / "state.pt")
        torch.save(model, folder / "model.pt")
        self.kept[state.global_step] = {
            name: value.detach().cpu().clone() for name, value in model.state_dict().items()
        }


def samples_batch(samples):
    return {name: torch.stack([sample[name] for sample in samples[:2]]) for name in samples[0]}


def test_saves_in_callbacks_hold_the_weights_of_that_step(device, tmp_path):
    samples = models.make_samples("llama", 6)
    callback = SaveInCallback()
    callback.kept = {}
    stepwise = {}

    class Remember(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            stepwise[state.global_step] = {n: v.detach().cpu().clone() for n, v in model.state_dict().items()}

    plain_run(llama(), samples, tmp_path, device, max_steps=3, trainer_options={"callbacks": [Remember()]})

    def drive(trainer):
        callback.trainer = trainer
        trainer.add_callback(callback)
        return harness.finish(trainer)

    def drive_and_save_the_engine(trainer):
        with pytest.raises(TypeError, match=r"torch\.save\(engine\.module, path\)"):
            drive(trainer) and torch.save(trainer.model_wrapped, tmp_path / "engine.pt")

    lazy_run(llama(), samples, tmp_path, device, drive_and_save_the_engine, max_steps=3)
    for step, expected in stepwise.items():
        folder = tmp_path / f"step-{step}"
        assert len(list((folder / "pretrained").glob("*.safetensors"))) > 1, "the sharded road must be sharded"
        for road in ("pretrained", "trainer"):
            loaded = transformers.LlamaForCausalLM.from_pretrained(folder / road)
            assert_same_weights(loaded.state_dict(), expected, device)
        assert_same_weights(torch.load(folder / "state.pt", map_location="cpu"), expected, device)
        assert b"lazytrain" not in (folder / "model.pt").read_bytes(), "loads where LazyTrain is not installed"
        whole = torch.load(folder / "model.pt", map_location="cpu", weights_only=False)
        assert_same_weights(whole.state_dict(), expected, device)
        assert whole.to(torch.float64)(**samples_batch(samples)).loss.isfinite(), "an ordinary model, dtype and all"
        assert_same_weights(callback.kept[step], expected, device)


class InPreOptimizerStep(transformers.TrainerCallback):
    """Changes something where Trainer promises that the optimizer has not stepped yet."""

    def __init__(self, change):
        self.change = change

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        self.change(model, optimizer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model, optimizer: model.lm_head.weight.detach().mul_(0.5), "lm_head.weight"),
        (lambda model, optimizer: [p.data.mul_(0.5) for p in model.parameters()], r"and \d+ more weights"),
        (lambda model, optimizer: optimizer.param_groups[0].update(lr=1e-5), "the learning rate"),
        (lambda model, optimizer: [p.norm() for p in model.parameters()], None),
    ],
    ids=["in place", "through data", "rate", "reads"],
)
def test_a_change_before_the_step_that_comes_after_it_is_said_once(change, says, device, tmp_path, caplog):
    options = {"max_steps": 2, "trainer_options": {"callbacks": [InPreOptimizerStep(change)]}}
    lazy_run(llama(), models.make_samples("llama", 4), tmp_path, device, **options)
    said = [record.message for record in caplog.records if "comes after the optimizer step" in record.message]
    assert len(said) == (says is not None)
    assert says is None or re.search(rf"InPreOptimizerStep changed .*{says}.* Make it in on_optimizer_step", said[0])


def test_buffers_are_exported_with_the_weights(tmp_path):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return {"loss": self.norm(x).square().mean() + x.mean()}

    torch.manual_seed(0)
    model = Counting()
    plain = copy.deepcopy(model)
    gather = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    engine = initialize(model, adamw(model.parameters()), tmp_path, zero_optimization=gather)
    optimizer = adamw(plain.parameters())
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(5, 6)
        engine.backward(engine(x=x)["loss"])
        engine.step()
        plain(x=x)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.save_16bit_model(str(tmp_path), "model.bin")
    engine.destroy()
    exported = torch.load(tmp_path / "model.bin")
    assert set(exported) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(exported[name], value), name
    assert exported["norm.num_batches_tracked"] == 3


# PEFT through Trainer.


def test_lora_with_dropout_and_modules_to_save(device, tmp_path):
    """Adapters with a head trained in full, dropout on, merged at the end: the same model as plain Trainer's."""
    samples = models.make_samples("llama", 12)

    def make():
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]
        )
        return peft.get_peft_model(models.llama(), config)

    def drive(trainer):
        torch.manual_seed(9)
        trainer.train()
        return weights_of(trainer.model.merge_and_unload())

    options = {"max_steps": 3, "gradient_accumulation_steps": 2}
    expected = plain_run(make(), samples, tmp_path, device, drive, **options)
    got = lazy_run(make(), samples, tmp_path, device, drive, placement=STREAMED, **options)
    assert_same_weights(got, expected, device)


# Data loading with workers; memory over a longer run with saves (S-10).


def test_loader_workers_and_saves_leave_host_memory_flat(device, tmp_path):
    """Two workers are forked per epoch beside weights and states of 200 MB, and every epoch saves."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=384, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    model_bytes = 4 * model.num_parameters()
    this = psutil.Process()
    sizes, worker_deficits = [], []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            mine = this.memory_info().vms
            worker_deficits.extend(mine - child.memory_info().vms for child in this.children())

        def on_epoch_end(self, args, state, control, **kwargs):
            gc.collect()
            sizes.append(this.memory_info().rss)

    with fresh_accelerate_state():
        trainer = make_trainer(
            model, models.make_samples("llama", 4), tmp_path, device, placement=STREAMED, max_steps=-1,
            num_train_epochs=6, dataloader_num_workers=2, save_strategy="epoch", save_total_limit=1,
            trainer_options={"callbacks": [Watch()]},
        )  # fmt: skip
        trainer.train()
        trainer.model_wrapped.destroy()
    # Lows: the C library's heap goes up and down by half the model. What an epoch leaves behind lifts them all.
    assert min(sizes[3:]) - min(sizes[:3]) < 0.2 * model_bytes, [size / model_bytes for size in sizes]
    assert len(worker_deficits) >= 6
    assert min(worker_deficits) > 0.9 * model_bytes, "a worker must not even map the weights at home"


def test_trainer_never_waits_for_a_pending_update(device, tmp_path, monkeypatch):
    """Trainer walks over parameters between a step and the next forward; nothing there may ask for their data."""
    suspected = []
    take_over = OutsideChanges.take_over
    monkeypatch.setattr(
        OutsideChanges, "take_over", lambda self: (suspected.append(set(self._touched)), take_over(self))
    )
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    lazy_run(llama(), models.make_samples("llama", 12), tmp_path, device, placement=STREAMED, **options)
    assert len(suspected) >= 7
    assert not any(suspected[:-1])


# S-40: the learning rate that the update really uses.


@pytest.mark.parametrize("scheduler", ["cosine", "constant_with_warmup"])
def test_rate_used_in_the_update_follows_the_schedule_over_a_resume(scheduler, device, tmp_path, monkeypatch):
    used: list[float] = []
    update = ClientOptimizer.update

    def spy(self, unit, arrived, scalars, *piece):
        if unit.name.endswith("layers.1"):
            used.append(scalars.groups[0]["lr"])
        return update(self, unit, arrived, scalars, *piece)

    monkeypatch.setattr(ClientOptimizer, "update", spy)
    samples = models.make_samples("llama", 16)
    options = {
        "max_steps": 6, "lr_scheduler_type": scheduler, "warmup_steps": 3, "save_strategy": "steps", "save_steps": 4,
        "ignore_data_skip": True,
    }  # fmt: skip
    lazy_run(llama(), samples, tmp_path, device, **options)
    straight, used[:] = list(used), []
    checkpoint = str(tmp_path / "checkpoint-4")
    lazy_run(
        llama(), samples, tmp_path, device, lambda trainer: trainer.train(resume_from_checkpoint=checkpoint), **options
    )
    assert len(straight) == 6 and len(set(straight)) >= 3
    assert used == straight[4:]


# S-47, S-51: refusals and automatic values.


@pytest.mark.parametrize("regional", [False, True])
def test_torch_compile_of_trainer_compiles_layers(device, tmp_path, regional, monkeypatch):
    """The training argument, and Accelerate's compilation of repeated blocks, with a backend that changes no bit."""
    torch._dynamo.reset()
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(regional))
    samples = models.make_samples("llama", 4)
    options = {"max_steps": 2, "lr_scheduler_type": "constant"}
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    seen = []

    def drive(trainer):
        trainer.train()
        seen.append([unit.is_compiled for unit in trainer.model_wrapped.lazytrain.executor.units])
        trainer.model_wrapped.flush()
        return weights_of(trainer.model)

    expected = lazy_run(llama(), samples, tmp_path, device, drive, **options)
    got = lazy_run(llama(), samples, tmp_path, device, drive, **options, **compiled)
    assert_same_weights(got, expected, device)
    assert not any(seen[0]) and all(seen[1])


def test_fp16_is_refused_with_the_remedy(device, tmp_path):
    model = llama()
    with pytest.raises(ConfigError, match="fp16.*needs a loss scale.*bf16"):
        initialize(model, adamw(model.parameters()), tmp_path, fp16={"enabled": True})
    options = {"ds_config": {"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, "max_steps": 1, "fp16": True}
    with pytest.raises(ConfigError, match="fp16.*needs a loss scale.*bf16"), fresh_accelerate_state():
        trainer = make_trainer(model, models.make_samples("llama", 4), tmp_path, device, placement=STREAMED, **options)
        trainer.train()


def test_automatic_batch_size_with_a_sampler_of_ones_own(device, tmp_path):
    """Batches by a batch sampler: the loader has no batch size to fill "auto" with, the training arguments have."""
    samples = models.make_samples("llama", 12)

    class Grouped(InOrderTrainer):
        def get_train_dataloader(self):
            batches = [[0, 1], [4, 5], [2, 3], [8, 9]]
            loader = torch.utils.data.DataLoader(
                self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    options = {"max_steps": 4, "trainer_class": Grouped}
    expected = plain_run(llama(), samples, tmp_path, device, **options)
    got = lazy_run(llama(), samples, tmp_path, device, **options)
    assert_same_weights(got.weights, expected.weights, device)


def test_prepare_without_a_loader(tmp_path):
    """Accelerate can't fill in "auto" then, and says so; with a number in its place it trains."""
    with fresh_accelerate_state():
        config = {**DEEPSPEED_CONFIG, "train_micro_batch_size_per_gpu": 2}
        plugin = LazyTrainPlugin().deepspeed(config, gradient_accumulation_steps=1, gradient_clipping=0.0)
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = llama()
        engine, optimizer = accelerator.prepare(model, adamw(model.parameters()))
        before = weights_of(model)
        for batch in random_batches(2):
            accelerator.backward(model_loss(engine, {key: value.to(engine.device) for key, value in batch.items()}))
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        assert all(not torch.equal(value, before[name]) for name, value in weights_of(model).items())
        engine.destroy()
