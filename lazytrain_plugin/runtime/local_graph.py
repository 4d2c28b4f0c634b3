"""A unit's own autograd graph, and what it must not reach.

[Note: gradient edges] While a unit runs, its parameters point into a GPU slot; afterwards they point home. Moving
`p.data` to another device resets the parameter's gradient accumulator, so a kept graph can't be differentiated with
respect to `p` later. The edges are therefore taken in forward, while `p` is on the slot, and given to `autograd.grad`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lazytrain_plugin.errors import UnsupportedModelError

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor
    from lazytrain_plugin.runtime.unit import Unit


class LocalGraph:
    """A unit's own autograd graph, from detached inputs to outputs.

    Args:
        lasts: longer than the unit's lease, see [Note: gradient edges]. One that is differentiated within the lease is
            known by its tensors, which autograd finds the edges of in no time.
    """

    def __init__(
        self, leaves: tuple[torch.Tensor, ...], outputs: list[torch.Tensor], unit: Unit, *, lasts: bool
    ) -> None:
        self.leaves = leaves
        self.outputs = outputs
        self.differentiable_leaves = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        self.targets = [target for target in unit.gradient_targets() if target.parameter.requires_grad]
        wanted = [leaves[i] for i in self.differentiable_leaves] + [target.parameter for target in self.targets]
        self._wanted = edges_of_leaves(wanted) if lasts else wanted
        root_of = get_gradient_edge if lasts else lambda output: output
        self._roots = [root_of(output) if output.requires_grad else None for output in outputs]

    def take_outputs(self) -> list[torch.Tensor]:
        """Once: the graph holds them no longer."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def gradients(self, output_gradients, *, retain: bool) -> list[torch.Tensor | None]:
        """Gradients of the differentiable leaves, then of the targets; None where nothing flowed."""
        pairs = [
            (root, gradient)
            for root, gradient in zip(self._roots, output_gradients, strict=True)
            if gradient is not None and root is not None
        ]
        if not pairs or not self._wanted:
            return [None] * len(self._wanted)
        roots, gradients = zip(*pairs, strict=True)
        return list(torch.autograd.grad(roots, self._wanted, gradients, allow_unused=True, retain_graph=retain))


class _Joined(torch.autograd.Function):
    """A node whose inputs are all leaves at once: torch's own way to a leaf's edge is an operator for each."""

    @staticmethod
    def forward(ctx, *leaves: torch.Tensor):
        return leaves[0].new_empty(0)

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


def edges_of_leaves(leaves: list[torch.Tensor]) -> list[GradientEdge]:
    """As `get_gradient_edge` of each."""
    if not leaves:
        return []
    with torch.enable_grad():
        joined = _Joined.apply(*leaves)
    return [GradientEdge(node, place) for node, place in joined.grad_fn.next_functions]


def detached_leaves(tensors) -> tuple[torch.Tensor, ...]:
    """The same values as leaves of a graph of their own."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


def audit(executor: Executor, unit: Unit, leaves: tuple[torch.Tensor, ...], outputs: list[torch.Tensor]) -> None:
    """Finds stem weights that a unit uses without holding them, and refuses what can't get a gradient.

    Raises:
        UnsupportedModelError: the unit uses a weight of another streamed layer, or an unknown tensor that needs grad.
    """
    known = {*leaves, *(target.parameter for target in unit.gradient_targets())}
    for leaf in leaves_of(outputs) - known:
        owner, tensor = executor.owner.get(leaf, (None, None))
        if owner is None:
            raise UnsupportedModelError(
                f"{unit.name} uses a tensor of shape {tuple(leaf.shape)} that requires grad but is neither an argument "
                "of the layer nor a parameter of the model: its gradient would be lost. Pass it as an argument."
            )
        if owner is unit:
            continue  # not given to the optimizer, so nobody asks for its gradient
        if owner.module is not None:
            raise UnsupportedModelError(
                f"{unit.name} uses {tensor.name}, a weight of another streamed layer; register it as a parameter of "
                "both, so that it is shared and stays on the GPU"
            )
        if tensor.trained:
            unit.foreign = (*unit.foreign, tensor)
    unit.audited = True


def leaves_of(outputs: list[torch.Tensor]) -> set[torch.Tensor]:
    """Every leaf tensor that requires grad and is reachable from `outputs`."""
    found, seen = set(), set()
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return found
