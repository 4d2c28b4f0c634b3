"""Every CUDA stream and event of the runtime, and the waits between them; null objects on the CPU.

- compute: the caller's current stream. Units run here; nobody else launches compute.
- h2d: weights on their way to a slot, so that a copy overlaps the previous unit's compute.
- d2h: gradients on their way home. Its own stream, because one copy engine serves each direction.
- comm: gradients that meet those of other ranks. Its own stream, so that backward goes on while the network works.
- one per state slot (`slot_stream`): states come, are updated and leave on it in this order, so that the slot is never
  written while something still reads it, and no other transfer waits behind an update.

A wait of the compute stream is bracketed by two timing events, so that the time it cost is known
without a host synchronisation; `Trace` reads them once the step is over.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.recorder import StepRecorder
from lazytrain_plugin.runtime.worker import LOOK_UP_S

POLL_S = 5e-5
"""Between two looks at an event."""


MOST_LAUNCHES = 4
"""Units of a step, its first ones, whose launches are timed."""


class NullEvent:
    """Stands for a CUDA event where every operation is already complete."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Trace:
    """Seconds the compute stream stood still, by cause, per optimizer step.

    Causes: `weights` (a transfer to the GPU), `update` (an optimizer update that forward needed),
    `gradients` (a gradient slot still on its way home), `activations` (a unit's input on its way),
    `step` (between two steps: from the last gradient to the next forward, without updates on this stream).
    """

    def __init__(self) -> None:
        self._pending: list[tuple[str, object, object]] = []
        self._current: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []
        """One dict per finished optimizer step; the last 1,000."""
        self.launches: list[tuple[str, float]] = []
        """Of the last finished step: host time to launch the forward of some of its first units. The host has
        just waited for the clip factor then, so the GPU's queue is short, and launching never waits for its end."""
        self._launches: list[tuple[str, float]] = []
        self._num_launched = 0
        self.recorder: StepRecorder | None = None
        """Measures single operations, where that was asked for."""

    def add_events(self, cause: str, before, after) -> None:
        self._pending.append((cause, before, after))
        if self.recorder is not None:
            self.recorder.wait(cause, before, after)

    def add_seconds(self, cause: str, seconds: float) -> None:
        self._current[cause] += seconds

    def launched(self, name: str, seconds: float, *, waited: bool) -> None:
        """The host has launched a unit's forward; `waited`: and may have waited for something else first."""
        self._num_launched += 1
        if self._num_launched <= MOST_LAUNCHES and not waited:
            self._launches.append((name, seconds))

    def end_step(self) -> None:
        """Closes a step. Events that have not happened yet count for the next one."""
        unfinished = []
        for cause, before, after in self._pending:
            if after.query():
                self._current[cause] += before.elapsed_time(after) / 1e3
            else:
                unfinished.append((cause, before, after))
        self._pending = unfinished
        self.launches, self._launches, self._num_launched = self._launches, [], 0
        self.steps.append(dict(self._current))
        del self.steps[:-1000]
        self._current.clear()
        if self.recorder is not None:
            self.recorder.end_step()

    def summary(self, last: int = 10) -> dict[str, float]:
        """Mean seconds per step and cause over the last `last` steps."""
        steps = self.steps[-last:]
        causes = sorted({cause for step in steps for cause in step})
        return {cause: sum(step.get(cause, 0.0) for step in steps) / len(steps) for cause in causes}


class Streams:
    """The streams of one device. All methods are no-ops (or plain clocks) on the CPU."""

    def __init__(self, device: torch.device, *, transfer_delay_s: float = 0.0) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.trace = Trace()
        self.patience: Callable[[float], None] | None = None
        """Called with the seconds so far, now and then while the host waits for what other ranks do too."""
        self.phase = "forward"
        """What computes now, forward or backward: names the copies that are started for it."""
        self._idle_since = None
        self._transfer_delay_s = transfer_delay_s
        """Race tests make every transfer late by this much, so that a missing wait shows."""
        if self.is_cuda:
            # High priority lets copies start as soon as they may, even while a long kernel queue waits.
            self.h2d = torch.cuda.Stream(device, priority=-1)
            self.d2h = torch.cuda.Stream(device, priority=-1)
            self.comm = torch.cuda.Stream(device, priority=-1)
        else:
            self.h2d = self.d2h = self.comm = None

    def use_device(self) -> None:
        """What a new thread does first: CUDA has it begin on the first GPU, where its first switch to a stream and back
        would take half a GiB of another rank's memory."""
        if self.is_cuda:
            torch.cuda.set_device(self.h2d.device)

    def slot_stream(self):
        """A stream for one staging buffer. High priority: an update is short, and units and transfers wait for it."""
        return torch.cuda.Stream(self.device, priority=-1) if self.is_cuda else None

    def on(self, stream):
        """Context in which work is launched on `stream`."""
        if not self.is_cuda:
            return contextlib.nullcontext()
        context = torch.cuda.stream(stream)
        if self._transfer_delay_s:
            return self._delayed(context)
        return context

    @contextlib.contextmanager
    def _delayed(self, context):
        with context:
            torch.cuda._sleep(int(self._transfer_delay_s * 1.5e9))
            yield

    def record(self, stream=None, *, timing: bool = False, blocking: bool = False):
        """An event at the end of `stream` (default: the compute stream).

        blocking: a thread that waits for it sleeps, and leaves its core to others.
        """
        if not self.is_cuda:
            return NullEvent()
        event = torch.cuda.Event(enable_timing=timing, blocking=blocking)
        event.record(stream if stream is not None else torch.cuda.current_stream(self.device))
        return event

    def wait(self, stream, event) -> None:
        """Makes a copy stream wait for `event`; the host goes on."""
        if self.is_cuda and event is not None:
            stream.wait_event(event)

    def reach(self, event, poll_s: float = POLL_S) -> None:
        """The host waits for `event`; raises what `patience` raises, for there may be no other end to it."""
        if self.patience is None:
            event.synchronize()
            return
        begin = look = time.monotonic()
        while not event.query():
            if (now := time.monotonic()) >= look + LOOK_UP_S:
                look = now
                self.patience(now - begin)
            time.sleep(poll_s)

    def compute_waits(self, event, cause: str, *, since=None) -> None:
        """Makes the compute stream wait for `event` and books the time under `cause`.

        `since`: a timing event from which the stall counts (default: now).
        """
        if not self.is_cuda or event is None:
            return
        compute = torch.cuda.current_stream(self.device)
        if since is None:
            if event.query():
                return
            since = self.record(timing=True)
        compute.wait_event(event)
        self.trace.add_events(cause, since, self.record(timing=True))

    def begin_idle(self) -> None:
        """Nothing is left to compute between two steps."""
        self._idle_since = self.record(timing=True)

    def end_idle(self):
        """The compute stream gets work again, and the time without is booked; returns the event of now."""
        since, now = self._idle_since, self.record(timing=True)
        if since is not None and self.is_cuda:
            self.trace.add_events("step", since, now)
        self._idle_since = None
        return now

    @contextlib.contextmanager
    def host_waits(self, cause: str):
        """Books host time under `cause` on the CPU, where the host is the compute stream."""
        start_s = time.perf_counter()
        yield
        if not self.is_cuda:
            end_s = time.perf_counter()
            self.trace.add_seconds(cause, end_s - start_s)
            if self.trace.recorder is not None:
                self.trace.recorder.wait(cause, start_s, end_s)

    def span(self, name: str, resource: Resource, *, stream=None, num_bytes: int = 0):
        """Context in which one operation is launched on `stream` (default: the compute stream), or done by the host.

        A running profiler sees its name; an active recorder measures it. Costs nothing otherwise.
        """
        recorder = self.trace.recorder
        if recorder is not None and recorder.active:
            return self._measured(recorder, name, resource, stream, num_bytes)
        if torch.autograd.profiler._is_profiler_enabled:
            return torch.profiler.record_function(name)
        return contextlib.nullcontext()

    def computing(self, name: str):
        """`span` of a computation on the current stream."""
        return self.span(name, Resource.COMPUTE)

    @contextlib.contextmanager
    def _measured(self, recorder: StepRecorder, name: str, resource: Resource, stream, num_bytes: int):
        on_gpu = (Resource.COMPUTE, Resource.H2D, Resource.D2H, Resource.EXCHANGE)
        on_host = resource not in on_gpu or not self.is_cuda
        mark = time.perf_counter if on_host else lambda: self.record(stream, timing=True)
        span = recorder.begin(name, resource, num_bytes, mark())
        with torch.profiler.record_function(name):
            yield
        recorder.end(span, mark())

    def run_backward_on_one_thread(self, enabled: bool) -> None:
        """For backwards that the calling thread starts. autograd has a thread per device, so the nodes of a penalty on
        weights at home would run while a lease has the same weights on the GPU."""
        if self.is_cuda:
            torch.autograd.set_multithreading_enabled(not enabled)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
