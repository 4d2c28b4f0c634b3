"""Updates that the ranks of a node share: a unit is up to date once each rank has updated its part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.cpu_update import CpuUpdates
from lazytrain_plugin.runtime.divided_updates import DividedUpdates
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.update import StepScalars
from lazytrain_plugin.runtime.worker import Ticket, UpdateWorker

Arrivals = dict[UnitTensor, Arrival]

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor
    from lazytrain_plugin.runtime.nvme.stores import NvmeStores


class SharedUpdates(CpuUpdates):
    """Every rank makes one at the same point, and submits the same updates in the same order.

    A second thread waits for the other ranks, unit by unit in forward order, so that neither the updates nor the model
    do. A third one launches the updates of states that pass the GPU.
    """

    def __init__(self, executor: Executor, nvme: NvmeStores, ranks: RankGroup, streamed: DividedUpdates) -> None:
        super().__init__(executor, nvme)
        self._streamed = streamed
        begin = executor.streams.use_device
        self._launcher = UpdateWorker(begin=begin)
        units = executor.all_units
        self._counters = ranks.update_counters(len(units))
        self._index = {unit: i for i, unit in enumerate(units)}
        self._numbers = [0] * len(units)
        self._waiter = UpdateWorker(begin=begin)

    def submit(self, unit: Unit, arrived: dict[UnitTensor, Arrival], scalars: StepScalars, gradients_done) -> Ticket:
        index, label = self._index[unit], f"optimizer update of {unit.name}"
        number = self._numbers[index] = self._numbers[index] + 1
        streams = unit.home.plan.streams_states
        start = self._start_on_gpu if streams else self._start_on_cpu
        own_part = start(unit, arrived, scalars, label, lambda: self._counters.count(index, number))

        def finish() -> None:
            own_part()
            self._counters.wait(index, number, unit.name)
            self._publish(unit, arrived, gradients_done)

        return self._waiter.submit(finish, label)

    def _start_on_cpu(
        self, unit: Unit, arrived: Arrivals, scalars: StepScalars, label: str, count: Callable[[], None]
    ) -> Callable[[], None]:
        """Returns what waits for this rank's part."""

        def update() -> None:
            try:
                self._update(unit, arrived, scalars)
            except BaseException:
                self._counters.fail(self._index[unit])  # or the others would wait for it
                raise
            count()

        return self._executor.worker.submit(update, label).wait

    def _start_on_gpu(
        self, unit: Unit, arrived: Arrivals, scalars: StepScalars, label: str, count: Callable[[], None]
    ) -> Callable[[], None]:
        """As `_start_on_cpu`; the part is counted by whoever waits for it."""
        steps = {tensor: self._executor.updater.next_step(tensor, scalars) for tensor in arrived}
        at_home = []
        launched = self._launcher.submit(lambda: at_home.append(self._streamed.launch(unit, arrived, steps)), label)

        def finish() -> None:
            launched.wait()
            if at_home[0] is not None:
                at_home[0].synchronize()
            count()

        return finish

    def close(self) -> None:
        self._launcher.close()
        self._waiter.close()
