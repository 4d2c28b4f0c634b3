"""The kernel implementations that this machine can run, by name."""

import torch

from lazytrain_plugin.kernels import native

IMPLEMENTATIONS = [*native.available_isas(), *(["cuda"] if torch.cuda.is_available() else [])]


def use(implementation: str) -> torch.device:
    """Selects "avx512", "avx2", "generic", "torch" or "cuda"; returns the device for its tensors."""
    native.force_isa(None if implementation == "cuda" else implementation)
    return torch.device("cuda" if implementation == "cuda" else "cpu")
