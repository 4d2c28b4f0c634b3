"""Run by test_triton_fused.py with TRITON_INTERPRET=1: the Triton kernels on CPU tensors against plain torch."""

import torch
from triton.runtime import interpreter

from lazytrain_plugin.kernels.cross_entropy import cross_entropy_rows_reference
from lazytrain_plugin.kernels.elementwise import (
    NormRounding,
    _rms_norm_backward_reference,
    _rms_norm_forward_reference,
    _rotate,
    _SwiGLU,
)
from lazytrain_plugin.kernels.triton import cross_entropy as triton_cross_entropy
from lazytrain_plugin.kernels.triton import elementwise as triton_elementwise

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor, scope):
    """Triton 3.6 turns one-element arrays into loop bounds with int(array), which numpy 2.4 no longer does."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


def close(ours, theirs, dtype, atol=0.03):
    # The interpreter cuts to bf16 where a GPU rounds: each rounding may be a unit in the last place off. What rounding
    # costs on a GPU is tested there, against fp64.
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 3 * 2**-7, "atol": atol}
    torch.testing.assert_close(ours, theirs, **tolerance)


def cross_entropy(dtype, num_classes, write_gradient):
    torch.manual_seed(0)
    logits = (4 * torch.randn(5, num_classes)).to(dtype)
    logits[0, : num_classes // 2] = -float("inf")  # longer than a block in one of the cases
    targets = torch.randint(0, num_classes, (5,))
    targets[0] = num_classes - 1
    targets[2] = -100
    scale = torch.tensor(0.125)
    ours, theirs, losses, expected = logits.clone(), logits.clone(), torch.empty(5), torch.empty(5)
    options = {"ignore_index": -100, "write_gradient": write_gradient}
    triton_cross_entropy.cross_entropy_rows(ours, targets, losses, scale, **options)
    cross_entropy_rows_reference(theirs, targets, expected, scale, **options)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6)
    assert losses[2] == 0
    if write_gradient:
        close(ours, theirs, dtype, atol=1e-5)
        assert not ours[2].any() and not ours[0, : num_classes // 2].any()
    else:
        assert torch.equal(ours, logits)


def rms_norm(dtype, rounding, rows, columns):
    torch.manual_seed(0)
    x, dy, weight = torch.randn(rows, columns).to(dtype), torch.randn(rows, columns).to(dtype), torch.randn(columns)
    weight = weight.to(dtype)
    options = {
        "cast_before_weight": rounding is NormRounding.BEFORE_WEIGHT,
        "unit_offset": rounding is NormRounding.UNIT_OFFSET,
    }
    y, rstd = triton_elementwise.rms_norm_forward(x, weight, 1e-5, **options)
    expected, expected_rstd = _rms_norm_forward_reference(x, weight, 1e-5, rounding)
    close(y, expected, dtype)
    torch.testing.assert_close(rstd, expected_rstd)
    dx, dweight = triton_elementwise.rms_norm_backward(dy, x, weight, rstd, weight_gradient=True, **options)
    expected_dx, expected_dweight = _rms_norm_backward_reference(dy, x, weight, rstd, rounding)
    close(dx, expected_dx, dtype)
    close(dweight, expected_dweight, dtype)
    frozen_dx, none = triton_elementwise.rms_norm_backward(dy, x, weight, rstd, weight_gradient=False, **options)
    assert none is None and torch.equal(frozen_dx, dx)


def swiglu(dtype):
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(7, 301).to(dtype) for _ in range(3))
    gate[0, :2] = torch.tensor([-200.0, 200.0])
    close(triton_elementwise.swiglu_forward(gate, up), torch.nn.functional.silu(gate) * up, dtype)
    reference = [t.clone().requires_grad_() for t in (gate, up)]
    _SwiGLU.apply(*reference, False).backward(dy)
    for ours, theirs in zip(triton_elementwise.swiglu_backward(dy, gate, up), reference, strict=True):
        close(ours, theirs.grad, dtype)


def rope(dtype, table_rows):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 10).to(dtype).transpose(1, 2)
    cos, sin = (torch.randn(table_rows, 5, 10).to(dtype) for _ in range(2))
    for transposed in (False, True):
        ours = triton_elementwise.rope(x, cos, sin, transposed=transposed)
        close(ours, _rotate(x, cos, sin, transposed=transposed), dtype)


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        for num_classes in (7, 2 * triton_cross_entropy.BLOCK + 11):
            for write_gradient in (False, True):
                cross_entropy(dtype, num_classes, write_gradient)
        for rounding in NormRounding:
            rms_norm(dtype, rounding, 11, 48)
            rms_norm(dtype, rounding, 3, 1030)
        swiglu(dtype)
        for table_rows in (1, 2):
            rope(dtype, table_rows)
    print("all kernels agree")
