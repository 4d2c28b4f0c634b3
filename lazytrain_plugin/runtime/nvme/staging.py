"""`Staging`: a few host buffers through which everything passes that rests on NVMe.

A buffer is, in turn: being read into, in use, being written from (write-behind), and then a clean copy that may serve
again. Reads go ahead as far as buffers are free of what is in use or on its way out.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import torch

from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.nvme.io import Job
from lazytrain_plugin.runtime.nvme.region import Region


class Holder(Protocol):
    """What can be staged: one region at a time fills a buffer."""

    region: Region


class StagingBuffer:
    """Host memory that holds one holder's bytes."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.memory = HostBuffer(nbytes, pin=pin)
        self.address = self.memory.tensor(torch.uint8, 0, 1).data_ptr()
        self.holder: Holder | None = None
        self.job: Job | None = None
        """The read or write that is under way, or was the last."""
        self.pins = 0
        self.dirty = False
        """Changed since it was read, and not on its way to the disk yet."""
        self.ahead = False
        """Read ahead of its use, which is still to come."""
        self.last_use = 0

    @property
    def at_rest(self) -> bool:
        return self.pins == 0 and not self.dirty and not self.ahead and (self.job is None or self.job.done)


class Staging:
    """`count` buffers of `nbytes`, made when first needed, shared by holders. Safe to use from several threads.

    Args:
        count: how many units may be read, in use or written at once.
        nbytes: the largest region.
        pin: page-locked, for what goes on to a GPU.
    """

    def __init__(self, count: int, nbytes: int, *, pin: bool) -> None:
        self.count = max(count, 1)
        self.nbytes = nbytes
        self._pin = pin
        self._buffers: list[StagingBuffer] = []
        self._upcoming: deque[Holder] = deque()
        self._clock = 0
        self._changed = threading.Condition()

    @property
    def allocated_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def read_ahead(self, holders: Iterable[Holder]) -> None:
        """Starts reading what is needed next, in this order, now and whenever a buffer comes free; never blocks."""
        with self._changed:
            self._upcoming = deque(holders)
            for buffer in self._buffers:
                buffer.ahead = False
            self._pump()

    def begin(self, holder: Holder) -> Job | None:
        """Starts reading what is used next, beside what `read_ahead` was told; None: no buffer is free."""
        with self._changed:
            buffer = self._pick(at_rest=True) if self._find(holder) is None else None
            if buffer is None:
                return None
            self._fill(buffer, holder)
            buffer.ahead = True
            return buffer.job

    def holds(self, holder: Holder) -> bool:
        """Whether `acquire` would not wait for the disk."""
        with self._changed:
            buffer = self._find(holder)
            return buffer is not None and (buffer.job is None or buffer.job.done)

    def acquire(self, holder: Holder, *, fresh: bool = False) -> StagingBuffer:
        """The buffer with the holder's bytes, until `release`. Waits for the disk, and for a free buffer.

        Args:
            fresh: all bytes are going to be written; what is on disk is not read.

        Raises:
            StorageError: reading failed, or anything before it.
        """
        with self._changed:
            while (buffer := self._find(holder)) is None:
                buffer = self._pick(at_rest=False)
                if buffer is None:
                    self._changed.wait()
                    continue
                self._fill(buffer, holder, read=not fresh)
            buffer.pins += 1
            buffer.ahead = False
            self._clock += 1
            buffer.last_use = self._clock
            job = buffer.job
        try:
            if job is not None:
                job.wait()  # also a write: who changes the buffer now would change what is being written
        except BaseException:
            self.release(buffer)
            raise
        with self._changed:
            if self._upcoming and self._upcoming[0] is holder:
                self._upcoming.popleft()
            self._pump()
        return buffer

    def release(self, buffer: StagingBuffer, *, changed: bool = False, write: bool = False) -> None:
        """Ends one `acquire`.

        Args:
            changed: the disk is to get the buffer's bytes; at the latest when the buffer is needed for others.
            write: start that now, in the background.
        """
        with self._changed:
            buffer.dirty = (buffer.dirty or changed) and buffer.holder is not None
            buffer.pins -= 1
            try:
                if buffer.dirty and write and buffer.pins == 0:
                    self._start_write(buffer)
                self._pump()
            finally:
                self._changed.notify_all()

    def forget(self, holder: Holder) -> None:
        """Its bytes in a buffer are stale, or of no use any more: changes are not written. A buffer that is in use
        serves others after its `release`."""
        with self._changed:
            self._upcoming = deque(other for other in self._upcoming if other is not holder)
            buffer = self._find(holder)
            if buffer is not None:
                buffer.holder = None
                buffer.dirty = buffer.ahead = False

    def drain(self) -> None:
        """Writes every change, and returns when all of it is on disk."""
        with self._changed:
            self._upcoming.clear()
            for buffer in self._buffers:
                buffer.ahead = False
                if buffer.dirty:
                    self._start_write(buffer)
            jobs = [buffer.job for buffer in self._buffers if buffer.job is not None]
        for job in jobs:
            job.wait()

    def close(self) -> None:
        """Gives page locks and memory back. Nothing may be under way or in use."""
        with self._changed:
            self._upcoming.clear()
            for buffer in self._buffers:
                buffer.memory.unpin()
            self._buffers.clear()

    # Under the lock.

    def _find(self, holder: Holder) -> StagingBuffer | None:
        return next((buffer for buffer in self._buffers if buffer.holder is holder), None)

    def _pump(self) -> None:
        while self._upcoming:
            holder = self._upcoming[0]
            buffer = self._find(holder)
            if buffer is None:
                buffer = self._pick(at_rest=True)
                if buffer is None or holder.region.busy:
                    return
                self._fill(buffer, holder)
            buffer.ahead = True
            self._upcoming.popleft()

    def _pick(self, *, at_rest: bool) -> StagingBuffer | None:
        """The buffer to fill next: unused, else with the oldest content that is not needed soon.

        Args:
            at_rest: only one that is free now; else also one whose content must be written, or would be needed.
        """
        if len(self._buffers) < self.count:
            self._buffers.append(StagingBuffer(self.nbytes, pin=self._pin))
            return self._buffers[-1]
        upcoming = {id(holder) for holder in self._upcoming}
        best = None
        for buffer in self._buffers:
            if buffer.pins or (at_rest and not (buffer.at_rest and id(buffer.holder) not in upcoming)):
                continue
            cost = (not buffer.at_rest, buffer.ahead, buffer.dirty, buffer.holder is not None, buffer.last_use)
            if best is None or cost < best[0]:
                best = cost, buffer
        return best[1] if best is not None else None

    def _fill(self, buffer: StagingBuffer, holder: Holder, *, read: bool = True) -> None:
        if buffer.dirty:
            self._start_write(buffer)
        buffer.holder = None  # stays so if the read can't start
        if read:
            if buffer.job is not None:
                buffer.job.wait()
            buffer.job = holder.region.read(buffer.address, buffer.memory)
        buffer.holder = holder
        self._clock += 1
        buffer.last_use = self._clock

    def _start_write(self, buffer: StagingBuffer) -> None:
        buffer.job = buffer.holder.region.write(buffer.address, buffer.memory)
        buffer.dirty = False
