"""The `"trace"` section: some steps are measured operation by operation, and written beside what the plan expected."""

from __future__ import annotations

import json
import logging

import torch

from lazytrain_plugin.config.schema import TraceConfig
from lazytrain_plugin.integration.planning import Planner
from lazytrain_plugin.plan.measured import MeasuredStep, MeasuredTrace
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.recorder import StepRecorder

logger = logging.getLogger(__name__)


def record_steps(config: TraceConfig, executor: Executor, planner: Planner) -> None:
    """Measures the steps that `config` names, if it names a file for them."""
    if config.path is None:
        return
    device = executor.device

    def finished(steps: tuple[MeasuredStep, ...]) -> None:
        trace = MeasuredTrace(
            steps=steps,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            plan=json.loads(executor.plan.to_json()),
            planned=planner.timeline(),
        )
        try:
            trace.save(config.path)
        except OSError as error:
            # A run must not end for a picture.
            logger.warning("the trace of %d steps can't be written to %s: %s", len(steps), config.path, error)
            return
        logger.info(
            "traced %d steps to %s; see `lazytrain explain %s` and its --timeline", len(steps), config.path, config.path
        )

    executor.streams.trace.recorder = StepRecorder(
        device, first_step=config.first_step, num_steps=config.num_steps, finished=finished
    )


def finish_recording(executor: Executor) -> None:
    """Training ends: whole steps that were recorded so far are written. Safe to call twice."""
    recorder = executor.streams.trace.recorder
    if recorder is not None:
        recorder.finish()
