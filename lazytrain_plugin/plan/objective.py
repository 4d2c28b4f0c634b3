"""What the program minimizes: step time; among equally fast placements the one that moves and holds less."""

from __future__ import annotations

import highspy

from lazytrain_plugin.plan.capacity import offloaded_mib, saved_mib
from lazytrain_plugin.plan.problem import PlacementProblem, mib
from lazytrain_plugin.plan.program_inputs import parked_mib
from lazytrain_plugin.plan.variables import Expression, Variables
from lazytrain_plugin.vocab import Tier

TIE_MS_PER_MIB = 1e-5
"""Price of a byte: 100 GiB weigh as much as 1 ms, far below what a step can be told apart by."""
NVME_WEAR = 10
"""A byte on NVMe counts as this many: it is written in every step, and wears the disk."""


def set_objective(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """min step + epsilon (bytes on the GPU that are not needed + bytes that cross the links + NVMe wear) (Eq. 21)."""
    held: Expression = 0
    moved: Expression = 0
    for u, cost in enumerate(problem.units):
        weights, states = mib(cost.weight_bytes), mib(cost.rest_state_bytes)
        held = held + saved_mib(cost, v, u, Tier.GPU)
        held = held + (weights + mib(cost.resident_state_bytes + cost.resident_gradient_bytes)) * v.homes["resident"][u]
        moved = moved + 2 * weights * v.streamed(u) + weights * v.homes["mirror"][u]
        moved = moved + 2 * states * v.streams_states(u) + 2 * offloaded_mib(cost, v, u)
        moved = moved + NVME_WEAR * (states * v.on_nvme(u) + weights * v.weights_on_nvme(u))
        gradients = mib(cost.accumulator_bytes or cost.gradient_rest_bytes)
        moved = moved + NVME_WEAR * (parked_mib(problem, v, u) + gradients * v.gradients_on_nvme(u))
    for s, cost in enumerate(problem.stem):
        held = held + mib(cost.resident_state_bytes + cost.resident_gradient_bytes) * v.stem_on_gpu[s]
        moved = moved + 2 * mib(cost.rest_state_bytes) * v.stem_streams[s]
    # `minimize` would solve at once.
    model.setObjective(v.step_ms + TIE_MS_PER_MIB * (held + moved), highspy.ObjSense.kMinimize)
