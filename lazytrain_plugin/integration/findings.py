"""What `lazytrain doctor` found, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a finding bears on a job."""

    OK = "ok"
    NOTE = "note"
    """Nothing to do; worth knowing."""
    WARNING = "warning"
    """The job runs, slower or untested."""
    ERROR = "error"
    """The job fails, or runs without LazyTrain."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


def to_json(findings: list[Finding]) -> str:
    """The findings as a JSON list of objects."""
    return json.dumps([asdict(finding) for finding in findings], indent=1)


def print_table(findings: list[Finding]) -> None:
    """The findings as a table, worst last so that it stays on the screen."""
    from rich.markup import escape
    from rich.table import Table

    from lazytrain_plugin.integration.console import make_console

    style = {Status.OK: "green", Status.NOTE: "cyan", Status.WARNING: "yellow", Status.ERROR: "bold red"}
    table = Table(title="LazyTrain", title_justify="left", box=None, pad_edge=False)
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold")
    order = list(Status)
    for finding in sorted(findings, key=lambda finding: order.index(finding.status)):
        table.add_row(
            f"[{style[finding.status]}]{finding.status}[/]",
            *map(escape, (finding.check, finding.detail, finding.remedy)),
        )
    make_console().print(table)
