"""How long a search may take: in computing time, so that a busy machine plans as well as an idle one."""

from __future__ import annotations

import math
import time

BUSY_FACTOR = 3
"""A search ends after this many times its limit on the clock, however little it got to compute."""


class Deadline:
    """So many seconds of this thread's computing from now on."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self._cpu_end_s = time.thread_time() + limit_s
        self._end_s = time.monotonic() + BUSY_FACTOR * limit_s

    @property
    def left_s(self) -> float:
        """Not above 0: it has passed."""
        return min(self._cpu_end_s - time.thread_time(), self._end_s - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.left_s <= 0

    def part(self, frac: float) -> Deadline:
        """One after a part of what is left."""
        return Deadline(frac * self.left_s)


NEVER = Deadline()
