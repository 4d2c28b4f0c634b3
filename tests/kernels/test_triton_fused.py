"""The Triton kernels without a GPU: interpreted against plain torch, and compiled for an H100.

On a machine with a GPU the tests of test_cross_entropy.py and test_elementwise.py run the kernels themselves.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
HERE = Path(__file__).parent


def run(script, **environment):
    command = [sys.executable, str(HERE / script)]
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=540)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(600)
def test_interpreted_kernels_agree_with_plain_torch():
    assert "all kernels agree" in run("run_triton_interpreted.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.timeout(600)
def test_kernels_compile_for_an_h100(tmp_path):
    output = run("run_triton_compile.py", TRITON_CACHE_DIR=str(tmp_path))
    assert "all kernels compile" in output
