"""A step of several ranks and nodes: what one rank's step costs, and what the exchange of gradients adds.

The node. The hardware profile describes it with one of its GPUs: host memory, cores and disk are shared, GPUs and their
links are there once per rank. `PlanRequest.local_ranks` says how many share it; the problem then holds what the runtime
does: homes are there once, each rank copies whole units over its own link, updates its part, and has activations,
buffers and a process of its own.

The exchange. Of each unit, in each micro-batch's backward as soon as its gradients are computed, the ranks of a node
exchange their parts over the links inside it, and nodes average those over the network. One unit follows the other, and
backward waits where more gradients would be under way than there are slots for. The next step begins when the last has
arrived, because the clip factor needs all of them. Where states are divided over the whole job, updated weights cross
the network as well, unit by unit before the forward that needs them. `PlanRequest.cluster` gives the planner the links,
and the simulator replays the exchange as a resource of its own; here is what of the step it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazytrain_plugin.plan.cluster import Cluster, on_cluster
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import StepTimes, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTimes:
    """The predicted step of a rank, all ranks alike."""

    step_s: float
    network_s: float
    """How long the network works in a step."""
    exposed_s: float
    """What of the exchange, inside nodes and between them, nothing hides."""
    wire_bytes: float
    """What a node sends in a step, gradients and updated weights."""
    weight_bytes: float
    """Of it updated weights."""
    rank: StepTimes
    """The step without the exchange."""

    def tokens_per_s(self, cluster: Cluster, problem: PlacementProblem) -> float:
        """Of the whole job, at the largest micro-batch."""
        return cluster.ranks * problem.max_tokens * problem.accumulation_steps / self.step_s


def predict_step(problem: PlacementProblem, plan: PlacementPlan, cluster: Cluster) -> ClusterTimes:
    """Replays the plan as one rank of the cluster.

    Args:
        problem: of one of the ranks of a node, as `build_problem` makes it for their number; for any links.
    """
    meeting = on_cluster(problem, cluster)
    alone = simulate(on_cluster(problem, None), plan)
    step_s = simulate(meeting, plan).step_s
    costs = (*meeting.units, *meeting.stem)
    weight_bytes = sum(cluster.spread_bytes(cost.gradient_bytes) for cost in costs if cost.num_trainable)
    gradient_bytes = problem.accumulation_steps * sum(cluster.wire_bytes(cost.num_trainable) for cost in costs)
    return ClusterTimes(
        step_s=step_s,
        network_s=sum(problem.accumulation_steps * cost.network_s + cost.spread_s for cost in costs),
        exposed_s=max(0.0, step_s - alone.step_s),
        wire_bytes=gradient_bytes + weight_bytes,
        weight_bytes=weight_bytes,
        rank=alone,
    )
