"""The simulator's machinery: resources that work in parallel, each in program order, and buffers used in turn."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Resource(StrEnum):
    """What works in parallel with the others; `WORKER` is the CPU that updates, `EXCHANGE` the links between ranks."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    WORKER = "worker"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of the replayed steady step, in seconds from the step's start."""

    name: str
    resource: Resource
    start_s: float
    end_s: float
    num_bytes: int = 0
    """What is copied, read or written; 0 for computations."""


class Clock:
    """FIFO resources. `noise` multiplies each duration."""

    def __init__(self, noise: random.Random | None, noise_frac: float, record: bool) -> None:
        self.free_s = dict.fromkeys(Resource, 0.0)
        self.busy_s = dict.fromkeys(Resource, 0.0)
        self.events: list[Event] = []
        self.host_s = 0.0
        """When the host has launched all that it has launched."""
        self.launching_s = self.launch_waits_s = 0.0
        """Time that the host launched, and that compute stood still for that alone."""
        self._noise = noise
        self._noise_frac = noise_frac
        self._record = record

    def run(self, name: str, resource: Resource, duration_s: float, *after_s: float, num_bytes: int = 0) -> float:
        """Ends an operation that begins when its resource is free and all of `after_s` have passed; returns when."""
        duration_s = self.noisy(duration_s)
        start_s = max(self.free_s[resource], *after_s) if after_s else self.free_s[resource]
        end_s = start_s + duration_s
        self.free_s[resource] = end_s
        self.busy_s[resource] += duration_s
        if self._record and duration_s > 0:
            self.events.append(Event(name, resource, start_s, end_s, num_bytes))
        return end_s

    def compute(self, name: str, duration_s: float, launch_s: float, *after_s: float) -> float:
        """As `run` on the compute stream, of many small operations that the host launches in `launch_s`.

        They begin with the first launch, and don't end before the last one.
        """
        begin_s = self.host_s
        self.host_s = begin_s + launch_s
        duration_s = self.noisy(duration_s)
        ready_s = max(self.free_s[Resource.COMPUTE], *after_s) if after_s else self.free_s[Resource.COMPUTE]
        start_s = max(ready_s, begin_s, self.host_s - duration_s)
        self.launching_s += launch_s
        self.launch_waits_s += start_s - ready_s
        self.free_s[Resource.COMPUTE] = end_s = start_s + duration_s
        self.ran(name, Resource.COMPUTE, start_s, end_s, duration_s, 0)
        return end_s

    def noisy(self, duration_s: float) -> float:
        return duration_s if self._noise is None else duration_s * (1 + self._noise_frac * self._noise.random())

    def ran(self, name: str, resource: Resource, start_s: float, end_s: float, busy_s: float, num_bytes: int) -> None:
        """Books an operation whose times were found elsewhere."""
        self.busy_s[resource] += busy_s
        if self._record and busy_s > 0:
            self.events.append(Event(name, resource, start_s, end_s, num_bytes))

    def wait(self, resource: Resource, until_s: float) -> float:
        """The resource idles until then."""
        self.free_s[resource] = max(self.free_s[resource], until_s)
        return self.free_s[resource]


class Ring:
    """Staging buffers used in turn: the next user waits for the one `count` places before it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free_s: list[float] = []

    def free_s(self) -> float:
        """When the buffer whose turn it is has been left."""
        return self._free_s[-self._count] if len(self._free_s) >= self._count > 0 else 0.0

    def use(self, until_s: float) -> None:
        """Takes that buffer until then."""
        self._free_s.append(until_s)

    def clear(self) -> None:
        self._free_s.clear()
