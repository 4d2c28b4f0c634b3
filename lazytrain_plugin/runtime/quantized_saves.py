"""What a unit saves, in fewer bits: block-wise codes between forward and backward.

The forward computes with exact values; only what waits for backward is rounded, so the loss of a step does not change,
its gradients do. AGoQ's layer-aware rule (arXiv 2605.00539, section on activation quantization):

- the inputs of products and of element-wise groups are kept in block-wise codes, and what is between them is computed
  again from the codes (the strategy "matmuls" does that; "keep" stores every saved tensor in codes);
- the core of attention stays exact (profile/attention_core.py);
- so do statistics, tables, indices and masks: integers and booleans, and whatever is small beside the unit's input.

[Note: when codes are made] At the end of the unit's forward: only then is it known what went into attention. Until then
the values themselves are held, so their memory is not used again, and the version says whether they were changed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.fused_saves import FusedSaves
from lazytrain_plugin.profile.attention_core import AttentionCore
from lazytrain_plugin.runtime.activation_store import ActivationStore, Handle, Parcel
from lazytrain_plugin.units import format_bytes

logger = logging.getLogger(__name__)

FORMATS = {4: "fp4", 5: "int5", 6: "int6", 8: "int8"}
"""Format of so many bits."""
SMALL_FRAC = 1 / 8
"""A tensor with fewer elements than this share of the unit's input stays exact: statistics, router logits, tables."""

ATTENTION = "of attention (never below 16 bits)"
UNSEEN = "of products without a gradient"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Stands for a tensor that is saved in fewer bits."""

    memory: torch.Tensor | Handle
    """Codes and scales, uint8; a handle if they rest off the device."""
    format: str
    numel: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    private: bool = False
    """A fused operator alone reads the tensor, and can read the codes (kernels/fused_saves.py)."""

    def decode(self, parcel: Parcel | None) -> torch.Tensor:
        """A new tensor with the shape and strides of the one that was saved; its parcel must be back."""
        with torch.no_grad():
            return blockwise.dequantize(self._coded(parcel)).as_strided(self.shape, self.stride)

    def give(self, parcel: Parcel | None, saves: FusedSaves) -> torch.Tensor:
        """The same; a private tensor comes without values, which `saves` knows."""
        return saves.give(self._coded(parcel), self.shape, self.stride) if self.private else self.decode(parcel)

    def _coded(self, parcel: Parcel | None) -> blockwise.QuantizedTensor:
        memory = parcel.unpack(self.memory) if isinstance(self.memory, Handle) else self.memory
        return blockwise.over_memory(memory, (self.numel,), self.dtype, self.format)


@dataclass(slots=True)
class SavingReport:
    """What one unit's call saved in fewer bits, and what it left as it is, by reason."""

    coded_bytes: int = 0
    """Of the codes."""
    exact_bytes: int = 0
    """Of what the codes stand for."""
    left: Counter = field(default_factory=Counter)
    """Reason -> bytes."""

    def __str__(self) -> str:
        left = ", ".join(f"{format_bytes(n)} {reason}" for reason, n in self.left.most_common())
        return (
            f"{format_bytes(self.exact_bytes)} saved in {format_bytes(self.coded_bytes)}; left as it is: "
            f"{left or 'nothing'}"
        )


class Encoder:
    """Turns saved tensors of one unit call into codes; the same memory only once.

    Args:
        unit_numel: elements of the unit's largest differentiable input.
    """

    def __init__(self, store: ActivationStore, unit_numel: int) -> None:
        self._store = store
        self.small = SMALL_FRAC * unit_numel
        """Elements below which a tensor stays exact."""
        self.fused = FusedSaves()
        """Has codes that fused operators made on the way."""
        self._known: dict[tuple, tuple[torch.Tensor, Codes]] = {}
        self._left: set[tuple] = set()
        """Memory of what stays exact; it lives as long as this object is in use."""
        self.report = SavingReport()

    def encode(
        self, tensor: torch.Tensor, bits: int, send: Callable | None = None, *, exact_because: str | None = None
    ) -> Codes | None:
        """Codes, or None for what stays exact (with the reason in the report).

        Args:
            send: packs what may leave the device, and returns its handle.
            exact_because: a reason that the caller knows.
        """
        reason = exact_because or self._why_exact(tensor, bits)
        if reason is not None:
            memory = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel())
            if memory not in self._left:
                self._left.add(memory)
                self.report.left[reason] += min(tensor.nbytes, tensor.untyped_storage().nbytes())
            return None
        # [Note: identity] in activation_store.py: what is known is held, so its address is nobody else's.
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor._version, bits)
        flat = _flat(tensor)
        key += (tensor.shape, tensor.stride()) if flat is None else (flat.numel(),)
        if key not in self._known:
            values = tensor.detach().contiguous().view(-1) if flat is None else flat
            self._known[key] = (tensor.detach(), self._new(values, bits, send))
        known = self._known[key][1]
        stride = _contiguous_stride(tensor.shape) if flat is None else tensor.stride()
        return Codes(known.memory, known.format, known.numel, tensor.dtype, tensor.shape, stride, known.private)

    def _new(self, flat: torch.Tensor, bits: int, send: Callable | None) -> Codes:
        form = blockwise.block_format(FORMATS[bits])
        num_bytes, private = form.storage_bytes(flat.numel()), False
        if (made := self.fused.made(flat, num_bytes)) is not None:
            memory, private = made
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=flat.device)
            out = blockwise.over_memory(memory, flat.shape, flat.dtype, form.name)
            with torch.no_grad():
                blockwise.quantize(flat, form.name, out=out)
        self.report.coded_bytes += memory.nbytes
        self.report.exact_bytes += flat.nbytes
        place = send(memory) if send is not None and self._store.can_leave(memory) else memory
        return Codes(place, form.name, flat.numel(), flat.dtype, flat.shape, flat.stride(), private)

    def _why_exact(self, tensor: torch.Tensor, bits: int) -> str | None:
        if bits == 16:
            return "that the plan keeps in 16 bits"
        if not tensor.dtype.is_floating_point:
            return "of integers and masks"
        if tensor.dtype not in _DTYPES:
            return f"of {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.numel() < self.small or not self._store.can_leave(tensor):
            return "in small tensors (statistics, tables)"
        if _span(tensor) < tensor.numel():
            return "expanded from less memory"
        return None

    def close(self) -> None:
        """All is encoded: lets go of the values."""
        self._known.clear()
        self.fused = FusedSaves()


class Deferred:
    """Stands for a tensor in a kept graph until `KeptSaves.seal` has decided in which bits it waits."""

    __slots__ = ("tensor", "version", "sequence", "bits", "send", "packed")

    def __init__(self, tensor: torch.Tensor, bits: int, send: Callable | None) -> None:
        # Detached: a saved output would otherwise keep its own graph alive through itself.
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.sequence = torch.autograd._get_sequence_nr() - 1
        self.bits = bits
        self.send = send
        self.packed = None


class KeptSaves:
    """The saved tensors of a kept graph while its unit runs.

    It must not know the call or its graph: the graph holds it, and Python couldn't free the circle.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._waiting: list[Deferred] = []

    def defer(self, tensor: torch.Tensor, bits: int, send: Callable | None) -> Deferred:
        """Packs a tensor that may wait in so many bits, its codes where `send` brings them."""
        self._waiting.append(deferred := Deferred(tensor, bits, send))
        return deferred

    def seal(self, core: AttentionCore, pack_exact: Callable[[torch.Tensor], object]) -> None:
        """The unit has run: encodes what has waited; `pack_exact` packs what stays exact."""
        waiting, self._waiting = self._waiting, []
        # What attention saves is exact for everybody else who saved it too.
        exact = {
            deferred.tensor.untyped_storage()._cdata
            for deferred in waiting
            if not core.knows(deferred.sequence) or core.holds_saved(deferred.sequence)
        }
        for deferred in waiting:
            tensor, deferred.tensor = deferred.tensor, None
            send, deferred.send = deferred.send, None
            if tensor._version != deferred.version:
                deferred.packed = tensor, deferred.version  # refused when it is asked for
                continue
            reason = ATTENTION if tensor.untyped_storage()._cdata in exact else None
            codes = self._encoder.encode(tensor, deferred.bits, send, exact_because=reason)
            deferred.packed = pack_exact(tensor) if codes is None else codes
        self._encoder.close()


def largest_numel(tensors: Sequence[torch.Tensor]) -> int:
    """Elements of the largest floating-point tensor that needs a gradient, else of the largest; 0 without any."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return max((t.numel() for t in [t for t in floating if t.requires_grad] or floating), default=0)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile hides operators of a unit: which of them are attention can't be seen then."""
    # The class's module takes a second to import, and is there if there is an instance.
    return any(
        type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None for part in module.modules()
    )


def say_compiled(unit_name: str, said: set) -> None:
    """Warns once that compiled units save in 16 bits."""
    if is_compiled not in said:
        said.add(is_compiled)
        logger.warning(
            "%s is compiled, which hides its attention: activations stay in 16 bits though the plan has fewer, so more "
            "memory is needed than planned; train without torch.compile on the layers, or plan with fidelity exact",
            unit_name,
        )


def _span(tensor: torch.Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's values in the order of its memory; None if there are gaps between them."""
    if _span(tensor) != tensor.numel():
        return None
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def log_once(unit_name: str, bits: tuple[int, int], report: SavingReport, said: set) -> None:
    """One line for units that treat the same kinds of tensors alike."""
    key = (bits, frozenset(report.left))
    if key not in said:
        said.add(key)
        logger.info("%s: activations in %d bits, inputs in %d: %s", unit_name, *bits, report)
