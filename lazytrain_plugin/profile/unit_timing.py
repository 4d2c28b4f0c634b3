"""Times real units on the device: forward and backward of one of each kind, with random weights.

A unit of a model on the meta device is copied and given memory, so that a machine needs room for one unit, not for the
model. Its inputs have the shapes and dtypes that it gets in a run of the whole model on meta tensors.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lazytrain_plugin.errors import UnsupportedModelError, first_line
from lazytrain_plugin.profile import shapes
from lazytrain_plugin.profile.model import ModelProfile, UnitProfile

logger = logging.getLogger(__name__)

WARM_UP_RUNS = 2
TIMED_RUNS = 5
"""At least."""
SETTLED_AFTER_S = 0.2
"""A GPU starts at clocks that it can't hold: an H200 that multiplies falls from 1980 to 1500 MHz within 0.1 s."""
TIMED_S = 0.5
"""It then corrects its power now and then, for some 0.1 s: the median of all runs of this time is what a step sees."""
LAUNCHED_RUNS = 5
"""Runs whose launches alone are timed."""
LONG_ENOUGH_S = 2.0
"""Without a GPU, a kind of unit is not run again once its runs took this long (a CPU takes seconds for one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """Median times of one unit, in seconds."""

    forward_s: float
    backward_s: float
    """With gradients of inputs and of every trainable weight; without recompute."""
    forward_launch_s: float | None = None
    """Time in which the host launches the forward; None: the device is the host."""
    backward_launch_s: float | None = None


def measure_units(
    profile: ModelProfile,
    model: nn.Module,
    units: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    *,
    batch_size: int,
    sequence_length: int,
    prepare: Callable[[nn.Module], None] | None = None,
) -> ModelProfile:
    """`profile` with measured times for every unit; units of equal tensors and work are timed once.

    Args:
        model: on the meta device, with its modules' own forwards.
        units: (name, module) of `model`, in forward order.
        prepare: changes a unit after it got memory (puts fused kernels in).

    Raises:
        UnsupportedModelError: the model does not run on meta tensors, or a unit does not run on random inputs.
    """
    calls = _calls_on_meta(model, units, batch_size, sequence_length)
    times: dict[tuple, UnitTimes] = {}
    measured = []
    modules = dict(units)
    for unit in profile.units:
        kind = kind_of(unit)
        if kind not in times:
            try:
                times[kind] = time_unit(modules[unit.name], *calls[unit.name], device, prepare=prepare)
            except Exception as error:
                raise UnsupportedModelError(
                    f"{unit.name} can't be timed: it does not run on random weights and inputs ({error}); plan with "
                    "derived times, without --measure"
                ) from error
            logger.info("%s: forward %.4g s, backward %.4g s", unit.name, times[kind].forward_s, times[kind].backward_s)
        tokens = batch_size * sequence_length
        measured.append(
            replace(
                unit,
                forward_s_per_token=times[kind].forward_s / tokens,
                backward_s_per_token=times[kind].backward_s / tokens,
                forward_launch_s=times[kind].forward_launch_s,
                backward_launch_s=times[kind].backward_launch_s,
            )
        )
    return replace(profile, units=tuple(measured))


def time_unit(
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    device: torch.device,
    *,
    prepare: Callable[[nn.Module], None] | None = None,
) -> UnitTimes:
    """Runs a copy of a meta `module` on tensors like `args` and `kwargs` (which may be meta tensors)."""
    unit = copy.deepcopy(module).to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for tensor in (*unit.parameters(), *unit.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02, generator=generator)
            else:
                tensor.zero_()
    if prepare is not None:
        prepare(unit)
    unit.train()
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: _random_like(tensor, device, generator), (args, kwargs))
    gradients, marks, begin_s = None, [], time.perf_counter()
    num_runs, num_unsettled = WARM_UP_RUNS + TIMED_RUNS, WARM_UP_RUNS
    while len(marks) < num_runs:
        if device.type == "cuda" and len(marks) <= WARM_UP_RUNS:
            # The first run compiles kernels, for seconds on a new machine. Nothing waits after the warm-up: a GPU that
            # has to wait for the next launch looks slower than it is.
            torch.cuda.synchronize(device)
            if len(marks) == WARM_UP_RUNS:
                run_s = max(_between(marks[-1][0], marks[-1][-1]), 1e-3)
                num_unsettled += math.ceil(SETTLED_AFTER_S / run_s)
                num_runs = num_unsettled + max(TIMED_RUNS, math.ceil(TIMED_S / run_s))
        run_marks = [_mark(device)]
        output = unit(*args, **kwargs)
        run_marks.append(_mark(device))
        roots = [t for t in _tensors(output) if t.requires_grad]
        if gradients is None:
            # Noise, as real ones are: equal numbers draw less power, and a GPU multiplies faster with them.
            gradients = [_random_like(root.detach(), device, generator) for root in roots]
        torch.autograd.backward(roots, gradients)
        run_marks.append(_mark(device))
        marks.append(run_marks)
        for parameter in unit.parameters():
            parameter.grad = None
        if device.type != "cuda" and time.perf_counter() - begin_s > LONG_ENOUGH_S:
            break
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    timed = marks[num_unsettled:] or marks[-1:]
    forward = [_between(start, middle) for start, middle, _ in timed]
    backward = [_between(middle, end) for _, middle, end in timed]
    launches = _time_launches(unit, args, kwargs, gradients, device) if device.type == "cuda" else (None, None)
    return UnitTimes(
        forward_s=statistics.median(forward),
        backward_s=statistics.median(backward),
        forward_launch_s=launches[0],
        backward_launch_s=launches[1],
    )


def _time_launches(
    unit: nn.Module, args: tuple, kwargs: dict, gradients: list[torch.Tensor], device: torch.device
) -> tuple[float, float]:
    """Host seconds to launch a forward and its backward, each onto a device that has nothing else to do."""
    forward, backward = [], []
    for _ in range(LAUNCHED_RUNS):
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        output = unit(*args, **kwargs)
        forward.append(time.perf_counter() - begin_s)
        roots = [t for t in _tensors(output) if t.requires_grad]
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        torch.autograd.backward(roots, gradients)
        backward.append(time.perf_counter() - begin_s)
        for parameter in unit.parameters():
            parameter.grad = None
    torch.cuda.synchronize(device)
    return statistics.median(forward), statistics.median(backward)


def meta_copy(model: nn.Module, dtypes: Mapping[nn.Parameter, torch.dtype]) -> nn.Module:
    """A copy of `model` without memory: its structure, with parameters and buffers on the meta device.

    Args:
        dtypes: what parameters are going to be where that is not what they are now.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        shape_only = torch.empty_like(parameter, dtype=dtypes.get(parameter, parameter.dtype), device="meta")
        memo[id(parameter)] = nn.Parameter(shape_only, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _calls_on_meta(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]], batch_size: int, sequence_length: int
) -> dict[str, tuple[tuple, dict]]:
    """Arguments of each unit's first call."""
    from lazytrain_plugin.profile.extract import meta_inputs

    calls: dict[str, tuple[tuple, dict]] = {}
    with contextlib.ExitStack() as stack:
        for name, module in units:

            def hook(module: nn.Module, args: tuple, kwargs: dict, name: str = name) -> None:
                calls.setdefault(name, (args, kwargs))

            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        stack.enter_context(shapes.shape_kernels(model, fused=True, on_attention=lambda *sizes: None))
        stack.enter_context(torch.enable_grad())
        try:
            model(**meta_inputs(model, batch_size, sequence_length))
        except Exception as error:  # whatever a model's own code raises on meta tensors
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run on meta tensors ({first_line(error)[:120]}), so the "
                "inputs of its layers are not known; plan with derived times, without --measure"
            ) from error
    return calls


def kind_of(unit: UnitProfile) -> tuple:
    """Units with the same are timed once."""
    tensors = tuple((tensor.shape, tensor.dtype, tensor.trainable) for tensor in unit.tensors)
    return tensors, unit.kept_bytes_per_token, unit.flop_per_token


def _random_like(tensor: torch.Tensor, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        # Positions and masks: indices that every table has, and "look at everything".
        if tensor.dtype == torch.bool:
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
        length = tensor.shape[-1] if tensor.ndim else 1
        return torch.arange(length, dtype=tensor.dtype, device=device).expand(tensor.shape).contiguous()
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).normal_(generator=generator)
    return made.requires_grad_(tensor.requires_grad)


def _tensors(output: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, output)
    return found


def _mark(device: torch.device) -> object:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(before: object, after: object) -> float:
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1e3
