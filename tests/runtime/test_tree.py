"""Arguments and outputs of layers taken apart and put together again."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
from torch.autograd.graph import get_gradient_edge

from lazytrain_plugin.runtime.local_graph import edges_of_leaves
from lazytrain_plugin.runtime.tree import flatten_tensors

Pair = namedtuple("Pair", "left right")


@dataclass
class Masks:
    full: torch.Tensor
    length: int


class Cache:
    """Not to be looked into."""


def test_every_container_is_rebuilt_around_other_tensors():
    tensors = [torch.full((1,), float(i)) for i in range(7)]
    a, b, c, d, e, f, g = tensors
    cache, size = Cache(), torch.Size([2, 3])
    items = [b, None]
    tree = (
        (a, items, size, 3, "x"),
        {"pair": Pair(c, {"deep": (d,)}), "cache": cache, "masks": Masks(e, 4), "named": OrderedDict(z=f, a=True)},
        [(), {}, [g]],
    )
    found, rebuild = flatten_tensors(tree)
    assert all(one is other for one, other in zip(found, tensors, strict=True))
    others = [tensor + 10 for tensor in tensors]
    (first, rebuilt, same_size, three, text), named, rest = rebuild(others)
    assert (first is others[0], rebuilt[0] is others[1], rebuilt[1], same_size, three, text) == (
        True, True, None, size, 3, "x",
    )  # fmt: skip
    assert rebuilt is not items, "a layer that writes into its list must not change the list of the next run"
    assert isinstance(named["pair"], Pair) and named["pair"].left is others[2]
    assert named["pair"].right["deep"][0] is others[3]
    assert named["cache"] is cache
    assert (type(named["masks"]), named["masks"].full is others[4], named["masks"].length) == (Masks, True, 4)
    assert list(named["named"].items()) == [("z", others[5]), ("a", True)] and type(named["named"]) is OrderedDict
    assert rest[:2] == [(), {}] and rest[2][0] is others[6]


def test_edges_of_many_leaves_are_those_of_each():
    leaves = [torch.nn.Parameter(torch.ones(3)), torch.ones(2, 2, requires_grad=True)]
    edges = edges_of_leaves(leaves)
    assert [edge.node for edge in edges] == [get_gradient_edge(leaf).node for leaf in leaves]
    loss = (leaves[0] * 2).sum() + (leaves[1] * 3).sum()
    found = torch.autograd.grad(loss, edges)
    assert [gradient.mean() for gradient in found] == [2, 3]
