"""One step of a plan as a page: what each resource does when, what computing waits for, and what fills each tier.

`build_timeline` makes the data (plain dicts, seconds and bytes), `timeline_page` puts it into `timeline.html`, which
needs nothing from the network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.measured import MeasuredStep
from lazytrain_plugin.plan.memory_series import memory_series
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import Event, Resource, StepTimes, simulate

LANE_NAMES = {
    Resource.COMPUTE: "compute",
    Resource.H2D: "host to GPU",
    Resource.D2H: "GPU to host",
    Resource.WORKER: "CPU update",
    Resource.NVME_READ: "NVMe read",
    Resource.NVME_WRITE: "NVMe write",
    Resource.EXCHANGE: "between ranks",
}
SHORTEST_WAIT_FRAC = 1e-4
"""Of the step; gaps below are rounding."""


def build_timeline(problem: PlacementProblem, plan: PlacementPlan, *, title: str) -> dict[str, Any]:
    """The planned part of what the page shows.

    Args:
        title: heading of the page: the model and the machine.
    """
    times = simulate(problem, plan, record=True)
    ledger = account(problem, plan)
    budgets = {
        "gpu": problem.gpu_budget_bytes if problem.has_gpu else 0,
        "cpu": problem.cpu_budget_bytes,
        "nvme": problem.nvme_budget_bytes,
    }
    peaks = ledger.total_bytes()
    return {
        "title": title,
        "facts": _facts(problem, plan, times),
        "step_s": times.step_s,
        "lanes": _lanes(times.events, times.step_s),
        "waits": compute_waits(times.events, times.step_s),
        "memory": [
            {"tier": tier, "budget_bytes": budgets[tier], "peak_bytes": peaks.get(tier, 0), **series}
            for tier, series in memory_series(problem, plan, times.events, times.step_s).items()
        ],
        "measured": None,
    }


def with_measured(timeline: dict[str, Any], measured: MeasuredStep) -> dict[str, Any]:
    """The data of `build_timeline` with a real step, which is drawn below the planned one."""
    return {
        **timeline,
        "measured": {
            "step": measured.step,
            "step_s": measured.step_s,
            "lanes": _lanes(measured.events, measured.step_s),
            "waits": compute_waits(measured.events, measured.step_s),
            "peak_bytes": measured.peak_bytes,
        },
    }


def timeline_page(data: dict[str, Any]) -> str:
    """The page of `build_timeline`'s data, as HTML."""
    template = files("lazytrain_plugin.plan").joinpath("timeline.html").read_text()
    # "</script>" inside a string would end the element.
    return template.replace("__TIMELINE__", json.dumps(data).replace("</", "<\\/"))


def compute_waits(events: Sequence[Event], step_s: float) -> list[dict[str, Any]]:
    """Gaps of the compute lane within the step.

    `for` is the operation at whose end the chain of operations that computing waited for could start (an update that a
    copy had to wait for), `through` the last of that chain where it is another one.
    """
    compute = sorted((e for e in events if e.resource == Resource.COMPUTE), key=lambda event: event.start_s)
    others = [event for event in events if event.resource != Resource.COMPUTE]
    waits, until_s = [], 0.0
    for event in [*compute, Event("the end of the step", Resource.COMPUTE, step_s, step_s)]:
        start_s = min(event.start_s, step_s)
        if start_s - until_s > SHORTEST_WAIT_FRAC * step_s:
            last = _ended_at(others, start_s, event.name, step_s)
            cause = last
            while cause is not None and cause.start_s > until_s:
                before = _ended_at([o for o in others if o is not cause], cause.start_s, cause.name, step_s)
                if before is None:
                    break
                cause = before
            waits.append(
                {
                    "start_s": until_s,
                    "end_s": start_s,
                    "for": cause.name if cause else "",
                    "through": last.name if last is not None and last is not cause else "",
                    "before": event.name,
                }
            )
        until_s = max(until_s, event.end_s)
    return waits


def _ended_at(events: Sequence[Event], time_s: float, name: str, step_s: float) -> Event | None:
    """The operation whose end let `name` start at `time_s`, one of the same unit first."""
    near = [event for event in events if 0 <= time_s - event.end_s <= SHORTEST_WAIT_FRAC * step_s]
    unit = name.split(" ")[1:2]
    return max(near, key=lambda event: (event.name.split(" ")[1:2] == unit, event.end_s), default=None)


def _lanes(events: Sequence[Event], step_s: float) -> list[dict[str, Any]]:
    return [
        {
            "resource": resource.value,
            "name": name,
            "busy_frac": sum(e.end_s - e.start_s for e in own) / step_s if step_s else 0.0,
            "events": [
                [event.name, round(event.start_s, 9), round(event.end_s, 9), event.num_bytes]
                for event in sorted(own, key=lambda event: event.start_s)
            ],
        }
        for resource, name in LANE_NAMES.items()
        if (own := [event for event in events if event.resource == resource])
    ]


def _facts(problem: PlacementProblem, plan: PlacementPlan, times: StepTimes) -> list[list[str]]:
    tokens = problem.max_tokens * problem.accumulation_steps
    gap = plan.solver.get("gap_frac")
    facts = [
        ["step", f"{1e3 * times.step_s:.0f} ms"],
        ["tokens / s", f"{tokens / times.step_s:,.0f}" if times.step_s else "-"],
        ["forward", f"{1e3 * times.forward_s:.0f} ms"],
        ["backward", f"{1e3 * times.backward_s:.0f} ms"],
        ["compute waits", f"{1e3 * max(0.0, times.step_s - times.compute_s):.0f} ms"],
        ["micro-batches", f"{problem.accumulation_steps} of {problem.max_tokens:,} tokens"],
        ["fidelity", str(plan.fidelity)],
        ["units on the GPU", f"{sum(unit.weights == 'gpu' for unit in plan.units)} of {len(plan.units)}"],
    ]
    if gap is not None:
        facts.append(["proven gap", f"{gap:.1%}"])
    return facts
