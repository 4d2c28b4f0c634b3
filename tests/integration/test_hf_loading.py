"""transformers under a block: models hold true weights, loaded once, whatever the order of model and arguments."""

import json
import subprocess
import sys

import pytest
import torch
import transformers.integrations.deepspeed as hf_deepspeed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lazytrain_plugin.runtime.streamed_file import _mapped_ranges

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(3)
    LlamaForCausalLM(llama_config()).save_pretrained(path)
    return path


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        tie_word_embeddings=True,
    )


def test_every_holder_of_the_question_has_the_patched_one(hf_config):
    import transformers.generation.utils
    import transformers.integrations.accelerate
    import transformers.modeling_utils
    import transformers.trainer_pt_utils
    import transformers.trainer_seq2seq

    hf_config()
    for module in (
        hf_deepspeed,
        transformers.integrations,
        transformers.integrations.accelerate,
        transformers.generation.utils,
        transformers.modeling_utils,
        transformers.trainer_pt_utils,
        transformers.trainer_seq2seq,
    ):
        assert module.is_deepspeed_zero3_enabled() is False, module.__name__


def test_a_disabled_block_changes_no_answer(hf_config):
    assert hf_deepspeed.is_deepspeed_zero3_enabled() is False
    config = hf_config(enabled=False)
    assert hf_deepspeed.is_deepspeed_zero3_enabled() is True
    del config


def test_stage_3_stays_declared_to_those_who_ask_the_config(hf_config):
    assert hf_config().is_zero3()


def test_from_pretrained_gives_the_saved_weights(hf_config, checkpoint):
    plain = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    hf_config()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(hasattr(parameter, "ds_id") or parameter.is_meta for parameter in model.parameters())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, plain[name]), name


def test_weights_rest_in_a_mapping_of_the_file_that_all_ranks_share(hf_config, checkpoint):
    """S-07: N ranks that load a model take the memory of one, until the engine holds it for all of them."""
    hf_config()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ranges = _mapped_ranges(str((checkpoint / "model.safetensors").resolve()))
    for name, weight in model.named_parameters():
        start, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
        assert any(first <= start and end <= last for first, last, _ in ranges), name


def test_from_config_initializes_as_without_deepspeed(hf_config):
    torch.manual_seed(11)
    plain = AutoModelForCausalLM.from_config(llama_config())
    hf_config()
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(llama_config())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name]), name


def test_resize_works_on_the_weights_themselves(hf_config, checkpoint):
    hf_config()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    before = model.model.embed_tokens.weight.detach().clone()
    model.resize_token_embeddings(41, mean_resizing=False)
    assert model.model.embed_tokens.weight.shape == (41, 24)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight[:37], before)


def test_a_missing_weight_is_initialized(hf_config, checkpoint, tmp_path):
    hf_config()
    config = llama_config()
    config.num_hidden_layers = 3
    model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config)
    assert 0 < model.model.layers[2].mlp.up_proj.weight.std() < 0.1


MEASURE = """
import gc, json, os, sys
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
import deepspeed, torch, transformers.integrations.deepspeed as hf_deepspeed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

def status_bytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

path, ds_config = sys.argv[1], json.loads(sys.argv[2])
config = LlamaConfig(
    vocab_size=512, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=8
)
model = LlamaForCausalLM(config)
num_bytes = sum(p.numel() * 4 for p in model.parameters())
model.save_pretrained(path)
del model
# With the block disabled, last: DeepSpeed partitions then, and wants a process group.
for enabled in (True, False):
    if not enabled:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    alive = hf_deepspeed.HfDeepSpeedConfig({**ds_config, "lazytrain": {"enabled": enabled}})
    gc.collect()
    before = status_bytes("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM
    model = AutoModelForCausalLM.from_pretrained(path)
    loaded = sum(p.double().sum().item() for p in model.parameters())
    print(json.dumps([(status_bytes("VmHWM") - before) / num_bytes, model.lm_head.weight.numel()]))
    del model, alive
"""


def test_peak_memory_of_loading_is_one_model(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "model", json.dumps(CONFIG)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    under_lazytrain, under_deepspeed = map(json.loads, process.stdout.splitlines()[-2:])
    models, lm_head_numel = under_lazytrain
    assert lm_head_numel == 512 * 1024
    assert 0.5 < models < 1.3
    models, lm_head_numel = under_deepspeed
    assert lm_head_numel == 0, "with the block disabled DeepSpeed partitions as it always did"
    assert models > 1.5, "the measurement must see a second copy where there is one"
