import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from typer.testing import CliRunner

from lazytrain_plugin.integration import cli, launcher


def test_the_console_script_is_this_app():
    (script,) = entry_points(group="console_scripts", name="lazytrain")
    assert script.load() is cli.main


def test_help_lists_every_command():
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for command in ("doctor", "launch", "plan", "explain", "profile"):
        assert command in result.stdout


@pytest.mark.parametrize("option", ["--config", "--config_file"])
def test_launch_takes_both_spellings_and_leaves_the_scripts_own_arguments_alone(option):
    parsed = launcher.parse([option, "a.yaml", "--num_processes", "2", "train.py", "--config", "b.yaml", "-m", "--x"])
    assert parsed.config_file == "a.yaml"
    assert parsed.num_processes == 2
    assert parsed.module is True
    assert [parsed.training_script, *parsed.training_script_args] == [
        *("lazytrain_plugin.launch", "train.py"),
        *("--config", "b.yaml", "-m", "--x"),
    ]


def test_launch_of_a_module_and_of_an_executable():
    module = launcher.parse(["-m", "package.train", "--lr", "1"])
    assert module.training_script_args == ["-m", "package.train", "--lr", "1"]
    executable = launcher.parse(["--no_python", "./run.sh", "--lr", "1"])
    assert executable.training_script == "./run.sh"
    assert not executable.module


def test_launch_without_its_config_says_so():
    with pytest.raises(SystemExit, match="there is no launch config missing.yaml"):
        launcher.launch(["--config", "missing.yaml", "train.py"])


def test_findings_as_json_stand_alone_on_stdout():
    """DeepSpeed logs to stdout when it is imported."""
    program = [sys.executable, "-m", "lazytrain_plugin.integration.cli", "doctor", "--json"]
    process = subprocess.run(program, capture_output=True, text=True, timeout=200)
    assert json.loads(process.stdout)


def test_launch_hands_its_arguments_over_as_they_stand(monkeypatch):
    handed_over = []
    monkeypatch.setattr(launcher, "launch", handed_over.extend)
    arguments = ["--config", "a.yaml", "--mixed_precision=bf16", "train.py", "--help", "--flag", "--", "rest"]
    assert CliRunner().invoke(cli.app, ["launch", *arguments]).exit_code == 0
    assert handed_over == arguments


def test_launch_runs_the_script_with_the_hook_even_when_torch_loads_no_plug_ins(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from lazytrain_plugin import _bootstrap\n"
        "print('ran', __name__, sys.argv[1:], _bootstrap.is_installed(), torch.__name__)\n"
    )
    config = tmp_path / "launch.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n")
    process = subprocess.run(
        [sys.executable, "-m", "lazytrain_plugin.integration.cli", "launch", "--config", config, script, "--lr", "1"],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert "ran __main__ ['--lr', '1'] True torch" in process.stdout
