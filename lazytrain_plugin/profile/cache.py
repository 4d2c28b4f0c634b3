"""Files that one run keeps for the next ones."""

from __future__ import annotations

import os
import time
from pathlib import Path


def default_cache_dir() -> Path:
    """Where runs and commands keep what they found out: `$XDG_CACHE_HOME/lazytrain`, by default `~/.cache/lazytrain`.

    A relative `XDG_CACHE_HOME` is ignored, as its specification asks.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "lazytrain"


def write_atomically(path: Path, text: str) -> None:
    """Writes a file whole or not at all, whoever else writes it; makes its folder. Raises OSError."""
    temporary = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(text)
    temporary.replace(path)
