"""Recompute edges: stretches of units whose inputs are not kept, and what backward runs again for them.

When backward reaches the last unit of a stretch, the units before it run forward once more, from the nearest unit that
keeps its input; each input found on the way waits until backward has passed its unit. A dropped input so costs one
forward of the unit before it, however long the stretch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.vocab import Activations

if TYPE_CHECKING:
    from lazytrain_plugin.plan.result import UnitPlan


@dataclass(frozen=True, slots=True)
class Edge:
    """Units `source + 1` to `last` drop their inputs."""

    source: int
    """The nearest unit before them that keeps its input."""
    last: int

    @property
    def again(self) -> range:
        """Units that run forward again when backward reaches `last`."""
        return range(self.source, self.last)


def edges(units: Sequence[UnitPlan]) -> list[Edge]:
    """All stretches of dropped inputs, in forward order."""
    found: list[Edge] = []
    for u, unit in enumerate(units):
        if unit.boundary is not None:
            continue
        if found and found[-1].last == u - 1:
            found[-1] = Edge(found[-1].source, u)
        else:
            found.append(Edge(u - 1, u))
    return found


def backward_order(units: Sequence[UnitPlan]) -> Iterator[tuple[int, bool]]:
    """Units in the order in which they run from the end of the loss on; True: forward again, for an edge."""
    by_last = {edge.last: edge for edge in edges(units)}
    for u in reversed(range(len(units))):
        if u in by_last:
            yield from ((again, True) for again in by_last[u].again)
        yield u, False


def check_edges(units: Sequence[UnitPlan]) -> None:
    """Raises PlanMismatchError where an input is dropped that can't be found again."""
    for u, unit in enumerate(units):
        if unit.boundary is not None:
            continue
        if u == 0:
            raise PlanMismatchError(
                f"{unit.name}: the input of the first unit is dropped, and no unit runs before it; keep it (boundary "
                '"gpu" or "cpu")'
            )
        before = units[u - 1]
        if before.activations == Activations.KEEP:
            raise PlanMismatchError(
                f"{unit.name}: its input is dropped, but {before.name}, which would compute it again, keeps its "
                "activations instead of its input; keep this input too, or plan that unit without keep"
            )
        if before.boundary_bits < 16:
            raise PlanMismatchError(
                f"{unit.name}: its input is dropped, but the input of {before.name}, which would compute it again, is "
                f"kept in {before.boundary_bits} bits; keep either of them as it is"
            )
