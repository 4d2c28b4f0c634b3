"""Folders on disks, and disks that fill up: small loop mounts.

Those need root; a machine that can't mount fails these tests loudly.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lazytrain_plugin.runtime import activation_store
from lazytrain_plugin.units import MIB


@pytest.fixture
def everything_is_large(monkeypatch):
    """Test models' activations are too small to be worth a transfer otherwise."""
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on this machine's disk, with a blank in its path."""
    folder = tmp_path / "nvme disk"
    folder.mkdir()
    return folder


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.fail(
            f"{' '.join(command)}: {result.stderr.strip()}. These tests fill a small disk of their own and need root "
            "and loop devices; deselect them by name (-k 'not mount') where there are none"
        )


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """mount(mib) gives the folder of an ext4 disk of that size; mount(mib, backed_mib=...) one whose own store is
    smaller than it says, so that writing fails with an I/O error."""
    mounted: list[Path] = []

    def make(mib: int, *, backed_mib: int | None = None) -> Path:
        where = tmp_path / f"disk{len(mounted)}"
        where.mkdir()
        image = tmp_path / f"disk{len(mounted)}.img"
        if backed_mib is not None:
            store = tmp_path / f"store{len(mounted)}"
            store.mkdir()
            run("mount", "-t", "tmpfs", "-o", f"size={backed_mib}m", "tmpfs", str(store))
            mounted.append(store)
            image = store / "disk.img"
        with image.open("wb") as file:
            os.truncate(file.fileno(), mib * MIB)
        run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
        run("mount", "-o", "loop", str(image), str(where))
        mounted.append(where)
        return where

    yield make
    for where in reversed(mounted):
        subprocess.run(["umount", "-l", str(where)], check=False, capture_output=True)
