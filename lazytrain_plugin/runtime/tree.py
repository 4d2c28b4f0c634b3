"""Takes the tensors out of nested arguments and outputs, and puts them back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Hole:
    """Marks where a tensor was."""


_HOLE = _Hole()


def flatten_tensors(tree: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors of `tree` in order, and a function that rebuilds `tree` around others in their place.

    Looks into lists, tuples, named tuples, dicts, whatever is registered with torch's pytree, and dataclasses.
    Everything else (caches, configs, None) is passed through as it is.
    """
    leaves, spec = tree_flatten(tree)
    tensors: list[torch.Tensor] = []
    rebuilders: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            rebuilders.append(_HOLE)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            rebuilders.append(_flatten_dataclass(leaf, tensors))
        else:
            rebuilders.append(leaf)

    def rebuild(replacements: Sequence[torch.Tensor]) -> Any:
        remaining = iter(replacements)
        return tree_unflatten([_fill(entry, remaining) for entry in rebuilders], spec)

    return tensors, rebuild


@dataclasses.dataclass(frozen=True)
class _DataclassRebuilder:
    dataclass_type: type  # not the instance, which would keep its tensors alive
    rebuild: Callable
    num_tensors: int


def _flatten_dataclass(value: Any, tensors: list[torch.Tensor]) -> Any:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    inner, rebuild = flatten_tensors(fields)
    if not inner:
        return value
    tensors.extend(inner)
    return _DataclassRebuilder(type(value), rebuild, len(inner))


def _fill(entry: Any, remaining) -> Any:
    if entry is _HOLE:
        return next(remaining)
    if isinstance(entry, _DataclassRebuilder):
        fields = entry.rebuild([next(remaining) for _ in range(entry.num_tensors)])
        # Not dataclasses.replace: `__post_init__` may compute on the tensors a second time.
        copy = object.__new__(entry.dataclass_type)
        for name, field in fields.items():
            object.__setattr__(copy, name, field)
        return copy
    return entry
