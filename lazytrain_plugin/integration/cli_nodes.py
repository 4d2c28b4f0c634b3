"""`lazytrain plan --nodes ...`: what a job of several nodes would do, for clusters that one does not have."""

from __future__ import annotations

import math
from dataclasses import replace

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lazytrain_plugin.comm.predict import TABLE_LATENCY_S, coded_bytes_per_element, predicted_speedup
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.cluster import Cluster, fp32_wire_bytes
from lazytrain_plugin.plan.network import predict_step
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.units import MIB, format_bytes, gbit_to_bytes_per_s
from lazytrain_plugin.vocab import Fidelity, Shard

EXAMPLE_BYTES = {"32 MiB": 32 * MIB, "32 KiB": 32 * 1024}


def wire_bytes_per_element(nodes: int, *, shards_job: bool = False) -> dict[int, float]:
    """What is sent of a gradient's element, in codes, or sums in fp32, as `gradient_comm.bits` says: both ways of an
    all-reduce, or one where states are divided over the job."""
    return {
        8: coded_bytes_per_element(nodes, of_parts=shards_job),
        16: fp32_wire_bytes(shards_job=shards_job),
    }


def cluster_of(
    machine: HardwareProfile,
    fidelity: Fidelity,
    nodes: int,
    ranks_per_node: int,
    network_gbit: float | None,
    inside_gbit: float | None,
    gradient_bits: int | None,
    shard: Shard = Shard.NODE,
) -> Cluster | None:
    """The cluster of the command's options; None for one rank.

    Raises:
        ConfigError: several nodes without `network_gbit` or one with it, another number of bits, or a bandwidth that
            isn't a number above 0.
    """
    for option, gbit in (("network-gbit", network_gbit), ("inside-gbit", inside_gbit)):
        if gbit is not None and not 0 < gbit < math.inf:
            raise ConfigError(f"--{option} is {gbit:g}; give a number of Gbit/s above 0")
    if nodes == 1 and network_gbit is not None:
        raise ConfigError(f"--network-gbit is {network_gbit:g}, but there is one node; add --nodes, or leave it out")
    if nodes * ranks_per_node == 1:
        return None
    if nodes > 1 and network_gbit is None:
        raise ConfigError(f"--nodes is {nodes}, but the network between them is unknown; add --network-gbit")
    bits = gradient_bits if gradient_bits is not None else (16 if fidelity == Fidelity.EXACT else 8)
    if bits not in (8, 16):
        raise ConfigError(f"--gradient-bits is {bits}; gradients travel in 8 or 16 bits")
    pcie_bytes_per_s = machine.h2d_bytes_per_s
    shards_job = shard == Shard.JOB and nodes > 1
    return Cluster(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        network_bytes_per_s=gbit_to_bytes_per_s(network_gbit) if network_gbit is not None else pcie_bytes_per_s,
        inside_bytes_per_s=gbit_to_bytes_per_s(inside_gbit) if inside_gbit is not None else pcie_bytes_per_s,
        wire_bytes_per_element=wire_bytes_per_element(nodes, shards_job=shards_job)[bits],
        latency_s=TABLE_LATENCY_S,
        shards_job=shards_job,
    )


def explain_cluster(problem: PlacementProblem, plan: PlacementPlan, cluster: Cluster) -> Group:
    """The step of the whole job, with gradients in codes and in fp32, and what an all-reduce by itself would gain."""
    gbit, inside = (rate * 8 / 1e9 for rate in (cluster.network_bytes_per_s, cluster.inside_bytes_per_s))
    links = f"{gbit:g} Gbit/s between nodes, " if cluster.nodes > 1 else ""
    title = f"{cluster.nodes} x {cluster.ranks_per_node} ranks, {links}{inside:.0f} Gbit/s inside a node"
    table = Table(title=title, title_justify="left")
    for column in ("gradients", "a node sends", "network works", "of it exposed", "step", "tokens/s of the job"):
        table.add_column(column, justify="left" if column == "gradients" else "right")
    for bits, wire_bytes in wire_bytes_per_element(cluster.nodes, shards_job=cluster.shards_job).items():
        variant = replace(cluster, wire_bytes_per_element=wire_bytes)
        times = predict_step(problem, plan, variant)
        planned = " (planned)" if wire_bytes == cluster.wire_bytes_per_element else ""
        table.add_row(
            f"{bits} bit{planned}" if bits == 8 else f"{bits} bit, sums in fp32{planned}",
            format_bytes(times.wire_bytes),
            f"{times.network_s:.3f} s",
            f"{times.exposed_s:.3f} s",
            f"{times.step_s:.3f} s",
            f"{times.tokens_per_s(variant, problem):,.0f}",
        )
    host = format_bytes(account(problem, plan).need_bytes()["cpu"])
    lines = [f"host memory of a node, its homes shared by its ranks: {host}"]
    if cluster.shards_job:
        sent = format_bytes(predict_step(problem, plan, cluster).weight_bytes)
        lines.append(
            f"optimizer states divided over all {cluster.ranks} ranks; of what a node sends, {sent} are updated weights"
        )
    if cluster.nodes > 1:
        links = {"nodes": cluster.nodes, "ranks_per_link": cluster.ranks_per_node}
        ratios = [f"{predicted_speedup(size, gbit, **links):.1f}x for {name}" for name, size in EXAMPLE_BYTES.items()]
        lines.append(f"an all-reduce in codes against one of fp32, by bandwidth alone: {', '.join(ratios)}")
    return Group(table, Text("\n".join(lines)))
