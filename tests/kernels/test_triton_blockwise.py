"""The block kernels without a GPU: interpreted, against plain torch, and compiled for an H100.

On a GPU test_blockwise.py runs the kernels themselves.
"""

import importlib.util

import pytest

from tests.kernels.test_triton_fused import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.timeout(300)
def test_interpreted_kernels_have_the_bits_of_plain_torch():
    assert "all kernels agree" in run("run_blockwise_interpreted.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.timeout(300)
def test_kernels_compile_for_an_h100(tmp_path):
    assert "all kernels compile" in run("run_blockwise_compile.py", TRITON_CACHE_DIR=str(tmp_path))
