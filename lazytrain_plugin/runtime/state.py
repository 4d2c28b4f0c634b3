"""`TrainState`: what a checkpoint sees of a training run, whatever the plan placed where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lazytrain_plugin.runtime.streamed_file import TensorSpec

StateValue = Tensor | float | int
"""One entry of a parameter's optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParamRecord:
    """One parameter of the model; tied names are one record."""

    name: str
    """First name in `model.named_parameters()` order."""
    aliases: tuple[str, ...] = ()
    """The other names of a tied parameter, in `model.named_parameters(remove_duplicate=False)` order."""
    parameter: nn.Parameter
    """Its data is the home; it has the true value after `TrainState.flush`."""
    shape: torch.Size
    numel: int
    dtype: torch.dtype
    """Of the weight; the master is fp32 whatever this is."""
    group: int | None
    """Index of its optimizer group; None: frozen, no master and no state."""


class TrainState(Protocol):
    """Masters and optimizer states of every parameter, read and written one parameter at a time.

    `read_master`, `write_master`, `read_state` and `write_state` are for trained records (`group` is not None); a
    frozen weight is its `parameter`. None of them may run while an update is pending: call `flush` first.
    """

    records: list[ParamRecord]
    """In `model.named_parameters()` order, tied tensors once."""

    def spans(self, record: ParamRecord) -> list[slice]:
        """Elements that can be read by themselves, in order: what is large is best read piece by piece."""
        ...

    def read_master(self, record: ParamRecord, span: slice | None = None) -> Tensor:
        """The fp32 master, [numel], on the CPU; may alias the home, so it's good until the next update.

        Args:
            span: one of `spans`; None: all elements.
        """
        ...

    def write_master(self, record: ParamRecord, values: Tensor) -> None:
        """Copies `values` [numel] (CPU; may be a read-only file mapping) into master and weight: fp32, or of a frozen
        weight, which has no master, its own dtype."""
        ...

    def state_specs(self, record: ParamRecord) -> dict[str, TensorSpec | StateValue]:
        """What `read_state` gives, without reading tensors."""
        ...

    def read_state(self, record: ParamRecord, span: slice | None = None) -> dict[str, StateValue]:
        """The optimizer state, of one of `spans` if it is given; `{}` before the first update of this parameter.

        The native optimizer gives "step" (number) and "exp_avg", "exp_avg_sq" decoded to fp32 [numel] on the CPU; a
        torch optimizer gives whatever it keeps. A key with a dot is a *codec entry*: the stored form of the value
        before the dot ("exp_avg.codes" uint8, "exp_avg.scales" fp32). Encoding decoded moments again gives the same
        codes, but one scale in some hundred moves by an ulp; only codec entries make a resume under 8-bit states
        bit-equal.
        """
        ...

    def write_state(self, record: ParamRecord, state: dict[str, StateValue]) -> None:
        """Copies `state` in, encoded to the planned format; `{}` means as before the first update.

        Tensors are on the CPU and may be read-only file mappings. Codec entries that fit the planned format are taken
        bit for bit, others are ignored in favour of the decoded values.
        """
        ...

    def flush(self) -> None:
        """Waits for every pending update."""
        ...

    def discard_gradients(self) -> None:
        """Forgets the gradients of a window that is not going to be stepped."""
        ...
