"""Decision variables of the program; the numbers are those of docs/formulation.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import highspy

from lazytrain_plugin.plan.names import name
from lazytrain_plugin.plan.problem import PlacementProblem

Column = Any
"""highspy's variable object."""


@dataclass(slots=True)
class Variables:
    """All columns. Lists are indexed by unit in forward order, or by stem unit."""

    stream: list[Column] = field(default_factory=list)
    resident: list[Column] = field(default_factory=list)
    mirror: list[Column] = field(default_factory=list)
    keep: list[Column] = field(default_factory=list)
    stem_on_gpu: list[Column] = field(default_factory=list)
    weight_slot_mib: Column = None
    gradient_slot_mib: Column = None

    updated_ms: list[Column] = field(default_factory=list)
    stem_updated_ms: list[Column] = field(default_factory=list)
    forward_weights_ms: list[Column] = field(default_factory=list)
    stem_weights_ms: list[Column] = field(default_factory=list)
    forward_ms: list[Column] = field(default_factory=list)
    loss_ms: Column = None
    backward_weights_ms: list[Column] = field(default_factory=list)
    backward_ms: list[Column] = field(default_factory=list)
    gradients_sent_ms: list[Column] = field(default_factory=list)
    stem_sent_ms: list[Column] = field(default_factory=list)
    accumulated_ms: list[Column] = field(default_factory=list)
    stem_accumulated_ms: list[Column] = field(default_factory=list)
    repeat_weights_ms: list[Column] = field(default_factory=list)
    repeat_ms: list[Column] = field(default_factory=list)
    """Forwards of the micro-batches after the first; empty without accumulation."""
    step_ms: Column = None


def define_homes(model: highspy.Highs, problem: PlacementProblem, variables: Variables) -> None:
    """stream(u), resident(u), mirror(u) in {0, 1} (V1).

    Weights and states on the CPU; both on the GPU; weights on the GPU with states and a mirror on the CPU. NVMe homes
    and other bits are further members of this family.
    """
    for index, cost in enumerate(problem.units):
        variables.stream.append(_binary(model, name("stream", index)))
        variables.resident.append(_binary(model, name("resident", index), allowed=problem.has_gpu))
        variables.mirror.append(
            _binary(model, name("mirror", index), allowed=problem.has_gpu and cost.num_trainable > 0)
        )


def define_activations(model: highspy.Highs, problem: PlacementProblem, variables: Variables) -> None:
    """keep(u) in {0, 1} (V2): 1 keeps all saved tensors, 0 recomputes. Strategies in between are further members."""
    variables.keep = [
        _binary(model, name("keep", index), allowed=cost.kept_bytes > 0) for index, cost in enumerate(problem.units)
    ]


def define_stem_states(model: highspy.Highs, problem: PlacementProblem, variables: Variables) -> None:
    """stem_on_gpu(s) in {0, 1} (V3): states and updater of a stem unit."""
    variables.stem_on_gpu = [
        _binary(model, name("stem_on_gpu", cost.name), allowed=problem.has_gpu) for cost in problem.stem
    ]


def define_slot_sizes(model: highspy.Highs, variables: Variables) -> None:
    """weight_slot_mib, gradient_slot_mib >= 0 (V4): sizes of one staging buffer."""
    variables.weight_slot_mib = _positive(model, "weight_slot_mib")
    variables.gradient_slot_mib = _positive(model, "gradient_slot_mib")


def define_times(model: highspy.Highs, problem: PlacementProblem, variables: Variables) -> None:
    """Finish times in ms (V5), on each resource in program order.

    Forward times count from `step()`, backward times from the end of the loss.
    """
    units, stem = range(len(problem.units)), [cost.name for cost in problem.stem]
    per_unit = {
        "updated_ms": "updated",
        "forward_weights_ms": "forward_weights",
        "forward_ms": "forward",
        "backward_weights_ms": "backward_weights",
        "backward_ms": "backward",
        "gradients_sent_ms": "sent",
    }
    per_stem = {"stem_updated_ms": "updated", "stem_weights_ms": "published", "stem_sent_ms": "sent"}
    if problem.has_accumulation:
        per_unit |= {
            "accumulated_ms": "accumulated",
            "repeat_weights_ms": "repeat_weights",
            "repeat_ms": "repeat",
        }
        per_stem |= {"stem_accumulated_ms": "accumulated"}
    for attribute, kind in per_unit.items():
        setattr(variables, attribute, [_positive(model, name(kind, index)) for index in units])
    for attribute, kind in per_stem.items():
        setattr(variables, attribute, [_positive(model, name(kind, stem_name)) for stem_name in stem])
    variables.loss_ms = _positive(model, "loss")
    variables.step_ms = _positive(model, "step")


def _binary(model: highspy.Highs, column: str, *, allowed: bool = True) -> Column:
    return model.addVariable(0, 1 if allowed else 0, type=highspy.HighsVarType.kInteger, name=column)


def _positive(model: highspy.Highs, column: str) -> Column:
    return model.addVariable(0, highspy.kHighsInf, name=column)
