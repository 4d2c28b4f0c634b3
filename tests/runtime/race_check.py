"""Finds accesses to the runtime's buffers that nothing orders, without a GPU and whatever the timing.

Streams, host threads and the events between them get vector clocks. Every access to a tracked buffer (homes in host
memory, weight slots, state slots, weights that rest on the GPU) must come after all earlier ones that conflict with it,
by a chain of waits; else two copy engines could run them in either order. The host learns that an event is complete by
waiting for it only, as if every transfer were late.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lazytrain_plugin.runtime import executor, gradients, host_memory, slots, state_slots, streamed_updates, update
from lazytrain_plugin.runtime import worker as worker_module
from lazytrain_plugin.runtime.homes import UnitHome
from lazytrain_plugin.runtime.streams import Streams

Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    start: int
    end: int
    writes: bool
    by: str
    tick: int
    what: str


@dataclass
class RaceCheck:
    """The clocks of one test, and what they found."""

    drop: Callable[[dict, object], bool] = lambda frame_locals, event: False
    """Waits to leave out, from the local variables of the caller and the event: a race must be found then."""
    races: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clocks: dict[str, Clock] = defaultdict(lambda: defaultdict(int))
        self.regions: list[tuple[int, int]] = []
        self.accesses: list[Access] = []
        self.actors: set[str] = set()
        self.local = threading.local()
        self.lock = threading.RLock()

    def host(self) -> str:
        return f"host {threading.current_thread().name}"

    def actor(self) -> str:
        stream = getattr(self.local, "stream", None)
        if stream is not None:
            return stream
        return self.host() if "lazytrain-update" in threading.current_thread().name else "compute"

    def join(self, name: str, clock: Clock) -> None:
        with self.lock:
            mine = self.clocks[name]
            for other, tick in clock.items():
                mine[other] = max(mine[other], tick)

    def snapshot(self, name: str) -> Clock:
        """What is done when everything is that `name` was given so far."""
        with self.lock:
            self.join(name, self.clocks[self.host()])  # work is launched by a thread that knows what it knows
            return dict(self.clocks[name])

    def track(self, tensor: torch.Tensor) -> None:
        self.regions.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))

    def access(self, tensor: torch.Tensor, *, writes: bool, what: str, by: str | None = None) -> None:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if start == end or not any(first <= start and end <= last for first, last in self.regions):
            return
        by = by or self.actor()
        with self.lock:
            known = self.snapshot(by)
            for other in self.accesses:
                overlaps = other.start < end and start < other.end and (writes or other.writes)
                if overlaps and known.get(other.by, 0) < other.tick:
                    self.races.append(f"{what} by {by} is not ordered after {other.what} by {other.by}")
            self.clocks[by][by] += 1
            self.actors.add(by)
            if writes:  # what comes after this one comes after those
                self.accesses = [other for other in self.accesses if other.start < start or end < other.end]
            self.accesses.append(Access(start, end, writes, by, self.clocks[by][by], what))


class CheckedEvent:
    def __init__(self, check: RaceCheck, clock: Clock) -> None:
        self._check, self.clock = check, clock

    def synchronize(self) -> None:
        self._check.join(self._check.host(), self.clock)

    def query(self) -> bool:
        known = self._check.clocks[self._check.host()]
        return all(known[name] >= tick for name, tick in self.clock.items())


def checked_streams(check: RaceCheck) -> type[Streams]:
    class CheckedStreams(Streams):
        def __init__(self, device: torch.device, **_) -> None:
            super().__init__(device)
            self.h2d, self.d2h, self._count = "h2d", "d2h", 0

        def slot_stream(self):
            self._count += 1
            return f"slot {self._count}"

        @contextlib.contextmanager
        def on(self, stream):
            before, check.local.stream = getattr(check.local, "stream", None), stream
            try:
                yield
            finally:
                check.local.stream = before

        def record(self, stream=None, *, timing: bool = False, blocking: bool = False):
            return CheckedEvent(check, check.snapshot(stream or "compute"))

        def wait(self, stream, event) -> None:
            if event is not None and not check.drop(sys._getframe(1).f_locals, event):
                check.join(stream, event.clock)

        def compute_waits(self, event, cause: str, *, since=None) -> None:
            if event is not None and not check.drop(sys._getframe(1).f_locals, event):
                check.join("compute", event.clock)

        def synchronize(self) -> None:
            for name in list(check.clocks):
                check.join(check.host(), check.clocks[name])

    return CheckedStreams


def install(check: RaceCheck, patch) -> None:
    """`patch`: pytest's monkeypatch."""

    def after_init(kind: type, tensors: Callable) -> None:
        init = kind.__init__

        def tracked(self, *args, **kwargs) -> None:
            init(self, *args, **kwargs)
            for tensor in tensors(self):
                check.track(tensor)

        patch.setattr(kind, "__init__", tracked)

    patch.setattr(executor, "Streams", checked_streams(check))
    after_init(host_memory.HostBuffer, lambda buffer: [buffer._bytes])
    after_init(slots.WeightSlot, lambda slot: [slot.flat])
    after_init(state_slots.StateSlot, lambda slot: [slot._memory])
    after_init(UnitHome, lambda home: home.gpu_weights.values())
    _watch_transfers(check, patch)
    _watch_kernels(check, patch)
    _watch_worker(check, patch)


def _watch_transfers(check: RaceCheck, patch) -> None:
    read, write, publish = host_memory.HostBuffer.read, host_memory.HostBuffer.write, UnitHome.publish

    def checked_read(self, offset_bytes, target) -> None:
        check.access(self._bytes[offset_bytes : offset_bytes + target.nbytes], writes=False, what="upload")
        check.access(target, writes=True, what="arrival in a slot")
        read(self, offset_bytes, target)

    def checked_write(self, offset_bytes, source) -> None:
        check.access(source, writes=False, what="departure from a slot")
        check.access(self._bytes[offset_bytes : offset_bytes + source.nbytes], writes=True, what="arrival at home")
        write(self, offset_bytes, source)

    def checked_publish(self, tensor) -> None:
        if self.has_two_copies:
            check.access(self.weight(tensor), writes=False, what="publishing")
            check.access(self.gpu_weights[tensor], writes=True, what="publishing")
        publish(self, tensor)

    patch.setattr(host_memory.HostBuffer, "read", checked_read)
    patch.setattr(host_memory.HostBuffer, "write", checked_write)
    patch.setattr(UnitHome, "publish", checked_publish)


def _watch_kernels(check: RaceCheck, patch) -> None:
    def parts(gradient) -> list[torch.Tensor]:
        return [gradient] if isinstance(gradient, torch.Tensor) else [gradient.codes, gradient.steps]

    def checked_update(tensor, weight, remainder, gradient, moments, step, **options) -> None:
        flats = [part for m in moments for part in ((m,) if isinstance(m, torch.Tensor) else (m.codes, m.scales))]
        for changed in (weight, *flats, *([remainder] if remainder is not None else [])):
            check.access(changed, writes=True, what=f"update of {tensor.name}")
        for part in parts(gradient):
            check.access(part, writes=False, what=f"update of {tensor.name} (gradient)")
        plain_update(tensor, weight, remainder, gradient, moments, step, **options)

    def checked_add_up(total, gradient, *, first) -> None:
        for part in parts(gradient):
            check.access(part, writes=False, what="accumulation")
        for part in parts(total):
            check.access(part, writes=True, what="accumulation")
        plain_add_up(total, gradient, first=first)

    @contextlib.contextmanager
    def checked_lease(self, unit, **options):
        with lease(self, unit, **options):
            used = [p.data for p in unit.module.parameters()]
            for when in ("first", "last"):
                for weight in used:
                    check.access(weight, writes=False, what=f"{when} use of {unit.name}", by="compute")
                if when == "first":
                    yield

    plain_update, plain_add_up, lease = update.update_span, gradients.add_up, executor.Executor.lease
    for module in (update, streamed_updates):
        patch.setattr(module, "update_span", checked_update)
    patch.setattr(gradients, "add_up", checked_add_up)
    patch.setattr(executor.Executor, "lease", checked_lease)


def _watch_worker(check: RaceCheck, patch) -> None:
    submit, wait = worker_module.UpdateWorker.submit, worker_module.Ticket.wait
    ended: dict[object, Clock] = {}

    def checked_submit(self, work, label):
        known = check.snapshot(check.host())

        def checked_work() -> None:
            check.join(check.host(), known)
            try:
                work()
            finally:
                clocks.append(check.snapshot(check.host()))

        clocks: list[Clock] = []
        ticket = submit(self, checked_work, label)
        ended[id(ticket)] = (ticket, clocks)  # holding the ticket keeps its id
        return ticket

    def checked_wait(self) -> None:
        wait(self)
        for clock in ended[id(self)][1]:
            check.join(check.host(), clock)

    def checked_done(self) -> bool:
        if not (self._done.is_set() and self._error is None):
            return False
        checked_wait(self)
        return True

    patch.setattr(worker_module.UpdateWorker, "submit", checked_submit)
    patch.setattr(worker_module.Ticket, "wait", checked_wait)
    patch.setattr(worker_module.Ticket, "done", property(checked_done))
