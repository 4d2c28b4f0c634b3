"""What the program minimizes: step time; among equally fast placements the one that moves and holds less."""

from __future__ import annotations

import highspy

from lazytrain_plugin.plan.problem import MIB_PER_BYTE, PlacementProblem
from lazytrain_plugin.plan.variables import Variables

TIE_MS_PER_MIB = 1e-5
"""Price of a byte: 100 GiB weigh as much as 1 ms, far below what a step can be told apart by."""


def set_objective(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """min step + epsilon (bytes on the GPU that are not needed + bytes that cross the links) (Eq. 16)."""
    held = sum(cost.kept_bytes * MIB_PER_BYTE * v.keep[u] for u, cost in enumerate(problem.units)) + sum(
        (cost.weight_bytes + cost.state_bytes) * MIB_PER_BYTE * v.resident[u] for u, cost in enumerate(problem.units)
    )
    stem = sum(cost.state_bytes * MIB_PER_BYTE * v.stem_on_gpu[s] for s, cost in enumerate(problem.stem))
    moved = sum(
        (2 * cost.weight_bytes * v.stream[u] + cost.weight_bytes * v.mirror[u]) * MIB_PER_BYTE
        for u, cost in enumerate(problem.units)
    )
    # `minimize` would solve at once.
    model.setObjective(v.step_ms + TIE_MS_PER_MIB * (held + stem + moved), highspy.ObjSense.kMinimize)
