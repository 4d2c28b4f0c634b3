"""Which parts of a unit's graph belong to attention, whose tensors are never rounded to fewer bits (AGoQ's rule).

Found by structure, in the unit's own autograd graph. The core of attention is

- what a fused attention operator takes and returns (queries, keys, values, its output, the logsumexp);
- the same of a product of two activations, which is what written-out attention is made of: neither operand leads to
  weights alone;
- all between the products that make queries, keys and values and the attention (rotary embedding, norms of queries
  and keys, softmax), with these products' outputs.

A node is known by its sequence number: the operator that runs below autograd right after the node was made is its.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.autograd.graph import Node

from lazytrain_plugin.profile.operator_kinds import OperatorKind

_OWN_NODE = re.compile(r"(\w+)Backward\d+")


class ProductCall(Protocol):
    """A call of a matrix product or of fused attention that ran in the unit's forward."""

    kind: OperatorKind
    operator: object
    """None for a stand-in."""
    sequence: int
    """Autograd's sequence number of its node; that of an older node if autograd does not see the call."""


class AttentionCore:
    """The core of attention in one forward of one unit.

    Args:
        outputs: the unit's, with their graph.
        calls: all of its products and fused attentions, in their order.
        leaves: the unit's inputs.
        since: sequence number of the unit's first node; older ones made its inputs.
    """

    def __init__(
        self,
        outputs: Iterable[torch.Tensor],
        calls: Sequence[ProductCall],
        leaves: Iterable[torch.Tensor] = (),
        *,
        since: int = 0,
    ) -> None:
        self._leaves = set(leaves)
        self._since = since
        self._nodes = _nodes_by_sequence(outputs, since)
        self._products: dict[int, ProductCall] = {}
        for call in calls:
            if call.sequence in self._nodes and _may_be_node_of(self._nodes[call.sequence], call.operator):
                self._products.setdefault(call.sequence, call)
        self._made_for: set[int] = set()
        """Products whose outputs go into attention, as they are or after element-wise work."""
        self._inside: set[int] = set()
        """Nodes of attention, and between it and those products."""
        for sequence, call in self._products.items():
            node = self._nodes[sequence]
            is_attention = call.kind == OperatorKind.ATTENTION
            if is_attention or sum(self._is_activation(edge) for edge, _ in node.next_functions) > 1:
                self._inside.add(sequence)
                self._walk(node)

    def knows(self, sequence: int) -> bool:
        """Whether a node is part of the graph of the outputs."""
        return sequence in self._nodes

    def is_product(self, call: ProductCall) -> bool:
        """Whether the call is one that autograd sees."""
        return self._products.get(call.sequence) is call

    def holds_output(self, call: ProductCall) -> bool:
        """Whether what the call returned belongs to the core."""
        return call.sequence in self._inside or call.sequence in self._made_for

    def holds_saved(self, sequence: int) -> bool:
        """Whether what the node saves belongs to the core."""
        return sequence in self._inside

    def _walk(self, attention: Node) -> None:
        stack = [node for node, _ in attention.next_functions if node is not None]
        while stack:
            node = stack.pop()
            sequence = node._sequence_nr()
            if hasattr(node, "variable") or sequence < self._since:
                continue
            if sequence in self._products:
                self._made_for.add(sequence)
            elif sequence not in self._inside:
                self._inside.add(sequence)
                stack.extend(parent for parent, _ in node.next_functions if parent is not None)

    def _is_activation(self, node: Node | None) -> bool:
        stack, seen = [node] if node is not None else [], set()
        while stack:
            node = stack.pop()
            if hasattr(node, "variable"):
                if node.variable in self._leaves:
                    return True
                continue
            sequence = node._sequence_nr()
            if sequence in self._products or sequence < self._since:
                return True
            if sequence not in seen:
                seen.add(sequence)
                stack.extend(parent for parent, _ in node.next_functions if parent is not None)
        return False


def _nodes_by_sequence(outputs: Iterable[torch.Tensor], since: int) -> dict[int, Node]:
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    nodes: dict[int, Node] = {}
    while stack:
        node = stack.pop()
        if hasattr(node, "variable") or node._sequence_nr() < since or node._sequence_nr() in nodes:
            continue
        nodes[node._sequence_nr()] = node
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return nodes


def _may_be_node_of(node: Node, operator: object) -> bool:
    """False for a node that autograd made for another operator: torch names its own after the operator."""
    name = _OWN_NODE.fullmatch(node.name())
    schema = getattr(operator, "_schema", None)
    if name is None or schema is None:
        return True
    return name[1].lower() == schema.name.rpartition("::")[2].replace("_", "").lower()
