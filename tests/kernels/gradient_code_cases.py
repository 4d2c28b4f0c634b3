"""Gradients that are hard to encode."""

import torch


def awkward_values(numel, seed=0, dtype=torch.float32):
    """Blocks of 64: normal values, zeros, one outlier, exact halves of a step, tiny, huge, NaN, infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x[64:128] = 0
    x[128:192] *= 1e-6
    x[130:131] = 3.0
    x[192:256] = torch.arange(-32, 32)[: x[192:256].numel()] + 0.5
    x[192:193] = 127.0
    x[256:320] *= 1e-39
    x[320:384] *= 1e37
    x[390:391] = float("nan")
    x[450:451] = -float("inf")
    x[520:522] = torch.tensor([float("inf"), -float("inf")])[: x[520:522].numel()]
    return x.to(dtype)
