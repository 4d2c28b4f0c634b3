"""Measures a disk through the path that training uses: blocks past the page cache, checksums, several in flight."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from lazytrain_plugin.errors import StorageError
from lazytrain_plugin.profile._json import digest_of
from lazytrain_plugin.profile.cache import default_cache_dir, write_atomically
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.nvme.region import Region
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.units import MIB, format_bytes

logger = logging.getLogger(__name__)

MEASURE_VERSION = 2
"""Part of the cache key: raise it when the measurement changes."""
REGION_BYTES = 256 * MIB
NUM_REGIONS = 8
MIN_REGIONS = 2
IN_FLIGHT = 3
LONG_ENOUGH_S = 4.0
"""A slow disk is not made to pass all regions."""
SETTLING_S, TOGETHER_S = 0.4, 2.0
"""Both directions at once: how long they run before they are timed, and timed."""
RATES = (
    "nvme_read_bytes_per_s",
    "nvme_write_bytes_per_s",
    "nvme_read_shared_bytes_per_s",
    "nvme_write_shared_bytes_per_s",
)


def nvme_fields(
    folders: Sequence[str | Path], *, limit_bytes: int | None = None, cache_dir: Path | None = None, cached: bool = True
) -> dict[str, float | int]:
    """`nvme_*` fields of a HardwareProfile for folders that data is striped over: what is free now, and rates.

    Args:
        limit_bytes: most that may rest there; None: what is free.
        cache_dir: where rates are kept between runs, by folder; None: `default_cache_dir()`.
        cached: False: measures in any case (and keeps the result).

    Raises: as `measure_nvme`.
    """
    tier = NvmeTier(folders, limit_bytes=limit_bytes)
    free_bytes = tier.free_bytes() // MIB * MIB
    disks = [[str(path), os.stat(path).st_dev] for path in tier.paths]
    path = (cache_dir or default_cache_dir()) / f"nvme-{digest_of([MEASURE_VERSION, disks])}.json"
    rates = _read_rates(path) if cached else None
    if rates is None:
        names = ", ".join(map(str, tier.paths))
        logger.info("measuring the disk of %s, which takes a few seconds, once", names)
        rates = measure_nvme(folders, limit_bytes=limit_bytes)
        try:
            write_atomically(path, json.dumps(rates, indent=1) + "\n")
        except OSError as error:
            logger.warning("the disk's rates can't be kept in %s (%s): every run measures again", path.parent, error)
    return {"nvme_bytes": free_bytes, **rates}


def _read_rates(path: Path) -> dict[str, float] | None:
    """Kept rates; None where there are none, or damaged ones."""
    try:
        kept = json.loads(path.read_text())
        rates = {name: float(kept[name]) for name in RATES}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return rates if all(0 < rate < float("inf") for rate in rates.values()) else None


def measure_nvme(folders: Sequence[str | Path], *, limit_bytes: int | None = None) -> dict[str, float]:
    """Bytes per second that training reads and writes.

    Alone: the better of two passes over up to 2 GiB in each direction. Shared: two seconds of both at once.

    Raises:
        ConfigError: a folder is missing, not writable, or memory.
        StorageError: less than 1 GiB may be placed there, or the disk fails.
    """
    tier = NvmeTier(folders, limit_bytes=limit_bytes)
    try:
        free_bytes = tier.free_bytes()
        num_regions = min(NUM_REGIONS, free_bytes // (2 * REGION_BYTES))
        if num_regions < MIN_REGIONS:
            need = format_bytes(2 * MIN_REGIONS * REGION_BYTES)
            raise StorageError(
                f"{', '.join(map(str, tier.paths))}: {format_bytes(free_bytes)} may be placed there, and measuring the "
                f'disk takes {need}; free space, raise "nvme_gib", or leave "nvme_path" out'
            )
        regions = [tier.region(REGION_BYTES, what=f"measurement {i}") for i in range(num_regions)]
        buffers = [HostBuffer(REGION_BYTES, pin=False) for _ in range(IN_FLIGHT)]
        for seed, buffer in enumerate(buffers):
            # Disks compress zeros.
            generator = torch.Generator().manual_seed(seed)
            buffer.tensor(torch.int64, 0, REGION_BYTES // 8).random_(generator=generator)
        rates = {}
        for direction in ("write", "read"):
            passes = []
            for _ in range(2):
                rate, num_passed = _pass(regions, buffers, direction)
                passes.append(rate)
                regions = regions[:num_passed]  # what was not written can't be read
            rates[f"nvme_{direction}_bytes_per_s"] = float(round(max(passes)))
        shared = together_bytes_per_s(tier, regions, buffers, timed_s=TOGETHER_S)
        for direction, rate in zip(("read", "write"), shared):
            alone = rates[f"nvme_{direction}_bytes_per_s"]
            rates[f"nvme_{direction}_shared_bytes_per_s"] = min(float(round(rate)), alone)
    finally:
        tier.close()
    return rates


def _pass(regions: list, buffers: list[HostBuffer], direction: str) -> tuple[float, int]:
    """Bytes per second, and over how many regions."""
    addresses = [buffer.tensor(torch.uint8, 0, 1).data_ptr() for buffer in buffers]
    jobs: list = [None] * len(buffers)
    num_passed, start_s = 0, time.perf_counter()
    for i, region in enumerate(regions):
        if i >= MIN_REGIONS and time.perf_counter() - start_s > LONG_ENOUGH_S:
            break
        slot = i % len(buffers)
        if jobs[slot] is not None:
            jobs[slot].wait()
        jobs[slot] = getattr(region, direction)(addresses[slot], buffers[slot])
        num_passed += 1
    for job in jobs:
        if job is not None:
            job.wait()
    return num_passed * REGION_BYTES / (time.perf_counter() - start_s), num_passed


def together_bytes_per_s(
    tier: NvmeTier, regions: list[Region], buffers: list[HostBuffer], *, timed_s: float
) -> tuple[float, float]:
    """Bytes per second read and written while half of the regions are read and the others written, over and over.

    Args:
        regions: two at least, all written before.
        buffers: two at least, of their size; the last is written from.
    """
    # Both directions have two regions in flight, where there are so many: the next begins as one ends.
    addresses = [buffer.tensor(torch.uint8, 0, 1).data_ptr() for buffer in buffers]
    half, sources = len(regions) // 2, len(buffers) - 1
    waiting = {"read": deque(regions[:half]), "write": deque(regions[half:])}
    running: dict[str, deque] = {"read": deque(), "write": deque()}
    num_started = 0

    def keep_busy_until(end_s: float) -> None:
        nonlocal num_started
        while time.perf_counter() < end_s:
            for direction, jobs in running.items():
                while jobs and jobs[0][1].done:
                    waiting[direction].append(jobs.popleft()[0])
                while waiting[direction] and len(jobs) < 2:
                    region = waiting[direction].popleft()
                    place = num_started % sources if direction == "read" else sources
                    num_started += direction == "read"
                    jobs.append((region, getattr(region, direction)(addresses[place], buffers[place])))
            time.sleep(0.001)

    keep_busy_until(time.perf_counter() + SETTLING_S)
    before, start_s = tier.engine.moved_bytes(), time.perf_counter()
    keep_busy_until(start_s + timed_s)
    after, took_s = tier.engine.moved_bytes(), time.perf_counter() - start_s
    for jobs in running.values():
        for _, job in jobs:
            job.wait()
    return tuple((now - then) / took_s for now, then in zip(after, before))
