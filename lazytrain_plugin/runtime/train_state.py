"""`ExecutorState`: the checkpoint's view of an executor (see runtime/state.py for the contract)."""

from __future__ import annotations

import torch

from lazytrain_plugin.plan.problem import SAVE_ELEMENTS
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.gradient_format import as_values
from lazytrain_plugin.runtime.layout import ALIGNMENT_ELEMENTS, UnitTensor
from lazytrain_plugin.runtime.state import ParamRecord, StateValue
from lazytrain_plugin.runtime.state_layout import MOMENTS, has_codes
from lazytrain_plugin.runtime.streamed_file import TensorSpec
from lazytrain_plugin.runtime.streams import Trace
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.update import gradient_of


class ExecutorState:
    """Reads and writes masters and optimizer states of an executor's model, one parameter at a time."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in executor.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        self.records = [self._record(parameter, found) for parameter, found in names.items()]

    def _record(self, parameter: torch.nn.Parameter, names: list[str]) -> ParamRecord:
        tensor = self.executor.owner[parameter][1]
        return ParamRecord(
            name=names[0],
            aliases=tuple(names[1:]),
            parameter=parameter,
            shape=tensor.shape,
            numel=tensor.numel,
            dtype=tensor.dtype,
            group=tensor.group if tensor.trained else None,
        )

    @property
    def trace(self) -> Trace:
        return self.executor.streams.trace

    @property
    def holds_parts(self) -> bool:
        """Whether any master or state can only be read by all ranks that have a part of it at once."""
        return any(unit.home.is_read_together for unit in self.executor.all_units if unit.trained)

    def holds_part(self, record: ParamRecord) -> bool:
        """As `holds_parts`, of one parameter."""
        unit, tensor = self._find(record)
        return tensor.trained and unit.home.is_read_together

    def spans(self, record: ParamRecord) -> list[slice]:
        tensor = self._find(record)[1]
        if not tensor.is_row_major:
            return [tensor.whole]
        return [
            slice(first, min(first + SAVE_ELEMENTS, tensor.numel)) for first in range(0, tensor.numel, SAVE_ELEMENTS)
        ] or [tensor.whole]

    def read_master(self, record: ParamRecord, span: slice | None = None) -> torch.Tensor:
        unit, tensor = self._find(record)
        master = unit.home.read_master(tensor, span)
        return master if tensor.is_row_major else logical_order(tensor, master)

    def write_master(self, record: ParamRecord, values: torch.Tensor) -> None:
        unit, tensor = self._find(record)
        self._forget_copies(unit)
        unit.home.write_master(tensor, storage_order(tensor, values))

    def read_state(self, record: ParamRecord, span: slice | None = None) -> dict[str, StateValue]:
        unit, tensor = self._find(record)
        span = span or tensor.whole
        state = {
            key: logical_order(tensor, value) if _elementwise(tensor, value) else value
            for key, value in self.executor.updater.read_state(unit, tensor, span).items()
        }
        if state and self._has_codec(unit, tensor):
            state |= unit.home.read_codec(tensor, span)
        return state

    def state_specs(self, record: ParamRecord) -> dict[str, TensorSpec | StateValue]:
        unit, tensor = self._find(record)
        updater = self.executor.updater
        if not updater.native:
            found = self.read_state(record)
            return {key: TensorSpec.like(value) if torch.is_tensor(value) else value for key, value in found.items()}
        if tensor not in updater.steps:
            return {}
        whole, blocks = torch.Size([tensor.numel]), torch.Size([-(-tensor.numel // ALIGNMENT_ELEMENTS)])
        names = [name for name, _ in MOMENTS]
        specs = {"step": float(updater.steps[tensor])} | dict.fromkeys(names, TensorSpec(whole, torch.float32))
        if self._has_codec(unit, tensor):
            for name in names:
                specs[f"{name}.codes"] = TensorSpec(whole, torch.uint8)
                specs[f"{name}.scales"] = TensorSpec(blocks, torch.float32)
        return specs

    def write_state(self, record: ParamRecord, state: dict[str, StateValue]) -> None:
        unit, tensor = self._find(record)
        if not tensor.trained:
            return  # trained when it was saved, frozen now: there is no place for its states
        plain = {
            key: storage_order(tensor, value) if _elementwise(tensor, value) else value
            for key, value in state.items()
            if "." not in key
        }
        self.executor.updater.write_state(unit, tensor, plain)
        if state and self._has_codec(unit, tensor) and f"{MOMENTS[0][0]}.codes" in state:
            unit.home.write_codec(tensor, state)

    def read_gradient(self, record: ParamRecord) -> torch.Tensor | None:
        """A copy of the window's gradient so far, [numel], fp32 or the weight's dtype; None: none yet.

        All ranks that have a part of it read it at once. Call `flush` first.
        """
        unit, tensor = self._find(record)
        arrival = unit.arrived.get(tensor)
        if arrival is None:
            return None
        if unit.fold_ticket is not None:
            unit.fold_ticket.wait()
        # Other ranks' parts of what the node has in common arrive, and are added up, in their own time.
        self.meet("reading of gradients")
        home = unit.home
        with home.gradients_in_memory() if arrival == Arrival.WHOLE else home.sums_in_memory(changes=False):
            found = as_values(gradient_of(unit, tensor, arrival))
            if home.has_part_of_gradients:
                return logical_order(tensor, home.assembled(tensor, found))
            # The memory is the next window's, or someone else's next.
            return logical_order(tensor, found).clone()

    def meet(self, phase: str) -> None:
        """Returns when every rank has called it that reads and writes the same masters and states."""
        if self.executor.ranks is not None:
            self.executor.ranks.barrier_of_owners(phase)

    def leave_together(self, record: ParamRecord, phase: str) -> None:
        """After all ranks have read its master or states: returns when none does any more where they read each other's
        disk space, which is gone with its rank."""
        unit, tensor = self._find(record)
        if tensor.trained and unit.home.is_read_from_disks:
            self.meet(phase)

    def flush(self) -> None:
        self.executor.flush()

    def discard_gradients(self) -> None:
        self.executor.discard_gradients()

    def _find(self, record: ParamRecord) -> tuple[Unit, UnitTensor]:
        return self.executor.owner[record.parameter]

    def _has_codec(self, unit: Unit, tensor: UnitTensor) -> bool:
        return self.executor.updater.native and has_codes(tensor, unit.home.plan)

    def _forget_copies(self, unit: Unit) -> None:
        self.executor.forget_copies(unit)


def _elementwise(tensor: UnitTensor, value: StateValue) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (tensor.numel,) and value.is_floating_point()


def logical_order(tensor: UnitTensor, values: torch.Tensor) -> torch.Tensor:
    """1-D in the parameter's storage order -> 1-D in its logical (row-major) order."""
    return tensor.shaped(values).reshape(-1)


def storage_order(tensor: UnitTensor, values: torch.Tensor) -> torch.Tensor:
    """1-D in logical order -> 1-D in the parameter's storage order."""
    if tensor.is_row_major:
        return values.reshape(-1)  # a view of the checkpoint's file: a copy of the largest tensor would be gigabytes
    ordered = torch.empty_strided(tensor.shape, tensor.stride, dtype=values.dtype)
    return ordered.copy_(values.view(tensor.shape)).as_strided((tensor.numel,), (1,))
