"""`lazytrain launch`: `accelerate launch` that also takes `--config`, with LazyTrain's hook installed for sure.

The script runs through `python -m lazytrain_plugin.launch`, so the `torch.backends` entry point need not work (see
`lazytrain doctor` for when it does not). Everything else is Accelerate's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

LAUNCH_MODULE = "lazytrain_plugin.launch"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Accelerate's own arguments, with the script replaced by `lazytrain_plugin.launch SCRIPT`."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.prog = "lazytrain launch"
    parser.add_argument("--config", dest="config_file", default=argparse.SUPPRESS, help="Same as --config_file.")
    parsed = parser.parse_args(arguments)
    if not parsed.no_python:  # then the "script" is an executable that starts Python by itself
        module_flag = ["-m"] if parsed.module else []
        parsed.training_script_args = [*module_flag, parsed.training_script, *parsed.training_script_args]
        parsed.training_script, parsed.module = LAUNCH_MODULE, True
    return parsed


def launch(arguments: list[str]) -> None:
    """Runs `accelerate launch` with these arguments; exits or raises as it does."""
    from accelerate.commands.launch import launch_command

    parsed = parse(arguments)
    if parsed.config_file is not None and not Path(parsed.config_file).is_file():
        sys.exit(f"lazytrain: there is no launch config {parsed.config_file}; `accelerate config` makes one")
    launch_command(parsed)
