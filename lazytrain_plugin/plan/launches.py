"""What the host does for a step on a GPU: it launches. Small micro-batches are computed faster than they are launched.

A layer's kernels are launched one after the other by Python, in its forward and when it runs again, and by autograd in
its backward; the executor adds what moves weights and gradients and sums norms, and the launches of updates. All this
takes as long for few tokens as for many. The host runs ahead of the GPU and waits for it in one place, for the clip
factor in `step()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.unit_cost import UnitCost
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import UnitProfile, UnitRole
from lazytrain_plugin.vocab import Activations, Updater

if TYPE_CHECKING:
    from lazytrain_plugin.plan.problem import PlacementProblem

LAYER_FACTOR = 2.0
"""What an operator of a layer takes, of a launch from Python: modules, views, the layer's own lines. 39 operators of a
Qwen2 layer take 1.25 ms where one alone takes 15 us (benchmarks/host_time.py)."""
BACKWARD_FACTOR = 1.2
"""Autograd's launches of a layer where they are not measured, as a share of its forward's: more of them, in C++."""
OBSERVED_FACTOR = 2.4
"""A layer that saves single operators, or codes, passes each of its operators through Python once more."""
OWN_FORWARD = 10
OWN_BACKWARD = 16
"""What the executor itself does for a unit takes the host as long as so many operators (benchmarks/host_time.py)."""
UPDATE = 12
"""The same of an update by the GPU, for each chunk where states pass it."""
LOSS = 40
"""The same of head and loss, forward and backward."""


def launch_costs(unit: UnitProfile, hardware: HardwareProfile) -> dict[str, float]:
    """The fields of a `UnitCost` that say how long the host launches; {} where that is not known."""
    launch_s = hardware.launch_s
    if not hardware.has_gpu or not launch_s:
        return {}
    costs = {"update_launch_s": UPDATE * launch_s}
    if unit.role != UnitRole.LAYER and unit.flop_per_token:  # head and loss
        return costs | {"forward_launch_s": LOSS * launch_s}
    forward_s = unit.forward_launch_s
    forward_s = LAYER_FACTOR * unit.num_operators * launch_s if forward_s is None else forward_s
    if not forward_s:
        return costs
    backward_s = unit.backward_launch_s
    backward_s = BACKWARD_FACTOR * forward_s if backward_s is None else backward_s
    return costs | {
        "forward_launch_s": forward_s + OWN_FORWARD * launch_s,
        "backward_launch_s": backward_s + OWN_BACKWARD * launch_s,
    }


def forward_launch_s(cost: UnitCost, activations: Activations, *, coded: bool) -> float:
    """Of a unit that saves so; `coded`: in fewer bits."""
    observed = coded or activations not in (Activations.RECOMPUTE, Activations.KEEP)
    return cost.forward_launch_s * (OBSERVED_FACTOR if observed else 1.0)


def backward_launch_s(cost: UnitCost, activations: Activations, *, coded: bool) -> float:
    """With what runs again."""
    if activations == Activations.KEEP:
        return cost.backward_launch_s
    return cost.backward_launch_s + forward_launch_s(cost, activations, coded=coded)


class Launches(NamedTuple):
    """Host seconds for a unit."""

    forward_s: float
    backward_s: float
    """With what runs again."""
    update_s: float
    """0 where the CPU updates."""


def launches_of(cost: UnitCost, unit: UnitPlan) -> Launches:
    """What launching a unit takes under a plan."""
    coded = min(unit.saved_bits, unit.boundary_bits) < 16
    update_s = 0.0
    if unit.updater == Updater.GPU and cost.num_trainable:
        update_s = cost.update_launch_s * (cost.state_chunks if unit.streams_states else 1)
    return Launches(
        forward_launch_s(cost, unit.activations, coded=coded),
        backward_launch_s(cost, unit.activations, coded=coded),
        update_s,
    )


def launches_are_slower(problem: PlacementProblem, plan: PlacementPlan, measured_s: Mapping[str, float]) -> float:
    """By which factor the host launches more slowly than planned; 0: nothing is known.

    Args:
        measured_s: host time to launch the forward, of some units by name.
    """
    known = [
        (measured_s[cost.name], launches_of(cost, unit).forward_s)
        for cost, unit in zip(problem.units, plan.units, strict=True)
        if cost.name in measured_s
    ]
    planned_s = sum(planned for _, planned in known)
    return sum(measured for measured, _ in known) / planned_s if planned_s else 0.0


BOUND_FRAC = 0.02
"""Share of a step that the GPU waits for launches from which on it is said."""


def launch_remark(launching_s: float, launch_waits_s: float, step_s: float) -> str:
    """What a person should know of a step that launches make longer; "" where they don't."""
    if launch_waits_s <= BOUND_FRAC * step_s:
        return ""
    return (
        f"host launches: {launching_s:.3g} s of {step_s:.3g} s, for which the GPU waits {launch_waits_s:.2g} s; "
        "a larger micro-batch or torch_compile would help"
    )
