import json
from dataclasses import fields
from pathlib import Path

import pytest

from lazytrain_plugin import _bootstrap
from lazytrain_plugin.config.parse import parse_block
from lazytrain_plugin.config.schema import LazyTrainConfig, OptimizerConfig
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.integration.accelerate_plugin import DEEPSPEED_CONFIG, LazyTrainPlugin

SAMPLE = Path(__file__).parents[2] / "configs" / "deepspeed" / "lazytrain.json"


@pytest.fixture(autouse=True)
def no_accelerate_environment(monkeypatch):
    for name in ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_ZERO3_INIT"):
        monkeypatch.delenv(name, raising=False)


def test_has_the_fields_of_the_block_with_their_help():
    assert [item.name for item in fields(LazyTrainPlugin)] == [item.name for item in fields(LazyTrainConfig)]
    assert all(item.metadata["help"] for item in fields(LazyTrainPlugin))


def test_its_block_is_plain_json_that_parses_to_the_same_config():
    plugin = LazyTrainPlugin(gpu_memory_gib=20, fidelity="balanced", optimizer=OptimizerConfig(threads=3))
    block = json.loads(json.dumps(plugin.block()))
    assert parse_block(block) == LazyTrainConfig(
        gpu_memory_gib=20, fidelity="balanced", optimizer=OptimizerConfig(threads=3)
    )


def test_deepspeed_plugin_carries_the_block():
    plugin = LazyTrainPlugin(max_tokens=4096).deepspeed(gradient_accumulation_steps=4, gradient_clipping=0.5)
    config = plugin.deepspeed_config
    assert config["lazytrain"]["max_tokens"] == 4096
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5
    assert plugin.zero_stage == 3
    assert plugin.zero3_save_16bit_model is True
    assert _bootstrap.is_installed()


def test_accelerate_walks_over_the_block_when_it_fills_in_what_is_left_at_auto():
    plugin = LazyTrainPlugin().deepspeed(gradient_accumulation_steps=1, gradient_clipping=1.0)
    plugin.deepspeed_config_process(
        must_match=False, **{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2, "bf16.enabled": True}
    )
    assert plugin.deepspeed_config["train_batch_size"] == 2
    assert plugin.deepspeed_config["lazytrain"] == LazyTrainPlugin().block()


def test_a_config_of_ones_own_is_checked_and_left_unchanged():
    own = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.25}
    assert LazyTrainPlugin().deepspeed(own).deepspeed_config["gradient_clipping"] == 0.25
    assert "lazytrain" not in own
    with pytest.raises(ConfigError, match="stage"):
        LazyTrainPlugin().deepspeed({"zero_optimization": {"stage": 2}})
    assert LazyTrainPlugin(enabled=False).deepspeed({"zero_optimization": {"stage": 2}}).zero_stage == 2


def test_wrong_values_are_refused_as_in_the_block():
    with pytest.raises(ConfigError, match="gpu_memory_gib"):
        LazyTrainPlugin(gpu_memory_gib=0)


def test_the_sample_json_says_the_same_as_the_plugin():
    sample = json.loads(SAMPLE.read_text())
    assert parse_block(sample.pop("lazytrain")) == LazyTrainConfig()
    assert sample == DEEPSPEED_CONFIG
