"""A step of several ranks and nodes: what one rank's step costs, and what the exchange of gradients adds.

The node. The hardware profile describes it with one of its GPUs: host memory, cores and disk are shared, GPUs and their
links are there once per rank. `PlanRequest.local_ranks` says how many share it; the problem then holds what the runtime
does: homes are there once, each rank copies whole units over its own link, updates its part, and has activations,
buffers and a process of its own.

The exchange. Of each unit, in each micro-batch's backward as soon as its gradients are computed, the ranks of a node
exchange their parts over the links inside it, and nodes average those over the network. One unit follows the other. The
next step begins when the last has arrived, because the clip factor needs all of them; until then the links work beside
backward. So

    step = step without them + how much later than the end of backward the last gradient is reduced

or the time that they need for all micro-batches, if that is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import Event, Resource, StepTimes, simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile, UnitRole
from lazytrain_plugin.vocab import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of one kind and the links between and inside them.

    Raises:
        ConfigError: fewer than one node or rank, or a bandwidth that isn't positive.
    """

    nodes: int
    ranks_per_node: int
    network_bytes_per_s: float
    """Of a node's link, in each direction."""
    inside_bytes_per_s: float
    """Of a GPU's link to the others of its node, in each direction."""
    wire_bytes_per_element: float
    """What an all-reduce between many nodes sends per element of a gradient, contributions and results together."""
    latency_s: float = 0.0
    """Of one reduction between nodes."""

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node) < 1:
            raise ConfigError(f"{self.nodes} nodes of {self.ranks_per_node} ranks; a job has at least one of each")
        if self.network_bytes_per_s <= 0 or self.inside_bytes_per_s <= 0:
            raise ConfigError("a link's bandwidth is not above 0; give --network-gbit and --inside-gbit above 0")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def wire_bytes(self, num_elements: int) -> float:
        """What leaves (and enters) a node to reduce so many elements, by all its ranks together."""
        return (self.nodes - 1) / self.nodes * num_elements * self.wire_bytes_per_element

    def reduce_s(self, num_elements: int) -> float:
        """One reduction between nodes, each rank of a node with its share."""
        if self.nodes == 1:
            return 0.0
        return self.latency_s + self.wire_bytes(num_elements) / self.network_bytes_per_s

    def inside_s(self, num_bytes: int) -> float:
        """One exchange of a unit's parts inside a node."""
        return (self.ranks_per_node - 1) / self.ranks_per_node * num_bytes / self.inside_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTimes:
    """The predicted step of a rank, all ranks alike."""

    step_s: float
    network_s: float
    """How long the network works in a step."""
    exposed_s: float
    """What of the exchange, inside nodes and between them, nothing hides."""
    wire_bytes: float
    """What a node sends in a step."""
    rank: StepTimes
    """The step without the exchange."""

    def tokens_per_s(self, cluster: Cluster, problem: PlacementProblem) -> float:
        """Of the whole job, at the largest micro-batch."""
        return cluster.ranks * problem.max_tokens * problem.accumulation_steps / self.step_s


def predict_step(problem: PlacementProblem, plan: PlacementPlan, cluster: Cluster) -> ClusterTimes:
    """Replays the plan as one rank of the cluster.

    Args:
        problem: of one of the ranks of a node, as `build_problem` makes it for their number.
    """
    times = simulate(problem, plan, record=True)
    costs = {cost.name: cost for cost in (*problem.units, *problem.stem)}
    stays = {unit.name: unit.states == Tier.GPU for unit in (*plan.units, *plan.stem)}
    backward_end_s = max((e.end_s for e in times.events if e.name.startswith("backward ")), default=times.step_s)
    free_s = links_s = network_s = wire_bytes = 0.0
    for name, ready_s in sorted(_final_gradients(problem, times.events, backward_end_s), key=lambda pair: pair[1]):
        cost = costs[name]
        if not cost.num_trainable:
            continue
        # Where every rank updates the whole unit, the means are gathered as well.
        inside_s = (2 if stays[name] else 1) * cluster.inside_s(cost.gradient_bytes)
        between_s = cluster.reduce_s(cost.num_trainable)
        free_s = max(free_s, ready_s) + inside_s + between_s
        links_s += inside_s + between_s
        network_s += between_s
        wire_bytes += cluster.wire_bytes(cost.num_trainable)
    micro_batches = problem.accumulation_steps
    exposed_s = max(0.0, free_s - backward_end_s, micro_batches * links_s - times.step_s)
    return ClusterTimes(
        step_s=times.step_s + exposed_s,
        network_s=micro_batches * network_s,
        exposed_s=exposed_s,
        wire_bytes=micro_batches * wire_bytes,
        rank=times,
    )


def _final_gradients(
    problem: PlacementProblem, events: tuple[Event, ...], backward_end_s: float
) -> Iterator[tuple[str, float]]:
    """When the last micro-batch has computed each unit's gradient."""
    ends_s = {e.name: e.end_s for e in events if e.resource == Resource.COMPUTE}  # the last of a name stays
    for cost in problem.units:
        yield cost.name, ends_s.get(f"backward {cost.name}", backward_end_s)
    for cost in problem.stem:
        early = cost.role == UnitRole.HEAD and not problem.tied
        yield cost.name, ends_s.get(f"loss {cost.name}", backward_end_s) if early else backward_end_s


def plan_for_cluster(
    model: ModelProfile,
    hardware: HardwareProfile,
    request: PlanRequest,
    cluster: Cluster,
    planner: Callable[[ModelProfile, HardwareProfile, PlanRequest], PlacementPlan] = make_plan,
) -> tuple[PlacementPlan, PlacementProblem, ClusterTimes]:
    """The plan of a rank, with the cluster's step time.

    Returns:
        The plan, the problem of one rank, and the predicted step.

    Raises:
        InfeasiblePlanError: a rank does not fit its GPU, or the ranks of a node its host memory.
    """
    request = replace(request, local_ranks=cluster.ranks_per_node, nodes=cluster.nodes)
    problem = build_problem(model, hardware, request)
    plan = planner(model, hardware, request)
    times = predict_step(problem, plan, cluster)
    return replace(plan, predicted_step_s=times.step_s), problem, times
