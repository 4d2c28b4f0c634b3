"""Threads that do work in order (the update thread first of all), and the tickets by which others wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

LOOK_UP_S = 0.5
"""Between two calls of what a waiting thread does meanwhile."""


class Ticket:
    """One piece of work of a thread. `wait` re-raises what went wrong there."""

    __slots__ = ("_done", "_error", "label", "thread_name")

    def __init__(self, label: str, thread_name: str = "update") -> None:
        self.label = label
        self.thread_name = thread_name
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set() and self._error is None

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Returns when the work is done; calls `meanwhile` now and then until it is."""
        while not self._done.wait(None if meanwhile is None else LOOK_UP_S) and meanwhile is not None:
            meanwhile()
        if self._error is not None:
            name = self.thread_name
            raise RuntimeError(f"{self.label} failed in the {name} thread: {self._error}") from self._error


class UpdateWorker:
    """Runs submitted work in order on one daemon thread.

    After a failure nothing more runs: every later ticket fails with the first error, because an update that was
    lost must not be followed by one that assumes it.

    Args:
        begin: what the thread does first.
    """

    def __init__(self, name: str = "update", *, begin: Callable[[], None] | None = None) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.update_s = 0.0
        """Time that optimizer updates took since the start, waits for their inputs not counted."""
        self.updated_parameters = 0
        """Parameters that they went over."""
        if begin is not None:
            self._queue.put((begin, Ticket("start", name)))
        self._thread = threading.Thread(target=self._run, name=f"lazytrain-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None], label: str) -> Ticket:
        if not self._thread.is_alive():
            raise RuntimeError(f"{label}: the engine was destroyed; make a new one with deepspeed.initialize")
        ticket = Ticket(label, self._name)
        self._queue.put((work, ticket))
        return ticket

    def drain(self) -> None:
        """Returns when everything submitted so far is done."""
        if self._thread.is_alive():
            self.submit(lambda: None, "drain").wait()

    def close(self, *, wait: bool = True) -> None:
        """Finishes what was submitted and ends the thread; returns then, or at once. Safe to call twice."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._queue.put(None)
            if wait:
                self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, ticket = item
            try:
                if self._failure is not None:
                    raise self._failure
                work()
            except BaseException as error:
                self._failure = ticket._error = error
            finally:
                ticket._done.set()
                del work, item
