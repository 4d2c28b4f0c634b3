"""Torch's allocator of GPU memory, set for steps whose blocks are of many sizes."""

from __future__ import annotations

import os

import torch


def grow_by_pages(device: torch.device) -> None:
    """What torch reserves grows by pages from here on, unless the user set the allocator.

    Segments of fixed size strand what no later block fits into: with 7B in 31 GiB, 2.7 GiB in the first steps, which
    no plan can foresee; page by page it is 1.4 GiB.
    """
    if device.type != "cuda" or "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        return
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # not in torch before 2.9
    if change is not None and torch.cuda.memory.get_allocator_backend() == "native":
        change("expandable_segments:True")
