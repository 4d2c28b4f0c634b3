"""The `lazytrain` command line: `doctor`, `launch`, and the planning commands of `cli_plan`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from lazytrain_plugin.integration import cli_plan

app = typer.Typer(
    name="lazytrain",
    help="Train models that don't fit the GPU: plan the placement, start a job, find out what would go wrong.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="a DeepSpeed JSON, or an Accelerate launch YAML that points to one")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="compare the config's budgets and plan file with this model: config.json, folder or hub id"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Check versions, hook, kernels, limits and a config; exit with 1 if a job would fail or run without LazyTrain."""
    from lazytrain_plugin.integration.doctor import examine
    from lazytrain_plugin.integration.findings import Status, print_table, to_json

    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed's warnings would spoil JSON
        findings = examine(config, model)
    print(to_json(findings)) if as_json else print_table(findings)
    if any(finding.status is Status.ERROR for finding in findings):
        raise typer.Exit(1)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Start a script with `accelerate launch`; takes --config or --config_file.",
)
def launch(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGUMENTS ...]")] = None,
) -> None:
    """`accelerate launch` that also takes --config, and installs LazyTrain's hook in the script's processes."""
    from lazytrain_plugin.integration import launcher

    launcher.launch(arguments or ["--help"])


cli_plan.register(app)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
