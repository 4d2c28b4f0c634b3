"""Takes the tensors out of nested arguments and outputs, and puts them back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Hole:
    """Marks where a tensor was."""


_HOLE = _Hole()
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))


def flatten_tensors(tree: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors of `tree` in order, and a function that rebuilds `tree` around others in their place.

    Looks into lists, tuples, named tuples, dicts, whatever is registered with torch's pytree, and dataclasses.
    Everything else (caches, configs, None) is passed through as it is.
    """
    tensors: list[torch.Tensor] = []
    entry = _take(tree, tensors)
    return tensors, lambda replacements: _fill(entry, iter(replacements))


def _take(node: Any, tensors: list[torch.Tensor]) -> Any:
    """Adds the tensors of `node`; returns what `_fill` makes it from again.

    Plain containers and values, which arguments of a layer mostly are, don't pass through pytree: it takes the host
    longer than a small operator.
    """
    kind = type(node)
    if kind is tuple or kind is list:
        return _Items(kind, [_take(item, tensors) for item in node])
    if kind is dict:
        return _Entries({key: _take(value, tensors) for key, value in node.items()})
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return _HOLE
    if kind in _PLAIN:
        return node
    leaves, spec = tree_flatten(node)
    if spec.is_leaf():
        is_dataclass = dataclasses.is_dataclass(node) and not isinstance(node, type)
        return _take_dataclass(node, tensors) if is_dataclass else node
    return _Registered(spec, [_take(leaf, tensors) for leaf in leaves])


@dataclasses.dataclass(frozen=True, slots=True)
class _Items:
    kind: type
    entries: list


@dataclasses.dataclass(frozen=True, slots=True)
class _Entries:
    entries: dict


@dataclasses.dataclass(frozen=True, slots=True)
class _Registered:
    """With torch's pytree."""

    spec: Any
    entries: list


@dataclasses.dataclass(frozen=True, slots=True)
class _Dataclass:
    kind: type  # not the instance, which would keep its tensors alive
    entries: dict


def _take_dataclass(node: Any, tensors: list[torch.Tensor]) -> Any:
    inner: list[torch.Tensor] = []
    entries = {f.name: _take(getattr(node, f.name), inner) for f in dataclasses.fields(node)}
    tensors += inner
    return _Dataclass(type(node), entries) if inner else node


def _fill(entry: Any, remaining: Iterator[torch.Tensor]) -> Any:
    if entry is _HOLE:
        return next(remaining)
    kind = type(entry)
    if kind is _Items:
        filled = [_fill(item, remaining) for item in entry.entries]
        return filled if entry.kind is list else tuple(filled)
    if kind is _Entries:
        return {key: _fill(value, remaining) for key, value in entry.entries.items()}
    if kind is _Registered:
        return tree_unflatten([_fill(item, remaining) for item in entry.entries], entry.spec)
    if kind is _Dataclass:
        # Not dataclasses.replace: `__post_init__` may compute on the tensors a second time.
        copy = object.__new__(entry.kind)
        for name, value in entry.entries.items():
            object.__setattr__(copy, name, _fill(value, remaining))
        return copy
    return entry
