"""Update threads and host memory beside the GPU, on machines with several NUMA nodes.

What crosses from one socket to the other shares a link that is slower than either memory: both the GPU's copies and the
CPU's updates read and write the homes, so both belong where the GPU is. With one node nothing is done.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from lazytrain_plugin.profile.numa import NumaNode, node_of_pci_device


def node_of(device: torch.device, root: str | Path = "/") -> NumaNode | None:
    """The NUMA node beside a CUDA device; None where there is nothing to choose or nothing is known."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:  # older torch
        return None
    return node_of_pci_device(address, root=root)


@contextlib.contextmanager
def threads_on(node: NumaNode | None) -> Iterator[None]:
    """Within: threads that this one starts run on the node's processors, for good. This one is as before afterwards."""
    if node is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, node.cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
