"""Which ranks share a node: from the launcher, from host names, or given.

Inside a node gradients travel in full precision, between nodes in codes; this page decides what a node is.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lazytrain_plugin.errors import ConfigError

NODE_VARIABLES = ("GROUP_RANK", "CROSS_RANK", "SLURM_NODEID")
"""The node's number as torchrun (also Accelerate), DeepSpeed's launchers and Slurm give it, in this order."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a process group, each a tuple of ranks within that group, ascending.

    Raises ConfigError if they don't hold every rank from 0 on exactly once.
    """

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if ranks != list(range(len(ranks))) or not all(self.nodes):
            raise ConfigError(f"The nodes {self.nodes} don't hold every rank from 0 on exactly once; correct them.")

    @property
    def world_size(self) -> int:
        return sum(len(node) for node in self.nodes)

    @property
    def ranks_per_node(self) -> int | None:
        """None where nodes are of different size."""
        sizes = {len(node) for node in self.nodes}
        return sizes.pop() if len(sizes) == 1 else None

    @classmethod
    def consecutive(cls, world_size: int, ranks_per_node: int) -> Topology:
        """Nodes of `ranks_per_node` neighbouring ranks. Raises ConfigError if that doesn't divide the world size."""
        if ranks_per_node < 1 or world_size % ranks_per_node:
            raise ConfigError(
                f"{world_size} ranks can't be parted into nodes of {ranks_per_node}; "
                '"lazytrain.gradient_comm.ranks_per_node" must divide the number of ranks, or be null.'
            )
        starts = range(0, world_size, ranks_per_node)
        return cls(tuple(tuple(range(start, start + ranks_per_node)) for start in starts))

    @classmethod
    def from_keys(cls, keys: Sequence[int]) -> Topology:
        """Ranks with the same key share a node; nodes are in the order of their first ranks."""
        nodes: dict[int, list[int]] = {}
        for rank, key in enumerate(keys):
            nodes.setdefault(key, []).append(rank)
        return cls(tuple(tuple(node) for node in nodes.values()))

    def describe(self) -> str:
        nodes = f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"
        size = self.ranks_per_node
        return f"{nodes} of {size} rank{'s' if size > 1 else ''}" if size else f"{nodes} of unequal size"


def node_key(environment: Mapping[str, str] = os.environ, host: str | None = None) -> int:
    """A number of 62 bits that the ranks of one node have in common, and no others.

    The host's name counts too: a job of several one-node launchers numbers every node 0.
    """
    number = next((f"{name}={environment[name]}" for name in NODE_VARIABLES if environment.get(name)), "")
    text = f"{socket.gethostname() if host is None else host}/{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2
