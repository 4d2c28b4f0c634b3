"""The optimizer update of one unit: the native AdamW kernels, or the client's own optimizer on fp32 masters."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lazytrain_plugin.errors import UnsupportedModelError
from lazytrain_plugin.kernels.adamw import AdamWStep, Batch, Moment8, accumulate, adamw_8bit, adamw_fp32
from lazytrain_plugin.profile.model import LEAST_CODED_NUMEL
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.gradient_format import Gradient, as_values, part_of
from lazytrain_plugin.runtime.layout import UnitTensor, elements
from lazytrain_plugin.runtime.state_layout import MOMENTS
from lazytrain_plugin.runtime.unit import Unit


@dataclass(frozen=True, slots=True)
class StepScalars:
    """What one `step()` fixes for all units: read from the optimizer's live groups, then never again."""

    groups: tuple[dict[str, Any], ...]
    """Hyper-parameters per optimizer group, without its parameters."""
    gradient_scale: float
    counters: dict[str, Any]
    """The optimizer's own attributes that are numbers or tensors: step counts and the like."""
    steps: dict[tuple[int, int], AdamWStep] = field(default_factory=dict, compare=False)
    """By group and number of the update, as tensors ask for them: most of a group's share one."""


def read_scalars(optimizer: torch.optim.Optimizer, gradient_scale: float) -> StepScalars:
    """Copies, because LR schedulers change tensors in place and the updates run later."""
    groups = tuple(
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    )
    counters = {key: copy.deepcopy(value) for key, value in vars(optimizer).items() if _is_counter(value)}
    return StepScalars(groups, gradient_scale, counters)


def _is_counter(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))


def gradient_of(unit: Unit, tensor: UnitTensor, arrival: Arrival) -> Gradient:
    """The window's gradient, 1-D in storage order: as it arrived, or the sum."""
    return unit.home.accumulated(tensor) if arrival == Arrival.SUMMED else unit.home.gradient(tensor)


def update_span(
    tensor: UnitTensor,
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: Gradient,
    moments: tuple[torch.Tensor | Moment8, torch.Tensor | Moment8],
    step: AdamWStep,
    *,
    start: int = 0,
    batch: Batch,
) -> None:
    """Updates the elements of one tensor from `start` (a multiple of 256) on, all given as 1-D of their number."""
    if isinstance(moments[0], Moment8):
        key = tensor.index
        adamw_8bit(weight, remainder, gradient, *moments, step, noise_key=key, first_index=start, batch=batch)
    else:
        adamw_fp32(weight, remainder, gradient, *moments, step, batch=batch)


class NativeAdamW:
    """AdamW (or Adam with L2 decay) by our kernels, in the unit's planned state format."""

    native = True

    def __init__(self, *, decoupled: bool, least_coded_numel: int = LEAST_CODED_NUMEL) -> None:
        self._decoupled = decoupled
        self.least_coded_numel = least_coded_numel
        """Tensors with fewer elements have 32-bit states under 8-bit plans too."""
        self.steps: dict[UnitTensor, int] = {}
        """Updates done per tensor; a tensor without a gradient in a step does not count it, as in torch."""
        self._counted: dict[UnitTensor, StepScalars] = {}
        """The last one of them: states in several pieces are updated one by one."""

    def update(self, unit: Unit, arrived: dict[UnitTensor, Arrival], scalars: StepScalars, piece: int = 0) -> None:
        """Of a piece of the unit's states, which is in memory."""
        home, batch = unit.home, Batch()
        for tensor, arrival in arrived.items():
            step, span = self.next_step(tensor, scalars), home.span_to_update(tensor, piece)
            if span.start == span.stop:
                continue  # another piece, or other ranks' part
            update_span(
                tensor,
                elements(home.weight(tensor), span),
                home.remainder_of(tensor, span),
                part_of(gradient_of(unit, tensor, arrival), home.span_in_gradient(tensor, span)),
                tuple(home.moment(tensor, name, span) for name, _ in MOMENTS),
                step,
                start=span.start,
                batch=batch,
            )
        batch.run()

    def next_step(self, tensor: UnitTensor, scalars: StepScalars) -> AdamWStep:
        """Counts an update of the tensor, once per `scalars`, and returns its scalars."""
        step = self.steps.get(tensor, 0)
        if self._counted.get(tensor) is not scalars:
            self._counted[tensor] = scalars
            step = self.steps[tensor] = step + 1
        made = scalars.steps.get((tensor.group, step))
        if made is None:
            made = scalars.steps[tensor.group, step] = self._step(scalars, tensor.group, step)
        return made

    def _step(self, scalars: StepScalars, index: int, step: int) -> AdamWStep:
        group = scalars.groups[index]
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return AdamWStep(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            decoupled=bool(group.get("decoupled_weight_decay", self._decoupled)),
            gradient_scale=scalars.gradient_scale,
            maximize=bool(group.get("maximize", False)),
        )

    def read_state(self, unit: Unit, tensor: UnitTensor, within: slice) -> dict[str, Any]:
        """Of some elements, from a multiple of 256 on."""
        if tensor not in self.steps:
            return {}
        return {"step": float(self.steps[tensor]), **unit.home.read_moments(tensor, within)}

    def write_state(self, unit: Unit, tensor: UnitTensor, state: dict[str, Any]) -> None:
        if not state:
            self.steps.pop(tensor, None)
            zeros = torch.zeros(tensor.numel)
            state = {"exp_avg": zeros, "exp_avg_sq": zeros}
        else:
            self.steps[tensor] = int(state["step"])
        unit.home.write_moments(tensor, state)


class ClientOptimizer:
    """Any torch optimizer: its own `step`, once per unit, on that unit's fp32 masters.

    Slower than the kernels: the masters of a bf16 unit are decoded before and encoded after every update. Masters keep
    the parameters' shapes, so that optimizers which look at matrices see them.

    What `step` writes to its groups or to its own attributes (a step count) is carried over to the client once per
    step. That must not depend on which parameters it saw: an optimizer that computes a value over all parameters at
    once (D-Adaptation's distance) can't run unit by unit, and is refused when its units disagree.
    """

    native = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._client = optimizer
        self._masters: dict[UnitTensor, nn.Parameter] = {}
        self._carried: dict[tuple[int | None, str], Any] = {}
        """What units have written in the step `_carried_step`, by group (None: the optimizer's attributes) and key."""
        self._carried_step: StepScalars | None = None
        self._one_carries = threading.Lock()

    def update(self, unit: Unit, arrived: dict[UnitTensor, Arrival], scalars: StepScalars, piece: int = 0) -> None:
        """`piece`: its states are never on NVMe, so there is one."""
        shadow = object.__new__(type(self._client))
        # Shares `state` with the client; has groups and counters of its own.
        shadow.__dict__.update(self._client.__dict__ | copy.deepcopy(scalars.counters))
        shadow.param_groups = [{**copy.deepcopy(group), "params": []} for group in scalars.groups]
        scratch = []
        for tensor, arrival in sorted(arrived.items(), key=lambda item: item[0].position_in_group):
            master = self._load_master(unit, tensor)
            flat = torch.empty(tensor.numel, dtype=torch.float32, device=master.device)
            accumulate(flat, as_values(gradient_of(unit, tensor, arrival)), first=True)
            if scalars.gradient_scale != 1.0:
                flat.mul_(scalars.gradient_scale)
            master.grad = tensor.shaped(flat)
            shadow.param_groups[tensor.group]["params"].append(master)
            scratch.append((tensor, master))
        in_use = {index: group for index, group in enumerate(shadow.param_groups) if group["params"]}
        shadow.param_groups = list(in_use.values())
        # The class's own method: instances carry wrappers (LR schedulers count calls) that belong to the client.
        type(self._client).step(shadow)
        self._carry_over(unit, scalars, in_use, shadow)
        for tensor, master in scratch:
            master.grad = None
            if tensor.is_split:
                unit.home.write_master(tensor, _flat_storage(tensor, master.data))
                master.data = torch.empty(0, device=master.device)

    def _carry_over(
        self, unit: Unit, scalars: StepScalars, groups: dict[int, dict[str, Any]], shadow: torch.optim.Optimizer
    ) -> None:
        counters = {key: value for key, value in vars(shadow).items() if _is_counter(value)}
        written = [(None, scalars.counters, counters, vars(self._client))]
        written += [(i, scalars.groups[i], group, self._client.param_groups[i]) for i, group in groups.items()]
        with self._one_carries:
            if self._carried_step is not scalars:
                self._carried_step, self._carried = scalars, {}
            for index, before, after, client in written:
                for key, value in after.items():
                    if key == "params":
                        continue
                    agreed = self._carried.setdefault((index, key), value)
                    if not _same(agreed, value):
                        where = f"param_groups[{index}][{key!r}]" if index is not None else f"attribute {key!r}"
                        raise UnsupportedModelError(
                            f"{type(self._client).__name__} computes its {where} over all parameters at once (at "
                            f"{unit.name} it is {value}, elsewhere {agreed}), which LazyTrain, updating layer by "
                            "layer, can't reproduce; use another optimizer, or disable LazyTrain"
                        )
                    if not _same(before.get(key), value):
                        client[key] = value

    def _load_master(self, unit: Unit, tensor: UnitTensor) -> nn.Parameter:
        weight = unit.home.weight(tensor)
        if tensor.is_split:
            values = unit.home.master_on_device(tensor)
        else:
            values = weight
        master = self._masters.get(tensor)
        if master is None:
            master = self._masters[tensor] = nn.Parameter(tensor.shaped(values))
        master.data = tensor.shaped(values)
        return master

    def read_state(self, unit: Unit, tensor: UnitTensor, within: slice) -> dict[str, Any]:
        """Of some elements; what has no value for each comes with the first of them."""
        master = self._masters.get(tensor)
        state = self._client.state.get(master, {}) if master is not None else {}
        return {
            key: elements(_flat_storage(tensor, value), within).cpu() if _is_elementwise(tensor, value) else value
            for key, value in state.items()
            if within.start == 0 or _is_elementwise(tensor, value)
        }

    def write_state(self, unit: Unit, tensor: UnitTensor, state: dict[str, Any]) -> None:
        master = self._load_master(unit, tensor)
        if not state:
            self._client.state.pop(master, None)
            return
        restored = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() == tensor.numel and value.ndim == 1:
                value = tensor.shaped(value.to(master.device, copy=True))
            elif isinstance(value, torch.Tensor):
                value = value.clone()  # it may be a view of the checkpoint's file
            elif key == "step" and not isinstance(value, torch.Tensor):
                value = torch.tensor(float(value))
            restored[key] = value
        self._client.state[master] = restored


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return a is b or bool(a == b)


def _is_elementwise(tensor: UnitTensor, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.numel() > 1


def _flat_storage(tensor: UnitTensor, values: torch.Tensor) -> torch.Tensor:
    """A shaped tensor as 1-D in the parameter's storage order."""
    if values.stride() != tensor.stride:
        values = torch.empty_strided(tensor.shape, tensor.stride, dtype=values.dtype, device=values.device).copy_(
            values
        )
    return values.as_strided((tensor.numel,), (1,))
