"""`Unit`: one streamed layer (or stem part) at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.homes import UnitHome
from lazytrain_plugin.runtime.layout import FlatLayout, UnitTensor
from lazytrain_plugin.runtime.pending import mark_pending, settle
from lazytrain_plugin.runtime.slots import WeightSlot
from lazytrain_plugin.runtime.tail import UnitTail
from lazytrain_plugin.runtime.worker import Ticket

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.streamed_updates import StreamedUpdate


class Unit:
    """A unit's parameters, where they rest, and what is under way for them."""

    def __init__(self, name: str, module: nn.Module | None, layout: FlatLayout) -> None:
        self.name = name
        self.module = module
        self.layout = layout
        self.trained = layout.trained
        self.home: UnitHome | None = None
        self.original_forward: Callable | None = None
        self.eager_forward: Callable | None = None
        """The forward that the module came with; `original_forward` is that one compiled, after `compile`."""
        self.foreign: tuple[UnitTensor, ...] = ()
        """Trained stem tensors that this unit uses too; their gradients go to their own unit."""
        self.tail = UnitTail()
        """What can be left out when it runs again."""
        self.audited = False
        """Whether a local graph has been searched for leaves that nobody declared."""
        self.slot: WeightSlot | None = None
        """The slot that `parameter.data` points into now; None while it points home."""
        self.update_ticket: Ticket | None = None
        """The last update of this unit on the update thread."""
        self.publish_event = None
        """When the GPU-resident weights carry that update (CPU updater only)."""
        self.gradient_event = None
        """When the gradients that were sent home have arrived there."""
        self.fold_ticket: Ticket | None = None
        """The last addition of arrived gradients into the accumulator."""
        self.upload_event = None
        """The last transfer that read the weights at home."""
        self.streamed_update: StreamedUpdate | None = None
        """An update by the GPU of states that rest in host memory, until its weights are known to be home."""
        self.gradients_read_event = None
        """When the last such update has read the gradients at home."""
        self.returned_event = None
        """When what the last such update changed has arrived at home."""
        self.arrived: dict[UnitTensor, Arrival] = {}
        """Tensors with a gradient in this window (between two optimizer steps)."""

    def gradient_targets(self) -> tuple[UnitTensor, ...]:
        return (*self.trained, *self.foreign)

    @property
    def is_compiled(self) -> bool:
        return self.original_forward is not self.eager_forward

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the module's own forward; arguments as of `torch.compile`. Leases and transfers stay outside."""
        self.tail = UnitTail()
        eager = self.eager_forward
        if isinstance(eager, functools.partial):
            # The class's function: units of one class share what was compiled.
            self.original_forward = functools.partial(torch.compile(eager.func, *args, **kwargs), *eager.args)
        else:
            self.original_forward = torch.compile(eager, *args, **kwargs)

    # Where the parameters point.

    def point_to(self, slot: WeightSlot) -> None:
        if self.streamed_update is not None:
            self._show_weights()  # in the slot they are new already
        for tensor, view in zip(self.layout.tensors, slot.views(self), strict=True):
            tensor.parameter.data = view
        self.slot = slot

    def point_home(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # pending weights may move unseen
            for tensor, view in self.home.views.items():
                tensor.parameter.data = view
        self.slot = None
        if self.streamed_update is not None:
            self._hide_weights()  # the new ones may still be on their way

    def pack(self, tensor: torch.Tensor):
        """Saved-tensor hook that keeps the slot out of a kept graph; `unpack` is its inverse."""
        slot = self.slot
        if slot is not None and tensor.untyped_storage().data_ptr() == slot.address:
            return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        # Detached: a saved output would otherwise keep its own graph alive through itself.
        return tensor.detach(), tensor._version

    def unpack(self, packed):
        if len(packed) == 4:
            dtype, shape, stride, offset = packed
            if self.slot is not None:
                return self.slot.flat.view(dtype).as_strided(shape, stride, offset)
            return self._resident_weight(dtype, shape, stride, offset)
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                f"{self.name}: a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after "
                "the layer ran; replace the in-place operation on the layer's output or input by an ordinary one"
            )
        return tensor

    def _resident_weight(self, dtype, shape, stride, offset) -> torch.Tensor:
        """A saved weight of a unit that came to rest on the GPU between the forward that saved it and this backward."""
        offset_bytes = offset * dtype.itemsize
        tensor = next(t for t in self.layout.tensors if 0 <= offset_bytes - t.weight_offset_bytes < max(t.nbytes, 1))
        inside = (offset_bytes - tensor.weight_offset_bytes) // dtype.itemsize
        return self.home.gpu_weights[tensor].as_strided(shape, stride, inside)

    # Updates under way.

    def mark_pending(self, ticket: Ticket, resolve: Callable[[], None]) -> None:
        self.update_ticket = ticket
        for tensor in self.trained:
            mark_pending(tensor.parameter, resolve)

    def mark_streamed(self, update: StreamedUpdate) -> None:
        self.streamed_update = update
        self._hide_weights()

    def _hide_weights(self) -> None:
        update = self.streamed_update
        if update.returned:
            self.settle()
            return
        for tensor in self.trained:
            mark_pending(tensor.parameter, update.resolve)

    def _show_weights(self) -> None:
        for tensor in self.trained:
            settle(tensor.parameter)

    def settle(self) -> None:
        self._show_weights()
        self.update_ticket = None
        self.streamed_update = None
