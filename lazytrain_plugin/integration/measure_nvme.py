"""Measures a disk through the path that training uses: blocks past the page cache, checksums, several in flight."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from lazytrain_plugin.errors import StorageError
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.units import GIB, MIB, format_bytes

REGION_BYTES = 256 * MIB
NUM_REGIONS = 8
MIN_REGIONS = 2
IN_FLIGHT = 3


def measure_nvme(folder: Path) -> dict[str, float | int]:
    """`nvme_*` fields of a HardwareProfile: free bytes, and the better of two passes over 2 GiB in each direction.

    Raises:
        ConfigError: the folder is missing, not writable, or memory.
        StorageError: less than 512 MiB are free there, or the disk fails.
    """
    tier = NvmeTier([folder])
    try:
        free = tier.free_bytes()
        num_regions = min(NUM_REGIONS, free // (2 * REGION_BYTES))
        if num_regions < MIN_REGIONS:
            raise StorageError(f"{folder} has {format_bytes(free)} free; measuring the disk takes at least 1.0 GiB")
        regions = [tier.region(REGION_BYTES, what=f"measurement {i}") for i in range(num_regions)]
        buffers = [HostBuffer(REGION_BYTES, pin=False) for _ in range(IN_FLIGHT)]
        for seed, buffer in enumerate(buffers):
            # Disks compress zeros.
            generator = torch.Generator().manual_seed(seed)
            buffer.tensor(torch.int64, 0, REGION_BYTES // 8).random_(generator=generator)
        rates = {
            direction: max(_pass(regions, buffers, direction) for _ in range(2)) for direction in ("write", "read")
        }
    finally:
        tier.close()
    return {
        "nvme_bytes": free // GIB * GIB,
        "nvme_read_bytes_per_s": round(rates["read"]),
        "nvme_write_bytes_per_s": round(rates["write"]),
    }


def _pass(regions: list, buffers: list[HostBuffer], direction: str) -> float:
    """Bytes per second over all regions."""
    addresses = [buffer.tensor(torch.uint8, 0, 1).data_ptr() for buffer in buffers]
    jobs: list = [None] * len(buffers)
    start_s = time.perf_counter()
    for i, region in enumerate(regions):
        slot = i % len(buffers)
        if jobs[slot] is not None:
            jobs[slot].wait()
        jobs[slot] = getattr(region, direction)(addresses[slot], buffers[slot])
    for job in jobs:
        if job is not None:
            job.wait()
    return len(regions) * REGION_BYTES / (time.perf_counter() - start_s)
