"""The start of a step's updates, each where the plan wants it.

[Note: who begins first] The host needs longer to launch a unit's update than to hand it to the worker or to note it. So
the GPU gets one update of states that rest there, which keeps it busy; then the worker gets its units, and the links
the first states; then the GPU the others. They don't depend on each other, so no bit depends on this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.cpu_update import CpuUpdates
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.resident_updates import ResidentUpdates
from lazytrain_plugin.runtime.streamed_updates import StreamedUpdates
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.update import StepScalars

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor

Arrivals = dict[Unit, dict[UnitTensor, Arrival]]
"""By unit, in forward order."""


class StepUpdates:
    """Of one executor.

    Args:
        elsewhere: updates by the worker, or shared with other ranks.
        divided: updates where states rest on the GPUs of several ranks; None: each rank has all of them.
        resolve: waits for a unit's update, for someone who wants its weights.
        prefetch: starts the transfers of the first units' weights.
    """

    def __init__(
        self,
        executor: Executor,
        elsewhere: CpuUpdates,
        streamed: StreamedUpdates,
        divided: ResidentUpdates | None,
        resolve: Callable[[Unit], None],
        prefetch: Callable[[], None],
    ) -> None:
        self._executor, self._elsewhere, self._streamed = executor, elsewhere, streamed
        self._divided, self._resolve, self._prefetch = divided, resolve, prefetch

    def begin(self, arrivals: Arrivals, scalars: StepScalars) -> None:
        """Returns before they are done. See [Note: who begins first]."""
        streams = self._executor.streams
        on_gpu = [unit for unit in arrivals if unit.home.states_on_gpu]
        computes = bool(on_gpu) and self._divided is None
        gradients_done = streams.end_idle() if computes else streams.record()
        ranks = self._executor.ranks
        # Where weights in host memory meet too, theirs come after (runtime/weights_between_nodes.py).
        first = on_gpu if ranks is not None and ranks.shards_job else on_gpu[:1]
        self._update_on_gpu(first, arrivals, scalars)
        for unit, arrived in arrivals.items():
            if not unit.home.states_on_gpu:
                self._hand_over(unit, arrived, scalars, gradients_done)
        if self._streamed.queued:
            self._prefetch()
        self._streamed.begin_following(None)
        self._update_on_gpu(on_gpu[len(first) :], arrivals, scalars)
        if computes:
            streams.begin_idle()

    def _hand_over(self, unit: Unit, arrived: dict[UnitTensor, Arrival], scalars: StepScalars, gradients_done) -> None:
        executor, resolve = self._executor, partial(self._resolve, unit)
        executor.forget_copies(unit)  # the weights at home may have been changed since
        if unit.home.plan.streams_states and executor.ranks is None:
            self._streamed.queue(unit, arrived, scalars, executor.updater, gradients_done, resolve)
        else:
            unit.mark_pending(self._elsewhere.submit(unit, arrived, scalars, gradients_done), resolve)

    def _update_on_gpu(self, units: Iterable[Unit], arrivals: Arrivals, scalars: StepScalars) -> None:
        for unit in units:
            if self._divided is not None:
                unit.mark_pending(self._divided.submit(unit, arrivals[unit], scalars), partial(self._resolve, unit))
                continue
            with self._executor.streams.computing(f"update {unit.name}"):
                self._executor.updater.update(unit, arrivals[unit], scalars)
            unit.home.drop_gradients()
