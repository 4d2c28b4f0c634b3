"""What this process may hold: RAM within the cgroup limit, page locks, cores. Reads Linux's files, imports no torch."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from lazytrain_plugin.units import GIB, format_bytes

_UNLIMITED = 1 << 60
"""cgroup v1 writes a huge number for "no limit"."""


_SMALL_SHM_BYTES = GIB
SHM_REMEDY = "DataLoader workers may die with a bus error: docker --shm-size=8g, or dataloader_num_workers=0"


def small_shared_memory() -> str | None:
    """What /dev/shm has, where that is too little for DataLoader workers and several ranks; None: enough.

    Whoever runs out of it there dies with a bus error and no word (exit status -7).
    """
    try:
        shm_bytes = shutil.disk_usage("/dev/shm").total
    except OSError:
        return "missing"
    return format_bytes(shm_bytes) if shm_bytes < _SMALL_SHM_BYTES else None


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Bytes of host memory for this process."""

    total_bytes: int
    """The smaller of RAM and the tightest cgroup limit on the way up."""
    free_bytes: int
    """What this process may hold in all: what is available, and what it already holds."""
    pin_limit_bytes: int | None
    """RLIMIT_MEMLOCK; None: no limit."""


def host_capacity(root: str | Path = "/") -> HostCapacity:
    """Host memory as the kernel and the cgroup (v1 or v2) allow it.

    Args:
        root: where `proc` and `sys` are found; another folder only in tests.
    """
    root = Path(root)
    meminfo = _meminfo(root / "proc/meminfo")
    own_bytes = psutil.Process().memory_info().rss
    total = meminfo["MemTotal"]
    free = meminfo.get("MemAvailable", meminfo.get("MemFree", 0)) + own_bytes
    for limit_bytes, used_bytes in _cgroup_limits(root):
        total = min(total, limit_bytes)
        # Our own pages are part of the group's use; they are ours to keep.
        free = min(free, limit_bytes - used_bytes + own_bytes)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostCapacity(
        total_bytes=total,
        free_bytes=max(0, min(free, total)),
        pin_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def usable_threads(root: str | Path = "/") -> int:
    """Cores of the affinity mask, or fewer when the cgroup's CPU quota is smaller."""
    threads = len(os.sched_getaffinity(0))
    for group in _cgroup_folders(Path(root), "cpu"):
        quota = _cpu_quota(group)
        if quota is not None:
            threads = min(threads, max(1, int(quota)))
    return threads


def _meminfo(path: Path) -> dict[str, int]:
    """Field -> bytes."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.split():
            fields[name] = int(value.split()[0]) * 1024
    return fields


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes of each group from ours up to the root that has a limit; reclaimable page cache isn't use."""
    limits = []
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, used_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _read_int(folder / limit_file)
            if limit is None or limit >= _UNLIMITED:
                continue
            used = _read_int(folder / used_file) or 0
            limits.append((limit, max(0, used - _stat(folder / "memory.stat", cache_key))))
    return limits


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders of our group and all above it, for v2 and for `controller` of v1."""
    folders = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path may be the host's; the mount itself is then our group.
        parts = Path(path.lstrip("/")).parts
        folders += [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in folders if folder.is_dir()]


def _cpu_quota(folder: Path) -> float | None:
    """Cores that the quota is worth; None: no quota."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us, period_us = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _stat(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except OSError:
        pass
    return 0
