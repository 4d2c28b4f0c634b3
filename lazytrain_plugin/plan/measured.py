"""`MeasuredTrace`: when each operation of real steps ran, in the words of the replay; planned against measured.

The names are those of `Event` ("forward model.layers.3", "weights model.layers.3 (backward)"), so that an operation can
be looked up in both.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.simulate import Event, Resource

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One optimizer step, from the first forward after an update was asked for to the end of its last backward."""

    step: int
    """Optimizer steps before it."""
    step_s: float
    events: tuple[Event, ...]
    """In seconds from the step's start; what a stream began earlier or ends later lies outside [0, step_s]."""
    waits_s: dict[str, float]
    """Time that the compute stream stood still, by cause."""
    peak_bytes: dict[str, int]
    """Peak per tier so far, `{"gpu": ..., "cpu": ...}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTrace:
    """Some steps of one run under one plan."""

    steps: tuple[MeasuredStep, ...]
    device: str = ""
    """Name of the GPU, or "cpu"."""
    plan: dict[str, Any] | None = None
    """The plan that was carried out, as its own JSON."""
    planned: dict[str, Any] | None = None
    """The plan's own step, as `build_timeline` makes it; None for a plan by hand."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigError("the trace holds no step; train up to the last one that it names")

    @property
    def typical(self) -> MeasuredStep:
        """The step of median length (the lower one of two)."""
        return sorted(self.steps, key=lambda step: step.step_s)[(len(self.steps) - 1) // 2]

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def from_json(cls, text: str) -> MeasuredTrace:
        """Parses a trace; raises ConfigError when it is not one."""
        try:
            raw = json.loads(text)
            if raw.get("schema_version") != SCHEMA_VERSION:
                raise ConfigError(
                    f"trace schema {raw.get('schema_version')} is not {SCHEMA_VERSION}; record it with this version"
                )
            raw["steps"] = tuple(_step_from_dict(step) for step in raw["steps"])
            return cls(**raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f'not a LazyTrain trace: {error}; record one with "trace": {{"path": ...}} in the "lazytrain" block'
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> MeasuredTrace:
        try:
            return cls.from_json(Path(path).read_text())
        except OSError as error:
            raise ConfigError(
                f"trace {str(path)!r} can't be read: {error.strerror}; record one with "
                '"trace": {"path": ...} in the "lazytrain" block'
            ) from error


def _step_from_dict(raw: dict) -> MeasuredStep:
    events = tuple(Event(**{**event, "resource": Resource(event["resource"])}) for event in raw["events"])
    return MeasuredStep(**{**raw, "events": events})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceComparison:
    """One resource over one step, as planned and as measured."""

    resource: Resource
    planned_busy_s: float
    measured_busy_s: float
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindComparison:
    """All operations of one kind ("forward", "weights", ...) over one step."""

    kind: str
    resource: Resource
    count: int
    """How many were measured."""
    planned_s: float
    measured_s: float


def compare_resources(planned: Iterable[Event], measured: Iterable[Event]) -> list[ResourceComparison]:
    """Working time and bytes per resource; those that neither uses are left out."""
    by_resource = [_grouped(events, lambda event: event.resource) for events in (planned, measured)]
    rows = []
    for resource in Resource:
        plan, real = (groups.get(resource, []) for groups in by_resource)
        if plan or real:
            rows.append(
                ResourceComparison(
                    resource=resource,
                    planned_busy_s=busy_s(plan),
                    measured_busy_s=busy_s(real),
                    planned_bytes=sum(event.num_bytes for event in plan),
                    measured_bytes=sum(event.num_bytes for event in real),
                )
            )
    return rows


def compare_kinds(planned: Iterable[Event], measured: Iterable[Event]) -> list[KindComparison]:
    """Working time per kind of operation, in the order of the resources."""

    def key(event: Event) -> tuple[Resource, str]:
        return event.resource, event.name.partition(" ")[0]

    by_kind = [_grouped(events, key) for events in (planned, measured)]
    keys = sorted({*by_kind[0], *by_kind[1]}, key=lambda kind: (list(Resource).index(kind[0]), kind[1]))
    return [
        KindComparison(
            kind=kind,
            resource=resource,
            count=len(by_kind[1].get((resource, kind), [])),
            planned_s=busy_s(by_kind[0].get((resource, kind), [])),
            measured_s=busy_s(by_kind[1].get((resource, kind), [])),
        )
        for resource, kind in keys
    ]


def busy_s(events: Sequence[Event]) -> float:
    """Time in which at least one of the events ran."""
    total_s, until_s = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_s):
        total_s += max(0.0, event.end_s - max(event.start_s, until_s))
        until_s = max(until_s, event.end_s)
    return total_s


def _grouped(events: Iterable[Event], key) -> dict:
    groups = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return groups
