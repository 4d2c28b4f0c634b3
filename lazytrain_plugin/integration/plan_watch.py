"""Plan against measurement: what a step really takes, said once, and the rates that it shows.

A mark is set at the end of each optimizer step, an event on the compute stream, and read when it has passed: nothing
here ever waits for the device. Steps with a save or an evaluation in between are not counted.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from dataclasses import dataclass

import psutil
import torch

from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import StepTimes
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.units import format_bytes

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
"""Steps after a plan was put in place in which memory is still being taken and kernels are chosen."""
MEASURED_STEPS = 2
"""Steps that are measured before anything is said."""
MEMORY_TOLERANCE_FRAC = 0.1
TIME_TOLERANCE_FRAC = 0.3
SHORT_STEP_S = 0.25
"""Below this the interpreter's own time, which is not planned, is what a step takes."""
CUDA_CONTEXT_BYTES = 600 * 2**20
"""Of GPU memory that torch's allocator does not count (driver, kernels, cuBLAS handles), as seen on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """What a steady step of the running plan takes."""

    step_s: float
    compute_s: float
    """Without the waits that the trace booked."""
    update_parameters_per_s: float | None
    """Of the CPU worker while the links are busy; None where it did not update, or did other work too."""


class PlanWatch:
    """Watches one executor.

    Args:
        accumulation_steps: with several, the worker's time holds additions too, and its rate is not told.
    """

    def __init__(self, executor: Executor, accumulation_steps: int) -> None:
        self._executor = executor
        self._accumulation_steps = accumulation_steps
        self._marks: deque[tuple[object, bool, float, int]] = deque()
        self._plan: PlacementPlan | None = None
        self._predicted: StepTimes | None = None
        self._steps_seen = 0
        self._clean = True
        self._durations_s: list[float] = []
        self._measured: ObservedStep | None = None

    def plan_changed(self, plan: PlacementPlan, predicted: StepTimes | None) -> None:
        """A plan was put in place; `predicted`: its replay, None where there is none (a plan by hand)."""
        self._plan, self._predicted = plan, predicted
        self._steps_seen, self._measured = 0, None
        self._durations_s.clear()
        self._marks.clear()
        self._clean = True

    def disturb(self) -> None:
        """Something that is no training step takes time now."""
        self._clean = False

    def step_ended(self) -> ObservedStep | None:
        """Called when an optimizer step has been launched. Returns a measurement, once per plan, when it is known."""
        if self._plan is None or self._measured is not None:
            return None
        self._steps_seen += 1
        worker = self._executor.worker
        self._marks.append((self._mark(), self._clean, worker.update_s, worker.updated_parameters))
        self._clean = True
        self._take_intervals()
        if len(self._durations_s) < MEASURED_STEPS:
            return None
        self._measured = self._measure()
        self._report(self._measured)
        return self._measured

    def _mark(self):
        streams = self._executor.streams
        return streams.record(timing=True) if streams.is_cuda else time.perf_counter()

    def _take_intervals(self) -> None:
        while len(self._marks) >= 2 and self._passed(self._marks[1][0]):
            (begin, _, *_), (end, clean, *_) = self._marks[0], self._marks[1]
            # The steps before the first mark are the warm-up.
            if clean and self._steps_seen - len(self._marks) + 1 >= WARM_UP_STEPS:
                seconds = begin.elapsed_time(end) / 1e3 if self._executor.streams.is_cuda else end - begin
                self._durations_s.append(seconds)
            if len(self._durations_s) == MEASURED_STEPS:
                return
            self._marks.popleft()

    @staticmethod
    def _passed(mark) -> bool:
        return isinstance(mark, float) or mark.query()

    def _measure(self) -> ObservedStep:
        step_s = min(self._durations_s)
        waits = self._executor.streams.trace.steps[-MEASURED_STEPS:]
        waited_s = statistics.fmean(sum(step.values()) for step in waits) if waits else 0.0
        (_, _, busy_before, updated_before), (_, _, busy_after, updated_after) = self._marks[0], self._marks[-1]
        busy_s, updated = busy_after - busy_before, updated_after - updated_before
        rate = updated / busy_s if updated and busy_s > 0 and self._accumulation_steps == 1 else None
        return ObservedStep(step_s=step_s, compute_s=max(step_s - waited_s, 0.0), update_parameters_per_s=rate)

    def _report(self, measured: ObservedStep) -> None:
        planned_bytes = self._plan.predicted_bytes
        lines, off = [], []
        if self._predicted is not None:
            planned_s = self._predicted.step_s
            difference = measured.step_s / planned_s - 1
            lines.append(f"step {measured.step_s:.3g} s (planned {planned_s:.3g} s, {difference:+.0%})")
            if abs(difference) > TIME_TOLERANCE_FRAC and measured.step_s > SHORT_STEP_S:
                off.append("time")
        for tier, name, measured_bytes in self._memory():
            if not planned_bytes.get(tier):
                continue
            difference = measured_bytes / planned_bytes[tier] - 1
            planned = format_bytes(planned_bytes[tier])
            lines.append(f"{name} {format_bytes(measured_bytes)} (planned {planned}, {difference:+.0%})")
            # Less than planned is no harm that a small model's reserve would not explain.
            if difference > MEMORY_TOLERANCE_FRAC:
                off.append(f"{name} memory")
        if not lines:
            return
        text = f"plan against measurement: {', '.join(lines)}"
        if off:
            logger.warning("%s. The plan is wrong about %s by more than it should be", text, " and ".join(off))
        else:
            logger.info("%s", text)

    def _memory(self):
        """(tier, name, bytes) as measured."""
        if self._executor.streams.is_cuda:
            reserved = torch.cuda.max_memory_reserved(self._executor.device)
            yield "gpu", "GPU", reserved + CUDA_CONTEXT_BYTES
        yield "cpu", "host", psutil.Process().memory_info().rss
