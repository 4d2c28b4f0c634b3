"""Model shapes that made other offload engines fail or train something else; each against plain torch or Trainer."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from integration_tests import harness, models
from integration_tests.cases import Placement
from integration_tests.harness import assert_bit_equal, assert_close_on_gpu, fresh_accelerate_state
from integration_tests.loops import (
    KEPT,
    MIXED,
    RESIDENT,
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
from lazytrain_plugin.errors import ConfigError, PlanMismatchError, UnsupportedModelError
from lazytrain_plugin.vocab import Activations

VOCAB, HIDDEN = models.VOCAB, 32
placements = pytest.mark.parametrize("placement", [STREAMED, KEPT, RESIDENT, MIXED], ids=str)
SINGLE = [[batch] for batch in random_batches(3)]
ACCUMULATING = [random_batches(2, seed=seed) for seed in range(3)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 41)
        self.down = nn.Linear(41, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, layers, head and loss, all open to subclasses."""

    def __init__(self, layers: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(layers or [Layer() for _ in range(3)])
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.hidden(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build(model_class: type[nn.Module] = TinyLM, *args, **kwargs) -> nn.Module:
    torch.manual_seed(1)
    return model_class(*args, **kwargs)


def check_parity(
    model: nn.Module, placement, folder: Path, steps=SINGLE, *, loss=model_loss, max_norm=0.0, exact: bool = True
):
    """The engine's weights are plain torch's: bit for bit, or (not `exact`) up to the order of a gradient's terms."""
    expected, expected_norms = train_torch(model, steps, loss=loss, max_norm=max_norm)
    engine = initialize(
        model, adamw(model.parameters()), folder, placement=placement, accumulation=len(steps[0]), max_norm=max_norm
    )
    got, norms = run_engine(engine, steps, loss=loss)
    engine.destroy()
    if exact:
        assert_bit_equal(got, expected)
        assert norms == expected_norms
    else:
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=2e-5)


# S-32: weights used outside their own module's forward.


def l2_penalty(model: nn.Module, batch) -> Tensor:
    return model_loss(model, batch) + 1e-2 * sum(p.square().sum() for p in model.parameters())


@placements
@pytest.mark.parametrize("steps", [SINGLE, ACCUMULATING], ids=["single", "accumulating"])
def test_penalty_over_all_parameters_reaches_streamed_weights(placement, steps, tmp_path):
    check_parity(build(), placement, tmp_path, steps, loss=l2_penalty, exact=False)


@placements
def test_penalty_alone_is_a_step_of_its_own(placement, tmp_path):
    """No forward of any layer: gradients come from the weights' own use only."""

    def loss(model, batch):
        return 1e-2 * sum(p.square().sum() for p in model.parameters())

    check_parity(build(), placement, tmp_path, loss=loss)


@placements
def test_method_other_than_forward_of_a_layer(placement, tmp_path):
    class Projects(Layer):
        def project(self, x):
            return x @ self.up.weight.t() @ self.up.weight

    class CallsMethod(TinyLM):
        def hidden(self, input_ids):
            x = super().hidden(input_ids)
            return x + self.layers[1].project(x)

    check_parity(build(CallsMethod, [Projects() for _ in range(3)]), placement, tmp_path, exact=False)


@placements
def test_loss_that_reads_the_head_weight_in_chunks(placement, tmp_path):
    class ChunkedLoss(TinyLM):
        def forward(self, input_ids, labels):
            hidden = self.hidden(input_ids).flatten(0, 1)
            losses = [
                nn.functional.cross_entropy(rows @ self.head.weight.t(), targets, reduction="sum")
                for rows, targets in zip(hidden.split(5), labels.flatten().split(5), strict=True)
            ]
            return {"loss": torch.stack(losses).sum() / labels.numel()}

    check_parity(build(ChunkedLoss), placement, tmp_path)


@placements
def test_torch_multi_head_attention_reads_its_output_projection_from_outside(placement, tmp_path):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)

        def forward(self, x):
            return x + self.attention(x, x, x, need_weights=False)[0]

    check_parity(build(TinyLM, [Attends() for _ in range(2)]), placement, tmp_path)


# S-19: a block used several times, and a number of uses that depends on the batch.


@placements
def test_encoder_called_once_or_twice_depending_on_the_batch(placement, tmp_path):
    class Siamese(TinyLM):
        def hidden(self, input_ids):
            first = super().hidden(input_ids)
            return first + super().hidden(input_ids.flip(1)) if input_ids[0, 0] % 2 else first

    batches = random_batches(4, seed=5)
    assert {int(batch["input_ids"][0, 0]) % 2 for batch in batches} == {0, 1}
    check_parity(build(Siamese), placement, tmp_path, [[batch] for batch in batches], exact=False)


# S-27: strides and sizes.


@placements
def test_non_contiguous_weights_and_gradients(placement, tmp_path):
    class Strided(nn.Module):
        """A transposed matrix, channels-last convolution, a one-element gain, a gradient made by expand."""

        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter((torch.randn(HIDDEN, HIDDEN) * 0.1).t())
            self.conv = nn.Conv2d(1, 1, 3, padding=1).to(memory_format=torch.channels_last)
            self.wide_conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
            self.gain = nn.Parameter(torch.ones(1))
            self.bias = nn.Parameter(torch.zeros(()))
            self.shift = nn.Parameter(torch.zeros(256))  # exactly one quantization block
            self.nothing = nn.Parameter(torch.empty(0, 5))
            self.unused = nn.Parameter(torch.ones(3))
            self.indices = nn.Parameter(torch.arange(4), requires_grad=False)

        def forward(self, x):
            image = self.wide_conv(self.conv(x.unsqueeze(1)).expand(-1, 3, -1, -1)).mean(1)
            return x @ self.matrix + image * self.gain + self.bias + self.shift.sum()

    model = build(TinyLM, [Strided(), Strided()])
    strides = {name: p.stride() for name, p in model.named_parameters()}
    check_parity(model, placement, tmp_path)
    assert {name: p.stride() for name, p in model.named_parameters()} == strides


def test_strides_survive_save_and_load(tmp_path):
    def model():
        layer = Layer()
        layer.up.weight = nn.Parameter((torch.randn(HIDDEN, 41) * 0.1).t())
        return build(TinyLM, [Layer(), layer])

    saved = model()
    engine = initialize(saved, adamw(saved.parameters()), tmp_path / "a")
    run_engine(engine, SINGLE[:1])
    engine.save_checkpoint(str(tmp_path / "save"))
    expected, _ = run_engine(engine, SINGLE[1:])
    engine.destroy()
    fresh = model()
    engine = initialize(fresh, adamw(fresh.parameters()), tmp_path / "b", placement=RESIDENT)
    engine.load_checkpoint(str(tmp_path / "save"))
    got, _ = run_engine(engine, SINGLE[1:])
    assert fresh.layers[1].up.weight.stride() == (1, 41)
    assert_bit_equal(got, expected)
    engine.destroy()


# S-29: frozen parameters with gradient checkpointing.


def _trainer_parity(make_model, placement, folder, device, samples=None, exact=True, **arguments):
    """Weights after a short Trainer run on `make_model()`, plain and under a plan, must be the same."""
    samples = samples or models.make_samples("llama", 24)
    arguments = {"max_steps": 3, **arguments}
    with harness.environment(dict.fromkeys(harness.LAUNCH_VARIABLES)), fresh_accelerate_state():
        plain = harness.finish(make_trainer(make_model(), samples, folder, device, **arguments))
    with fresh_accelerate_state():
        run = harness.finish(make_trainer(make_model(), samples, folder, device, placement=placement, **arguments))
        harness.close(run)
    if exact and device == "cpu":
        assert_bit_equal(run.weights, plain.weights)
        assert run.losses == plain.losses
    else:
        assert run.losses == pytest.approx(plain.losses, rel=1e-5)
        assert_close_on_gpu(run.weights, plain.weights)
    return run


@pytest.mark.parametrize("trained", ["half frozen", "lora"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_frozen_weights_with_gradient_checkpointing(trained, use_reentrant, device, tmp_path):
    run = _trainer_parity(
        lambda: models.build_model("llama", trained), MIXED, tmp_path, device,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
    )  # fmt: skip
    frozen = {name for name, p in run.trainer.model.named_parameters() if not p.requires_grad}
    states = {record.name for record in run.engine.lazytrain.records if record.group is not None}
    assert frozen and states == {name for name, _ in run.trainer.model.named_parameters()} - frozen


# S-30: tied weights.


@placements
def test_weights_tied_by_hand_between_layers(placement, tmp_path):
    """A matrix that two layers share stays where both can read it; its gradient is the sum."""

    def make():
        layers = [Layer() for _ in range(3)]
        layers[2].up.weight = layers[0].up.weight
        model = build(TinyLM, layers)
        model.head.weight = model.embedding.weight
        return model

    model = make()
    check_parity(model, placement, tmp_path, exact=False)
    assert model.layers[2].up.weight is model.layers[0].up.weight
    assert model.head.weight is model.embedding.weight


# S-31: experts without tokens.


@placements
def test_top_1_mixture_with_idle_experts(placement, tmp_path):
    """Eight experts as modules, one expert per token, four tokens: most experts get nothing in a step."""

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(HIDDEN, 8, bias=False)
            self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(8))

        def forward(self, x):
            tokens = x.flatten(0, 1)
            weight, choice = self.router(tokens).softmax(-1).max(-1)
            out = torch.zeros_like(tokens)
            for index in choice.unique().tolist():
                rows = (choice == index).nonzero()[:, 0]
                out = out.index_add(0, rows, self.experts[index](tokens[rows]) * weight[rows, None])
            return x + out.view_as(x)

    model = build(TinyLM, [Mixture(), Mixture()])
    before = weights_of(model)
    steps = [[batch] for batch in random_batches(3, rows=1, length=4)]
    check_parity(model, placement, tmp_path, steps)
    moved = {name for name, value in weights_of(model).items() if not torch.equal(value, before[name])}
    experts = {name for name in before if "experts" in name}
    assert experts & moved and experts - moved


@pytest.mark.parametrize("placement", [STREAMED, RESIDENT], ids=str)
def test_mixtral_top_1_with_router_losses(placement, device, tmp_path):
    def make():
        torch.manual_seed(2)
        config = transformers.MixtralConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=1, output_router_logits=True,
            router_aux_loss_coef=0.1,
        )  # fmt: skip
        return transformers.MixtralForCausalLM(config)

    _trainer_parity(make, placement, tmp_path, device, per_device_train_batch_size=1)


# S-25: several dtypes in one model.


def test_mixed_dtypes_stay_what_they_are(device, tmp_path):
    """fp32 router and adapter in a bf16 model: after prepare, after a step, in the saved files, after a resume."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(HIDDEN, HIDDEN).bfloat16().requires_grad_(False)
            self.router = nn.Linear(HIDDEN, 2)
            self.lora = nn.Linear(HIDDEN, HIDDEN, bias=False)

        def forward(self, x):
            gate = self.router(x.float()).softmax(-1)[..., :1]
            return x + (self.base(x) + self.lora(x.float()) * gate).to(x.dtype)

    def make():
        model = build(TinyLM, [Adapted(), Adapted()])
        model.embedding.bfloat16()
        model.head.bfloat16()
        return model

    model = make()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    engine = initialize(
        model, adamw([p for p in model.parameters() if p.requires_grad]), tmp_path, bf16={"enabled": True}
    )
    assert {name: p.dtype for name, p in model.named_parameters()} == dtypes
    weights, _ = run_engine(engine, SINGLE[:2])
    assert {name: p.dtype for name, p in model.named_parameters()} == dtypes
    assert {name: v.dtype for name, v in engine._zero3_consolidated_16bit_state_dict().items()} == dtypes
    engine.save_checkpoint(str(tmp_path / "save"))
    engine.destroy()
    resumed = make()
    engine = initialize(
        resumed, adamw([p for p in resumed.parameters() if p.requires_grad]), tmp_path, bf16={"enabled": True}
    )
    engine.load_checkpoint(str(tmp_path / "save"))
    assert_bit_equal(weights_of(resumed), weights)
    engine.destroy()


# S-33: shapes and counts that users see, resize, late parameters.


def test_shapes_and_counts_are_real_everywhere(device, tmp_path, capsys):
    model = models.build_model("llama")
    shapes = {name: p.shape for name, p in model.named_parameters()}
    count = model.num_parameters()

    class Looks(transformers.TrainerCallback):
        seen: list = []

        def look(self, args, state, control, model, **kwargs):
            self.seen.append((model.num_parameters(), {name: p.shape for name, p in model.named_parameters()}))

        on_train_begin = on_step_end = on_substep_end = look

    with fresh_accelerate_state():
        trainer = make_trainer(
            model, models.make_samples("llama", 8), tmp_path, device, placement=STREAMED, max_steps=2,
            gradient_accumulation_steps=2, trainer_options={"callbacks": [Looks()]},
        )  # fmt: skip
        assert trainer.get_num_trainable_parameters() == count
        run = harness.finish(trainer)
        assert trainer.get_num_trainable_parameters() == count
        harness.close(run)
    assert len(Looks.seen) >= 5
    assert all(seen == (count, shapes) for seen in Looks.seen)


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_resized_before_the_trainer(tied, device, tmp_path):
    def make():
        torch.manual_seed(2)
        model = models.qwen2(tied)
        model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
        return model

    run = _trainer_parity(make, MIXED, tmp_path, device)
    assert run.weights["model.embed_tokens.weight"].shape[0] == VOCAB + 3
    assert (run.trainer.model.lm_head.weight is run.trainer.model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_resized_after_prepare_is_refused_by_name(tied, tmp_path):
    torch.manual_seed(2)
    model = models.qwen2(tied)
    engine = initialize(model, adamw(model.parameters()), tmp_path)
    run_engine(engine, SINGLE[:1])
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    with pytest.raises(
        UnsupportedModelError, match=r"(embed_tokens|lm_head)\.weight .*after the engine was made.*before"
    ):
        run_engine(engine, SINGLE[:1])
    engine.destroy()


@placements
def test_weights_swapped_through_data_are_refused_not_undone(placement, tmp_path):
    """An average swapped in for evaluation: the next transfer would silently bring the old values back."""
    model = build()
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=placement)
    run_engine(engine, SINGLE[:1])
    weight = model.layers[1].up.weight
    home = weight.data
    weight.data = torch.zeros_like(home)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.up\.weight was given other memory.*copy_"):
        engine(**SINGLE[0][0])
    weight.data = home
    run_engine(engine, SINGLE[:1])
    engine.destroy()


@placements
def test_averaged_weights_copied_in_and_out(placement, tmp_path):
    """What EMA helpers do: average after each step, copy in for evaluation, copy back, go on."""

    def train(model, step):
        average = {name: p.detach().clone() for name, p in model.named_parameters()}
        scores = []
        for batch in random_batches(3):
            step(batch)
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.5)
            kept = {name: p.detach().clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(average[name])
                scores.append(model_loss(model, batch).item())
                for name, p in model.named_parameters():
                    p.copy_(kept[name])
        return scores, weights_of(model)

    plain = build()
    optimizer = adamw(plain.parameters())

    def plain_step(batch):
        model_loss(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    expected_scores, expected = train(plain, plain_step)
    model = build()
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=placement)

    def engine_step(batch):
        engine.backward(model_loss(engine, batch))
        engine.step()

    scores, weights = train(model, engine_step)
    engine.destroy()
    assert scores == expected_scores
    assert_bit_equal(weights, expected)


@pytest.mark.parametrize("implementation", ["torch", "native"])
def test_model_without_a_list_of_layers(implementation, tmp_path):
    """Nothing streams; it trains all the same."""
    model = build()
    model.layers = nn.Sequential(*model.layers)
    expected, _ = train_torch(model, SINGLE)
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=None, implementation=implementation)
    got, _ = run_engine(engine, SINGLE)
    engine.destroy()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0 if implementation == "torch" else 2e-5)


def test_parameter_added_after_prepare_is_refused_by_name(tmp_path):
    model = build()
    engine = initialize(model, adamw(model.parameters()), tmp_path)
    model.layers[1].gain = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.gain .*after the engine was made"):
        run_engine(engine, SINGLE[:1])
    engine.destroy()


@pytest.mark.parametrize("change", ["half", "double"])
def test_moves_do_nothing_and_other_dtypes_are_refused(change, tmp_path):
    model = build()
    engine = initialize(model, adamw(model.parameters()), tmp_path)
    homes = [p.data_ptr() for p in model.parameters()]
    assert model.to("cpu") is model and model.cpu() is model and model.float() is model
    with pytest.raises(UnsupportedModelError, match="can't be changed from torch.float32"):
        getattr(model, change)()
    with pytest.raises(UnsupportedModelError, match="can't be changed from torch.float32"):
        getattr(engine, change)()
    assert [p.data_ptr() for p in model.parameters()] == homes
    run_engine(engine, SINGLE[:1])
    engine.destroy()


def test_optimizer_over_parameters_that_are_not_the_models_is_refused(tmp_path):
    """Made before the model was resized, or over a loss with weights of its own: nothing would train them."""
    model, own_loss = build(), nn.Linear(3, 7)
    optimizer = adamw([*model.parameters(), *own_loss.parameters()])
    with pytest.raises(
        UnsupportedModelError, match=r"holds 2 parameters that are not in the model.*\(7, 3\).*submodule"
    ):
        initialize(model, optimizer, tmp_path)


@pytest.mark.parametrize("placement", [STREAMED, KEPT, RESIDENT], ids=["streamed", "kept", "resident"])
@pytest.mark.parametrize("part", ["one layer", "biases", "head"])
def test_optimizer_over_a_part_of_the_model(part, placement, tmp_path):
    """Weights that need a gradient and that nobody trains, without being frozen: they stay as they are."""
    model, steps = build(), SINGLE
    chosen = {"one layer": "layers.1.", "biases": "bias", "head": "head"}[part]
    is_chosen = [chosen in name for name, _ in model.named_parameters()]
    assert any(is_chosen) and not all(is_chosen)

    def make_optimizer(parameters):
        return adamw([parameter for parameter, wanted in zip(parameters, is_chosen, strict=True) if wanted])

    expected, _ = train_torch(model, steps, make_optimizer)
    engine = initialize(model, make_optimizer(model.parameters()), tmp_path, placement=placement)
    weights, _ = run_engine(engine, steps)
    engine.destroy()
    assert_bit_equal(weights, expected)


def test_parameters_given_to_the_optimizer_later_are_refused_not_left_out(tmp_path):
    model, steps = build(), SINGLE
    first, *rest = model.parameters()
    optimizer = adamw([first])
    engine = initialize(model, optimizer, tmp_path)
    run_engine(engine, steps[:1])
    optimizer.add_param_group({"params": rest})
    with pytest.raises(UnsupportedModelError, match=r"groups hold \[1, \d+\] parameters, and held \[1\] when.*first"):
        run_engine(engine, steps[1:])
    engine.destroy()


# S-49: adapters injected by hand.


def test_adapter_injected_by_hand(device, tmp_path):
    class ByHand(nn.Module):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
            self.up = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x):
            return self.base(x) + x @ self.down.t() @ self.up.t()

    def make():
        model = models.build_model("llama").requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = ByHand(layer.self_attn.q_proj)
        return model

    run = _trainer_parity(make, MIXED, tmp_path, device, gradient_accumulation_steps=2)
    trained = {name for name, p in run.trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 6 and all(run.weights[name].abs().max() > 0 for name in trained)


# S-46: tables that are rebuilt while training.


@placements
def test_table_kept_as_a_plain_attribute_that_grows_with_the_sequence(placement, tmp_path):
    class Rotary(Layer):
        table = None

        def forward(self, x):
            if self.table is None or self.table.shape[0] < x.shape[1]:
                self.table = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None].cos()
            return super().forward(x * self.table[: x.shape[1]])

    steps = [random_batches(1, length=length, seed=length) for length in (5, 12, 7, 31)]
    check_parity(build(TinyLM, [Rotary() for _ in range(3)]), placement, tmp_path, steps)


# S-45: cache objects.


@placements
def test_layer_that_returns_a_cache_object(placement, tmp_path):
    """The model makes a cache by itself, as decoders do with use_cache left on, and layers write to it."""

    def loss(model, batch):
        return model(**batch, use_cache=True).loss

    torch.manual_seed(2)
    check_parity(models.llama(), placement, tmp_path, loss=loss)


# S-48: what can't be streamed is refused before anything is moved.


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_base_model_is_refused_with_the_reason(bits, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = models.build_model("llama").requires_grad_(False)
    for layer in model.model.layers:
        old = layer.mlp.down_proj
        make = bitsandbytes.nn.Linear4bit if bits == 4 else bitsandbytes.nn.Linear8bitLt
        kwargs = {} if bits == 4 else {"has_fp16_weights": False}
        layer.mlp.down_proj = make(old.in_features, old.out_features, bias=False, **kwargs)
        layer.mlp.down_proj.load_state_dict(old.state_dict())
        layer.mlp.down_proj.to("cpu")  # quantizes
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(model, config)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(UnsupportedModelError, match=r"down_proj\.weight is a (Params4bit|Int8Params).*quantized"):
        initialize(model, optimizer, tmp_path)


def test_lazy_module_is_refused_with_the_reason(tmp_path):
    model = build(TinyLM, [Layer(), nn.LazyLinear(HIDDEN)])
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.weight is an? UninitializedParameter"):
        initialize(model, torch.optim.SGD(model.head.parameters(), lr=1e-2), tmp_path, placement=None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_weights_of_another_float_dtype_are_refused_by_name(dtype, tmp_path):
    model = build()
    model.layers[1].to(dtype)
    with pytest.raises(UnsupportedModelError, match=rf"layers\.1\.norm\.weight is {dtype}.*bfloat16"):
        initialize(model, adamw(model.parameters()), tmp_path)


# S-47: torch.compile.

COMPILED = {
    "the model": lambda model: model.compile(backend="eager"),
    "a layer": lambda model: model.layers[1].compile(backend="eager"),
    "a wrapped layer": lambda model: model.layers.__setitem__(1, torch.compile(model.layers[1], backend="eager")),
}


@pytest.mark.parametrize("what", COMPILED)
def test_compiled_around_a_layer_is_refused_by_name_before_and_after_prepare(what, tmp_path):
    name = "the model" if what == "the model" else r"layers\.1"
    model = build()
    COMPILED[what](model)
    with pytest.raises(ConfigError, match=f"torch.compile of {name} is not supported.*set torch_compile"):
        initialize(model, adamw(model.parameters()), tmp_path)
    if what == "the model":
        model = build()
        engine = initialize(model, adamw(model.parameters()), tmp_path)
        COMPILED[what](model)
        with pytest.raises(ConfigError, match=f"torch.compile of {name} is not supported.*set torch_compile"):
            run_engine(engine, SINGLE[:1])
        engine.destroy()


@pytest.mark.parametrize("placement", [STREAMED, KEPT, MIXED], ids=str)
def test_modules_compiled_inside_a_layer(placement, tmp_path):
    """Plain eager code around a traced graph: weights that moved in between must not be baked in."""
    torch._dynamo.reset()
    model = build()
    expected, _ = train_torch(model, SINGLE)
    for layer in model.layers:
        layer.up.compile(backend="eager")
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=placement)
    got, _ = run_engine(engine, SINGLE)
    engine.destroy()
    assert_bit_equal(got, expected)


@pytest.mark.parametrize("placement", [STREAMED, KEPT, RESIDENT, MIXED], ids=str)
def test_engine_compile_compiles_each_layer(placement, tmp_path):
    """What a layer computes is traced once for all layers; weights that move are inputs of it, not baked in."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    model = build()
    expected, _ = train_torch(model, SINGLE)
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=placement)
    engine.compile(backend=backend)
    got, _ = run_engine(engine, SINGLE)
    assert engine.is_compiled
    engine.destroy()
    assert_bit_equal(got, expected)
    # With and without a graph to keep; the three layers have one class, and one code.
    assert 1 <= len(graphs) <= 2


@pytest.mark.parametrize("placement", [STREAMED, KEPT], ids=str)
def test_layers_with_compiled_backward(placement, tmp_path):
    """Forward and backward graphs made ahead of time: what is saved between them are weights in slots, too."""
    torch._dynamo.reset()
    model = build()
    expected, _ = train_torch(model, ACCUMULATING)
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=placement, accumulation=2)
    engine.compile(backend="aot_eager")
    got, _ = run_engine(engine, ACCUMULATING)
    engine.destroy()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)


def test_a_compiled_layer_is_an_ordinary_one_after_destroy(tmp_path):
    torch._dynamo.reset()
    model = build()
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=STREAMED)
    engine.compile(backend=lambda graph, example_inputs: pytest.fail("nothing of it ran"))
    engine.destroy()
    assert type(model.layers[0]) is Layer and "forward" not in model.layers[0].__dict__
    model.layers[0](torch.zeros(1, HIDDEN))


@pytest.mark.parametrize(
    "options",
    [
        {"compile_kwargs": {"mode": "reduce-overhead"}},
        {"compile_kwargs": {"options": {"triton.cudagraphs": True}}},
        {"backend": "cudagraphs"},
        {"compiled_autograd_enabled": True},
    ],
    ids=str,
)
def test_ways_to_compile_that_need_still_weights_are_refused(options, tmp_path):
    model = build()
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=STREAMED)
    with pytest.raises(ConfigError, match="addresses of weights, which move|without compiled autograd"):
        engine.compile(**options)
    engine.destroy()


def test_a_plan_that_saves_single_operators_is_refused_for_compiled_layers(tmp_path):
    model = build()
    engine = initialize(
        model, adamw(model.parameters()), tmp_path, placement=Placement(homes="cpu", activations="attention")
    )
    engine.compile(backend="eager")
    with pytest.raises(PlanMismatchError, match=r"saves attention of layers\.0.*without torch.compile"):
        run_engine(engine, SINGLE[:1])
    engine.destroy()


def test_plans_for_compiled_layers_keep_whole_graphs(tmp_path):
    """Whether a plan was made before (max_tokens is known) or not."""
    for block in ({}, {"max_tokens": 24}):
        model = build()
        block |= {"fidelity": "compact", "plan": {"cache": False}}
        engine = initialize(model, adamw(model.parameters()), tmp_path, placement=None, lazytrain=block)
        engine.compile(backend="eager")
        run_engine(engine, SINGLE[:1])
        request = engine._planner.request
        assert request.capabilities.strategies == {Activations.RECOMPUTE, Activations.KEEP}
        assert request.activation_bits == 16
        engine.destroy()
