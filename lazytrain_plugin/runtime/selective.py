"""Saves what chosen operators return in a unit's forward, and gives it back in their place when the forward runs again.

`Recorder` is active while a unit runs first, `Replay` while it runs again. Both see operators below autograd, so
autograd builds the same graph from a saved output as from a computed one, and what an operator saves of its own output
(the logsumexp of fused attention) is there too.

[Note: the tail] A unit often ends in a matrix product (the MLP's second) whose value nobody needs in backward: it only
becomes the output. Such products are replaced by zeros when the unit runs again, under every strategy (of a unit that
saves nothing by runtime/tail.py, without looking at every operator). It is safe when, after the product, autograd saves
nothing, no value reaches the host or an operator that we don't know, no module has a hook that would see the zeros, and
product and all that follows are nodes of torch's own in the graph of the outputs, which save by autograd only.

[Note: the same way again] Calls are matched by their order, their operator, and by how often autograd had saved
something before them. A layer that takes another way (it caches a table in its first run) is an error if something was
already given back, and otherwise runs again as if nothing had been recorded.

[Note: changes in place] An operator that writes into a saved output (an in-place activation) would spoil it: the output
is copied before the write, and the copy is given out again as a copy.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lazytrain_plugin.kernels.fused_saves import FusedSaves
from lazytrain_plugin.profile.operator_kinds import OperatorKind, forgets_earlier, operator_kind, saves
from lazytrain_plugin.runtime.activation_store import Handle
from lazytrain_plugin.runtime.quantized_saves import Codes
from lazytrain_plugin.vocab import Activations

_OWN_NODE = re.compile(r"\w+Backward\d+")
_KNOWN_NAMESPACES = ("aten", "prims", "prim")
_VALUE_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


@dataclass(slots=True, eq=False)
class _Call:
    """One call of an operator that may be saved."""

    kind: OperatorKind
    operator: object
    structure: object
    outputs: list | None
    """Flat outputs; None: the call runs again."""
    packs: int
    """How often autograd had saved something before."""
    sequence: int
    """Autograd's sequence number of its node, if it has one."""
    versions: list[int | None] = field(default_factory=list)
    changed: bool = False
    """Whether the unit wrote into an output: see [Note: changes in place]."""
    rng_after: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    """Random generators that the call moved, and where to."""
    blank: list | None = None
    """(shape, stride, dtype, device) of outputs whose values nobody needs: see [Note: the tail]."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a recorder must know of an operator."""

    kind: OperatorKind
    value_is_needed: bool
    """It may bring values to the host, or be known to nobody: see [Note: the tail]."""
    writes: bool
    """Into arguments."""


@functools.cache
def traits_of(operator: object) -> Traits:
    """Cached, as some seventy operators of a layer are asked about in every forward."""
    kind = operator_kind(operator)
    if not isinstance(operator, torch._ops.OpOverload):
        return Traits(kind, value_is_needed=True, writes=False)
    unknown = operator.namespace not in _KNOWN_NAMESPACES
    needed = unknown or not _VALUE_TAGS.isdisjoint(operator.tags)
    return Traits(kind, value_is_needed=needed, writes=operator._schema.is_mutable)


class Recording:
    """What one forward saved. `Replay` reads it."""

    def __init__(self, calls: list[_Call]) -> None:
        self.calls = calls

    def exchange(self, change: Callable[[torch.Tensor, _Call], torch.Tensor | Handle | Codes]) -> None:
        """Replaces saved tensors by what `change` returns; `Replay`'s `restore` turns what is no tensor back."""
        for call in self.calls:
            for i, output in enumerate(call.outputs or ()):
                if isinstance(output, torch.Tensor) and output._version == call.versions[i]:
                    call.outputs[i] = change(output, call)
                    if call.outputs[i] is not output:
                        call.versions[i] = None


NOTHING = Recording([])
"""Of a unit that saves nothing: all of it runs again."""


class Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled inside a unit runs as it is, and again as it is


class Recorder(Mode):
    """Active around a unit's first forward.

    Args:
        activations: which strategy saves.
        device: whose random generator attention may move, beside the CPU's.
    """

    def __init__(self, activations: Activations, device: torch.device) -> None:
        super().__init__()
        self._activations = activations
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._calls: list[_Call] = []
        self._holders: dict[int, list[tuple[_Call, int]]] = {}
        self._packs = 0
        self._needed = 0
        """Calls before this one have an output that backward may need."""

    @property
    def calls(self) -> list[_Call]:
        """Every call so far of an operator that may be saved."""
        return self._calls

    def drop(self, tensor: torch.Tensor) -> None:
        """Pack hook of the forward: nothing is kept, but a value is needed here."""
        self._packs += 1
        self._needed = len(self._calls)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        traits = traits_of(func)
        if traits.kind == OperatorKind.OTHER:
            if traits.value_is_needed:
                self._needed = len(self._calls)
            if traits.writes and self._holders:
                self._copy_before_write(func._schema, args, kwargs)
            return func(*args, **kwargs)
        kind = traits.kind
        saved = saves(self._activations, kind)
        may_draw = saved and kind == OperatorKind.ATTENTION
        before = [generator.get_state() for generator in self._generators] if may_draw else []
        packs, sequence = self._packs, torch.autograd._get_sequence_nr() - 1
        result = func(*args, **kwargs)
        flat, structure = tree_flatten(result)
        call = _Call(kind, func, structure, None, packs, sequence)
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        if saved:
            call.outputs = [_alias(x) if isinstance(x, torch.Tensor) else x for x in flat]
            for i, x in enumerate(call.outputs):
                call.versions.append(x._version if isinstance(x, torch.Tensor) else None)
                if isinstance(x, torch.Tensor):
                    self._holders.setdefault(x.untyped_storage()._cdata, []).append((call, i))
        if len(tensors) == len(flat):
            call.blank = [(x.shape, x.stride(), x.dtype, x.device) for x in tensors]
        for generator, state in zip(self._generators if may_draw else (), before, strict=True):
            if not torch.equal(after := generator.get_state(), state):
                call.rng_after.append((generator, after))
        self._calls.append(call)
        if forgets_earlier(self._activations, kind):
            for earlier in self._calls:
                earlier.outputs, earlier.versions = None, []
            self._holders.clear()
        return result

    def _copy_before_write(self, schema, args, kwargs) -> None:
        written = [
            value
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
        ]
        for tensor in written:
            if isinstance(tensor, torch.Tensor):
                for call, i in self._holders.pop(tensor.untyped_storage()._cdata, ()):
                    call.outputs[i] = copy = torch.empty_strided(
                        call.outputs[i].shape, call.outputs[i].stride(), dtype=tensor.dtype, device=tensor.device
                    ).copy_(call.outputs[i])
                    call.versions[i], call.changed = copy._version, True

    def finish(self, outputs: list[torch.Tensor], module: nn.Module | None) -> Recording:
        """Call it once, after the unit returned `outputs`."""
        tail = self._calls[self._needed :]
        if tail and (has_hooks(module) or not _is_known(tail, outputs)):
            tail = []
        for call in self._calls[: len(self._calls) - len(tail)]:
            call.blank = None
        for call in tail:
            call.outputs, call.versions = None, []
        self._holders.clear()
        return Recording(self._calls)


def _is_known(tail: list[_Call], outputs: list[torch.Tensor]) -> bool:
    """Whether the calls of the tail can be left out."""
    if any(call.blank is None for call in tail):
        return False
    return ends_in_own_nodes({call.sequence for call in tail}, outputs)


def ends_in_own_nodes(sequences: set[int], outputs: list[torch.Tensor]) -> bool:
    """Whether the graph of the outputs has nodes of these numbers, and from there on nothing but torch's own nodes."""
    first = min(sequences)
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: dict[Node, int] = {}
    while stack:
        node = stack.pop()
        if node in seen or hasattr(node, "variable"):
            continue
        sequence = node._sequence_nr()
        if sequence < first:
            continue
        seen[node] = sequence
        if isinstance(node, torch.autograd.function.BackwardCFunction) or not _OWN_NODE.fullmatch(node.name()):
            return False
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return sequences <= set(seen.values())


class Replay(Mode):
    """Active while the unit runs again.

    Args:
        name: the unit's, for errors.
        restore: turns what `Recording.exchange` left into tensors.
        keep: the recording is going to be replayed again.
        saves: knows the tensors that `restore` gave without values; they get them before an operator reads them.
    """

    def __init__(
        self,
        recording: Recording,
        name: str,
        restore: Callable[[Handle | Codes], torch.Tensor],
        *,
        keep: bool,
        saves: FusedSaves,
    ) -> None:
        super().__init__()
        self._calls = iter(recording.calls)
        self._packs = 0
        self._gave = False
        self._lost = False
        self._name = name
        self._restore = restore
        self._keep = keep
        self._saves = saves

    def count_pack(self) -> None:
        """Autograd saves something."""
        self._packs += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._saves.waiting and not _only_looks(func):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    self._saves.settle(value)
        if self._lost or operator_kind(func) == OperatorKind.OTHER:
            return func(*args, **kwargs)
        call = next(self._calls, None)
        if call is None or call.operator is not func or call.packs != self._packs:
            if not self._gave:
                self._lost = True
                return func(*args, **kwargs)
            ran = "nothing more" if call is None else str(call.operator)
            raise RuntimeError(
                f"{self._name}: its forward takes another way when it runs again ({func} where {ran} ran before), so "
                "what it saved can't be used; make it deterministic, or plan with activations recompute or keep"
            )
        if call.blank is not None:
            self._gave = True
            blanks = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
                for shape, stride, dtype, device in call.blank
            ]
            return tree_unflatten(blanks, call.structure)
        if call.outputs is None:
            return func(*args, **kwargs)
        self._gave = True
        outputs, versions = call.outputs, call.versions
        if not self._keep:
            call.outputs = None  # the graph alone holds it now, and frees it as backward goes
        for generator, state in call.rng_after:
            generator.set_state(state)
        return tree_unflatten([self._given(call, i, x, versions) for i, x in enumerate(outputs)], call.structure)

    def _given(self, call: _Call, i: int, saved, versions: list[int | None]):
        tensor = self._restore(saved) if isinstance(saved, Handle | Codes) else saved
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if versions[i] is not None and tensor._version != versions[i]:
            raise RuntimeError(
                f"{self._name}: the output of {call.operator}, of shape {tuple(tensor.shape)}, was changed in place "
                "after the layer ran; replace the in-place operation on the layer's output by an ordinary one"
            )
        if call.changed:
            self._saves.settle(tensor)
        if call.changed and self._keep:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        return _alias(tensor)


@functools.cache
def _only_looks(operator: object) -> bool:
    """Whether an operator makes a view, and reads no values."""
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    aliases = [argument.alias_info for argument in operator._schema.arguments if argument.alias_info is not None]
    return operator is torch.ops.aten._unsafe_view.default or any(not alias.is_write for alias in aliases)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version counter in a tensor that autograd knows nothing of.

    Below autograd a plain `detach` has a version counter of its own; with this key back on, it shares it.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def has_hooks(module: nn.Module | None) -> bool:
    if torch.nn.modules.module._has_any_global_hook():
        return True
    return module is not None and any(
        part._forward_hooks or part._forward_pre_hooks for part in module.modules() if part is not module
    )
