"""Fused kernels on tiny Hugging Face models: the same training, and logits that look ordinary to everybody."""

import copy
import gc
import importlib
import inspect
import io
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from lazytrain_plugin.errors import LazyTrainError
from lazytrain_plugin.integration import fused, fused_modules, managed_model
from lazytrain_plugin.integration.deferred_logits import DeferredLogits
from lazytrain_plugin.kernels import cross_entropy
from lazytrain_plugin.kernels.cross_entropy import CHUNK_TOKENS
from lazytrain_plugin.profile import model as model_profile
from tests.runtime.rig import make_executor, plan_for

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
COMMON = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CAUSAL = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen2-tied": lambda: transformers.Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**COMMON, num_key_value_heads=2, head_dim=8),
    "gemma": lambda: transformers.GemmaConfig(**COMMON, num_key_value_heads=2, head_dim=8, pad_token_id=0),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
SPECIAL = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", 16)


def make(family, device="cpu", seed=0):
    torch.manual_seed(seed)
    config = CAUSAL[family]()
    for key, value in SPECIAL.items():
        if hasattr(config, key):
            setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms of 1 (or 0) would hide which formula is used
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(device).train()


def batch(device="cpu", *, rows=3, columns=13, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 67, (rows, columns), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    labels[2, 9:] = -100
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    return {k: v.to(device) for k, v in {"input_ids": ids, "labels": labels, "attention_mask": mask}.items()}


def gradients(model, **inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_training(model, reference, rtol=2e-5, **inputs):
    output, ours = gradients(model, **inputs)
    expected_output, expected = gradients(reference, **inputs)
    torch.testing.assert_close(output.loss, expected_output.loss, rtol=1e-6, atol=0)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= rtol * gradient.norm() + 1e-9, name
    return output, expected_output


# --- the chunked loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("num_items", [None, 57])
def test_loss_and_gradients_equal_the_unpatched_models(family, device, num_items):
    model, reference = make(family, device), make(family, device)
    assert "applied" in fused.apply_chunked_loss(model) and "not applied" not in fused.apply_chunked_loss(model)
    kwargs = {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items)}
    output, expected = assert_same_training(model, reference, **batch(device), **kwargs)
    torch.testing.assert_close(output.logits + 0, expected.logits)


def test_the_loss_is_really_computed_without_logits():
    model = make("llama")
    fused.apply_chunked_loss(model)
    output, _ = gradients(model, **batch())
    assert isinstance(output.logits, DeferredLogits) and not output.logits.source.is_materialised
    assert output.logits.source.call.consumed == 1


def test_a_compiled_head_goes_back_to_deferring_logits():
    """Accelerate's regional compilation compiles what is no layer, too; a traced head would compute all logits."""
    model = make("llama")
    fused.apply_chunked_loss(model)
    model.lm_head.compile(backend=lambda graph, example_inputs: pytest.fail("the head was traced"))
    fused.keep_heads_eager(model)
    output, _ = gradients(model, **batch())
    assert isinstance(output.logits, DeferredLogits) and not output.logits.source.is_materialised


def test_hooks_on_outputs_do_not_compute_logits_and_still_fire():
    """DeepSpeed registers a hook on every output with a gradient function: whole logits must not come of it."""
    from deepspeed.runtime.utils import register_output_backward_hooks

    model = make("llama")
    fused.apply_chunked_loss(model)
    for use_logits in (False, True):
        output, calls = model(**batch()), []
        register_output_backward_hooks(output, lambda: calls.append(1), lambda gradient: gradient)  # noqa: B023
        assert not output.logits.source.is_materialised
        (output.logits.float().square().mean() if use_logits else output.loss).backward()
        assert calls == [1]
        assert output.logits.source.is_materialised == use_logits


def test_capped_logits_are_computed_in_full_and_deferring_stops():
    """Gemma 2 caps its logits: the loss is that of the capped ones, and the detour is taken once only."""
    model, reference = make("gemma2"), make("gemma2")
    fused.apply_chunked_loss(model)
    for _ in range(2):
        output, _ = assert_same_training(model, reference, **batch())
        assert not isinstance(output.logits, DeferredLogits)
    assert vars(model)["_lazytrain_loss_call"].pointless


def test_encoder_decoder_with_a_loss_of_its_own():
    config = transformers.T5Config(
        vocab_size=67,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).train()
    reference = copy.deepcopy(model)
    fused.apply_chunked_loss(model)
    for _ in range(2):
        assert_same_training(model, reference, **batch())


@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_every_label_ignored(family):
    model, reference = make(family), make(family)
    fused.apply_chunked_loss(model)
    inputs = batch()
    inputs["labels"].fill_(-100)
    output, ours = gradients(model, **inputs)
    expected_output, expected = gradients(reference, **inputs)
    assert torch.isnan(output.loss) and torch.isnan(expected_output.loss)
    assert all(not g.any() for g in ours.values()) == all(not g.any() for g in expected.values())


def test_shift_labels_and_logits_to_keep():
    model, reference = make("llama"), make("llama")
    fused.apply_chunked_loss(model)
    inputs = batch()
    shifted = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    assert_same_training(model, reference, **inputs, shift_labels=shifted.contiguous())
    kept = batch(columns=13)
    kept["labels"] = kept["labels"][:, -6:]
    assert_same_training(model, reference, **kept, logits_to_keep=6)
    for m in (model, reference):  # labels that don't fit the kept logits: torch's own error
        with pytest.raises(ValueError, match="batch_size"):
            m(**inputs, logits_to_keep=6)


def test_labels_given_by_position():
    model, reference = make("gpt2"), make("gpt2")
    fused.apply_chunked_loss(model)
    inputs = batch()
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    args = [inputs.get(name) for name in names[: names.index("labels") + 1]]
    output = model(*args)
    assert isinstance(output.logits, DeferredLogits)
    torch.testing.assert_close(output.loss, reference(*args).loss, rtol=1e-6, atol=0)


def test_ordinary_logits_without_grad_mode_without_labels_and_in_generate():
    model, reference = make("llama"), make("llama")
    fused.apply_chunked_loss(model)
    inputs = batch()
    with torch.no_grad():
        output = model(**inputs)
        assert type(output.logits) is torch.Tensor
        assert torch.equal(output.loss, reference(**inputs).loss)  # evaluation: the very same bits
    assert type(model(input_ids=inputs["input_ids"]).logits) is torch.Tensor
    with pytest.raises(IndexError):  # the flag of a forward that failed does not leak into the next one
        model(input_ids=inputs["input_ids"] + 999, labels=inputs["labels"])
    assert type(model(input_ids=inputs["input_ids"]).logits) is torch.Tensor
    for m in (model, reference):
        m.eval()
    prompt = {"input_ids": inputs["input_ids"][:2], "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**prompt), reference.generate(**prompt))


def test_another_loss_function_is_left_alone():
    model = make("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().square().mean()
    line = fused.apply_chunked_loss(model)
    assert line.startswith("chunked loss: not applied") and "loss function" in line
    assert type(model(**batch()).logits) is torch.Tensor


def test_remove_gives_back_the_model_as_it_was():
    model, reference = make("llama"), make("llama")
    before = {k: set(vars(m)) for k, m in model.named_modules()}
    fused.apply_chunked_loss(model)
    duplicate = copy.deepcopy(model)
    assert_same_training(duplicate, reference, **batch())
    assert vars(duplicate)["_lazytrain_loss_call"] is not vars(model)["_lazytrain_loss_call"]
    for patched in (model, duplicate):
        fused.remove(patched)
        assert {k: set(vars(m)) for k, m in patched.named_modules()} == before
        assert not patched._forward_hooks and not patched._forward_pre_hooks
        output, _ = gradients(patched, **batch())
        assert type(output.logits) is torch.Tensor
    fused.remove(model)  # harmless


def test_a_model_that_was_pickled_whole_still_works():
    model, reference = make("llama"), make("llama")
    fused.apply_chunked_loss(model)
    fused.fuse_rms_norms(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert_same_training(torch.load(buffer, weights_only=False), reference, **batch())


def test_patching_keeps_no_model_alive():
    model = make("llama")
    fused.fuse_rms_norms(model)
    fused.fuse_swiglus(model)
    fused.fuse_ropes(model)
    fused.apply_chunked_loss(model)
    gradients(model, **batch())
    reference = weakref.ref(model)
    fused.remove(model)
    del model
    gc.collect()
    assert reference() is None


# --- logits that are looked at ---------------------------------------------------------------------------------------


USES = {
    "arithmetic": lambda x: x * 2 + 1,
    "reflected": lambda x: 1 - x,
    "inplace": lambda x: x.div_(3.0),
    "indexing": lambda x: x[..., :-1, 3:5],
    "view": lambda x: x.view(-1, x.size(-1)),
    "softmax": lambda x: torch.softmax(x, -1),
    "argmax": lambda x: x.argmax(-1),
    "detach": lambda x: x.detach(),
    "cat": lambda x: torch.cat([x, x]),
    "stack in a list": lambda x: torch.stack([x, torch.zeros_like(x)]),
    "out of functional": lambda x: nn.functional.log_softmax(x, dim=-1),
    "einsum": lambda x: torch.einsum("bsv->b", x),
    "to": lambda x: x.to(torch.float64),
    "float": lambda x: x.float() + 0,
    "numpy": lambda x: torch.from_numpy(np.asarray(x.detach())),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "iteration": lambda x: next(iter(x)),
    "clone": lambda x: x.clone(),
    "copied into": lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "data": lambda x: x.data,
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "item": lambda x: torch.tensor(x[0, 0, 0].item()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("grad", [True, False])
def test_any_use_sees_the_ordinary_logits(use, grad):
    model, reference = make("llama"), make("llama")
    fused.apply_chunked_loss(model)
    logits, expected = model(**batch()).logits, reference(**batch()).logits
    assert isinstance(logits, DeferredLogits)
    with torch.set_grad_enabled(grad):
        ours, theirs = USES[use](logits), USES[use](expected)
    assert type(ours) is torch.Tensor
    torch.testing.assert_close(ours, theirs)
    assert ours.requires_grad == theirs.requires_grad


def test_metadata_needs_no_logits():
    model, reference = make("llama"), make("llama")
    fused.apply_chunked_loss(model)
    logits, expected = model(**batch()).logits, reference(**batch()).logits
    for ask in (
        lambda x: x.shape,
        lambda x: (x.size(), x.size(-1), x.dim(), x.ndim, x.numel(), len(x)),
        lambda x: (x.dtype, x.device, x.is_cuda, x.layout, x.is_floating_point(), x.element_size(), x.itemsize),
        lambda x: (x.requires_grad, x.is_leaf, x.grad_fn is None, x.is_contiguous(), x.stride()),
        lambda x: isinstance(x, torch.Tensor) and torch.is_tensor(x),
    ):
        assert ask(logits) == ask(expected)
    assert not logits.source.is_materialised


def test_a_loss_of_the_users_own_on_the_logits_trains_right():
    """Like Trainer's compute_loss_func or label smoothing: the model's own loss is thrown away."""

    def loss_of(model):
        output = model(**batch())
        return nn.functional.cross_entropy(output.logits.view(-1, 67), batch()["labels"].view(-1), label_smoothing=0.1)

    model, reference = make("qwen2-tied"), make("qwen2-tied")
    fused.apply_chunked_loss(model)
    for m in (model, reference):
        loss_of(m).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_custom_autograd_function_on_the_logits_trains_right():
    """`Function.apply` never asks __torch_function__: gradients must still reach hidden and head."""

    class MeanSquare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.save_for_backward(logits)
            return logits.square().mean()

        @staticmethod
        def backward(ctx, gradient):
            (logits,) = ctx.saved_tensors
            return 2 * logits * gradient / logits.numel()

    model, reference = make("qwen2-tied"), make("qwen2-tied")
    fused.apply_chunked_loss(model)
    for m in (model, reference):
        MeanSquare.apply(m(**batch()).logits).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_logits_after_backward_are_right_and_after_the_step_an_error():
    model, reference = make("llama"), make("llama")
    fused.apply_chunked_loss(model)
    output, _ = gradients(model, **batch())
    expected, _ = gradients(reference, **batch())
    torch.testing.assert_close(output.logits.detach(), expected.logits)

    output, _ = gradients(model, **batch())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(LazyTrainError, match="before step"):
        output.logits.detach()

    output, _ = gradients(model, **batch())
    fused.weights_changed(model)  # an engine whose kernels write behind torch's back
    with pytest.raises(LazyTrainError, match="fused_kernels"):
        output.logits.argmax(-1)


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_autocast(head_dtype):
    model, reference = make("llama").to(head_dtype), make("llama").to(head_dtype)
    fused.apply_chunked_loss(model)
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = model(**batch()), reference(**batch())
    assert output.logits.dtype == expected.logits.dtype
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(output.logits + 0, expected.logits + 0, rtol=0, atol=0)
    output.loss.backward()
    expected.loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype == theirs.grad.dtype
        assert (ours.grad - theirs.grad).norm() <= 0.02 * theirs.grad.norm()


def test_accelerates_output_conversion_does_not_compute_logits():
    from accelerate.utils import convert_outputs_to_fp32

    model = make("llama").bfloat16()
    fused.apply_chunked_loss(model)
    model.forward = convert_outputs_to_fp32(model.forward)
    result = model(**batch())
    assert result.logits.dtype == torch.float32 and not result.logits.source.is_materialised
    assert type(result.logits + 0) is torch.Tensor and (result.logits + 0).dtype == torch.float32


@pytest.mark.parametrize("kind", ["body", "head", "head saved"])
def test_peft(kind):
    import peft

    def wrap():
        settings = {
            "body": {"target_modules": ["q_proj"]},
            "head": {"target_modules": ["q_proj", "lm_head"]},
            "head saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        }[kind]
        model = make("llama")
        torch.manual_seed(5)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **settings)).train()

    model, reference = wrap(), wrap()
    line = fused.apply_chunked_loss(model)
    assert line.startswith("chunked loss: not applied" if kind == "head" else "chunked loss: applied")
    output, _ = assert_same_training(model, reference, **batch())
    assert isinstance(output.logits, DeferredLogits) == (kind != "head")


def test_trainer_runs_the_same(tmp_path):
    """Training, evaluation and prediction through Trainer, with accumulation and label counts."""

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            row = batch(seed=index // 2)  # rows with different numbers of labels that count
            return {k: v[index % 2] for k, v in row.items() if k != "attention_mask"}

    def run(patched):
        model = make("qwen2-tied")
        if patched:
            fused.apply_chunked_loss(model)
        arguments = transformers.TrainingArguments(
            str(tmp_path / str(patched)), per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=3,
            learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", seed=3,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        prediction = trainer.predict(Rows()).predictions
        return losses, trainer.evaluate()["eval_loss"], prediction[0] if isinstance(prediction, tuple) else prediction

    (losses, evaluation, logits), (expected_losses, expected_evaluation, expected_logits) = run(True), run(False)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-4)
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-2, atol=1e-3)


# --- fused modules ---------------------------------------------------------------------------------------------------


def fuse_modules(model):
    return [fused.fuse_rms_norms(model), fused.fuse_swiglus(model), fused.fuse_ropes(model)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CAUSAL)
def test_fused_modules_train_as_the_model_does(family, device):
    model, reference = make(family, device), make(family, device)
    fuse_modules(model)
    try:
        assert_same_training(model, reference, **batch(device), rtol=5e-5)
    finally:
        fused.remove(model)


@pytest.mark.parametrize(
    ("family", "norms", "mlps", "attentions"),
    [
        ("llama", 5, 2, 2),
        ("qwen3", 9, 2, 2),
        ("gemma", 5, 0, 2),
        ("gemma2", 9, 0, 2),
        ("mixtral", 5, 0, 2),
        ("gpt2", 0, 0, 0),
    ],
)
def test_what_is_fused(family, norms, mlps, attentions):
    model = make(family)
    lines = fuse_modules(model)
    bound = [vars(m)["forward"].__func__ for m in model.modules() if "forward" in vars(m)]
    assert bound.count(fused_modules._rms_norm_forward) == norms
    assert bound.count(fused_modules._swiglu_forward) == mlps
    assert bound.count(fused_modules._attention_forward) == attentions
    for line, count in zip(lines, (norms, mlps, attentions), strict=True):
        assert (f"{count} of {count} fused" in line) == (count > 0)
    fused.remove(model)
    assert not any("forward" in vars(m) for m in model.modules())


def test_bf16_rounding_is_the_models():
    """Which side of the weight a norm rounds on shows in bf16 only; on the CPU the bits are equal."""
    for family in ("llama", "gemma"):
        model, reference = make(family).bfloat16(), make(family).bfloat16()
        fuse_modules(model)
        with torch.no_grad():
            assert torch.equal(model(**batch()).logits, reference(**batch()).logits)
        fused.remove(model)


def test_rope_is_patched_for_this_model_only_and_given_back():
    modeling = importlib.import_module("transformers.models.llama.modeling_llama")
    original = modeling.apply_rotary_pos_emb
    first, second, plain = make("llama"), make("llama"), make("llama")
    calls = []
    fused_modules.fuse_ropes(first)
    fused_modules.fuse_ropes(second)
    rope = fused_modules.rope
    try:
        fused_modules.rope = lambda *args: calls.append(1) or rope(*args)
        gradients(plain, **batch())
        assert not calls
        gradients(first, **batch())
        assert len(calls) == 2
    finally:
        fused_modules.rope = rope
    fused.remove(first)
    assert modeling.apply_rotary_pos_emb is not original  # the second model still uses it
    fused.remove(second)
    assert modeling.apply_rotary_pos_emb is original


class OtherRMSNorm(nn.Module):
    """Named like a norm that we know, but it isn't one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.variance_epsilon)


def test_a_norm_with_another_formula_keeps_it():
    model = nn.Sequential(OtherRMSNorm())
    line = fused.fuse_rms_norms(model)
    assert "not applied" in line and "OtherRMSNorm" in line
    x = torch.randn(3, 8)
    assert torch.equal(model(x), model[0].weight * x / (x.abs().mean(-1, keepdim=True) + 1e-6))


def test_mixed_dtypes_keep_the_models_own_promotion():
    model, reference = make("llama").bfloat16(), make("llama").bfloat16()
    for m in (model, reference):
        m.model.norm.float()
        m.lm_head.float()
    fused.fuse_rms_norms(model)
    with torch.no_grad():
        ours, theirs = model(**batch()).logits, reference(**batch()).logits
    assert ours.dtype == theirs.dtype == torch.float32 and torch.equal(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kept_graph_runs_twice(device):
    """No saved tensor and no incoming gradient is overwritten."""
    model = make("qwen3", device)
    fuse_modules(model)
    fused.apply_chunked_loss(model)
    loss = model(**batch(device)).loss
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, once[name]), name
    fused.remove(model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "qwen3"])
def test_every_plan_of_the_executor_gives_the_same_bits(family, device):
    """Streamed weights, recomputed and kept graphs, updates that run while the next forward does."""
    weights = {}
    for home, keep in (("cpu", "none"), ("cpu", "all"), ("mixed", "mixed")):
        model = make(family)
        executor = make_executor(model, plan_for(model, home=home, keep=keep, device=device), device=device)
        fuse_modules(model)
        fused.apply_chunked_loss(model)
        for step in range(3):
            executor.begin_forward()
            output = model(**batch(device, seed=step), use_cache=False)
            assert isinstance(output.logits, DeferredLogits)
            output.loss.backward()
            executor.step(1.0)
            fused.weights_changed(model)
        with pytest.raises(LazyTrainError):
            output.logits.sum()
        executor.flush()
        weights[home, keep] = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        executor.close()
        fused.remove(model)

    reference = make(family, device)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        reference(**batch(device, seed=step)).loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    first, *others = weights.values()
    for name, parameter in reference.named_parameters():
        assert all(torch.equal(first[name], other[name]) for other in others), name
        # Adam turns tiny gradients into full steps: a share of elements may differ, the tensor may not.
        assert (first[name] - parameter.detach().cpu()).norm() <= 1e-3 * parameter.norm().cpu(), name


def test_the_planner_counts_with_the_same_chunk():
    assert model_profile.LOSS_CHUNK_TOKENS == CHUNK_TOKENS


def test_on_the_cpu_nothing_is_applied_and_it_says_so(caplog):
    model = make("llama")
    with caplog.at_level("INFO", logger="lazytrain_plugin"):
        report = fused.apply_fused_kernels(model, "cpu")
    assert len(report) == 1 and "not applied" in report[0]
    assert sum("fused kernels" in message for message in caplog.messages) == 1
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_is_applied_on_cuda():
    model, reference = make("llama", "cuda").bfloat16(), make("llama", "cuda").bfloat16()
    report = fused.apply_fused_kernels(model, "cuda")
    assert len(report) == 4 and not any("not applied" in line for line in report)
    exact = make("llama", "cuda").double()
    _, ours = gradients(model, **batch("cuda"))
    _, theirs = gradients(reference, **batch("cuda"))
    _, oracle = gradients(exact, **batch("cuda"))

    def error(grads):
        return sum((grads[n].double() - g).norm() ** 2 for n, g in oracle.items()).sqrt()

    assert error(ours) <= 2 * error(theirs)
    fused.remove(model)


def test_importing_the_module_does_not_import_transformers():
    code = "import sys, lazytrain_plugin.integration.fused as f, torch; print('transformers' in sys.modules)"
    code += "; print(f.apply_chunked_loss(torch.nn.Linear(2, 2)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[0] == "False" and "not applied" in out


def test_gate_and_up_are_private_only_where_nothing_else_can_look(monkeypatch):
    """In a unit that saves in codes they would otherwise come without values to somebody who reads them."""
    seen = []
    plain = fused_modules.swiglu
    monkeypatch.setattr(
        fused_modules, "swiglu", lambda *args, private, **options: (seen.append(private), plain(*args, **options))[1]
    )
    model = make("llama")
    assert "2 of 2 fused" in fused_modules.fuse_swiglus(model)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 32)

    def is_private() -> bool:
        mlp(x)
        return seen.pop()

    assert is_private()
    with torch.no_grad():
        handles = [mlp.gate_proj.register_forward_hook(lambda *_: None)]
        assert not is_private()
        handles.pop().remove()
        handles.append(mlp.up_proj.register_full_backward_hook(lambda *_: None))
        assert not is_private()
        handles.pop().remove()
        handles.append(nn.modules.module.register_module_forward_hook(lambda *_: None))
        assert not is_private()
        handles.pop().remove()
        mlp.up_proj.forward = lambda x, forward=mlp.up_proj.forward: forward(x)
        assert not is_private()
        del mlp.up_proj.forward
        mlp.gate_proj = type("Adapted", (nn.Linear,), {})(32, 48, bias=False)
        assert not is_private()


def test_a_managed_model_is_pickled_without_our_kernels():
    model = make("llama")
    for fuse in (fused.fuse_rms_norms, fused.fuse_swiglus, fused.fuse_ropes, fused.apply_chunked_loss):
        fuse(model)
    patched = [module for module in model.modules() if "forward" in vars(module)]
    managed_model.manage(model, executor=None)
    try:
        text = pickle.dumps(model)
    finally:
        for name in ("_apply", "__reduce_ex__"):
            del model.__dict__[name]
        assert patched == [module for module in model.modules() if "forward" in vars(module)] != []
        fused.remove(model)
    assert b"lazytrain" not in text, "loads where LazyTrain is not installed"
    found = pickle.loads(text).state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
