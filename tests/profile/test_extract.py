"""Model profiles from live and meta models; activation bytes against what autograd really saves."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)

from lazytrain_plugin.profile.extract import extract_model_profile
from lazytrain_plugin.profile.model import ModelProfile, UnitRole
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.runtime.selective import Recorder
from lazytrain_plugin.vocab import Activations

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "use_cache": False,
}


def build(config, dtype=torch.float32):
    torch.manual_seed(0)
    if isinstance(config, T5Config):
        return T5ForConditionalGeneration(config).to(dtype)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def profile_of(model, **options):
    found = discover(model)
    units = [(unit.name, unit.module) for unit in found.units]
    stem = [(unit.name, [parameter for _, parameter in unit.parameters]) for unit in found.stem]
    return extract_model_profile(model, units, stem, **options)


def really_saved_bytes(model, layer, tokens: int) -> int:
    """Runs the model and counts the storages that autograd saves inside `layer`, but for weights and its inputs."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    state = {"inside": False, "inputs": set()}
    storages = {}

    def enter(module, args, kwargs):
        tensors = [
            t for t in (*args, *kwargs.values(), *(kwargs.get("position_embeddings") or ())) if torch.is_tensor(t)
        ]
        state.update(inside=True, inputs={t.untyped_storage().data_ptr() for t in tensors})

    def pack(tensor):
        storage = tensor.untyped_storage()
        if state["inside"] and storage.data_ptr() not in weights | state["inputs"]:
            storages[storage.data_ptr()] = storage
        return tensor

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(lambda *_: state.update(inside=False))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.arange(tokens)[None] % 97)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_bytes_match_what_eager_autograd_saves(config_class, dtype):
    model = build(config_class(**SMALL), dtype)
    profile = profile_of(model, fused_kernels=False)
    assert profile.estimate == ""
    tokens = 256
    saved = really_saved_bytes(model, model.model.layers[1], tokens)
    # SDPA on the CPU saves what flash attention saves, give or take a mask or a statistic.
    assert profile.units[1].kept_bytes_per_token * tokens == pytest.approx(saved, rel=0.03)
    assert profile.units[1].boundary_bytes_per_token == 48 * dtype.itemsize


def test_fused_kernels_save_less():
    model = build(Qwen2Config(**SMALL), torch.bfloat16)
    fused, eager = (profile_of(model, fused_kernels=flag) for flag in (True, False))
    element, hidden, inner, kv = 2, 48, 112, 24
    statistics = 4 * 2 + 4 * 4  # two norms, one log-sum-exp per head
    # Two norm outputs, q k v and the attention's output, the residual stream, gate, up and their product.
    expected = element * (2 * hidden + 2 * hidden + 2 * kv + hidden + 3 * inner) + statistics
    assert fused.units[0].kept_bytes_per_token == pytest.approx(expected, rel=0.02)
    assert eager.units[0].kept_bytes_per_token > 1.3 * fused.units[0].kept_bytes_per_token
    assert fused.units[0].workspace_bytes_per_token > fused.units[0].kept_bytes_per_token


def test_every_parameter_appears_once_and_tied_models_say_so():
    for tied in (False, True):
        model = build(Qwen2Config(**SMALL, tie_word_embeddings=tied))
        profile = profile_of(model)
        names = [tensor.name for unit in (*profile.units, *profile.stem) for tensor in unit.tensors]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        assert profile.num_parameters == sum(parameter.numel() for parameter in model.parameters())
        assert profile.tied == tied
        assert profile.vocab_size == 97 and profile.hidden_size == 48


def test_roles_of_big_stem_tensors():
    config = Qwen2Config(**{**SMALL, "vocab_size": 30000}, tie_word_embeddings=False)
    with torch.device("meta"):
        model = build(config, torch.bfloat16)
    roles = {unit.role: unit for unit in profile_of(model).stem}
    assert set(roles) == {UnitRole.EMBEDDING, UnitRole.HEAD, UnitRole.REST}
    assert roles[UnitRole.HEAD].flop_per_token == 2 * 30000 * 48
    assert roles[UnitRole.EMBEDDING].flop_per_token == 0


def test_flop_counts_matrices_and_causal_attention():
    profile = profile_of(build(LlamaConfig(**SMALL)), sequence_length=512)
    matrices = 48 * 48 * 2 + 48 * 24 * 2 + 48 * 112 * 3
    assert profile.units[0].flop_per_token == 2 * matrices + 2 * 512 * 48


def test_the_model_is_left_as_it_was():
    model = build(Qwen2Config(**SMALL))
    model.gradient_checkpointing_enable()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    profile_of(model)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_have_no_gradient():
    model = build(Qwen2Config(**SMALL))
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    units = profile_of(model).units
    assert units[0].num_trainable == units[0].gradient_bytes == units[0].moment_bytes(32) == 0
    assert units[1].num_trainable == units[1].num_parameters


@pytest.mark.parametrize("family", ["moe", "t5"])
def test_other_families_are_profiled_or_say_how_they_are_estimated(family):
    if family == "moe":
        config = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    else:
        config = T5Config(d_model=48, d_kv=12, d_ff=112, num_layers=2, num_heads=4, vocab_size=97)
    model = build(config)
    profile = profile_of(model)
    assert all(unit.kept_bytes_per_token > 0 and unit.boundary_bytes_per_token == 4 * 48 for unit in profile.units)
    if family == "moe":
        # Attention and router in full, two of four experts.
        per_token = 2 * (48 * 48 * 2 + 48 * 24 * 2 + 4 * 48 + 2 * 3 * 48 * 112)
        attention = 2 * profile.sequence_length * 48
        assert profile.units[0].flop_per_token == per_token + attention


def test_a_model_that_cannot_run_on_meta_tensors_is_estimated_high():
    model = build(Qwen2Config(**SMALL))
    exact = profile_of(model)
    inner = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: inner(hidden * float(hidden.sum()))
    estimated = profile_of(model)
    assert estimated.estimate.startswith("structural")
    ratio = estimated.units[0].kept_bytes_per_token / exact.units[0].kept_bytes_per_token
    assert 1.0 <= ratio < 2.0


def test_planned_dtypes_are_profiled_not_the_loaded_ones():
    model = build(Qwen2Config(**SMALL))
    half = profile_of(model, dtypes=dict.fromkeys(model.parameters(), torch.bfloat16))
    assert half == profile_of(build(Qwen2Config(**SMALL), torch.bfloat16))


def test_json_round_trip_and_digest():
    profile = profile_of(build(Qwen2Config(**SMALL)))
    assert ModelProfile.from_json(profile.to_json()) == profile
    assert profile.digest == profile_of(build(Qwen2Config(**SMALL))).digest
    assert profile.digest != profile_of(build(Qwen2Config(**{**SMALL, "intermediate_size": 128}))).digest


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("activations", [Activations.ATTENTION, Activations.MLP, Activations.MATMULS])
def test_strategies_save_what_the_runtime_saves(config_class, activations):
    model = build(config_class(**SMALL), torch.bfloat16)
    tokens = 256
    (strategy,) = [s for s in profile_of(model).units[1].strategies if s.activations == activations]
    held = held_by_the_runtime(model, model.model.layers[1], activations, tokens)
    assert strategy.saved_bytes_per_token * tokens == pytest.approx(held, rel=0.01)


def held_by_the_runtime(model, layer, activations, tokens) -> int:
    """Bytes that the runtime's own recorder holds after the layer's forward, each storage once."""
    inner, found = layer.forward, []

    def forward(*args, **kwargs):
        recorder = Recorder(activations, torch.device("cpu"))
        with saved_tensors_hooks(recorder.drop, lambda tensor: tensor), recorder:
            output = inner(*args, **kwargs)
        found.extend(recorder.finish([output], None).calls)
        return output

    layer.forward = forward
    model(input_ids=torch.arange(tokens)[None] % 97)
    outputs = [x for call in found for x in call.outputs or () if isinstance(x, torch.Tensor)]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in outputs}.values())


def test_the_last_product_of_a_layer_is_not_run_again():
    """down_proj only becomes the output; of a layer this wide it is a fifth of the work."""
    sizes = {**SMALL, "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 1}
    with torch.device("meta"):
        unit = profile_of(build(Qwen2Config(**sizes), torch.bfloat16), sequence_length=256).units[0]
    by_strategy = {strategy.activations: strategy for strategy in unit.strategies}
    down = 2 * 2048 * 4096 / unit.flop_per_token
    recompute = by_strategy[Activations.RECOMPUTE]
    assert recompute.saved_bytes_per_token == 0
    assert 1 - down < recompute.recompute_frac < 1 - 0.6 * down  # element-wise work runs again
    fractions = [by_strategy[a].recompute_frac for a in Activations if a != Activations.KEEP]
    assert fractions == sorted(fractions, reverse=True) and fractions[-1] > 0
    saved = [by_strategy[a].saved_bytes_per_token for a in Activations if a != Activations.KEEP]
    assert 0 == saved[0] < saved[1] < saved[2] < saved[3] < unit.kept_bytes_per_token


@pytest.mark.parametrize("config", [Qwen2Config(**SMALL), MixtralConfig(**SMALL, num_local_experts=4)])
def test_kept_bytes_by_class_add_up(config):
    unit = profile_of(build(config, torch.bfloat16)).units[0]
    by_class = unit.kept_bytes_per_token_by_class
    assert sum(by_class.values()) == pytest.approx(unit.kept_bytes_per_token, abs=len(by_class))
    assert {"norm", "attention", "mlp"} <= set(by_class)
    assert by_class["mlp"] >= 3 * 2 * 112  # gate, up and their product, at least


def test_a_model_that_cannot_run_has_no_strategies():
    model = build(Qwen2Config(**SMALL))
    inner = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: inner(hidden * float(hidden.sum()))
    assert profile_of(model).units[0].strategies == ()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_what_fused_operators_make_codes_of_on_their_way_is_known(fused, activation):
    """Gate and up of a SwiGLU and the input of the first norm, where the kernels run; the runtime's rule."""
    sizes = {**SMALL, "hidden_size": 128, "intermediate_size": 224, "hidden_act": activation}
    unit = profile_of(build(LlamaConfig(**sizes), torch.bfloat16), fused_kernels=fused).units[0]
    by_strategy = {strategy.activations: strategy for strategy in unit.strategies}
    gate_and_up = 2 * 2 * 224 if fused and activation == "silu" else 0
    assert by_strategy[Activations.MATMULS].fused_bytes_per_token == gate_and_up
    assert by_strategy[Activations.MLP].fused_bytes_per_token == gate_and_up
    assert by_strategy[Activations.ATTENTION].fused_bytes_per_token == 0
    assert unit.fused_input == fused
    assert ModelProfile.from_json(profile_of(build(LlamaConfig(**SMALL))).to_json()).units[0].fused_input is False
