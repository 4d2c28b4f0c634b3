"""Whether a folder can hold what rests on NVMe; pure Python, so that `lazytrain plan` and doctor can ask too."""

from __future__ import annotations

import os
from pathlib import Path

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.units import GIB, format_bytes

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
KERNEL_FILESYSTEMS = (
    "proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "debugfs", "tracefs", "securityfs", "bpf", "pstore",
    "configfs", "efivarfs", "fusectl", "binfmt_misc", "nsfs", "hugetlbfs",
)  # fmt: skip
"""What the kernel shows as files: nothing can be kept there, even where a superuser seems allowed to write."""


def filesystem_type(path: str | Path) -> str:
    """Type of the file system that holds `path` ("ext4", "tmpfs"), from /proc/self/mountinfo; "" when unknown."""
    resolved = os.path.realpath(path)
    best, found = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        # Field 5 is the mount point, with blanks and the like as octal escapes (man 5 proc).
        mount = before.split()[4].encode().decode("unicode_escape")
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # a later mount covers an earlier one on the same point
            best, found = mount, after.split()[0]
    return found


def free_bytes(path: str | Path) -> int:
    """Bytes that this user may still write to the file system of `path`."""
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def check_nvme_folder(key: str, path: str) -> None:
    """Raises ConfigError if `path` (as it stands under `key`) can't hold training data."""
    resolved = Path(path).expanduser().absolute()
    if not resolved.is_dir():
        what = "is a file" if resolved.exists() else "does not exist"
        raise ConfigError(f'"{key}" is "{path}", but {resolved} {what}; name an existing folder on an NVMe disk.')
    _check_writable(key, path, resolved)
    if filesystem_type(resolved) in MEMORY_FILESYSTEMS:
        raise ConfigError(
            f'"{key}" is "{path}", but {resolved} is host memory ({filesystem_type(resolved)}), not a disk; '
            'name a folder on an NVMe disk, or raise "cpu_memory_gib" instead.'
        )


def check_distinct_folders(key: str, paths: tuple[str, ...]) -> None:
    """Raises ConfigError if two of `paths` are one folder."""
    seen: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            same = f'"{path}" twice' if seen[real] == path else f'"{seen[real]}" and "{path}", which are one folder'
            raise ConfigError(f'"{key}" has {same}; name each disk once.')
        seen[real] = path


def check_output_file(key: str, path: str) -> None:
    """Raises ConfigError if the file `path` (as it stands under `key`) can't be written."""
    resolved = folder_of(key, path)
    if resolved.is_dir():
        raise ConfigError(f'"{key}" is "{path}", but that is a folder; name a file in it.')
    _check_writable(key, path, resolved.parent)


def folder_of(key: str, path: str) -> Path:
    """The absolute form of a file's `path`; raises ConfigError if its folder does not exist."""
    resolved = Path(path).absolute()
    if not resolved.parent.is_dir():
        raise ConfigError(f'"{key}" is "{path}", but the folder {resolved.parent} does not exist; correct the path.')
    return resolved


def _check_writable(key: str, path: str, folder: Path) -> None:
    if (kind := filesystem_type(folder)) in KERNEL_FILESYSTEMS:
        raise ConfigError(f'"{key}" is "{path}", but {folder} is the kernel\'s own ({kind}); name a folder on a disk.')
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f'"{key}" is "{path}", but {folder} is not writable; name a folder that is yours.')


def check_nvme_space(key: str, paths: tuple[str, ...], need_bytes: int) -> None:
    """Raises ConfigError if the file systems of `paths` together have less than `need_bytes` free."""
    free = sum({os.stat(path).st_dev: free_bytes(path) for path in paths}.values())
    if free < need_bytes:
        raise ConfigError(
            f'"{key}" is {need_bytes / GIB:g}, {format_bytes(need_bytes)}, but there is {format_bytes(free)} free in '
            f"{', '.join(paths)}; free space there, or write a smaller number."
        )
