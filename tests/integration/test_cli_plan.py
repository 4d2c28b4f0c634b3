"""`lazytrain plan | explain | profile` as a user types them."""

import json
from pathlib import Path

import pytest
import typer
from transformers import Qwen2Config
from typer.testing import CliRunner

from lazytrain_plugin.integration import cli_plan
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
H200 = str(HARDWARE / "h200_1x.json")


@pytest.fixture
def lazytrain():
    app = typer.Typer()
    cli_plan.register(app)
    runner = CliRunner(env={"COLUMNS": "140"})
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def config_7b(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2-7b")
    Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def test_7b_is_planned_without_a_gpu_or_weights(lazytrain, config_7b, tmp_path):
    out = tmp_path / "plan.json"
    result = lazytrain("plan", config_7b, "--hardware", H200, "--micro-batch", 32, "--gpu-memory-gib", 70, "--out", out)
    assert result.exit_code == 0, result.output
    assert "7.62 G parameters" in result.output and "70.0 GiB" in result.output
    plan = PlacementPlan.load(out)
    assert len(plan.units) == 28 and plan.max_tokens == 32 * 1024
    assert plan.predicted_bytes["gpu"] <= 70 * 2**30

    shown = lazytrain("explain", out)
    assert shown.exit_code == 0 and "model.layers.0" in shown.output
    why = lazytrain("explain", out, "model.layers.27.mlp.gate_proj.weight")
    assert why.exit_code == 0 and plan.units[27].reason.split(";")[0] in " ".join(why.output.split())


def test_config_file_and_json_output(lazytrain, config_7b):
    result = lazytrain(
        "plan", config_7b / "config.json", "--hardware", H200, "--micro-batch", 8, "--fidelity", "balanced", "--json"
    )
    assert result.exit_code == 0, result.output
    plan = PlacementPlan.from_json(result.stdout)
    assert {unit.state_bits for unit in plan.units} == {8}


def test_what_does_not_fit_exits_with_need_and_have(lazytrain, config_7b):
    result = lazytrain(
        "plan", config_7b, "--hardware", HARDWARE / "rtx3090_64gb.json", "--micro-batch", 32, "--cpu-memory-gib", 30
    )
    assert result.exit_code == 1
    assert "need" in result.stderr and "have 30.0 GiB" in result.stderr and "remedies" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "no/such/model", "--hardware", H200], "no network"),
        (["plan", "missing.json", "--hardware", H200], "no config at"),
        (["plan", "{folder}", "--hardware", "missing_box.json"], "can't be read"),
        (["plan", "{folder}", "--hardware", H200, "--gpu-memory-gib", "-4"], "gpu-memory-gib is -4"),
        (["plan", "{folder}", "--hardware", H200, "--dtype", "bf17"], "bf17"),
        (["explain", "missing_plan.json"], "no plan at"),
    ],
)
def test_mistakes_end_in_one_line(lazytrain, config_7b, arguments, message):
    result = lazytrain(*(argument.format(folder=config_7b) for argument in arguments))
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output and len(result.stderr.strip().splitlines()) == 1


def test_folder_without_a_config(lazytrain, tmp_path):
    result = lazytrain("plan", tmp_path, "--hardware", H200)
    assert result.exit_code == 1 and "holds no config.json" in result.stderr


def test_profiles(lazytrain, config_7b, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = lazytrain("profile", "--out", tmp_path / "this.json")
    assert result.exit_code == 0, result.output
    assert HardwareProfile.load(tmp_path / "this.json").cpu_bytes > 0
    assert list((tmp_path / "cache" / "lazytrain").glob("rates-*.json"))
    described = lazytrain("profile", config_7b)
    model = ModelProfile.from_json(described.stdout)
    assert model.num_parameters == 7_615_616_512
    assert json.loads(described.stdout)["estimate"] == ""
