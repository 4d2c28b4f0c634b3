"""Run by test_coded_elementwise.py with TRITON_INTERPRET=1: the kernels on CPU tensors against plain torch."""

import torch

from lazytrain_plugin.kernels import blockwise, coded_elementwise
from lazytrain_plugin.kernels.elementwise import NormRounding, _rms_norm_forward_reference
from lazytrain_plugin.kernels.triton import coded_elementwise as kernels
from tests.kernels.blockwise_cases import awkward
from tests.kernels.run_blockwise_interpreted import same
from tests.kernels.run_triton_interpreted import close


def swiglu(name, numel):
    gate, up = awkward(numel, torch.float32), awkward(numel, torch.float32).flip(0)
    ours, theirs = ([blockwise.empty((numel,), gate.dtype, name, "cpu") for _ in range(2)] for _ in range(2))
    y = kernels.swiglu_quantized(gate, up, *ours)
    expected = coded_elementwise.swiglu_quantized(gate, up, *theirs)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-6, equal_nan=True)
    for a, b in zip(ours, theirs, strict=True):
        same(a, b)

    torch.manual_seed(0)
    gate, up, dy = (torch.randn(numel) for _ in range(3))
    codes = [blockwise.quantize(x, name) for x in (gate, up)]
    y = torch.empty(numel)
    kernels.swiglu_decoded(*codes, y)
    close(y, coded_elementwise.swiglu_decoded(*codes, y.shape), torch.float32)
    gradients, expected = ([torch.empty(numel) for _ in range(2)] for _ in range(2))
    kernels.swiglu_backward_decoded(dy, *codes, *gradients)
    coded_elementwise.swiglu_backward_decoded(dy, *codes, *expected)
    for a, b in zip(gradients, expected, strict=True):
        close(a, b, torch.float32)


def rms_norm(name, rows, columns, rounding):
    x, weight = awkward(rows * columns, torch.float32).view(rows, columns), torch.rand(columns)
    x = x.nan_to_num(posinf=1.0).clamp(-1e4, 1e4)
    ours, theirs = (blockwise.empty((x.numel(),), x.dtype, name, "cpu") for _ in range(2))
    formula = {
        "cast_before_weight": rounding is NormRounding.BEFORE_WEIGHT,
        "unit_offset": rounding is NormRounding.UNIT_OFFSET,
    }
    y, rstd = kernels.rms_norm_quantized(x, weight, 1e-5, ours, **formula)
    expected, expected_rstd = _rms_norm_forward_reference(x, weight, 1e-5, rounding)
    close(y, expected, torch.float32)
    torch.testing.assert_close(rstd, expected_rstd)
    blockwise.quantize_reference(x.view(-1), theirs)
    same(ours, theirs)


if __name__ == "__main__":
    for name in blockwise.LOW_BIT_FORMATS:
        for numel in (1, 129, 18 * 128 + 5):
            swiglu(name, numel)
        for rounding in NormRounding:
            rms_norm(name, 9, 128, rounding)
        rms_norm(name, 3, 1152, NormRounding.BEFORE_WEIGHT)
    print("all kernels agree")
