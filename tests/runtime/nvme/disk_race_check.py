"""The disk's part of tests/runtime/race_check.py: I/O threads and staging buffers get vector clocks too."""

from __future__ import annotations

import itertools
from collections import defaultdict

from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.nvme.io import Job, Kind
from lazytrain_plugin.runtime.nvme.region import Region
from lazytrain_plugin.runtime.nvme.staging import Staging
from tests.runtime.race_check import Clock, RaceCheck


def install_disk(check: RaceCheck, patch) -> None:
    """After `race_check.install`. A request to the disk touches its memory at any time until somebody waited for it."""
    start, wait, acquire, release = Region._start, Job.wait, Staging.acquire, Staging.release
    fill, start_write = Staging._fill, Staging._start_write
    ended: dict[int, tuple[Job, Clock]] = {}
    given_back: dict[object, Clock] = defaultdict(dict)
    """What those knew who gave a staging buffer back."""
    numbers = itertools.count()

    def checked_start(self, kind, address, keep, nbytes=None, *, first=0):
        job = start(self, kind, address, keep, nbytes, first=first)
        if isinstance(keep, HostBuffer):
            name = f"disk request {next(numbers)}"
            what = f"{kind.name.lower()} of {self.what}"
            check.access(keep._bytes[first : nbytes or self.nbytes], writes=kind == Kind.READ, what=what, by=name)
            ended[id(job)] = (job, check.snapshot(name))
        return job

    def checked_wait(self):
        wait(self)
        if id(self) in ended:
            check.join(check.host(), ended[id(self)][1])

    def checked_acquire(self, holder, **options):
        buffer = acquire(self, holder, **options)
        with check.lock:
            check.join(check.host(), given_back[buffer])
        return buffer

    def checked_fill(self, buffer, holder, **options):
        with check.lock:  # under the lock of the staging, under which it was given back
            check.join(check.host(), given_back[buffer])
        fill(self, buffer, holder, **options)

    def checked_start_write(self, buffer):
        with check.lock:
            check.join(check.host(), given_back[buffer])
        start_write(self, buffer)

    def checked_release(self, buffer, **options):
        with check.lock:
            clock = given_back[buffer]
            for name, tick in check.clocks[check.host()].items():
                clock[name] = max(clock.get(name, 0), tick)
        release(self, buffer, **options)

    patch.setattr(Region, "_start", checked_start)
    patch.setattr(Job, "wait", checked_wait)
    patch.setattr(Staging, "acquire", checked_acquire)
    patch.setattr(Staging, "release", checked_release)
    patch.setattr(Staging, "_fill", checked_fill)
    patch.setattr(Staging, "_start_write", checked_start_write)
