"""Updates that are queued one by one and carried out together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Batch:
    """A queue per implementation. The CPU gives up the interpreter's lock once, and its threads meet once; a GPU gets
    one launch instead of one per tensor (a launch takes the host longer than the GPU needs for a small tensor)."""

    def __init__(self) -> None:
        self._items: dict[Callable[[list], None], list] = {}

    def add(self, run_together: Callable[[list], None], item: Any) -> None:
        self._items.setdefault(run_together, []).append(item)

    def run(self) -> None:
        """Carries out what was added, on a GPU in the current stream's order; CPU tensors must have stayed alive."""
        items, self._items = self._items, {}
        for run_together, queued in items.items():
            run_together(queued)


def run_or_add(run_together: Callable[[list], None], item: Any, batch: Batch | None) -> None:
    """At once, or with `batch`."""
    if batch is None:
        run_together([item])
    else:
        batch.add(run_together, item)
