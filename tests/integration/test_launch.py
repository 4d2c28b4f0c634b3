"""`python -m lazytrain_plugin.launch`: the script must not notice how it was started."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import helper
class Local: pass
import pickle; pickle.loads(pickle.dumps(Local()))
from lazytrain_plugin import _bootstrap
print([__name__, os.path.basename(sys.argv[0]), sys.argv[1:], helper.VALUE, _bootstrap.is_installed()])
sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "helper.py").write_text("VALUE = 'beside the script'")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("VALUE = 'in the working folder'")
    return tmp_path


def run(folder, *arguments):
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


def test_script(folder):
    process = run(folder, "-m", "lazytrain_plugin.launch", "scripts/train.py", "-m", "--lr", "1")
    assert process.stdout == "['__main__', 'train.py', ['-m', '--lr', '1'], 'beside the script', True]\n"
    assert process.returncode == 3


def test_module(folder):
    process = run(folder, "-m", "lazytrain_plugin.launch", "-m", "package.train", "--lr", "1")
    assert process.stdout == "['__main__', 'train.py', ['--lr', '1'], 'in the working folder', True]\n"
    assert process.returncode == 3


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--lr", "1"], ["missing.py"]])
def test_wrong_use_says_how(folder, arguments):
    process = run(folder, "-m", "lazytrain_plugin.launch", *arguments)
    assert process.returncode == 1
    assert "usage: python -m lazytrain_plugin.launch" in process.stderr


def test_import_road(folder):
    process = run(
        folder,
        "-c",
        "from lazytrain_plugin import _bootstrap; print(_bootstrap.is_installed())\n"
        "import lazytrain_plugin.install; print(_bootstrap.is_installed())",
    )
    assert process.stdout == "False\nTrue\n"
