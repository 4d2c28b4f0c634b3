"""What a job of several ranks adds to the engine: who belongs to it, and one plan for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from lazytrain_plugin.comm import threshold
from lazytrain_plugin.comm.between_nodes import BetweenNodes
from lazytrain_plugin.comm.links import Line, measure_links
from lazytrain_plugin.comm.predict import TABLE_LATENCY_S, coded_bytes_per_element
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.config.schema import LazyTrainConfig
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.cluster import Cluster, fp32_wire_bytes
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import StepTimes
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.runtime.gradient_exchange import GradientExchange
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.update import ClientOptimizer, NativeAdamW
from lazytrain_plugin.units import format_bytes, gbit_to_bytes_per_s
from lazytrain_plugin.vocab import Shard

if TYPE_CHECKING:
    from lazytrain_plugin.integration.plan_watch import ObservedStep
    from lazytrain_plugin.integration.planning import Planner

logger = logging.getLogger(__name__)


_groups: dict[tuple, tuple[Any, RankGroup]] = {}
"""By ranks, device and nodes: the job's process group at that time, and the group of ranks."""


def make_rank_group(group: Any, device: torch.device, config: LazyTrainConfig) -> RankGroup | None:
    """The ranks of this job; None for one rank.

    Raises:
        ConfigError: ranks that do not all train the whole model, or nodes that can't be.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        return None
    if dist.get_world_size(group) != size:
        raise ConfigError(
            f"LazyTrain trains with data parallelism, and of this job's {size} ranks only {dist.get_world_size(group)} "
            "share a model; leave model, sequence and expert parallelism out of the DeepSpeed config"
        )
    per_node = config.gradient_comm.ranks_per_node
    topology = None if per_node is None else Topology.consecutive(size, per_node)
    # Kept for the next engine: process groups that were destroyed can't be made again (their names are taken).
    key = tuple(dist.get_process_group_ranks(group)), device, topology, config.shard
    world, ranks = _groups.get(key, (None, None))
    if world is not dist.group.WORLD:
        ranks = RankGroup(device, group=group, topology=topology, shard=Shard(config.shard))
        _groups[key] = dist.group.WORLD, ranks
    over = "divided over all ranks" if ranks.shards_job else "on each node"
    text = "training on %s; the ranks of a node have one copy of the weights; optimizer states are %s"
    logger.info(text, ranks.hops.topology.describe(), over)
    return ranks


def make_between_nodes(ranks: RankGroup, config: LazyTrainConfig) -> BetweenNodes:
    """How the nodes of this job average gradients; every rank makes one at the same point."""
    smallest = config.gradient_comm.smallest_bucket_elements
    return BetweenNodes(ranks.hops, config.wire_gradient_bits, smallest, of_parts=ranks.shards_job)


def links_of(ranks: RankGroup, between: BetweenNodes, config: LazyTrainConfig) -> Cluster | None:
    """The links on which gradients meet, as measured by all ranks or given; None where a plan is given.

    Every rank calls it at the same point.
    """
    if config.plan.path is not None:
        return None
    nodes, local = ranks.num_nodes, ranks.local_size
    given_gbit = config.gradient_comm.network_gbit
    links = measure_links(ranks.hops, between, network=given_gbit is None)
    in_codes = between.off_because is None and between.smallest_bucket_elements < threshold.NEVER
    fp32_bytes = fp32_wire_bytes(shards_job=ranks.shards_job)
    wire_bytes = coded_bytes_per_element(nodes, of_parts=ranks.shards_job) if in_codes else fp32_bytes
    if given_gbit is not None:
        each = {"network_bytes_per_s": gbit_to_bytes_per_s(given_gbit), "latency_s": TABLE_LATENCY_S}
    else:
        fp32, coded = (_rate(line, (nodes - 1) / nodes * size) for line, size in (
            (links.fp32, fp32_bytes), (links.coded, wire_bytes)))  # fmt: skip
        network_bytes_per_s, latency_s = coded if links.coded is not None else fp32
        each = {
            "network_bytes_per_s": network_bytes_per_s,
            "latency_s": latency_s,
            "fp32_bytes_per_s": fp32[0],
            "fp32_latency_s": fp32[1],
        }
        if links.weights is not None:
            weights = _rate(links.weights, (nodes - 1) / nodes * torch.bfloat16.itemsize)
            each |= {"weights_bytes_per_s": weights[0], "weights_latency_s": weights[1]}
    inside_bytes_per_s, inside_latency_s = _rate(links.inside, (local - 1) / local * torch.bfloat16.itemsize)
    cluster = Cluster(
        nodes=nodes,
        ranks_per_node=local,
        inside_bytes_per_s=inside_bytes_per_s,
        inside_latency_s=inside_latency_s,
        wire_bytes_per_element=wire_bytes,
        fp32_below_elements=between.smallest_bucket_elements if in_codes else 0,
        shards_job=ranks.shards_job,
        **each,
    )
    logger.info("links of this job: %s", _describe_links(cluster, given=given_gbit is not None))
    return cluster


NO_LINK_BYTES_PER_S = 1e15
"""Where nothing crosses."""


def _rate(line: Line | None, element_bytes: float) -> tuple[float, float]:
    """Bytes per second and latency of a way on which each element of a unit sends so many bytes."""
    if line is None or not element_bytes:
        return NO_LINK_BYTES_PER_S, 0.0
    return element_bytes / line.element_s, line.latency_s


def _describe_links(cluster: Cluster, *, given: bool) -> str:
    parts = []
    if cluster.nodes > 1:
        source = "given" if given else "measured, the making of what is sent included"
        parts.append(f"{cluster.network_bytes_per_s * 8 / 1e9:.3g} Gbit/s between nodes ({source})")
    if cluster.ranks_per_node > 1:
        parts.append(f"{cluster.inside_bytes_per_s / 1e9:.3g} GB/s inside a node (measured)")
    return ", ".join(parts)


def describe_exchange(exchange: GradientExchange) -> str:
    """What nodes send each other, in which format, once a plan is placed."""
    between, sizes = exchange.between, [unit.layout.state_numel for unit in exchange.units]
    sent = format_bytes(sum(map(between.sent_bytes, sizes)))
    text = f"gradients between {exchange.num_nodes} nodes: a node sends {sent} in each backward"
    if between.of_parts:
        text += f", and {format_bytes(sum(map(between.weight_bytes, sizes)))} of updated weights after each step"
    in_fp32 = [size for size in sizes if not between.uses_codes(size)]
    if between.off_because is not None:
        return f"{text}, all in fp32 ({between.off_because})"
    if between.smallest_bucket_elements >= threshold.NEVER:
        return f"{text}, all in fp32 (measured: codes are not faster at any size on this link)"
    bf16 = format_bytes(between.bf16_bytes(sum(sizes)))
    text += f" (bf16: {bf16}), in 8-bit codes with a bf16 scale per 64 elements"
    if in_fp32:
        smallest = between.smallest_bucket_elements
        text += f", but for {len(in_fp32)} of {len(sizes)} units in fp32, which have fewer than {smallest} elements"
    return text


def refuse_for_several_ranks(updater: NativeAdamW | ClientOptimizer | None) -> None:
    """Raises ConfigError for what this version does for one rank only."""
    if updater is not None and not updater.native:
        raise ConfigError(
            "Several ranks train with the native AdamW update only: other optimizers look at whole tensors, of which "
            'each rank updates a part. Use AdamW (or Adam) with "optimizer.implementation": "native", or one process'
        )


def shared_hardware(profile: HardwareProfile, ranks: RankGroup) -> HardwareProfile:
    """The machine, from the profile with this rank's share of its memory and cores."""
    size = ranks.local_size
    rates = {
        name: getattr(profile, name) * size
        for bits in (32, 8)
        for name in (f"cpu_update_{bits}bit_parameters_per_s", f"cpu_update_{bits}bit_shared_parameters_per_s")
    }
    return replace(profile, cpu_bytes=profile.cpu_bytes * size, cpu_free_bytes=profile.cpu_free_bytes * size, **rates)


def shared_request(request: PlanRequest, ranks: RankGroup, links: Cluster | None) -> PlanRequest:
    """What is asked of the planner where ranks of a machine train together."""
    shard = Shard.JOB if ranks.shards_job else Shard.NODE
    return replace(request, local_ranks=ranks.local_size, nodes=ranks.num_nodes, shard=shard, cluster=links)


class AgreedPlanner:
    """The first rank's planner, for every rank. Plans are for the largest batch of any rank.

    Args:
        make: the planner; called on the first rank only.
        adapts: whether it may find a better plan while the model trains.
    """

    def __init__(self, ranks: RankGroup, make: Callable[[], Planner], *, adapts: bool) -> None:
        self._ranks = ranks
        self._adapts = adapts
        self._planner: Planner | None = None
        self._planned_tokens = 0

        def begin() -> None:
            self._planner = make()

        ranks.from_first(begin, "start of the planner")

    def first_plan(self) -> PlacementPlan:
        """As `Planner.first_plan`, on every rank."""
        return self._from_first(lambda: self._planner.first_plan())

    def plan_for(self, num_tokens: int | None) -> PlacementPlan | None:
        """Every rank calls it before each of its forwards in training."""
        largest = self._ranks.maximum([num_tokens or 0], "comparison of batch sizes")[0]
        if largest <= self._planned_tokens:
            return None
        plan = self._from_first(lambda: self._planner.plan_for(largest))
        self._planned_tokens = largest  # not where no plan was found: a smaller batch asks again
        return plan

    def layers_compiled(self) -> PlacementPlan | None:
        """As `Planner.layers_compiled`; every rank calls it at the same point."""
        return self._from_first(lambda: self._planner.layers_compiled())

    def _from_first(self, make: Callable[[], PlacementPlan | None]) -> PlacementPlan | None:
        def as_text() -> str | None:
            plan = make()
            return None if plan is None else plan.to_json()

        text = self._ranks.from_first(as_text, "planning")
        return None if text is None else PlacementPlan.from_json(text)

    def better_plan(self) -> PlacementPlan | None:
        """As `Planner.better_plan`, on every rank. Each calls it when a window of micro-batches begins."""
        if not self._adapts:
            return None
        found, error = None, None
        if self._planner is not None:
            try:
                found = self._planner.better_plan()
            except Exception as raised:  # which the others, who wait, must hear of
                error = raised
        if not self._ranks.maximum([int(found is not None or error is not None)], "look for a better plan")[0]:
            return None

        def answer() -> PlacementPlan:
            if error is not None:
                raise error
            return found

        return self._from_first(answer)

    def predicted(self, plan: PlacementPlan) -> StepTimes | None:
        """The replay on the first rank; None on the others, which have no planner."""
        return self._planner.predicted(plan) if self._planner is not None else None

    def timeline(self) -> dict[str, Any] | None:
        """As `predicted`."""
        return self._planner.timeline() if self._planner is not None else None

    def observe(self, measured: ObservedStep) -> None:
        """The first rank keeps the rates for the next run."""
        if self._planner is not None:
            self._planner.observe(measured)

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()
