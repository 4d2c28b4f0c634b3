"""Tensors that block formats get wrong first; used by the tests on the CPU, on CUDA and under Triton's interpreter."""

import torch

SIZES = (0, 1, 63, 127, 128, 129, 16 * 128 + 5, 40 * 128)


def awkward(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values; among them blocks with an outlier, of zeros, tiny, subnormal, huge, at ties, and not finite."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    for index, block in enumerate(x.split(128)):
        if index == 1:
            block[block.numel() // 2] = 1e4
        elif index == 2:
            block.zero_()
        elif index == 3:
            block *= 1e-30
        elif index == 4:
            block *= 1e-40  # subnormal
        elif index == 5:
            block *= 1e37
        elif index == 6:  # ties of fp4 and of whole numbers, where the scale is 1
            block.copy_((torch.arange(block.numel()) % 49 - 24) / 4)
        elif index == 7:
            block[3] = torch.inf
        elif index == 8:
            block[5] = torch.nan
        elif index == 9:
            block.copy_(torch.where(torch.arange(block.numel()) == 9, 3.3e38, 1.0))
    return x.to(dtype)
