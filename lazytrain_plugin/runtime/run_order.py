"""Which unit runs after which under a plan, and so whose weights are fetched next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lazytrain_plugin.plan.edges import backward_order
from lazytrain_plugin.runtime.unit import Unit

FORWARD, BACKWARD, AGAIN = "forward", "backward", "again"
"""What a unit is run for; again: forward once more, to find an input that was dropped."""


class RunOrder:
    """Units in the order of one forward, and of its backward with what runs again in it.

    Args:
        units: with their homes.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.streamed = [unit for unit in units if not unit.home.on_gpu]
        backward = [
            (units[u], AGAIN if again else BACKWARD) for u, again in backward_order([unit.home.plan for unit in units])
        ]
        self._upcoming: dict[tuple[Unit, str], list[Unit]] = {}
        for program in ([(unit, FORWARD) for unit in units], backward):
            for place, (unit, phase) in enumerate(program):
                self._upcoming[unit, phase] = _streamed_once((later for later, _ in program[place + 1 :]), but=unit)

    def upcoming(self, unit: Unit, phase: str) -> list[Unit]:
        """Streamed units that run after `unit` does in this phase, each once, the next one first.

        A unit that runs again though the plan has no edge for it is followed as in backward.
        """
        found = self._upcoming.get((unit, phase))
        return self._upcoming[unit, BACKWARD] if found is None else found


def _streamed_once(units: Iterable[Unit], *, but: Unit) -> list[Unit]:
    return [unit for unit in dict.fromkeys(units) if unit is not but and not unit.home.on_gpu]
