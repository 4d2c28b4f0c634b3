"""The one autograd node of a unit call: lease weights, run, keep or recompute, hand gradients over.

[Note: gradient edges] While a unit runs, its parameters point into a GPU slot; afterwards they point home. Moving
`p.data` to another device resets the parameter's gradient accumulator, so a kept graph can't be differentiated with
respect to `p` later. The edges are therefore taken in forward, while `p` is on the slot, and given to `autograd.grad`.

[Note: weights in kept graphs] A kept graph must not hold the slot's memory: the slot is reused by other units. The
pack hook replaces a saved tensor that lies in the slot by its position; unpack finds it in the slot leased now.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from lazytrain_plugin.errors import UnsupportedModelError
from lazytrain_plugin.runtime.tree import flatten_tensors
from lazytrain_plugin.vocab import Activations, Tier

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.boundary_store import Parcel
    from lazytrain_plugin.runtime.executor import Executor
    from lazytrain_plugin.runtime.unit import Unit


class UnitCall:
    """One forward of one unit, and what its backward needs. A unit called twice has two of these."""

    def __init__(self, executor: Executor, unit: Unit, args: tuple, kwargs: dict) -> None:
        self.executor = executor
        self.unit = unit
        self.keep = unit.home.plan.activations == Activations.KEEP
        self.offloads_inputs = unit.home.plan.boundary == Tier.CPU and not self.keep
        self.parcel: Parcel | None = None
        self.inputs, self.rebuild_inputs = flatten_tensors((args, kwargs))
        self.side_keys = executor.side_outputs.active_keys()
        self.rebuild_outputs = None
        self.graph: LocalGraph | None = None
        if not self.keep:
            self.autocast = AutocastState(executor.device.type)
            self.cpu_rng = torch.get_rng_state()
            self.gpu_rng = get_device_states(*self.inputs) if executor.streams.is_cuda else None

    def run(self):
        """The unit's outputs, attached to the outer graph by one node."""
        # From here on only autograd holds the inputs: it frees them as backward goes, while this object lives as long
        # as the loss does, which is often into the next step.
        inputs, self.inputs = self.inputs, []
        outputs = _UnitNode.apply(self, self.executor.graph_root, *inputs)
        result, captured = self.rebuild_outputs(outputs if isinstance(outputs, tuple) else (outputs,))
        self.executor.side_outputs.append(captured)
        return result

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        with self.executor.lease(self.unit, backward=False):
            if self.keep:
                self.graph = self.build_graph(inputs)
                outputs = self.graph.outputs
            else:
                # With grad, but saving nothing: without grad torch may pick other kernels (fused attention with a
                # learned bias), and the recompute would not repeat the same bits.
                with torch.enable_grad(), saved_tensors_hooks(_drop, _refuse_dropped):
                    args, kwargs = self.rebuild_inputs(detached_leaves(inputs))
                    outputs = self.call_unit(args, kwargs)
            self.differentiable = [output.requires_grad for output in outputs]
            return [output.detach() for output in outputs]

    def call_unit(self, args, kwargs) -> list[torch.Tensor]:
        with self.executor.side_outputs.collecting(self.side_keys) as captured:
            result = self.unit.original_forward(*args, **kwargs)
        outputs, self.rebuild_outputs = flatten_tensors((result, captured))
        return outputs

    def build_graph(self, inputs) -> LocalGraph:
        """Runs the unit with grad on leaves of its own. The unit must be leased."""
        leaves = detached_leaves(inputs)
        hooks = self.unit.weight_hooks()
        with torch.enable_grad(), saved_tensors_hooks(*hooks) if hooks else contextlib.nullcontext():
            args, kwargs = self.rebuild_inputs(leaves)
            outputs = self.call_unit(args, kwargs)
        graph = LocalGraph(leaves, outputs, self.unit)
        if not self.unit.audited:
            audit(self.executor, self.unit, graph)
            graph = LocalGraph(leaves, outputs, self.unit)
        return graph

    def backward(self, inputs, output_gradients) -> list[torch.Tensor | None]:
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        with self.executor.lease(self.unit, backward=True):
            graph = self.graph if self.keep else self.recompute(inputs)
            if graph is None:
                raise RuntimeError(
                    f"{self.unit.name}: backward ran a second time through a graph that was freed; "
                    "pass retain_graph=True to the first backward"
                )
            gradients = graph.gradients(output_gradients, retain=retain and self.keep)
            if self.keep and not retain:
                self.graph = None
            if self.parcel is not None and not retain:
                self.parcel.release()
            num_leaves = len(graph.differentiable_leaves)
            by_leaf = dict(zip(graph.differentiable_leaves, gradients[:num_leaves], strict=True))
            parameter_gradients = [
                (target, gradient)
                for target, gradient in zip(graph.targets, gradients[num_leaves:], strict=True)
                if gradient is not None
            ]
            self.executor.deliver(self.unit, parameter_gradients)
        return [by_leaf.get(position) for position in range(len(inputs))]

    def recompute(self, inputs) -> LocalGraph:
        devices = self.gpu_rng[0] if self.gpu_rng is not None else []
        with torch.random.fork_rng(devices=devices), self.autocast:
            torch.set_rng_state(self.cpu_rng)
            if self.gpu_rng is not None:
                set_device_states(*self.gpu_rng)
            return self.build_graph(inputs)


class LocalGraph:
    """A unit's own autograd graph, from detached inputs to outputs."""

    def __init__(self, leaves: tuple[torch.Tensor, ...], outputs: list[torch.Tensor], unit: Unit) -> None:
        self.leaves = leaves
        self.outputs = outputs
        self.differentiable_leaves = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        # See [Note: gradient edges].
        self.targets = [target for target in unit.gradient_targets() if target.parameter.requires_grad]
        self.edges = [get_gradient_edge(target.parameter) for target in self.targets]

    def gradients(self, output_gradients, *, retain: bool) -> list[torch.Tensor | None]:
        """Gradients of the differentiable leaves, then of the targets; None where nothing flowed."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(self.outputs, output_gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        wanted = [self.leaves[i] for i in self.differentiable_leaves] + self.edges
        if not pairs or not wanted:
            return [None] * len(wanted)
        outputs, gradients = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True, retain_graph=retain))


class _UnitNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: UnitCall, graph_root: torch.Tensor, *inputs: torch.Tensor):
        saved = () if call.keep else inputs
        if call.offloads_inputs:
            call.parcel = call.executor.boundaries.put(inputs)
            saved = call.parcel.on_device
        outputs = call.forward(inputs)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.num_inputs = len(inputs)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, call.differentiable, strict=True) if not d))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *output_gradients):
        call = ctx.call
        inputs = call.graph.leaves if call.keep and call.graph is not None else ctx.saved_tensors
        if call.keep and call.graph is None:
            inputs = [None] * ctx.num_inputs
        if call.parcel is not None:
            inputs = call.parcel.get(inputs)
        return (None, None, *call.backward(inputs, output_gradients))


def detached_leaves(tensors) -> tuple[torch.Tensor, ...]:
    """The same values as leaves of a graph of their own."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


def _drop(tensor: torch.Tensor) -> None:
    return None


def _refuse_dropped(packed: None) -> torch.Tensor:
    raise RuntimeError("a layer ran backward inside its own forward, which a recomputed unit can't do; keep it")


class AutocastState:
    """The autocast settings of forward, entered again around its recompute."""

    def __init__(self, device_type: str) -> None:
        self.settings = [
            (
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys((device_type, "cpu"))
        ]
        self.contexts: list[torch.autocast] = []

    def __enter__(self) -> None:
        for kind, enabled, dtype, cache in self.settings:
            context = torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache)
            context.__enter__()
            self.contexts.append(context)

    def __exit__(self, *exc_info) -> None:
        while self.contexts:
            self.contexts.pop().__exit__(*exc_info)


def audit(executor: Executor, unit: Unit, graph: LocalGraph) -> None:
    """Finds stem weights that a unit uses without holding them, and refuses what can't get a gradient.

    Raises:
        UnsupportedModelError: the unit uses a weight of another streamed layer, or an unknown tensor that needs grad.
    """
    known = {*graph.leaves, *(target.parameter for target in unit.gradient_targets())}
    for leaf in leaves_of(graph.outputs) - known:
        owner, tensor = executor.owner.get(leaf, (None, None))
        if owner is None:
            raise UnsupportedModelError(
                f"{unit.name} uses a tensor of shape {tuple(leaf.shape)} that requires grad but is neither an argument "
                "of the layer nor a parameter of the model: its gradient would be lost. Pass it as an argument."
            )
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
