"""What one unit saves and computes in a run on meta tensors: bytes per token, by strategy and by class of tensor.

Products are counted by the operator kinds that the runtime saves by (profile/operator_kinds.py). Attention itself is a
stand-in (profile/shapes.py) that tells its sizes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lazytrain_plugin.profile.attention_core import AttentionCore
from lazytrain_plugin.profile.model import StrategyProfile
from lazytrain_plugin.profile.operator_kinds import OperatorKind, forgets_earlier, operator_kind, saves
from lazytrain_plugin.vocab import MAY_BE_CODED, Activations

FLOP_PER_MOVED_BYTE = 150.0
"""Element-wise work takes as long as this many FLOP of matrix products for each byte read or written: the ratio of the
two measured rates on an H200; 73 (RTX 3090) to 200 (H100) by data sheet."""
STRATEGIES = tuple(activations for activations in Activations if activations != Activations.KEEP)
_CLASSES = (
    ("norm", re.compile(r"norm|(^|\.)ln_")),
    ("qkv", re.compile(r"(^|\.)(q|k|v|qkv|q_proj|k_proj|v_proj|qkv_proj|c_attn|query|key|value|query_key_value)$")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|expert|moe|gate_proj|up_proj|down_proj|fc\d|DenseReluDense")),
)


@dataclass(slots=True)
class _Product:
    """One matrix product or attention call, per token."""

    kind: OperatorKind
    flop: float
    output_bytes: float
    operator: object
    """None for attention's stand-in."""
    sequence: int
    """Autograd's number of its node."""
    storage: int
    """Of its (first) output."""
    fused: bool = False
    """Whether a fused operator alone reads its output."""
    needed: bool = False
    """Whether autograd saves anything after it; without that it is not run again under any strategy."""
    in_attention: bool = False
    """Whether its output belongs to the core of attention."""


@dataclass(slots=True)
class Probe:
    """Per-token bytes seen in one unit on meta tensors."""

    boundary_bytes: int = 0
    fused_input: bool = False
    kept_bytes: int = 0
    workspace_bytes: int = 0
    attention_widths: list[int] = field(default_factory=list)
    """Query width (heads x head size) of every attention call."""
    bytes_by_class: dict[str, int] = field(default_factory=dict)
    products: list[_Product] = field(default_factory=list)
    num_operators: int = 0
    """Of the forward, views apart."""
    moved_bytes: float = 0.0
    """Read and written by everything that is no product."""

    def attention_flop(self, sequence_length: int) -> float:
        # Causal: half of the two products over the sequence.
        return sum(2.0 * sequence_length * width for width in self.attention_widths)

    def strategies(self, sequence_length: int) -> tuple[StrategyProfile, ...]:
        """What each strategy but KEEP saves and computes again; none where the operators were not seen."""
        if not any(product.flop for product in self.products):
            return ()
        widths = iter(self.attention_widths)
        work = [
            2.0 * sequence_length * next(widths, 0) if product.kind == OperatorKind.ATTENTION else product.flop
            for product in self.products
        ]
        elementwise = FLOP_PER_MOVED_BYTE * self.moved_bytes
        total = sum(work) + elementwise
        found = []
        for activations in STRATEGIES:
            earlier = [i for i, p in enumerate(self.products) if forgets_earlier(activations, p.kind)]
            if activations == Activations.MLP and not earlier:
                continue  # attention is written out, and its scores would be saved
            begin = max(earlier, default=0)
            saved = [i >= begin and p.needed and saves(activations, p.kind) for i, p in enumerate(self.products)]
            again = sum(w for w, p, is_saved in zip(work, self.products, saved) if p.needed and not is_saved)
            saved_bytes = sum(p.output_bytes for p, is_saved in zip(self.products, saved) if is_saved)
            attention = sum(p.output_bytes for p, s in zip(self.products, saved) if s and p.in_attention)
            fused = sum(p.output_bytes for p, s in zip(self.products, saved) if s and p.fused and not p.in_attention)
            if activations != Activations.RECOMPUTE and not saved_bytes:
                continue
            found.append(
                StrategyProfile(
                    activations=activations,
                    saved_bytes_per_token=-(-int(saved_bytes * 1024) // 1024),
                    recompute_frac=round((again + elementwise) / total, 4),
                    attention_bytes_per_token=-(-int(attention * 1024) // 1024),
                    fused_bytes_per_token=int(fused) if activations in MAY_BE_CODED else 0,
                )
            )
        return tuple(found)


class ProbeRecorder:
    """Counts saved tensors and operators by the unit that runs.

    Args:
        tokens: of the run; figures are per token.
    """

    def __init__(self, tokens: int) -> None:
        self.probes: dict[str, Probe] = {}
        self.ignored: set[int] = set()
        self._tokens = tokens
        self._current: str | None = None
        self._modules: list[str] = []
        """Names inside the unit of the modules that run, the innermost last."""
        self._inputs: set[int] = set()
        self._since = 0
        """Autograd's number of the unit's first node."""
        self._largest: dict[str, int] = {}
        self._classes: dict[int, str] = {}
        """Storage -> class of the module that made it."""
        self._seen: set[int] = set()
        self._alive: list[torch.UntypedStorage] = []  # an address may only be compared while its storage lives

    @contextlib.contextmanager
    def watch(self, units: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        handles = []
        for name, module in units:
            handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
            for part_name, part in module.named_modules():
                if part is not module:
                    handles.append(part.register_forward_pre_hook(self._enter_part(part_name)))
                    handles.append(part.register_forward_hook(self._leave_part))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def operators(self) -> TorchDispatchMode:
        """Within it, operators are counted."""
        return _Operators(self)

    def _enter(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            floating = [tensor for tensor in tensors if tensor.is_floating_point()]
            self._current = name
            self._modules = []
            self._inputs = {tensor.untyped_storage()._cdata for tensor in tensors}
            self._alive += [tensor.untyped_storage() for tensor in tensors]
            boundary = floating[0].nbytes if floating else 0
            self.probes.setdefault(name, Probe(boundary_bytes=boundary))
            self._largest.setdefault(name, 0)
            self._since = torch.autograd._get_sequence_nr()

        return hook

    def _leave(self, module: nn.Module, args: tuple, output: object) -> None:
        if self._current is not None:
            products = self.probes[self._current].products
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            core = AttentionCore(outputs, products, since=self._since)
            for product in products:
                product.in_attention = core.holds_output(product) or not core.is_product(product)
        self._current = None

    def _enter_part(self, name: str):
        return lambda module, args: self._modules.append(name)

    def _leave_part(self, module: nn.Module, args: tuple, output: object) -> None:
        if self._modules:
            self._modules.pop()

    def attention(self, query_width: int, output_bytes: int) -> None:
        if self._current is not None:
            probe = self.probes[self._current]
            probe.attention_widths.append(query_width)
            probe.products.append(
                _Product(OperatorKind.ATTENTION, 0.0, output_bytes, None, torch.autograd._get_sequence_nr() - 1, 0)
            )
            # The stand-in's own saving came before this was known.
            for product in probe.products:
                product.needed = True

    def fused(self, kind: str, read: tuple[torch.Tensor, ...]) -> None:
        """A fused operator that makes codes of what it reads on its way."""
        if self._current is None:
            return
        probe, storages = self.probes[self._current], {tensor.untyped_storage()._cdata for tensor in read}
        if kind == "norm":
            probe.fused_input = probe.fused_input or bool(storages & self._inputs)
            return
        for product in probe.products:
            product.fused = product.fused or product.storage in storages

    def operator(self, func, args: tuple, kwargs: dict, result: object) -> None:
        """One dispatched operator ran."""
        if self._current is None:
            return
        probe = self.probes[self._current]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._classes:
                self._alive.append(storage)
                self._classes[storage._cdata] = class_of(self._modules[-1] if self._modules else "")
        kind, is_launched = operator_kind(func), not _is_view(func)
        probe.num_operators += is_launched
        if kind == OperatorKind.OTHER:
            if is_launched:
                inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                moved = sum(_touched_bytes(tensor) for tensor in (*inputs, *outputs))
                # A fused stand-in makes its output from nothing: it reads as much.
                probe.moved_bytes += moved if inputs and not _makes_empty(func) else 2 * moved
            return
        flop, nbytes = _product_flop(func, args, kwargs, result), sum(tensor.nbytes for tensor in outputs)
        storage = outputs[0].untyped_storage()._cdata if outputs else 0
        probe.products.append(_Product(kind, flop, nbytes, func, torch.autograd._get_sequence_nr() - 1, storage))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self._current is None:
            return tensor
        probe = self.probes[self._current]
        for product in probe.products:
            product.needed = True
        if not (key in self.ignored or key in self._inputs or key in self._seen):
            self._seen.add(key)
            self._alive.append(storage)
            nbytes = storage.nbytes()
            probe.kept_bytes += nbytes
            name = self._classes.get(key) or class_of(self._modules[-1] if self._modules else "")
            probe.bytes_by_class[name] = probe.bytes_by_class.get(name, 0) + nbytes
            self._largest[self._current] = max(self._largest[self._current], nbytes)
        return tensor

    def finish(self, *, eager: bool) -> dict[str, Probe]:
        per_token = lambda num_bytes: -(-num_bytes // self._tokens)  # noqa: E731
        for name, probe in self.probes.items():
            # Backward is fullest in the MLP: all saved tensors plus the gradients of its widest intermediates (three
            # of them in eager SwiGLU, one with the fused kernel, which writes over what it saved), and the unit's input
            # and output gradients. Measured on an H200 at 7B: 6.2 to 6.3 GiB against 6.2 by this rule.
            transient = (3 if eager else 1) * self._largest[name] + 2 * probe.boundary_bytes
            probe.workspace_bytes = per_token(probe.kept_bytes + transient)
            probe.kept_bytes = per_token(probe.kept_bytes)
            probe.boundary_bytes = per_token(probe.boundary_bytes)
            probe.bytes_by_class = {name: per_token(size) for name, size in sorted(probe.bytes_by_class.items())}
            probe.moved_bytes /= self._tokens
            for product in probe.products:
                product.flop /= self._tokens
                product.output_bytes /= self._tokens
        return self.probes


class _Operators(TorchDispatchMode):
    def __init__(self, recorder: ProbeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._recorder.operator(func, args, kwargs or {}, result)
        return result


def class_of(module_name: str) -> str:
    """Class of a tensor that a module of a unit makes: norm, qkv, attention, mlp or other."""
    return next((name for name, pattern in _CLASSES if pattern.search(module_name)), "other")


def _product_flop(func, args: tuple, kwargs: dict, result: object) -> float:
    count = flop_registry.get(getattr(func, "overloadpacket", func))
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    # Grouped products and the like: every element of the result is a sum over the first argument's last dimension.
    first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
    numel = sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return 0.0 if first is None else 2.0 * numel * first.shape[-1]


def _is_view(func) -> bool:
    return getattr(func, "is_view", False) or func in (
        torch.ops.aten.detach.default,
        torch.ops.aten._unsafe_view.default,
    )


def _makes_empty(func) -> bool:
    return getattr(func, "overloadpacket", None) in (
        torch.ops.aten.new_empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty,
    )


def _touched_bytes(tensor: torch.Tensor) -> int:
    """What reading or writing it moves: an expanded tensor only what is behind it."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
