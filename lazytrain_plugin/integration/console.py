"""Where tables are printed."""

from __future__ import annotations

import os
import sys

from rich.console import Console

PIPED_WIDTH = 160
"""Columns where nobody says how many there are: in a file or a pipe names of layers must stay whole, to be found."""


def make_console() -> Console:
    """As wide as the terminal, or as COLUMNS says; else `PIPED_WIDTH`."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else PIPED_WIDTH)
