"""Error prices of saved activations, measured on the model that trains: three layers, one sequence, one step.

The plan's figures come from a small model (plan/formats.py). When layers save in fewer bits, the first, the middle and
the last of them measure their own in an early step, in their backward, where a layer's weights, its input and the
gradient of its output are at hand; the plan's bits are chosen by them from then on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from lazytrain_plugin.errors import first_line
from lazytrain_plugin.runtime.operator_errors import OperatorErrors, watch_operators
from lazytrain_plugin.runtime.quantized_saves import FORMATS
from lazytrain_plugin.vocab import MAY_BE_CODED

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor
    from lazytrain_plugin.runtime.node import UnitCall
    from lazytrain_plugin.runtime.unit import Unit

logger = logging.getLogger(__name__)

FIRST_STEP = 3
"""Optimizer steps before the one that measures: gradients of the very first tell little."""
MOST_TOKENS = 2**15
"""Of a sequence: a layer runs on all of it, for its masks and positions; that takes what its recompute takes."""
MOST_ROWS = 1024
"""Of them are looked at, in fp32."""
Errors = dict[str, dict[int, float]]


class ErrorPrices:
    """Measures once per run; hands what it found to `found`."""

    def __init__(self, executor: Executor, found: Callable[[Errors], None]) -> None:
        self._executor, self._found = executor, found
        self._steps = 0
        self._done = False
        self._waiting: list[Unit] = []
        """Layers that have not been measured in the step that measures."""
        self._rows: list[Errors] = []

    def step_ended(self) -> None:
        self._steps += 1
        if self._waiting:  # a layer of them did not run
            self._finish()
        if self._done or self._steps < FIRST_STEP:
            return
        coded = [unit for unit in self._executor.units if _saves_codes(unit)]
        if coded and self._executor.on_backward is None:
            self._waiting = [coded[place] for place in sorted({0, len(coded) // 2, len(coded) - 1})]
            self._executor.on_backward = self._look

    def _look(self, call: UnitCall, inputs: list[torch.Tensor], output_gradients) -> None:
        if call.keep or not any(call.unit is unit for unit in self._waiting):
            return
        self._waiting = [unit for unit in self._waiting if unit is not call.unit]
        try:
            self._rows.append(measure(call, inputs, output_gradients))
        except Exception as error:  # whatever a layer's own code makes of a part of a batch: training goes on
            logger.info("error prices of %s are not known: %s", call.unit.name, first_line(error)[:200])
        if not self._waiting:
            self._finish()

    def _finish(self) -> None:
        self._executor.on_backward, self._waiting, self._done = None, [], True
        errors = averaged(self._rows)
        if not errors:
            logger.info("error prices stay those of the plan: no layer could be measured")
            return
        logger.info(
            "activations in fewer bits put gradients of %d layers off by: %s", len(self._rows), describe(errors)
        )
        self._found(errors)


def averaged(rows: list[Errors]) -> Errors:
    """Root mean squares over layers, of the classes that they have."""
    combined: Errors = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        having = [row[name] for row in rows if name in row]
        combined[name] = {bits: math.sqrt(fmean(each[bits] ** 2 for each in having)) for bits in having[0]}
    return combined


def _saves_codes(unit: Unit) -> bool:
    plan = unit.home.plan
    return plan.activations in MAY_BE_CODED and min(plan.saved_bits, plan.boundary_bits) < 16


def measure(call: UnitCall, inputs: list[torch.Tensor], output_gradients) -> Errors:
    """Class of operator -> bits -> error, from the first sequence of a unit's call; the unit must be leased."""
    hidden = max((t for t in inputs if t.is_floating_point() and t.requires_grad), key=torch.Tensor.numel)
    gradient = next(g for g in output_gradients if g is not None and g.shape == hidden.shape)
    batch_size = hidden.shape[0]
    # A whole sequence where it is short: masks and tables of positions fit it then.
    part = lambda t: t[:1] if batch_size > 1 and t.ndim > 1 and t.shape[0] == batch_size else t  # noqa: E731
    sample = [part(t.detach()).requires_grad_(t is hidden) for t in inputs]
    leaf = sample[next(i for i, t in enumerate(inputs) if t is hidden)]
    if leaf.shape[:-1].numel() > MOST_TOKENS:
        raise ValueError(f"a sequence has {leaf.shape[:-1].numel()} tokens, more than the {MOST_TOKENS} of a sample")
    errors = OperatorErrors(tuple(FORMATS.values()), most_rows=MOST_ROWS)
    handles = watch_operators(call.unit.module, errors)
    try:
        with torch.enable_grad(), call.before.restored():
            args, kwargs = call.rebuild_inputs(sample)
            result = call.unit.original_forward(*args, **kwargs)
            output = result if isinstance(result, torch.Tensor) else result[0]
            torch.autograd.grad(output, leaf, part(gradient))
    finally:
        for handle in handles:
            handle.remove()
    by_format = {form: bits for bits, form in FORMATS.items()}
    return {
        name: {by_format[form]: error for form, error in row.items()}
        for name, row in errors.table().items()
        if all(0 <= error < float("inf") for error in row.values())
    }


def describe(errors: Errors) -> str:
    """One line."""
    return "; ".join(
        f"{name} " + ", ".join(f"{error:.1%} ({bits} bits)" for bits, error in sorted(row.items()))
        for name, row in errors.items()
    )
