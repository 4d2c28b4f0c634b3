"""Plan against measurement: what a step really takes, said once, the rates that it shows, and whether that changes.

A mark is set at the end of each optimizer step, an event on the compute stream, and read when it has passed: nothing
here ever waits for the device. Steps with a save or an evaluation in between are not counted, nor those with fewer
tokens than the plan is for.

After the first measurement steps are watched in windows. A machine that gets slower or faster (another job on the same
cores, a lower clock) shows in the median of a window; two windows in a row that are off by the same sign, and by more
than noise, are a drift. What they took is then what further windows are compared with, so that one change is told once.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

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
WINDOW_STEPS = 20
"""Steps of a window after the first measurement."""
DRIFT_WINDOWS = 2
"""Windows in a row that must agree."""
DRIFT_TIME_FRAC = 0.15
"""By how much a window's median must be off: more than noise, less than what a better plan gains."""
FULL_FRAC = 0.9
"""Share of the planned tokens from which on a step is one that the plan is about."""
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
    launches_s: Mapping[str, float] = field(default_factory=dict)
    """Host time to launch a unit's forward, of some units of a step."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The end of an optimizer step."""

    at: object
    """An event on the compute stream, or the clock's time."""
    counted: bool
    """The step before it was a full one with nothing beside it."""
    update_s: float
    updated_parameters: int


class PlanWatch:
    """Watches one executor.

    Args:
        accumulation_steps: with several, the worker's time holds additions too, and its rate is not told.
    """

    def __init__(self, executor: Executor, accumulation_steps: int) -> None:
        self._executor = executor
        self._accumulation_steps = accumulation_steps
        self._plan: PlacementPlan | None = None
        self._predicted: StepTimes | None = None
        self._tokens = 0
        self._clean = True
        self._forget()

    def _forget(self) -> None:
        self._marks: deque[_Mark] = deque()
        self._steps_seen = self._short_steps = 0
        self._durations_s: list[float] = []
        self._launches_s: dict[str, list[float]] = defaultdict(list)
        self._window_began: _Mark | None = None
        self._reference_s: float | None = None
        """What further windows are compared with."""
        self._drifts: list[bool] = []
        """Of the windows in a row that are off: whether they are slower."""

    def plan_changed(self, plan: PlacementPlan, predicted: StepTimes | None) -> None:
        """A plan was put in place; `predicted`: its replay, None where there is none (a plan by hand)."""
        self._plan, self._predicted = plan, predicted
        self._clean = True
        self._forget()

    def disturb(self) -> None:
        """Something that is no training step takes time now."""
        self._clean = False

    def ran(self, num_tokens: int | None) -> None:
        """A micro-batch of so many tokens is about to run; None: it can't be told, and is taken for a full one."""
        self._tokens += num_tokens if num_tokens is not None else self._planned_tokens

    @property
    def _planned_tokens(self) -> int:
        """Of a micro-batch; 0 where the plan does not say."""
        return (self._plan.max_tokens or 0) if self._plan is not None else 0

    def step_ended(self) -> ObservedStep | None:
        """Called when an optimizer step has been launched.

        Returns a measurement when it is known: the first one of a plan, and one for each drift after it.
        """
        if self._plan is None:
            return None
        self._steps_seen += 1
        worker = self._executor.worker
        counted = self._clean and self._is_full()
        self._marks.append(_Mark(self._now(), counted, worker.update_s, worker.updated_parameters))
        self._clean, self._tokens = True, 0
        if counted and self._steps_seen > WARM_UP_STEPS:
            for name, seconds in self._executor.streams.trace.launches:
                self._launches_s[name].append(seconds)
        first = self._reference_s is None
        wanted = MEASURED_STEPS if first else WINDOW_STEPS
        self._take_intervals(wanted)
        if len(self._durations_s) < wanted:
            return None
        # The first ones are few: the smaller is the one that nothing disturbed.
        step_s = min(self._durations_s) if first else statistics.median(self._durations_s)
        measured = self._measure(step_s, wanted)
        self._durations_s.clear()
        self._launches_s.clear()
        self._window_began = None
        if first:
            self._reference_s = step_s
            self._report(measured)
            return measured
        return measured if self._has_drifted(step_s) else None

    def _is_full(self) -> bool:
        planned = self._planned_tokens * self._accumulation_steps
        if self._tokens >= FULL_FRAC * planned:
            return True
        self._short_steps += 1
        if self._short_steps == WINDOW_STEPS and self._steps_seen == WINDOW_STEPS:
            logger.info(
                "no step had the %d tokens that the plan is for (the last one had %d): what steps take is not compared "
                'with the plan. "max_tokens" is best the largest batch that there is',
                planned,
                self._tokens,
            )
        return False

    def _has_drifted(self, step_s: float) -> bool:
        change = step_s / self._reference_s - 1
        if abs(change) <= DRIFT_TIME_FRAC:
            self._drifts.clear()
            return False
        slower = change > 0
        self._drifts = [*(drift for drift in self._drifts if drift == slower), slower]
        if len(self._drifts) < DRIFT_WINDOWS:
            return False
        num_steps = DRIFT_WINDOWS * WINDOW_STEPS
        logger.info("steps take %.3g s now, they took %.3g s (last %d)", step_s, self._reference_s, num_steps)
        self._reference_s = step_s
        self._drifts.clear()
        return True

    def _now(self):
        streams = self._executor.streams
        return streams.record(timing=True) if streams.is_cuda else time.perf_counter()

    def _take_intervals(self, wanted: int) -> None:
        while len(self._marks) >= 2 and len(self._durations_s) < wanted and self._passed(self._marks[1].at):
            begin, end = self._marks[0], self._marks[1]
            # The steps before the first mark are the warm-up.
            if end.counted and self._steps_seen - len(self._marks) + 1 >= WARM_UP_STEPS:
                if self._window_began is None:
                    self._window_began = begin
                is_cuda = self._executor.streams.is_cuda
                self._durations_s.append(begin.at.elapsed_time(end.at) / 1e3 if is_cuda else end.at - begin.at)
            self._marks.popleft()

    @staticmethod
    def _passed(mark) -> bool:
        return isinstance(mark, float) or mark.query()

    def _measure(self, step_s: float, num_steps: int) -> ObservedStep:
        waits = self._executor.streams.trace.steps[-num_steps:]
        waited_s = statistics.fmean(sum(step.values()) for step in waits) if waits else 0.0
        begin, end = self._window_began, self._marks[-1]
        busy_s, updated = end.update_s - begin.update_s, end.updated_parameters - begin.updated_parameters
        rate = updated / busy_s if updated and busy_s > 0 and self._accumulation_steps == 1 else None
        return ObservedStep(
            step_s=step_s,
            compute_s=max(step_s - waited_s, 0.0),
            update_parameters_per_s=rate,
            launches_s={name: statistics.median(seconds) for name, seconds in self._launches_s.items()},
        )

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
        process, ranks = psutil.Process(), self._executor.ranks
        if ranks is None:
            yield "cpu", "host", process.memory_info().rss
        else:
            # Of the machine, all ranks alike: each has its share of what they have in common.
            yield "cpu", "host", ranks.local_size * process.memory_full_info().pss
