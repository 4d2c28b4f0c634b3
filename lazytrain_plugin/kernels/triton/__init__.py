"""Triton kernels for CUDA tensors; each module is imported by its caller only when a kernel is launched."""

from __future__ import annotations

import functools
import importlib.util

from lazytrain_plugin.errors import KernelError


@functools.cache
def require_triton() -> None:
    """Raises KernelError when Triton, which every kernel on a GPU needs, is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise KernelError(
            "The kernels for CUDA tensors need Triton, which is not installed. Run: pip install 'triton>=3.6'"
        )
