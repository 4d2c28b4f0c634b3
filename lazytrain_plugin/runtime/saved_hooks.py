"""What autograd's hooks for saved tensors do with them while a unit runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lazytrain_plugin.runtime.activation_store import Handle, Parcel
from lazytrain_plugin.runtime.quantized_saves import Codes, Deferred

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.unit import Unit


def unpack_with(unit: Unit, parcel: Parcel | None) -> Callable:
    def unpack(packed) -> torch.Tensor:
        if isinstance(packed, Deferred):
            packed = packed.packed
        if isinstance(packed, Codes):
            return packed.decode(parcel)
        return parcel.unpack(packed) if isinstance(packed, Handle) else unit.unpack(packed)

    return unpack


def address_of(tensor: torch.Tensor) -> int:
    """Of memory that lives as long as it is compared."""
    return tensor.untyped_storage().data_ptr()


def drop(tensor: torch.Tensor) -> None:
    """Pack hook that keeps nothing."""


def refuse_dropped(packed: None) -> torch.Tensor:
    raise RuntimeError("a layer ran backward inside its own forward, which a recomputed unit can't do; keep it")
