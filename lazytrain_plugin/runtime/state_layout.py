"""Which flats make up a unit's optimizer states."""

from __future__ import annotations

import torch

from lazytrain_plugin.plan.result import UnitPlan
from lazytrain_plugin.runtime.layout import ALIGNMENT_ELEMENTS, FlatLayout, UnitTensor

MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Names of the AdamW moments and whether their values are signed."""
ACCUMULATOR = "accumulator"
"""Key of the sums over micro-batches, which are no state: they last for one window."""
CODEC = ("codes", "scales")
"""Parts of an 8-bit moment."""


def state_flats(
    layout: FlatLayout, plan: UnitPlan, *, native: bool, part: tuple[int, int] | None = None
) -> list[tuple[str, torch.dtype, int]]:
    """(key, dtype, numel) of each flat: remainder, and the moments that the native kernels keep.

    Args:
        part: [first, end) of the trained elements, whole blocks of 256, that are to have states; None: all. Moments
            beside codes are few, and whole in every part.
    """
    first, end = (0, layout.state_numel) if part is None else part
    numel = end - first
    flats = [("remainder", torch.int16, numel)] if any(tensor.is_split for tensor in layout.tensors) else []
    if native:
        for name, _ in MOMENTS:
            if plan.state_bits == 8:
                flats.append((f"{name}.codes", torch.uint8, numel))
                flats.append((f"{name}.scales", torch.float32, numel // ALIGNMENT_ELEMENTS))
                if layout.exact_numel:
                    flats.append((name, torch.float32, layout.exact_numel))
            else:
                flats.append((name, torch.float32, numel))
    return flats


def has_codes(tensor: UnitTensor, plan: UnitPlan) -> bool:
    """Whether the tensor's moments are in 8 bits."""
    return plan.state_bits == 8 and tensor.exact_offset is None
