import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from lazytrain_plugin.config.schema import LazyTrainConfig, json_schema
from lazytrain_plugin.errors import ConfigError


def test_values_given_in_python_are_checked_too():
    with pytest.raises(ConfigError, match="lazytrain.gpu_memory_gib"):
        LazyTrainConfig(gpu_memory_gib=-2)
    with pytest.raises(ConfigError, match="lazytrain.optimizer.*expected an object"):
        LazyTrainConfig(optimizer={"threads": 2})


def test_a_config_cant_be_changed_after_the_check():
    with pytest.raises(FrozenInstanceError):
        LazyTrainConfig().optimizer.threads = -1


def test_json_schema_for_editors():
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["gpu_memory_gib"]["type"] == ["number", "null"]
    assert schema["properties"]["gpu_memory_gib"]["exclusiveMinimum"] == 0
    assert schema["properties"]["nvme_path"]["type"] == ["string", "array", "null"]
    assert schema["properties"]["nvme_path"]["items"] == {"type": "string"}
    assert schema["properties"]["fidelity"]["enum"] == ["exact", "balanced", "compact"]
    optimizer = schema["properties"]["optimizer"]["properties"]
    assert optimizer["state_bits"]["enum"] == [32, 8, None]
    assert optimizer["threads"]["default"] is None
    assert set(optimizer) == {"state_bits", "embedding_state_bits", "implementation", "threads"}
    assert all(entry["description"] for entry in schema["properties"].values())


def test_config_needs_no_torch():
    code = "import sys, lazytrain_plugin.config.parse, lazytrain_plugin.config.deepspeed_conflicts; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "deepspeed", "transformers"} & set(modules)
