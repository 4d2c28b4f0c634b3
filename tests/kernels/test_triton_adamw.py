"""The update and norm kernels of a GPU without one: interpreted against the CPU's bits, and compiled for an H100.

On a machine with a GPU the other tests here run them with the parameter "cuda".
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels.triton import require_triton

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(script, **environment):
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    result = subprocess.run(
        [sys.executable, str(HERE / script)], capture_output=True, text=True, env=environment, timeout=540
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@needs_triton
@pytest.mark.timeout(600)
def test_interpreted_kernels_give_the_cpu_s_bits():
    assert "same bits" in run("run_adamw_interpreted.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@needs_triton
@pytest.mark.timeout(600)
def test_kernels_compile_without_fused_or_approximate_operations(tmp_path):
    assert "all kernels compile" in run("run_adamw_compile.py", TRITON_CACHE_DIR=str(tmp_path))


def test_a_missing_triton_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_triton.cache_clear()
    try:
        with pytest.raises(KernelError, match="pip install"):
            require_triton()
    finally:
        require_triton.cache_clear()
