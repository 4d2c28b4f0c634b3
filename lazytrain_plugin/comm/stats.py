"""What a reducer did so far, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class CommStats:
    """Counters of one rank; `QuantizedReducer.stats()` gives a copy."""

    quantized_buckets: int = 0
    full_precision_buckets: int = 0
    quantized_elements: int = 0
    wire_bytes: int = 0
    """Bytes that this rank sent to other nodes. A full-precision all-reduce is counted as a ring's, whose every edge
    carries 2 (n-1)/n of the bucket: that much leaves each node once, here divided by its ranks."""
    node_bytes: int = 0
    """Bytes that this rank sent to ranks of its own node, in quantized buckets."""
    reduce_scatter_bytes: int = 0
    """The part of `wire_bytes` that gathered contributions in 8-bit codes; the rest carried results."""
    weight_bytes: int = 0
    """Bytes of updated weights that this rank sent to other nodes; no part of `wire_bytes`."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Buckets reduced in full precision, by reason."""

    def __add__(self, other: CommStats) -> CommStats:
        return CommStats(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def copy(self) -> CommStats:
        return self + CommStats()
