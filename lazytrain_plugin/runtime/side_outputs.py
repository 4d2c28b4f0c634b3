"""Tensors that leave a unit other than by return; the integration layer says how a framework records them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class SideOutputs(Protocol):
    """How a framework's hooks collect tensors from inside a unit while its model runs."""

    def active_keys(self) -> tuple[str, ...]:
        """What is being collected right now."""
        ...

    def collecting(self, keys: tuple[str, ...]) -> AbstractContextManager[dict[str, list]]:
        """Within: hooks collect into the yielded dict instead of the outer one (also in a backward thread)."""
        ...

    def append(self, captured: dict[str, list]) -> None:
        """Adds what a unit captured to the outer collection."""
        ...


class NoSideOutputs:
    """Nothing is collected."""

    def active_keys(self) -> tuple[str, ...]:
        return ()

    def collecting(self, keys: tuple[str, ...]) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext({})

    def append(self, captured: dict[str, list]) -> None:
        pass
