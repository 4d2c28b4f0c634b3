"""`Arrival`: what has become of a tensor's gradient in a window (between two optimizer steps)."""

from enum import Enum


class Arrival(Enum):
    """What a tensor's gradient memory holds in this window."""

    WHOLE = "whole"
    """One gradient, in the weight's dtype or in 8-bit codes, where it arrived."""
    SUMMED = "summed"
    """A sum over micro-batches, in fp32 or in 16-bit codes."""
