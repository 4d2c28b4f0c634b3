"""Updates by the GPUs of a node of states in the host memory that its ranks have in common: each updates its part.

A rank's part of the weights comes and leaves with its states. New weights so meet at home, from where every rank copies
them whole, as after an update by the CPUs; what waits for what is the same (runtime/shared_updates.py).

All of a step's updates are launched at once, in forward order, by a thread of their own: no rank's part may depend on
how far another rank's model has come. States come ahead of them as with one rank (runtime/streamed_updates.py), weights
don't: they may still be changed from outside.
"""

from __future__ import annotations

from lazytrain_plugin.kernels.adamw import AdamWStep
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.homes import UnitHome
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.state_slots import Chunk, cut
from lazytrain_plugin.runtime.streamed_updates import StreamedUpdate, StreamedUpdates
from lazytrain_plugin.runtime.unit import Unit


class DividedUpdates(StreamedUpdates):
    """Never queues: `launch` begins an update. One thread calls it; another one `bring_ahead`, while that one rests."""

    _with_weights = True

    def _numel(self, home: UnitHome) -> int:
        first, end = home.part(home.ranks.own_part)
        return end - first

    def _cut(self, unit: Unit, arrived: dict[UnitTensor, Arrival]) -> list[Chunk]:
        home = unit.home
        return cut(arrived, home.layout, self._max_blocks(home), home.part(home.ranks.own_part))

    def launch(self, unit: Unit, arrived: dict[UnitTensor, Arrival], steps: dict[UnitTensor, AdamWStep]):
        """Starts the update of this rank's part; returns the event of its arrival at home, None where it has none."""
        chunks = self._cut(unit, arrived)
        if not chunks:
            return None
        update = StreamedUpdate(unit, steps, chunks, None, _nothing, _nothing)
        for chunk in chunks:
            self._pass(unit, update, chunk, weights=None, before=None, came=None)  # weights come with their states
        # Chunks return in order: the last one's return stands for all.
        return self._streams.record(self._slots[-1].stream, blocking=True)


def _nothing() -> None:
    """Nobody asks a divided update to begin."""
