"""`NvmeTier`: the folders of a run and the I/O threads over them."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lazytrain_plugin.config.folders import check_nvme_folder, free_bytes
from lazytrain_plugin.errors import StorageError
from lazytrain_plugin.plan.unit_cost import nvme_pieces
from lazytrain_plugin.runtime.nvme.folder import PeerFile, RunFolder
from lazytrain_plugin.runtime.nvme.io import SLOW_AFTER_S, THREADS_PER_FOLDER, IoEngine
from lazytrain_plugin.runtime.nvme.region import BLOCK_BYTES, Region, padded
from lazytrain_plugin.units import format_bytes

logger = logging.getLogger(__name__)

_MOST_THREADS = 32


class NvmeTier:
    """Where regions come from. Folders and threads are made with the first region; `close` removes both.

    Args:
        paths: existing folders, one per disk; data is striped over them.
        limit_bytes: most that may rest there; None: what the file systems have.
        pieces: in how many states come to memory; see plan/unit_cost.py.
        delay_s: makes every request late; for race tests.
        slow_after_s: a longer wait for a disk is reported.

    Raises:
        ConfigError: a folder is missing, not writable, or memory.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        limit_bytes: int | None = None,
        block_bytes: int = BLOCK_BYTES,
        pieces: Callable[[int, int], int] = nvme_pieces,
        delay_s: float = 0.0,
        slow_after_s: float = SLOW_AFTER_S,
    ) -> None:
        for path in paths:
            check_nvme_folder("lazytrain.nvme_path", str(path))
        self.paths = tuple(Path(path).expanduser().absolute() for path in paths)
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.folders: list[RunFolder] = []
        self._engine: IoEngine | None = None
        self.block_bytes = block_bytes
        self.pieces = pieces
        self._delay_s = delay_s
        self._slow_after_s = slow_after_s
        self._regions: dict[Region, int] = {}
        """With the bytes of the limit that each takes."""
        self._num_mapped = 0
        self._lock = threading.Lock()
        """Regions are made by the thread that runs the model and by the update thread."""

    @property
    def engine(self) -> IoEngine:
        if self._engine is None:
            for path in self.paths[len(self.folders) :]:
                self.folders.append(RunFolder(path))
            threads = min(THREADS_PER_FOLDER * len(self.paths), _MOST_THREADS)
            self._engine = IoEngine(threads, delay_s=self._delay_s, slow_after_s=self._slow_after_s)
        return self._engine

    def region(self, nbytes: int, *, what: str, direct: bool = True, **options: Any) -> Region:
        """Takes `nbytes` now. `direct=False` (for what is mapped): in one folder, through the page cache.

        Args:
            options: `sharers` of one region, of whom each has a limit of its own that bears a part of it; `checksums`
                and `on_write` as of `Region`.

        Raises:
            StorageError: more than `limit_bytes`, or than a disk has.
        """
        with self._lock:
            return self._region(nbytes, what=what, direct=direct, **options)

    def peer_region(self, files: Sequence[PeerFile], nbytes: int, *, what: str, checksums: ctypes.Array) -> Region:
        """What another rank of this node has made with `region`, to read; whoever asks for it closes it."""
        return Region(self.engine, files, nbytes, what=what, block_bytes=self.block_bytes, checksums=checksums)

    def mapped_peer_region(self, file: PeerFile, nbytes: int, *, what: str, sharers: int) -> Region:
        """What another rank of this node has made with `region(direct=False)`; `give_back` as if it were one's own."""
        with self._lock:
            region = Region(self.engine, [file], nbytes, what=what, direct=False, block_bytes=self.block_bytes)
            self._take(region, padded(nbytes) // sharers)
            return region

    def _take(self, region: Region, num_bytes: int) -> None:
        self._regions[region] = num_bytes
        self.used_bytes += num_bytes

    def _region(self, nbytes: int, *, what: str, direct: bool, sharers: int = 1, **options: Any) -> Region:
        need_bytes = padded(nbytes) // sharers
        if self.limit_bytes is not None and self.used_bytes + need_bytes > self.limit_bytes:
            raise StorageError(
                f"no room on NVMe for {what}: {format_bytes(need_bytes)} needed, "
                f"{format_bytes(self.limit_bytes - self.used_bytes)} left of {format_bytes(self.limit_bytes)}; "
                'raise "nvme_gib", or plan again'
            )
        engine = self.engine
        folders = self.folders
        if not direct:  # a mapping is of one file: the folders take turns
            folders = [self.folders[self._num_mapped % len(self.folders)]]
            self._num_mapped += 1
        region = Region(engine, folders, nbytes, what=what, direct=direct, block_bytes=self.block_bytes, **options)
        self._take(region, need_bytes)
        return region

    def give_back(self, region: Region) -> None:
        """Removes a region; waits for what is under way there."""
        if region in self._regions:
            try:
                region.wait()
            finally:
                with self._lock:
                    self.used_bytes -= self._regions.pop(region)
                    region.close()

    def free_bytes(self) -> int:
        """Bytes that may still be placed: the smaller of the limit's and the file systems' rest."""
        free = sum({os.stat(path).st_dev: free_bytes(path) for path in self.paths}.values())
        return free if self.limit_bytes is None else min(free, self.limit_bytes - self.used_bytes)

    def close(self) -> None:
        """Finishes what is under way, ends the threads and removes the folders. Safe to call twice."""
        if self._engine is not None:
            self._engine.close()
        for region in self._regions:
            region.close()
        self._regions.clear()
        for folder in self.folders:
            folder.close()
        self.folders = []
