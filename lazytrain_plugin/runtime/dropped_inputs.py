"""Inputs that a plan does not keep (a recompute edge), and how backward finds them again.

A call that drops its input knows which call returned it. When backward comes to it, that call runs forward once more;
if it dropped its own input too, the call before it runs first, and so on back to the first that kept one. What is found
on the way waits until backward has passed the calls it belongs to: a stretch runs again once, however long it is.

[Note: the same bits] Each call runs again with its random state and autocast settings, with grad but saving nothing, as
it did the first time; what it computes along the way for others (side outputs) is thrown away.

[Note: who holds whom] A call holds the autograd node of the call before, as the graph of autograd does: no circle.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lazytrain_plugin.runtime.local_graph import detached_leaves
from lazytrain_plugin.units import format_bytes

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.node import UnitCall

logger = logging.getLogger(__name__)


class DroppedInputs:
    """Stands for the inputs that a call let go of.

    Args:
        node: autograd's node of the call that returned them.
        outputs: position among the inputs of the one call -> position among the outputs of the other.
    """

    def __init__(self, node: Any, outputs: dict[int, int]) -> None:
        self.node = node
        self.outputs = outputs
        self.found: dict[int, torch.Tensor] = {}
        """Those that were computed again and are still needed."""

    def take(self, position: int) -> torch.Tensor:
        """One of them, as a unit's forward takes it."""
        return self.found[position].requires_grad_()


def drop_inputs(call: UnitCall, inputs: tuple[torch.Tensor, ...]) -> DroppedInputs | None:
    """Finds out where a call's inputs came from. None: they must be kept, which is said once for each unit."""
    found = _sources(call, inputs)
    if isinstance(found, DroppedInputs):
        return found
    said = call.executor.activations.said
    if (drop_inputs, call.unit.name) not in said:
        said.add((drop_inputs, call.unit.name))
        kept = sum(tensor.nbytes for tensor in inputs if tensor.requires_grad) or max(t.nbytes for t in inputs)
        logger.warning(
            "%s: its input is kept though the plan drops it, which takes %s more than planned: %s",
            call.unit.name,
            format_bytes(kept),
            found,
        )
    return None


def _sources(call: UnitCall, inputs: tuple[torch.Tensor, ...]) -> DroppedInputs | str:
    """Who returned the inputs, or why they can't be dropped."""
    differentiable = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
    if not differentiable:
        return "it is not differentiable: no unit before it is trained"
    node = inputs[differentiable[0]].grad_fn
    before = getattr(node, "call", None)
    if not isinstance(before, type(call)):
        return "it is not simply what the unit before returned, but computed from that or from elsewhere"
    if before.keep:
        return f"{before.unit.name}, which returned it, keeps its activations instead of its own input"
    if before.boundary_bits < 16:
        return f"{before.unit.name}, which returned it, keeps its own input in {before.boundary_bits} bits"
    # What comes from elsewhere, like an encoder's output that all units of a decoder read, is kept once for all.
    outputs = {i: inputs[i].output_nr for i in differentiable if inputs[i].grad_fn is node}
    if any(inputs[i]._version != before.output_versions[position] for i, position in outputs.items()):
        return f"it was changed in place after {before.unit.name} returned it"
    return DroppedInputs(node, outputs)


def find_again(call: UnitCall) -> None:
    """Computes what `call` dropped, and what the calls before it dropped up to the first that kept its input."""
    later_calls = []
    while call.dropped is not None and not call.dropped.found:
        later_calls.append(call)
        call = call.dropped.node.call
    if call.parcel is not None:
        call.parcel.bring_back()
    for later in reversed(later_calls):
        dropped = later.dropped
        if call.stayed is None:
            call.stayed = dropped.node.saved_tensors
        outputs = _run_again(call, call.stayed)
        dropped.found = {i: outputs[position] for i, position in dropped.outputs.items()}
        call = later


def _run_again(call: UnitCall, stayed) -> list[torch.Tensor]:
    """A unit's outputs once more. See [Note: the same bits]."""
    leaves = detached_leaves(call.bring_back_inputs(stayed))
    with (
        call.executor.lease(call.unit, backward=True, again=True),
        call.before.restored(),
        torch.enable_grad(),
        saved_tensors_hooks(lambda tensor: None, _refuse),
    ):
        args, kwargs = call.rebuild_inputs(leaves)
        return [output.detach() for output in call.call_unit(args, kwargs)]


def _refuse(packed: None) -> torch.Tensor:
    raise RuntimeError("a layer ran backward inside its own forward, whose output was to be computed again; keep it")
