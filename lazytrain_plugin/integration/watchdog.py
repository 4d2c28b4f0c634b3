"""Says which phase a run is stuck in, and where, instead of leaving a silent hang."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches named phases; one that lasts longer than `timeout_s` is reported once, with every thread's stack.

    Time between phases (the user's own code, a slow data loader) is not watched.

    Args:
        timeout_s: 0 switches it off.
        rank: named in the report.
    """

    def __init__(self, timeout_s: float, rank: int) -> None:
        self._timeout_s = timeout_s
        self._rank = rank
        self._phases: list[tuple[str, float]] = []
        self._reported: tuple[str, float] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if timeout_s > 0:
            self._thread = threading.Thread(target=self._watch, name="lazytrain-watchdog", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within: the run is in phase `name`. Phases nest; the innermost is watched."""
        entry = (name, time.monotonic())
        self._phases.append(entry)
        try:
            yield
        finally:
            self._phases.remove(entry)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        while not self._closed.wait(min(self._timeout_s / 4, 10.0)):
            current = self._phases[-1:]
            if not current or current[0] == self._reported:
                continue
            name, started_s = current[0]
            waited_s = time.monotonic() - started_s
            if waited_s > self._timeout_s:
                self._reported = current[0]
                logger.warning(
                    "rank %d has been in phase '%s' for %.0f s; the stacks of all threads follow on stderr "
                    '(set "watchdog_s" higher if this is normal here)',
                    self._rank,
                    name,
                    waited_s,
                )
                faulthandler.dump_traceback(file=sys.__stderr__)
