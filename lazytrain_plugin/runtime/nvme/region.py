"""`Region`: a fixed number of bytes on disk, in blocks over one file per folder."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from lazytrain_plugin.runtime.nvme.folder import ALIGNMENT_BYTES, PeerFile, RunFolder
from lazytrain_plugin.runtime.nvme.io import IoEngine, Job, Kind, Request
from lazytrain_plugin.units import MIB, align_up

BLOCK_BYTES = 4 * MIB
"""Of one request: large enough for full speed, small enough for many in flight."""


class Region:
    """`nbytes` on disk, zero until written; read and written as a whole, asynchronously.

    Every block carries a checksum, written and verified by the I/O threads. Memory that is read into or written from
    must be page-aligned and `padded_bytes` long.

    Args:
        folders: blocks go to them in turn.
        direct: past the page cache. Without it blocks are unchecked: others may write through a mapping.
        what: names it in messages ("states of model.layers.3").
        checksums: uint64 of each block, all 0 for a new region; default: memory of its own.
        on_write: gets the job of every write.

    Raises:
        StorageError: a disk has no room for it.
    """

    def __init__(
        self,
        engine: IoEngine,
        folders: Sequence[RunFolder | PeerFile],
        nbytes: int,
        *,
        what: str,
        direct: bool = True,
        block_bytes: int = BLOCK_BYTES,
        checksums: ctypes.Array | None = None,
        on_write: Callable[[Job], None] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.padded_bytes = padded(nbytes)
        self.what = what
        self._engine = engine
        self._direct = direct
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks(nbytes, block_bytes)
        self._checksums = None
        if direct:
            self._checksums = (ctypes.c_uint64 * self._num_blocks)() if checksums is None else checksums
        self._on_write = on_write
        self._jobs: list[Job] = []
        """Under way, or lately done."""
        self.files: list[tuple[RunFolder | PeerFile, int, str]] = []
        """(folder, descriptor, path) per folder."""
        try:
            for index, folder in enumerate(folders):
                size = sum(self._size(block) for block in range(index, self._num_blocks, len(folders)))
                fd, path = folder.create(size, direct=direct, what=what)
                engine.paths[fd] = path
                self.files.append((folder, fd, path))
            self._past_the_cache = direct and all(folder.direct for folder in folders)
        except BaseException:
            self.close()
            raise

    def _size(self, block: int) -> int:
        return min(self._block_bytes, self.padded_bytes - block * self._block_bytes)

    @property
    def busy(self) -> bool:
        """Whether a read would wait for something that is under way."""
        return self._direct and not all(job.done for job in self._jobs)

    def read(self, address: int, keep, *, nbytes: int | None = None) -> Job:
        """Starts reading it, or its first `nbytes`, to `address`; waits for a write that is under way.

        A part must be what was written as such: blocks are checked as a whole.
        """
        return self._start(Kind.READ, address, keep, nbytes)

    def write(self, address: int, keep, *, nbytes: int | None = None) -> Job:
        """Starts writing it, or its first `nbytes`, from `address`; waits for what is under way. The memory must not
        change yet."""
        job = self._start(Kind.WRITE, address, keep, nbytes)
        if self._on_write is not None:
            self._on_write(job)
        return job

    def warm(self, span: slice) -> Job:
        """Starts bringing some bytes into the page cache (not for `direct` regions)."""
        return self._start(Kind.WARM, 0, None, span.stop, first=span.start)

    def write_back(self, mapping_address: int, keep, span: slice) -> Job:
        """Starts bringing some bytes to the disk and out of the page cache, where a mapping of all holds them (not
        for `direct`)."""
        return self._start(Kind.WRITE_BACK, mapping_address, keep, span.stop, first=span.start)

    def _start(self, kind: Kind, address: int, keep, nbytes: int | None = None, *, first: int = 0) -> Job:
        """`first`, `nbytes`: of the bytes to move; the blocks that hold them are moved whole."""
        if self._direct:
            self.wait()  # otherwise the page cache keeps what is read true
        verb = "reading" if kind in (Kind.READ, Kind.WARM) else "writing"
        requests, num_files = [], len(self.files)
        # Weights that go to a slot: somebody waits for them, or is about to, and right behind an update they are still
        # in the page cache. What waits before them is states of updates to come.
        urgent = kind == Kind.READ and not self._direct
        # What is mapped is written back by a job of its own, so that a write is visible as soon as it can be.
        drop = not self._past_the_cache and (self._direct or kind == Kind.READ)
        checksums = ctypes.addressof(self._checksums) if self._checksums is not None else None
        end = self.padded_bytes if nbytes is None else padded(nbytes)
        for block in range(first // self._block_bytes, -(-end // self._block_bytes)):
            requests.append(
                Request(
                    fd=self.files[block % num_files][1],
                    kind=kind,
                    offset=block // num_files * self._block_bytes,
                    address=address + block * self._block_bytes if address else 0,
                    nbytes=min(self._block_bytes, end - block * self._block_bytes),
                    checksum=None if checksums is None else checksums + 8 * block,
                    drop_from_cache=drop,
                    urgent=urgent,
                )
            )
        job = self._engine.submit(requests, keep=(keep, self._checksums), what=f"{verb} {self.what}")
        self._jobs = [*(earlier for earlier in self._jobs if not earlier.done), job]
        return job

    def wait(self) -> None:
        """Returns when nothing is under way. Raises StorageError for what failed."""
        for job in self._jobs:
            job.wait()

    def close(self) -> None:
        """Gives its space back. Nothing may be under way."""
        for folder, fd, path in self.files:
            self._engine.paths.pop(fd, None)
            folder.delete(path)
        self.files = []


def num_blocks(nbytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Of a region; each has a checksum."""
    return -(-padded(nbytes) // block_bytes)


def padded(nbytes: int) -> int:
    """Bytes of direct I/O that hold `nbytes`."""
    return align_up(max(nbytes, 1), ALIGNMENT_BYTES)
