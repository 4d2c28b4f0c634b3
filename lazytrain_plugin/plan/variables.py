"""Decision variables of the program; the numbers are those of docs/formulation.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import highspy

from lazytrain_plugin.plan.choices import (
    HOMES,
    allows_home,
    offloads_boundaries,
    parks_boundaries,
    parks_gradients,
    parks_saved,
    saving_choices,
)
from lazytrain_plugin.plan.names import name
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.vocab import Activations, Tier

Column = Any
"""highspy's variable object, or the number 0 where a choice is not allowed."""
Expression = Any


@dataclass(slots=True)
class Variables:
    """All columns. Lists are indexed by unit in forward order, or by stem unit; empty where a family is not used."""

    homes: dict[str, list[Column]] = field(default_factory=dict)
    saved: list[dict[tuple[Activations, Tier], Column]] = field(default_factory=list)
    boundary_on_cpu: list[Column] = field(default_factory=list)
    boundary_on_nvme: list[Column] = field(default_factory=list)
    coded_on_gpu: list[Column] = field(default_factory=list)
    """The input waits on the GPU in codes; 0 where codes are not allowed."""
    dropped: list[Column] = field(default_factory=list)
    found_mib: list[Column] = field(default_factory=list)
    """Inputs found again for a unit's backward."""
    stem_on_gpu: list[Column] = field(default_factory=list)
    stem_streams: list[Column] = field(default_factory=list)
    weight_slot_mib: Column = None
    gradient_slot_mib: Column = None
    state_slot_mib: Column = 0
    activation_slot_mib: Column = 0
    nvme_slot_mib: Column = 0
    """Of states' pieces."""
    nvme_weight_slot_mib: Column = 0
    nvme_gradient_slot_mib: Column = 0
    """Of gradients, with their sums."""
    parked_slot_mib: Column = 0
    used: dict[str, Column] = field(default_factory=dict)
    """Whether any unit is streamed, sends gradients, ...: 1 as soon as one is."""

    updated_ms: list[Column] = field(default_factory=list)
    stem_updated_ms: list[Column] = field(default_factory=list)
    spread_ms: list[Column] = field(default_factory=list)
    """Updated weights have come to the other nodes; empty where each has all states."""
    stem_spread_ms: list[Column] = field(default_factory=list)
    forward_weights_ms: list[Column] = field(default_factory=list)
    stem_weights_ms: list[Column] = field(default_factory=list)
    forward_ms: list[Column] = field(default_factory=list)
    states_back_ms: list[Column] = field(default_factory=list)
    left_ms: list[Column] = field(default_factory=list)
    """Activations of a unit's forward have left the GPU."""
    loss_ms: Column = None
    backward_weights_ms: list[Column] = field(default_factory=list)
    returned_ms: list[Column] = field(default_factory=list)
    backward_ms: list[Column] = field(default_factory=list)
    end_ms: Column = None
    """Backward's end: unit 0's, and a place for the embedding's gradient."""
    gradients_sent_ms: list[Column] = field(default_factory=list)
    stem_sent_ms: list[Column] = field(default_factory=list)
    accumulated_ms: list[Column] = field(default_factory=list)
    stem_accumulated_ms: list[Column] = field(default_factory=list)
    exchanged_ms: list[Column] = field(default_factory=list)
    """Gradients have met those of other ranks; empty where there are none."""
    stem_exchanged_ms: list[Column] = field(default_factory=list)
    unhidden_ms: Column = 0
    """From the end of the last backward until all gradients have met."""
    repeat_weights_ms: list[Column] = field(default_factory=list)
    repeat_ms: list[Column] = field(default_factory=list)
    """Forwards of the micro-batches after the first; empty without accumulation."""
    repeat_left_ms: list[Column] = field(default_factory=list)
    disk_read_ms: list[Column] = field(default_factory=list)
    disk_written_ms: list[Column] = field(default_factory=list)
    gradients_written_ms: list[Column] = field(default_factory=list)
    disk_backward_ms: list[Column] = field(default_factory=list)
    disk_repeat_ms: list[Column] = field(default_factory=list)
    parked_ms: list[Column] = field(default_factory=list)
    """Inputs that rest on NVMe have been written."""
    fetched_ms: list[Column] = field(default_factory=list)
    step_ms: Column = None

    # Sums of choices that the equations use.

    def streamed(self, u: int) -> Expression:
        """1 when the weights of unit u rest off the GPU."""
        return self.homes["stream"][u] + self.homes["stream_update"][u] + self.on_nvme(u)

    def on_nvme(self, u: int) -> Expression:
        """1 when the states of unit u rest on NVMe."""
        return self.homes["nvme_states"][u] + self.homes["nvme_gradients"][u] + self.weights_on_nvme(u)

    def weights_on_nvme(self, u: int) -> Expression:
        return self.homes["nvme"][u] + self.homes["nvme_all"][u]

    def gradients_on_nvme(self, u: int) -> Expression:
        return self.homes["nvme_gradients"][u] + self.homes["nvme_all"][u]

    def on_worker(self, u: int) -> Expression:
        """1 when the CPU updates unit u."""
        return self.homes["stream"][u] + self.homes["mirror"][u] + self.on_nvme(u)

    def streams_states(self, u: int) -> Expression:
        """1 when the states of unit u pass the GPU for their update."""
        return self.homes["stream_update"][u] + self.homes["mirror_update"][u]

    def sends(self, u: int) -> Expression:
        """1 when the gradients of unit u leave the GPU."""
        return self.on_worker(u) + self.streams_states(u)

    def stem_on_worker(self, s: int) -> Expression:
        return 1 - self.stem_on_gpu[s] - self.stem_streams[s]


def define_homes(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """stream(u), resident(u), mirror(u), ... in {0, 1}, one for each member of `HOMES` (V1)."""
    for home in HOMES:
        v.homes[home] = [
            _binary(model, name(home, index)) if allows_home(problem, cost, home) else 0
            for index, cost in enumerate(problem.units)
        ]


def define_activations(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """keep(u), matmuls(u), attention(u) in {0, 1}, each also with saved tensors on the CPU; none: recompute (V2).

    boundary_on_cpu(u) in {0, 1}: the unit's input leaves the GPU between forward and backward.
    """
    for index, cost in enumerate(problem.units):
        v.saved.append(
            {
                (activations, tier): _binary(
                    model, name(activations if tier == Tier.GPU else f"{activations}_{tier}", index)
                )
                for activations, tier in saving_choices(problem, cost)
            }
        )
    v.boundary_on_cpu = [
        _binary(model, name("boundary_cpu", index)) if offloads_boundaries(problem) else 0
        for index in range(len(problem.units))
    ]


def define_stem_states(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """stem_on_gpu(s), stem_stream_update(s) in {0, 1} (V3): states and updater of a stem unit."""
    streams = problem.has_gpu and problem.capabilities.streamed_states
    for cost in problem.stem:
        v.stem_on_gpu.append(_binary(model, name("stem_on_gpu", cost.name), allowed=problem.has_gpu))
        v.stem_streams.append(
            _binary(model, name("stem_stream_update", cost.name)) if streams and cost.num_trainable else 0
        )


def define_slot_sizes(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """weight_slot_mib, gradient_slot_mib, ... >= 0 (V4): sizes of one staging buffer."""
    v.weight_slot_mib = _positive(model, "weight_slot_mib")
    v.gradient_slot_mib = _positive(model, "gradient_slot_mib")
    if problem.has_gpu and problem.capabilities.streamed_states:
        v.state_slot_mib = _positive(model, "state_slot_mib")
    if offloads_anything(problem):
        v.activation_slot_mib = _positive(model, "activation_slot_mib")
    if problem.has_gpu and problem.has_nvme:
        v.nvme_slot_mib = _positive(model, "nvme_slot_mib")
        v.nvme_weight_slot_mib = _positive(model, "nvme_weight_slot_mib")
        if parks_gradients(problem):
            v.nvme_gradient_slot_mib = _positive(model, "nvme_gradient_slot_mib")


def define_uses(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """uses(kind) in {0, 1} (V4): whether any unit has weights off the GPU, sends gradients, ...

    A slot is as large for one unit as for all. Fractions of units would make it smaller; a fraction of these few
    binaries is branched away first.
    """
    for kind, columns in kinds_of_use(problem, v).items():
        present = [column for column in columns if not isinstance(column, int)]
        if len(present) > 1:
            v.used[kind] = _binary(model, name("uses", kind))
            model.addConstr(sum(present) <= len(present) * v.used[kind], name=name("uses", kind))


def kinds_of_use(problem: PlacementProblem, v: Variables) -> dict[str, list[Column]]:
    """What takes slots, and per unit whether it does: 0, or an expression."""
    units = range(len(problem.units))
    trains = [cost.num_trainable > 0 for cost in problem.units]
    kinds = {
        "streamed": [v.streamed(u) for u in units],
        "worker": [v.on_worker(u) if trains[u] else 0 for u in units],
        "sends": [v.sends(u) if trains[u] else 0 for u in units],
        "passing": [v.streams_states(u) for u in units],
        "boundary_cpu": list(v.boundary_on_cpu),
        "nvme": [v.on_nvme(u) for u in units],
        "nvme_weights": [v.weights_on_nvme(u) for u in units],
        "nvme_gradients": [v.gradients_on_nvme(u) for u in units],
        "boundary_nvme": list(v.boundary_on_nvme),
    }
    for activations, tier in dict.fromkeys(choice for choices in v.saved for choice in choices):
        if tier != Tier.GPU:
            key = (activations, tier)
            kinds[f"{activations}_{tier}"] = [choices.get(key, 0) for choices in v.saved]
    return kinds


def offloads_anything(problem: PlacementProblem) -> bool:
    """Whether activations of any kind may leave the GPU."""
    able = problem.capabilities
    return parks_anything(problem) or problem.has_gpu and (able.offloaded_boundaries or able.offloaded_saved)


def parks_anything(problem: PlacementProblem) -> bool:
    """Whether activations of any kind may rest on NVMe."""
    return parks_boundaries(problem) or parks_saved(problem)


def define_times(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
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
    if problem.exchanges:
        per_unit |= {"exchanged_ms": "exchanged"}
        per_stem |= {"stem_exchanged_ms": "exchanged"}
        v.unhidden_ms = _positive(model, "unhidden")
    if problem.spreads:
        per_unit |= {"spread_ms": "spread"}
        per_stem |= {"stem_spread_ms": "spread"}
    leaves, streams = offloads_anything(problem), problem.has_gpu and problem.capabilities.streamed_states
    disk = problem.has_gpu and problem.has_nvme
    if problem.has_accumulation:
        per_unit |= {
            "accumulated_ms": "accumulated",
            "repeat_weights_ms": "repeat_weights",
            "repeat_ms": "repeat",
        }
        per_stem |= {"stem_accumulated_ms": "accumulated"}
        per_unit |= {"repeat_left_ms": "repeat_left"} if leaves else {}
        per_unit |= {"disk_repeat_ms": "disk_repeat"} if disk else {}
    if leaves or streams:
        per_unit |= {"states_back_ms": "states_back", "left_ms": "left"}
    if leaves:
        per_unit |= {"returned_ms": "returned"}
    if disk:
        per_unit |= {
            "disk_read_ms": "disk_read",
            "disk_written_ms": "disk_written",
            "disk_backward_ms": "disk_backward",
        }
        per_unit |= {"gradients_written_ms": "gradients_written"} if parks_gradients(problem) else {}
    for attribute, kind in per_unit.items():
        setattr(v, attribute, [_positive(model, name(kind, index)) for index in units])
    for attribute, kind in per_stem.items():
        setattr(v, attribute, [_positive(model, name(kind, stem_name)) for stem_name in stem])
    v.loss_ms = _positive(model, "loss")
    v.end_ms = _positive(model, "end")
    v.step_ms = _positive(model, "step")


def _binary(model: highspy.Highs, column: str, *, allowed: bool = True) -> Column:
    return model.addVariable(0, 1 if allowed else 0, type=highspy.HighsVarType.kInteger, name=column)


def _positive(model: highspy.Highs, column: str) -> Column:
    return model.addVariable(0, highspy.kHighsInf, name=column)
