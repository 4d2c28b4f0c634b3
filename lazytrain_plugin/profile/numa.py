"""Which processors and which memory are beside a device, by Linux's sysfs. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NumaNode:
    """The node of a device, on a machine that has several."""

    index: int
    cpus: frozenset[int]
    """Of its processors, those that this process may use; at least one."""
    num_nodes: int
    """Nodes with processors."""


def node_of_pci_device(
    address: str, *, allowed_cpus: Collection[int] | None = None, root: str | Path = "/"
) -> NumaNode | None:
    """The node of a PCI device; None on a machine with one node, where the kernel doesn't know, and where this process
    may run on none of its processors (somebody has bound it elsewhere).

    Args:
        address: as in `/sys/bus/pci/devices`, `0000:17:00.0`.
        allowed_cpus: None: this process's affinity mask.
        root: where `sys` is found; another folder only in tests.
    """
    sys = Path(root) / "sys"
    nodes = _nodes(sys / "devices/system/node")
    try:
        index = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    allowed = os.sched_getaffinity(0) if allowed_cpus is None else allowed_cpus
    cpus = nodes.get(index, frozenset()) & frozenset(allowed)
    return NumaNode(index, cpus, len(nodes)) if len(nodes) > 1 and cpus else None


def count_nodes(root: str | Path = "/") -> int:
    """Nodes with processors; 1 where the kernel doesn't say."""
    return max(1, len(_nodes(Path(root) / "sys/devices/system/node")))


def _nodes(folder: Path) -> dict[int, frozenset[int]]:
    """Node -> its processors; nodes of memory alone are left out."""
    found = {}
    for path in folder.glob("node[0-9]*"):
        try:
            cpus = _cpu_list((path / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            found[int(path.name.removeprefix("node"))] = cpus
    return found


def _cpu_list(text: str) -> frozenset[int]:
    """`0-3,8,10-11` as Linux writes it."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
