"""`Releases`: staging buffers go back, or on to the disk, when the transfer that touches them is over."""

from __future__ import annotations

import queue
import threading

from lazytrain_plugin.runtime.nvme.staging import Staging, StagingBuffer


class Releases:
    """One daemon thread that waits for events, so that the thread that runs the model need not.

    It is made when first needed. What goes wrong there (the disk is full) is raised by whoever calls next; buffers go
    back nevertheless, so that nobody waits for one forever.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def after(
        self, event, staging: Staging, buffer: StagingBuffer, *, changed: bool = False, write: bool = True
    ) -> None:
        """Ends an `acquire` once `event` has happened, as `Staging.release` does."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((event, staging, buffer, changed, write))

    def wait(self) -> None:
        """Returns when all that was given so far is released. Raises StorageError for what failed."""
        if self._thread is not None:
            reached = threading.Event()
            self._queue.put(reached)
            reached.wait()
        self.check()

    def check(self) -> None:
        """Raises StorageError if something failed."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Finishes what was given and ends the thread. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            event, staging, buffer, changed, write = item
            try:
                event.synchronize()
            except BaseException as error:
                self._failure, changed = self._failure or error, False
            try:
                staging.release(buffer, changed=changed, write=write)
            except BaseException as error:
                self._failure = self._failure or error
            del item, event, staging, buffer
