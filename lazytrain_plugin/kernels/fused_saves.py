"""`FusedSaves`: what fused operators and those who save for backward tell each other while one unit runs.

First run: an operator that reads a large tensor anyway makes its codes on the way; whoever saves that tensor takes the
codes instead of making them in a pass of its own.

Second run: a saved tensor that nobody but a fused operator reads is not decoded. It comes as memory without values; the
operator takes its codes instead, and reads those. Everybody else must `settle` it first (runtime/selective.py sees
every operator of torch's; kernels that it can't see get no such tensors, since only a caller who knows that nobody else
reads a tensor asks for `private`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.blockwise import QuantizedTensor

_running = threading.local()


class FusedSaves:
    """One run of one unit.

    Args:
        format: of the codes of private tensors; None: nothing is encoded on the way.
        input_format: the same of the unit's inputs.
        inputs: those that shall wait in codes.
        least_numel: smaller tensors are not encoded.
    """

    def __init__(
        self,
        format: str | None = None,
        *,
        input_format: str | None = None,
        inputs: tuple[torch.Tensor, ...] = (),
        least_numel: float = 0,
    ) -> None:
        self._format, self._input_format, self._least_numel = format, input_format, least_numel
        self._inputs = {_memory(tensor): tensor for tensor in inputs}
        self._made: dict[tuple, tuple[torch.Tensor, int, torch.Tensor, bool]] = {}
        """Memory -> the tensor (held: its address is nobody else's), its version, its codes, whether it is private."""
        self.waiting: dict[int, tuple[torch.Tensor, QuantizedTensor]] = {}
        """Storage -> memory without values, and its codes."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        before = getattr(_running, "saves", None)
        _running.saves = self
        try:
            yield
        finally:
            _running.saves = before

    # First run.

    def codes_of_private(self, *tensors: torch.Tensor) -> tuple[QuantizedTensor, ...] | None:
        """Where the codes of tensors that nobody else reads go; None: they are not wanted."""
        if self._format is None or any(tensor.numel() < max(self._least_numel, 1) for tensor in tensors):
            return None
        return tuple(self._new(tensor, self._format, private=True) for tensor in tensors)

    def codes_of_input(self, tensor: torch.Tensor) -> QuantizedTensor | None:
        """Where the codes of an input of the unit go; None: they are not wanted, or are made already."""
        key = _memory(tensor)
        if key not in self._inputs or key in self._made or tensor.numel() < max(self._least_numel, 1):
            return None
        return self._new(tensor, self._input_format, private=False)

    def _new(self, tensor: torch.Tensor, format: str, *, private: bool) -> QuantizedTensor:
        form = blockwise.block_format(format)
        memory = torch.empty(form.storage_bytes(tensor.numel()), dtype=torch.uint8, device=tensor.device)
        self._made[_memory(tensor)] = tensor.detach(), tensor._version, memory, private
        return blockwise.over_memory(memory, (tensor.numel(),), tensor.dtype, form.name)

    def made(self, tensor: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, bool] | None:
        """(codes and scales in one uint8 tensor, whether nobody else reads the tensor), if they were made on the way
        and the tensor was not changed since. Gives them away: a second caller gets None."""
        held, version, memory, private = self._made.get(_memory(tensor), (None, 0, None, False))
        if held is None or held._version != version or memory.numel() != num_bytes:
            return None
        del self._made[_memory(tensor)]
        return memory, private

    # Second run.

    def give(self, quantized: QuantizedTensor, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
        """Memory without values in place of a private tensor."""
        device = quantized.codes.device
        tensor = torch.empty(quantized.shape.numel(), dtype=quantized.dtype, device=device).as_strided(shape, stride)
        self.waiting[tensor.untyped_storage()._cdata] = tensor, quantized
        return tensor

    def take(self, *tensors: torch.Tensor) -> tuple[QuantizedTensor, ...] | None:
        """The codes of tensors that came without values, all of them contiguous; None: they have values (now)."""
        keys = [tensor.untyped_storage()._cdata for tensor in tensors]
        if all(key in self.waiting and t.is_contiguous() for key, t in zip(keys, tensors, strict=True)):
            return tuple(self.waiting.pop(key)[1] for key in keys)
        for tensor in tensors:
            self.settle(tensor)
        return None

    def settle(self, tensor: torch.Tensor) -> None:
        """Decodes a tensor that came without values."""
        held, quantized = self.waiting.pop(tensor.untyped_storage()._cdata, (None, None))
        if held is not None:
            flat = held.as_strided((quantized.shape.numel(),), (1,))
            flat.copy_(blockwise.dequantize(quantized).view(-1))


def running() -> FusedSaves | None:
    """Of the unit that runs in this thread."""
    return getattr(_running, "saves", None)


def _memory(tensor: torch.Tensor) -> tuple:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype
