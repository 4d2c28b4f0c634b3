"""Triton kernels for CUDA tensors; each module is imported by its caller only when a kernel is launched."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from contextlib import AbstractContextManager

import torch

from lazytrain_plugin.errors import KernelError


@functools.cache
def require_triton() -> None:
    """Raises KernelError when Triton, which every kernel on a GPU needs, is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise KernelError(
            "The kernels for CUDA tensors need Triton, which is not installed. Run: pip install 'triton>=3.6'"
        )


def on_device(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device, whichever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()  # CPU: Triton's interpreter
