"""Updates by the GPUs of a node of states in the host memory that its ranks have in common: each updates its part.

A rank's part of the weights comes and leaves with its states. New weights so meet at home, from where every rank copies
them whole, as after an update by the CPUs; what waits for what is the same (runtime/shared_updates.py).

All of a step's updates are launched at once, in forward order, by a thread of their own: no rank's part may depend on
how far another rank's model has come.
"""

from __future__ import annotations

from lazytrain_plugin.kernels.adamw import AdamWStep
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.homes import UnitHome
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.state_slots import cut
from lazytrain_plugin.runtime.streamed_updates import StreamedUpdate, StreamedUpdates
from lazytrain_plugin.runtime.unit import Unit


class DividedUpdates(StreamedUpdates):
    """Never queues: `launch` begins an update. One thread calls it."""

    _with_weights = True

    def _numel(self, home: UnitHome) -> int:
        first, end = home.part(home.ranks.own_part)
        return end - first

    def launch(self, unit: Unit, arrived: dict[UnitTensor, Arrival], steps: dict[UnitTensor, AdamWStep]):
        """Starts the update of this rank's part; returns the event of its arrival at home, None where it has none."""
        home = unit.home
        chunks = cut(arrived, home.layout, self._max_blocks(home), home.part(home.ranks.own_part))
        if not chunks:
            return None
        update = StreamedUpdate(unit, steps, chunks, None, _nothing, _nothing)
        for chunk in chunks:
            self._pass(unit, update, chunk, weights=None, before=None, came=None)  # weights come with their states
        # Chunks return in order: the last one's return stands for all.
        last = self._slots[(self._turn - 1) % len(self._slots)]
        return self._streams.record(last.stream, blocking=True)


def _nothing() -> None:
    """Nobody asks a divided update to begin."""
