"""A step of several nodes: what one rank's step costs when homes are sharded inside a node, and what the network adds.

The node. Every unit's weights and states are there once, sharded over the node's ranks: each copies its share over its
own PCIe link, an all-gather makes the whole unit out of the shares, and a reduce-scatter of gradients leaves each rank
its share. The hardware profile describes the node with one of its GPUs: host memory, cores and disk are shared,
GPUs and their links are there once per rank. What a rank has for itself (its GPU; staging buffers, activations and the
process in host memory) is counted in full for each.

The network. Each node has its own copy, so only gradients cross: of each unit, when its last micro-batch's backward
has computed them, in the order in which they are final, one after the other over the node's link. The next step
begins when the last one has arrived, because the clip factor needs all of them; until then the network works beside
backward. So

    step = step without a network + how much later than the end of backward the last gradient is reduced
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lazytrain_plugin.errors import ConfigError, InfeasiblePlanError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import Event, Resource, StepTimes, simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile, UnitRole
from lazytrain_plugin.units import GIB

HOME_LINES = ("units: weights and states", "stem: weights and states")
"""What of a ledger a node has once."""
LINK_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "h2d_shared_bytes_per_s", "d2h_shared_bytes_per_s")


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
        """An all-gather or reduce-scatter of a unit inside a node."""
        return (self.ranks_per_node - 1) / self.ranks_per_node * num_bytes / self.inside_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTimes:
    """The predicted step of a rank, all ranks alike."""

    step_s: float
    network_s: float
    """How long the network works in a step."""
    exposed_s: float
    """The part of it that nothing hides."""
    wire_bytes: float
    """What a node sends in a step."""
    rank: StepTimes
    """The step without a network."""

    def tokens_per_s(self, cluster: Cluster, problem: PlacementProblem) -> float:
        """Of the whole job, at the largest micro-batch."""
        return cluster.ranks * problem.max_tokens * problem.accumulation_steps / self.step_s


def shard_problem(problem: PlacementProblem, cluster: Cluster) -> PlacementProblem:
    """The problem as one rank of the node sees its time: its share of every home, and the whole of its activations.

    For times only: what slots hold on the GPU is whole units, which `problem` counts.
    """
    count = cluster.ranks_per_node

    def share(cost: UnitCost) -> UnitCost:
        return replace(
            cost,
            weight_bytes=cost.weight_bytes // count,
            gradient_bytes=cost.gradient_bytes // count,
            remainder_bytes=cost.remainder_bytes // count,
            moment_bytes=cost.moment_bytes // count,
            accumulator_bytes=cost.accumulator_bytes // count,
            weight_h2d_s=cost.weight_h2d_s / count + cluster.inside_s(cost.weight_bytes),
            gradient_d2h_s=cost.gradient_d2h_s / count + cluster.inside_s(cost.gradient_bytes),
            gpu_update_s=cost.gpu_update_s / count,
            # cpu_update_s stays: a share of the elements by a share of the cores
        )

    return replace(
        problem,
        units=tuple(share(cost) for cost in problem.units),
        stem=tuple(share(cost) for cost in problem.stem),
        nvme_read_bytes_per_s=problem.nvme_read_bytes_per_s / count,
        nvme_write_bytes_per_s=problem.nvme_write_bytes_per_s / count,
    )


def predict_step(problem: PlacementProblem, plan: PlacementPlan, cluster: Cluster) -> ClusterTimes:
    """Replays the plan as one rank of the cluster.

    Args:
        problem: of one rank alone, as `build_problem` makes it.
    """
    times = simulate(shard_problem(problem, cluster), plan, record=True)
    trainable = {cost.name: cost.num_trainable for cost in (*problem.units, *problem.stem)}
    backward_end_s = max((e.end_s for e in times.events if e.name.startswith("backward ")), default=times.step_s)
    free_s = network_s = wire_bytes = 0.0
    for name, ready_s in sorted(_final_gradients(problem, times.events, backward_end_s), key=lambda pair: pair[1]):
        if trainable[name]:
            duration_s = cluster.reduce_s(trainable[name])
            free_s = max(free_s, ready_s) + duration_s
            network_s += duration_s
            wire_bytes += cluster.wire_bytes(trainable[name])
    exposed_s = max(0.0, free_s - backward_end_s)
    return ClusterTimes(
        step_s=times.step_s + exposed_s, network_s=network_s, exposed_s=exposed_s, wire_bytes=wire_bytes, rank=times
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


def node_host_bytes(problem: PlacementProblem, plan: PlacementPlan, cluster: Cluster) -> int:
    """Host memory of a node: the homes once, everything else once per rank."""
    ledger = account(problem, plan)
    own_bytes = sum(num_bytes for line, num_bytes in ledger.cpu.items() if line not in HOME_LINES)
    return ledger.need_bytes()["cpu"] + (cluster.ranks_per_node - 1) * own_bytes


def plan_for_cluster(
    model: ModelProfile,
    hardware: HardwareProfile,
    request: PlanRequest,
    cluster: Cluster,
    planner: Callable[[ModelProfile, HardwareProfile, PlanRequest], PlacementPlan] = make_plan,
) -> tuple[PlacementPlan, PlacementProblem, ClusterTimes]:
    """The better of two plans by the replay of the cluster's step: one made for a whole unit's copies over one PCIe
    link, one for a share's.

    Returns:
        The plan, the problem of one rank, and the predicted step.

    Raises:
        InfeasiblePlanError: a rank does not fit its GPU, or the ranks of a node its host memory.
    """
    problem = build_problem(model, hardware, request)
    found: list[tuple[PlacementPlan, ClusterTimes]] = []
    have_bytes = problem.cpu_budget_bytes
    refusal: InfeasiblePlanError | None = None
    for links in sorted({1, cluster.ranks_per_node}):
        machine = replace(hardware, **{rate: getattr(hardware, rate) * links for rate in LINK_RATES})
        budget_bytes = have_bytes
        for _ in range(4):  # what each rank has for itself is known once there is a plan
            try:
                plan = planner(model, machine, replace(request, cpu_budget_bytes=budget_bytes))
            except InfeasiblePlanError as error:
                refusal = error
                break
            excess_bytes = node_host_bytes(problem, plan, cluster) - have_bytes
            if excess_bytes <= 0:
                found.append((plan, predict_step(problem, plan, cluster)))
                break
            budget_bytes -= excess_bytes
            if budget_bytes <= 0:
                break
    if not found:
        raise InfeasiblePlanError(
            f"a node's {have_bytes / GIB:.0f} GiB of host memory don't hold the model and the buffers of "
            f"{cluster.ranks_per_node} ranks; use fewer ranks per node, a smaller micro-batch, or more memory"
        ) from refusal
    plan, times = min(found, key=lambda pair: pair[1].step_s)
    return replace(plan, predicted_step_s=times.step_s, digests=dict(problem.digests)), problem, times
