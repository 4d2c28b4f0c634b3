"""A plan made in training puts on NVMe what neither memory holds, and no bit changes."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers

from integration_tests import harness, models
from integration_tests.harness import InOrderTrainer, assert_bit_equal, fresh_accelerate_state
from integration_tests.loops import make_trainer
from lazytrain_plugin.integration import measure_nvme, training_request
from lazytrain_plugin.vocab import Tier
from tests.integration.on_disk import tight_budgets
from tests.plan import builders

TOKENS = 2 * models.SEQUENCE
LAYERS = 12


@pytest.fixture(autouse=True)
def small_machine(tmp_path, monkeypatch):
    """A described machine with a GPU, whose plans this machine carries out; the disk is measured, in small blocks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(training_request, "measure_hardware", lambda *args, **kwargs: builders.hardware())
    monkeypatch.setattr(measure_nvme, "REGION_BYTES", 2**20)


def build_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS, "vocab_size": models.VOCAB}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.Qwen2ForCausalLM(config)


def run(folder, device, block):
    with fresh_accelerate_state():
        trainer = make_trainer(
            build_model(), models.make_samples("llama", 32), folder, device,
            block={"optimizer": {"implementation": "native"}, "max_tokens": TOKENS, "plan": {"adapt": False}, **block},
            trainer_class=InOrderTrainer, max_grad_norm=0.5, max_steps=4,
        )  # fmt: skip
        found = harness.finish(trainer)
        plan = trainer.model_wrapped.lazytrain.executor.plan
        harness.close(found)
        return found, plan


def test_states_that_memory_does_not_hold_go_to_nvme(device, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    expected, _ = run(tmp_path / "plain", device, {})
    disk = tmp_path / "disk"
    disk.mkdir()
    budgets = tight_budgets(build_model(), max_tokens=TOKENS)
    got, plan = run(tmp_path / "tight", device, {**budgets, "nvme_path": str(disk)})
    on_disk = sum(unit.states == Tier.NVME for unit in plan.units)
    assert on_disk > 0
    assert plan.predicted_bytes["nvme"] > 0
    assert_bit_equal(got.weights, expected.weights)
    assert got.losses == expected.losses and got.grad_norms == expected.grad_norms
    assert not list(disk.iterdir()), "the run's files are gone"
    assert caplog.text.count("measuring the disk of") == 1
    # The next run knows the disk.
    caplog.clear()
    again, plan = run(tmp_path / "again", device, {**budgets, "nvme_path": [str(disk)], "nvme_gib": 1})
    assert "measuring the disk" not in caplog.text
    assert any(unit.states == Tier.NVME for unit in plan.units)
    assert_bit_equal(again.weights, expected.weights)


def test_without_a_disk_the_same_budgets_are_refused(device, tmp_path):
    with pytest.raises(Exception, match="host memory: need .* have .* Nearest remedies"):
        run(tmp_path / "refused", device, tight_budgets(build_model(), max_tokens=TOKENS))
