"""`IoEngine`: disk requests on the C++ library's threads (kernels/csrc/io.cpp), as jobs that can be waited for."""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from lazytrain_plugin.errors import KernelError, StorageError
from lazytrain_plugin.kernels.native import LIBRARY
from lazytrain_plugin.units import MIB, format_bytes

logger = logging.getLogger(__name__)

THREADS_PER_FOLDER = 8
"""Requests in flight per disk: with blocks of megabytes more than enough to saturate one."""
SLOW_AFTER_S = 30.0
"""A wait for the disk that lasts longer is reported."""
_POLL_S = 0.5
"""Waits look up this often, so that Ctrl-C is noticed."""
_SHORT, _CHECKSUM, _STOPPED = 1000, 1001, 1002


class Kind(IntEnum):
    READ = 0
    WRITE = 1
    WRITE_BACK = 2
    """What was written through the page cache goes to the disk and out of the cache."""
    WARM = 3
    """Into the page cache."""


@dataclass(frozen=True, slots=True)
class Request:
    """One block. `checksum`: address of the uint64 that holds its hash (0 there: never written), or None: unchecked."""

    fd: int
    kind: Kind
    offset: int
    address: int
    nbytes: int
    checksum: int | None = None
    drop_from_cache: bool = False
    urgent: bool = False
    """A read that goes before those that wait."""

    @property
    def flags(self) -> int:
        return int(self.drop_from_cache) | int(self.urgent) << 1


class _Request(ctypes.Structure):
    _fields_ = [
        ("fd", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
        ("checksum", ctypes.c_void_p),
    ]


class _Failure(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_int32),
        ("fd", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(LIBRARY))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
            ("open", pointer, (ctypes.c_int,)),
            ("close", None, (pointer,)),
            ("submit", pointer, (pointer, ctypes.POINTER(_Request), number)),
            ("wait", ctypes.c_int, (pointer, pointer, number, ctypes.POINTER(_Failure))),
            ("forget", None, (pointer,)),
            ("set_delay", None, (pointer, number)),
            ("moved", None, (pointer, ctypes.POINTER(number), ctypes.POINTER(number))),
            ("hash", ctypes.c_uint64, (pointer, number)),
        ):
            function = getattr(library, f"lazytrain_io_{name}")
            function.restype, function.argtypes = result, arguments
        return library
    except (OSError, AttributeError) as error:
        raise KernelError(
            f"nothing can rest on NVMe: the C++ library is missing or old ({error}). "
            "Install g++ and run: python -m lazytrain_plugin._build"
        ) from error


def hash_block(address: int, nbytes: int) -> int:
    """The 64-bit hash that is kept of a block; never 0."""
    return _library().lazytrain_io_hash(address, nbytes)


class Job:
    """Requests with one outcome. Keeps their memory alive until they are done."""

    def __init__(self, engine: IoEngine, handle: int, keep: Any, what: str, nbytes: int) -> None:
        self._engine = engine
        self._handle = handle
        self._keep = keep
        self._over = False
        self._failure: StorageError | None = None
        self.what = what
        self.nbytes = nbytes

    @property
    def done(self) -> bool:
        """Whether all of it is over; an error shows at `wait`."""
        return self._poll(0.0)

    def wait(self) -> None:
        """Returns when all of it is done.

        Raises:
            StorageError: a request failed, here or in an earlier job.
        """
        start_s, reported = time.monotonic(), False
        while not self._poll(_POLL_S):
            waited_s = time.monotonic() - start_s
            if waited_s > self._engine.slow_after_s and not reported:
                reported = True
                logger.warning(
                    "waiting for the disk for %.0f s (%s, %s): it is slow or stuck. Look at `iostat -x 1`; another "
                    "program may be using it",
                    waited_s,
                    self.what,
                    format_bytes(self.nbytes),
                )
        if self._failure is not None:
            raise self._failure

    def _poll(self, timeout_s: float) -> bool:
        if self._over:
            return True
        failure, engine = _Failure(), self._engine
        state = engine.library.lazytrain_io_wait(
            engine.handle, self._handle, int(timeout_s * 1000), ctypes.byref(failure)
        )
        if state == 0:
            return False
        with engine.lock:  # two threads may see the end
            if not self._over:
                self._failure = engine.error_of(failure) if state < 0 else None
                self._keep = None
                self._over = True
                engine.pending.discard(self)
        return True

    def __del__(self) -> None:
        # Not earlier: another thread may be inside the library with this handle. The engine holds unfinished jobs.
        self._engine.library.lazytrain_io_forget(self._handle)


class IoEngine:
    """Threads that read and write blocks, each direction in the order of submission, but urgent reads first.

    Args:
        num_threads: requests in flight.
        delay_s: makes every request late; for race tests.
        slow_after_s: a longer wait for the disk is reported, once.
    """

    def __init__(
        self, num_threads: int = THREADS_PER_FOLDER, *, delay_s: float = 0.0, slow_after_s: float = SLOW_AFTER_S
    ) -> None:
        self.library = _library()
        self.slow_after_s = slow_after_s
        self.lock = threading.Lock()
        self.pending: set[Job] = set()
        self.paths: dict[int, str] = {}
        """Path of each open file, for messages."""
        self._pid = os.getpid()
        self.handle = self.library.lazytrain_io_open(num_threads)
        _open_engines.add(self)
        if delay_s:
            self.library.lazytrain_io_set_delay(self.handle, int(delay_s * 1e6))

    def submit(self, requests: Sequence[Request], *, keep: Any, what: str) -> Job:
        """Starts requests; `keep` is held until they are done, `what` names them in messages."""
        array = (_Request * len(requests))(
            *(_Request(r.fd, r.kind, r.flags, 0, r.offset, r.address, r.nbytes, r.checksum) for r in requests)
        )
        handle = self.library.lazytrain_io_submit(self.handle, array, len(requests))
        job = Job(self, handle, keep, what, sum(request.nbytes for request in requests))
        with self.lock:
            self.pending.add(job)
        return job

    def moved_bytes(self) -> tuple[int, int]:
        """Bytes read and written so far (never-written blocks count as read)."""
        read, written = ctypes.c_int64(), ctypes.c_int64()
        self.library.lazytrain_io_moved(self.handle, ctypes.byref(read), ctypes.byref(written))
        return read.value, written.value

    def close(self) -> None:
        """Finishes what was submitted and ends the threads. Safe to call twice; a forked child has none to end."""
        if os.getpid() == self._pid:
            self.library.lazytrain_io_close(self.handle)
            for job in list(self.pending):
                job.done  # noqa: B018  lets go of its memory

    def error_of(self, failure: _Failure) -> StorageError:
        path = self.paths.get(failure.fd, f"file {failure.fd}")
        return storage_error(failure.code, path, Kind(failure.kind), failure.offset, failure.nbytes)


def storage_error(code: int, path: str, kind: Kind, offset: int, nbytes: int) -> StorageError:
    """What went wrong with one block, what the disk has, and what to do."""
    verb = "reading" if kind in (Kind.READ, Kind.WARM) else "writing"
    where = f"{verb} {format_bytes(nbytes)} at {offset / MIB:.1f} MiB of {path}"
    resume = "then resume from the last checkpoint"
    if code == _CHECKSUM:
        return StorageError(
            f"{where}: the block is not what was written there (its checksum differs). The disk is failing or another "
            f"program wrote to the file; look at `dmesg` and `smartctl -a`, {resume}"
        )
    if code == _STOPPED:
        return StorageError(f"{where}: the engine was destroyed; make a new one with deepspeed.initialize")
    if code == _SHORT:
        return StorageError(f"{where}: the file ends before that; another program truncated it. Stop it, {resume}")
    reason = os.strerror(code)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageError(
            f"{where}: {reason}, {_free(path)}. Free space (or raise the quota) there, or name a larger disk in "
            f'"nvme_path", {resume}'
        )
    return StorageError(
        f'{where}: {reason} (errno {code}), {_free(path)}. Look at `dmesg`; name another disk in "nvme_path", {resume}'
    )


def _free(path: str) -> str:
    try:
        stats = os.statvfs(os.path.dirname(path))
    except OSError:
        return "free space unknown"
    return f"{format_bytes(stats.f_bavail * stats.f_frsize)} free"


_open_engines: weakref.WeakSet[IoEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A write that is under way when the interpreter goes would read memory that is gone."""
    for engine in list(_open_engines):
        engine.close()
