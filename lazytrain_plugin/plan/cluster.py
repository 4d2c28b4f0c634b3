"""`Cluster`: nodes of one kind and the links on which their ranks exchange gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lazytrain_plugin.errors import ConfigError

if TYPE_CHECKING:
    from lazytrain_plugin.plan.problem import PlacementProblem


def fp32_wire_bytes(*, shards_job: bool) -> int:
    """Of an element that is averaged in fp32 between many nodes: contributions and results together, or contributions
    alone where states are divided over the job."""
    return 4 if shards_job else 8


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
    inside_latency_s: float = 0.0
    """Of one exchange inside a node."""
    fp32_below_elements: int = 0
    """Units with fewer trained elements are averaged in fp32, whatever the others travel in."""
    fp32_bytes_per_s: float | None = None
    """Of the network for those; None: as for the others. Measured rates differ: codes are made on the way."""
    fp32_latency_s: float | None = None
    shards_job: bool = False
    """States are divided over all ranks: gradients go to the ranks that update them and not back, and nodes send each
    other updated weights."""
    weights_bytes_per_s: float | None = None
    """Of the network for updated weights; None: as for gradients."""
    weights_latency_s: float | None = None

    def __post_init__(self) -> None:
        if min(self.nodes, self.ranks_per_node) < 1:
            raise ConfigError(f"{self.nodes} nodes of {self.ranks_per_node} ranks; a job has at least one of each")
        if self.network_bytes_per_s <= 0 or self.inside_bytes_per_s <= 0:
            raise ConfigError("a link's bandwidth is not above 0; give --network-gbit and --inside-gbit above 0")

    def rounded(self) -> Cluster:
        """With rates to the next power of two, and latencies and the smallest unit in codes left out: the same for
        measurements that differ a little."""
        rates = {
            name: 2.0 ** round(math.log2(rate))
            for name in ("network_bytes_per_s", "inside_bytes_per_s", "fp32_bytes_per_s", "weights_bytes_per_s")
            if (rate := getattr(self, name)) is not None
        }
        none = dict.fromkeys(("latency_s", "inside_latency_s"), 0.0)
        same = dict.fromkeys(("fp32_latency_s", "weights_latency_s"))
        return replace(self, **rates, **none, **same, fp32_below_elements=0)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def in_fp32(self, num_elements: int) -> bool:
        """Whether a unit of so many trained elements is too small for codes."""
        return num_elements < self.fp32_below_elements

    def wire_bytes(self, num_elements: int) -> float:
        """What leaves (and enters) a node to reduce so many elements, by all its ranks together."""
        in_fp32 = self.in_fp32(num_elements)
        each = fp32_wire_bytes(shards_job=self.shards_job) if in_fp32 else self.wire_bytes_per_element
        return (self.nodes - 1) / self.nodes * num_elements * each

    def reduce_s(self, num_elements: int) -> float:
        """One reduction between nodes, each rank of a node with its share."""
        if self.nodes == 1 or not num_elements:
            return 0.0
        latency_s, bytes_per_s = self.latency_s, self.network_bytes_per_s
        if self.in_fp32(num_elements):
            latency_s = latency_s if self.fp32_latency_s is None else self.fp32_latency_s
            bytes_per_s = self.fp32_bytes_per_s or bytes_per_s
        return latency_s + self.wire_bytes(num_elements) / bytes_per_s

    def spread_bytes(self, num_bytes: float) -> float:
        """What leaves (and enters) a node for so many bytes of updated weights, by all its ranks together."""
        return (self.nodes - 1) / self.nodes * num_bytes if self.shards_job else 0.0

    def spread_s(self, num_bytes: float) -> float:
        """What so many bytes of updated weights take to come to the other nodes."""
        sent_bytes = self.spread_bytes(num_bytes)
        if not sent_bytes:
            return 0.0
        latency_s = self.latency_s if self.weights_latency_s is None else self.weights_latency_s
        return latency_s + sent_bytes / (self.weights_bytes_per_s or self.network_bytes_per_s)

    def inside_s(self, num_bytes: int) -> float:
        """One exchange of a unit's parts inside a node."""
        if self.ranks_per_node == 1 or not num_bytes:
            return 0.0
        sent_bytes = (self.ranks_per_node - 1) / self.ranks_per_node * num_bytes
        return self.inside_latency_s + sent_bytes / self.inside_bytes_per_s


def on_cluster(problem: PlacementProblem, cluster: Cluster | None) -> PlacementProblem:
    """The problem of a rank of the cluster, whose gradients meet those of the others; None: they do so in no time."""

    def meeting(cost):
        if cluster is None:
            return replace(cost, exchange_s=0.0, network_s=0.0, gather_s=0.0, spread_s=0.0)
        between_s = cluster.reduce_s(cost.num_trainable)
        trained_bytes = cost.gradient_bytes if cost.num_trainable else 0
        inside_s, spread_s = cluster.inside_s(trained_bytes), cluster.spread_s(trained_bytes)
        return replace(
            cost,
            exchange_s=inside_s + between_s,
            network_s=between_s,
            gather_s=inside_s + spread_s,
            spread_s=spread_s,
        )

    return replace(problem, units=tuple(map(meeting, problem.units)), stem=tuple(map(meeting, problem.stem)))
