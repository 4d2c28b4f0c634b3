"""When each operation of chosen steps ran: CUDA events on the streams, host clocks for what the host does.

Off unless asked for. Recording adds two events per operation and one synchronisation before the first recorded step and
one after the last; what happens in between is launched as always.

[Note: one clock] Times on a stream are measured from an event that passed while the host was reading its own clock;
the two clocks agree to the time of that synchronisation (tens of microseconds).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lazytrain_plugin.plan.measured import MeasuredStep
from lazytrain_plugin.plan.simulate import Event, Resource


@dataclass(slots=True)
class _Span:
    name: str
    resource: Resource
    num_bytes: int
    begin: object
    end: object = None


class StepRecorder:
    """Records the operations of `num_steps` optimizer steps.

    Args:
        device: the device that computes.
        first_step: steps of this run before the first recorded one; at least 1, because a step begins with the updates
            of the one before.
        finished: called with what was recorded, on the thread that calls `end_step`, once.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        first_step: int,
        num_steps: int,
        finished: Callable[[tuple[MeasuredStep, ...]], None],
    ) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._first, self._end = first_step, first_step + num_steps
        self._finished = finished
        self._ended_steps = 0
        self._lock = threading.Lock()  # the update thread has spans too
        self._spans: list[_Span] = []
        self._waits: list[tuple[str, object, object]] = []
        self._marks: list[object] = []
        """The ends of the steps, the end of the one before the first included."""
        self._origin: tuple[object, float] | None = None
        self.phase = "forward"
        """What computes now: names the copies that are started for it."""

    @property
    def active(self) -> bool:
        return self._origin is not None

    def begin(self, name: str, resource: Resource, num_bytes: int, mark: object) -> _Span:
        """`mark`: a timing event, or seconds of `time.perf_counter`."""
        return _Span(name, resource, num_bytes, mark)

    def end(self, span: _Span, mark: object) -> None:
        span.end = mark
        with self._lock:
            if self.active:
                self._spans.append(span)

    def wait(self, cause: str, before: object, after: object) -> None:
        """The compute stream stood still between two marks."""
        if self.active:
            self._waits.append((cause, before, after))

    def end_step(self) -> None:
        """`step()` was called: the next operation belongs to the next step."""
        self._ended_steps += 1
        if self._ended_steps == self._first:
            self._start()
        if self.active:
            self._marks.append(self._mark())
            if self._ended_steps == self._end:
                self.finish()

    def finish(self) -> None:
        """Hands over the steps that are complete, if there are any. Safe to call twice."""
        if not self.active:
            return
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        with self._lock:
            spans, self._spans = self._spans, []
            steps = self._steps(spans)
            self._origin = None
        self._first = self._end = -1
        if steps:
            self._finished(steps)

    def _start(self) -> None:
        # See [Note: one clock].
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            self._origin = event, time.perf_counter()
        else:
            self._origin = None, time.perf_counter()

    def _mark(self) -> object:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: object) -> float:
        event, host_s = self._origin
        return mark - host_s if isinstance(mark, float) else event.elapsed_time(mark) / 1e3

    def _steps(self, spans: list[_Span]) -> tuple[MeasuredStep, ...]:
        marks_s = [self._seconds(mark) for mark in self._marks]
        waits = [(cause, self._seconds(before), self._seconds(after)) for cause, before, after in self._waits]
        events = [
            Event(span.name, span.resource, self._seconds(span.begin), self._seconds(span.end), span.num_bytes)
            for span in spans
        ]
        events = _without_waits(events, waits)
        events += _losses(events, waits)
        steps = []
        for number, (begin_s, end_s) in enumerate(zip(marks_s, marks_s[1:])):
            own = [_shifted(event, begin_s) for event in events if begin_s <= event.start_s < end_s]
            causes: dict[str, float] = {}
            for cause, before_s, after_s in waits:
                if begin_s <= before_s < end_s:
                    causes[cause] = causes.get(cause, 0.0) + after_s - before_s
            steps.append(
                MeasuredStep(
                    step=self._first + number,
                    step_s=end_s - begin_s,
                    events=tuple(sorted(own, key=lambda event: event.start_s)),
                    waits_s=causes,
                    peak_bytes=self._peak_bytes(),
                )
            )
        return tuple(steps)

    def _peak_bytes(self) -> dict[str, int]:
        from psutil import Process

        peak = {"cpu": Process().memory_info().rss}
        if self._is_cuda:
            peak["gpu"] = torch.cuda.max_memory_reserved(self._device)
        return peak


def _without_waits(events: list[Event], waits: list[tuple[str, float, float]]) -> list[Event]:
    """Computations without the waits that fell into them (for a gradient on its way): in pieces of the same name."""
    pieces = []
    for event in events:
        start_s = event.start_s
        if event.resource == Resource.COMPUTE:
            for _, before_s, after_s in sorted(waits, key=lambda wait: wait[1]):
                is_what_was_waited_for = before_s <= event.start_s and event.end_s <= after_s
                if start_s < after_s and before_s < event.end_s and not is_what_was_waited_for:
                    if before_s > start_s:
                        pieces.append(Event(event.name, event.resource, start_s, before_s))
                    start_s = max(start_s, min(after_s, event.end_s))
        if event.end_s > start_s:
            pieces.append(Event(event.name, event.resource, start_s, event.end_s, event.num_bytes))
    return pieces


def _losses(events: list[Event], waits: list[tuple[str, float, float]]) -> list[Event]:
    """Head and loss, which are no units: what lies between the last forward and the first backward of a micro-batch."""
    compute = sorted((e for e in events if e.resource == Resource.COMPUTE), key=lambda event: event.start_s)
    begins_backward = ("backward ", "again ")  # an edge runs units forward again first
    gaps = [
        Event("loss", Resource.COMPUTE, before.end_s, after.start_s)
        for before, after in zip(compute, compute[1:])
        if before.name.startswith("forward ")
        and after.name.startswith(begins_backward)
        and after.start_s > before.end_s
    ]
    return _without_waits(gaps, waits)


def _shifted(event: Event, origin_s: float) -> Event:
    return Event(event.name, event.resource, event.start_s - origin_s, event.end_s - origin_s, event.num_bytes)
