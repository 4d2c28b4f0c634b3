"""A model that can't be trained within the budgets is refused before its weights are read, by every way to start."""

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.integration import early_refusal
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.greedy import leanest_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.profile.capacity import host_capacity
from lazytrain_plugin.units import GIB
from tests.plan import builders

CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
SIZES = {"vocab_size": 997, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}


@pytest.fixture
def under(monkeypatch, hf_config):
    """A block in the config that transformers sees; training computes on the CPU."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return functools.partial(hf_config, micro_batch=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4)).save_pretrained(path)
    return path


@pytest.fixture
def unreadable(checkpoint, tmp_path):
    """The same checkpoint, whose weights give an error of their own when they are read."""
    path = shutil.copytree(checkpoint, tmp_path / "unreadable")
    (path / "model.safetensors").write_bytes(b"not weights")
    return path


def needs(*, frozen: bool) -> float:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))
    profile = early_refusal._profile(model, CONFIG)
    profile = early_refusal._frozen(profile) if frozen else profile
    slots = {"weight_slots": 2, "gradient_slots": 1} if frozen else {}
    problem = build_problem(profile, builders.hardware(gpu_gib=0), PlanRequest(max_tokens=2, **slots))
    return account(problem, leanest_plan(problem)).need_bytes()["cpu"] / GIB


def test_too_small_for_frozen_weights_is_refused(under, unreadable):
    under(cpu_memory_gib=needs(frozen=True) - 1e-4)
    with pytest.raises(InfeasiblePlanError, match=r"host memory: need .*, have .*Nearest remedies: .*none were loaded"):
        AutoModelForCausalLM.from_pretrained(unreadable)


def test_what_fits_is_loaded_without_a_word(under, checkpoint, caplog):
    plain = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    under(cpu_memory_gib=needs(frozen=False) + 1e-4)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in plain.items())
    assert not [record for record in caplog.records if record.name.startswith("lazytrain_plugin")]


def test_too_small_for_training_the_whole_is_a_warning(under, checkpoint, caplog):
    """It may get adapters before it is trained."""
    assert needs(frozen=False) > needs(frozen=True) + 1e-3
    under(cpu_memory_gib=(needs(frozen=True) + needs(frozen=False)) / 2)
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert "does not fit" in caplog.text and "host memory: need" in caplog.text


def test_a_plan_of_ones_own_is_not_judged(under, checkpoint):
    under(cpu_memory_gib=0.5, plan={"path": str(checkpoint / "config.json")})
    AutoModelForCausalLM.from_pretrained(checkpoint)


SCRIPT = """
import sys, torch, transformers
arguments = transformers.TrainingArguments(
    sys.argv[1], deepspeed=sys.argv[2], per_device_train_batch_size=2, max_steps=1, report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[3])
print("weights are loaded")
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
transformers.Trainer(model, arguments, train_dataset=data).train()
"""


@pytest.mark.parametrize("launcher", ["python", "accelerate launch"])
def test_a_job_ends_with_an_error_before_it_loads(launcher, unreadable, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    small = {"cpu_memory_gib": 0.6, "gpu_memory_gib": 0.6}
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}, "lazytrain": small}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    start = [sys.executable]
    if launcher == "accelerate launch":
        options = [] if torch.cuda.is_available() else ["--cpu"]
        start = [str(Path(sys.executable).parent / "accelerate"), "launch", "--num_processes", "1", *options]
    job = subprocess.run(
        [*start, tmp_path / "train.py", tmp_path / "out", tmp_path / "ds.json", unreadable],
        capture_output=True, text=True, timeout=200, cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert job.returncode != 0
    assert "InfeasiblePlanError: no placement fits" in job.stderr
    assert "need" in job.stderr and "have 614.4 MiB" in job.stderr and "Nearest remedies" in job.stderr
    assert "weights are loaded" not in job.stdout


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.bfloat16])
def test_ranks_that_would_each_have_a_copy_are_told(under, checkpoint, monkeypatch, caplog, ranks, dtype):
    """S-07: weights in the dtype of the file are one mapping for all ranks; converted ones are a copy for each."""
    under()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    told = ranks == 2 and dtype == torch.bfloat16
    assert caplog.text.count("stored in float32 and loaded in bfloat16, so each of the 2 ranks") == told
    assert not told or ('load it with dtype="auto"' in caplog.text and "save it in bfloat16 once" in caplog.text)


def test_copies_that_do_not_fit_are_refused_before_the_first_is_read(under, checkpoint, monkeypatch):
    under()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("WORLD_SIZE", "8")
    few = host_capacity()
    few = replace(few, total_bytes=1 << 20)
    monkeypatch.setattr(early_refusal, "host_capacity", lambda: few)
    with pytest.raises(InfeasiblePlanError, match=r"8 ranks .* MiB together of 1.0 MiB of host memory; load it with"):
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
