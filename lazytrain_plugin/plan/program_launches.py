"""The host's launches in the program: one function per equation, with the number of docs/formulation.md. In ms."""

from __future__ import annotations

import highspy

from lazytrain_plugin.plan.launches import backward_launch_s, forward_launch_s
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost, ms
from lazytrain_plugin.plan.variables import Expression, Variables
from lazytrain_plugin.vocab import Activations


def add_launches(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """A step takes as long as the host needs to launch it (Eq. 28). Row: `launches`.

    step >= A (sum_u (launch(u) + sum_a (launch(a,u) - launch(recompute,u)) saved(a,.,u)) + head) + updates by the GPU
    The host has waited for the clip factor when a step begins, and the GPU does not end it before the last launch.
    """
    costs = (*problem.units, *problem.stem)
    if not any(cost.forward_launch_s for cost in costs):
        return
    total: Expression = 0
    for u, cost in enumerate(problem.units):
        again = _launch_s(cost, Activations.RECOMPUTE)
        passes: Expression = ms(again)
        for (activations, _), column in v.saved[u].items():
            passes = passes + ms(_launch_s(cost, activations) - again) * column
        total = total + problem.accumulation_steps * passes
        if cost.num_trainable:
            total = total + ms(cost.update_launch_s) * (
                v.homes["resident"][u] + cost.state_chunks * v.streams_states(u)
            )
    for s, cost in enumerate(problem.stem):
        total = total + ms(problem.accumulation_steps * cost.forward_launch_s)
        if cost.num_trainable:
            total = total + ms(cost.update_launch_s) * (v.stem_on_gpu[s] + cost.state_chunks * v.stem_streams[s])
    model.addConstr(v.step_ms >= total, name="launches")


def _launch_s(cost: UnitCost, activations: Activations) -> float:
    """Of a micro-batch; codes, which are chosen later, only add to it."""
    return forward_launch_s(cost, activations, coded=False) + backward_launch_s(cost, activations, coded=False)
