"""RMSNorm and SwiGLU around codes: values against fp64, bits against the separate passes."""

import importlib.util

import pytest
import torch

from lazytrain_plugin.kernels import blockwise, coded_elementwise
from lazytrain_plugin.kernels.elementwise import swiglu
from tests.kernels.blockwise_cases import awkward
from tests.kernels.test_triton_fused import run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def coded(x, name):
    return blockwise.quantize(x.view(-1), name)


def same_codes(ours, theirs):
    """NaN has many bit patterns in a scale, and its block's codes mean nothing."""
    finite = ~theirs.scales.isnan()
    assert torch.equal(ours.scales.isnan(), ~finite) and torch.equal(ours.scales[finite], theirs.scales[finite])
    assert torch.equal(ours.codes[finite], theirs.codes[finite])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", blockwise.LOW_BIT_FORMATS)
@pytest.mark.parametrize("numel", [0, 1, 127, 129, 40 * 128 + 5])
def test_swiglu_quantized_is_swiglu_and_quantize(name, dtype, numel, device):
    gate, up = awkward(numel, dtype).to(device), awkward(numel, dtype).flip(0).to(device)
    outs = [blockwise.empty((numel,), dtype, name, device) for _ in range(2)]
    y = coded_elementwise.swiglu_quantized(gate, up, *outs)
    torch.testing.assert_close(y, swiglu(gate, up), rtol=0, atol=0, equal_nan=True)
    for values, out in zip((gate, up), outs, strict=True):
        same_codes(out, coded(values, name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", blockwise.LOW_BIT_FORMATS)
@pytest.mark.parametrize("shape", [(1,), (3, 43), (7, 301)])
def test_from_codes_it_is_swiglu_of_the_decoded_values(name, dtype, shape, device):
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(shape).to(device, dtype) for _ in range(3))
    codes = [coded(x, name) for x in (gate, up)]
    decoded = [blockwise.dequantize(part).view(shape).requires_grad_() for part in codes]
    expected = swiglu(*decoded)
    expected.backward(dy)
    assert torch.equal(coded_elementwise.swiglu_decoded(*codes, dy.shape), expected)
    gradients = [torch.empty_like(dy) for _ in range(2)]
    coded_elementwise.swiglu_backward_decoded(dy, *codes, *gradients)
    for ours, theirs in zip(gradients, decoded, strict=True):
        assert torch.equal(ours, theirs.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp4", "int8"])
@pytest.mark.parametrize("columns", [128, 384, 3584])
def test_rms_norm_quantized_is_rms_norm_and_quantize(name, columns):
    from lazytrain_plugin.kernels.triton import coded_elementwise as kernels
    from lazytrain_plugin.kernels.triton import elementwise

    x = awkward(5 * columns, torch.bfloat16).view(5, columns).cuda()
    weight, formula = torch.rand(columns).bfloat16().cuda(), {"cast_before_weight": True, "unit_offset": False}
    out = blockwise.empty((x.numel(),), x.dtype, name, "cuda")
    ours = kernels.rms_norm_quantized(x, weight, 1e-6, out, **formula)
    for a, b in zip(ours, elementwise.rms_norm_forward(x, weight, 1e-6, **formula), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    same_codes(out, coded(x, name))


@with_triton
@pytest.mark.timeout(300)
def test_interpreted_kernels_agree_with_plain_torch():
    script = "run_coded_elementwise_interpreted.py"
    assert "all kernels agree" in run(script, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@with_triton
@pytest.mark.timeout(300)
def test_kernels_compile_for_an_h100(tmp_path):
    assert "all kernels compile" in run("run_coded_elementwise_compile.py", TRITON_CACHE_DIR=str(tmp_path))
