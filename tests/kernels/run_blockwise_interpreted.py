"""Run by test_triton_blockwise.py with TRITON_INTERPRET=1: the kernels on CPU tensors have the bits of plain torch."""

import torch

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.triton import blockwise as kernels
from tests.kernels import run_triton_interpreted  # noqa: F401  (repairs the interpreter)
from tests.kernels.blockwise_cases import awkward


def same(ours, theirs):
    assert torch.equal(ours.scales.isnan(), theirs.scales.isnan())
    assert torch.equal(ours.scales.nan_to_num(), theirs.scales.nan_to_num()), (ours.scales, theirs.scales)
    assert torch.equal(ours.codes, theirs.codes), (ours.codes != theirs.codes).nonzero()


def check(name, numel):
    x, y = awkward(numel, torch.float32), awkward(numel, torch.float32).flip(0)
    for seeds in [None, (7, 4000000000)] if blockwise.FORMATS[name].is_integer else [None]:
        ours, theirs = (blockwise.zeros(x.shape, x.dtype, name, "cpu") for _ in range(2))
        kernels.quantize(x, ours, seeds=seeds, accumulate=False)
        blockwise.quantize_reference(x, theirs, seeds=seeds)
        same(ours, theirs)
        decoded, expected = torch.empty(numel), torch.empty(numel)
        kernels.dequantize(ours, decoded)
        blockwise.dequantize_reference(theirs, expected)
        assert torch.equal(decoded.isnan(), expected.isnan())
        assert torch.equal(decoded.nan_to_num(), expected.nan_to_num())
        kernels.quantize(y, ours, seeds=seeds, accumulate=True)
        blockwise.quantize_reference(y, theirs, seeds=seeds, accumulate=True)
        same(ours, theirs)


if __name__ == "__main__":
    for name in blockwise.LOW_BIT_FORMATS:
        for numel in (0, 1, 129, 18 * 128 + 5):
            check(name, numel)
    print("all kernels agree")
