"""Updates that the ranks of a node share: a unit is up to date once each rank has updated its part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.cpu_update import CpuUpdates
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.update import StepScalars
from lazytrain_plugin.runtime.worker import Ticket, UpdateWorker

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor
    from lazytrain_plugin.runtime.nvme.stores import NvmeStores


class SharedUpdates(CpuUpdates):
    """Every rank makes one at the same point, and submits the same updates in the same order.

    A second thread waits for the other ranks, unit by unit in forward order, so that neither the updates nor the model
    do.
    """

    def __init__(self, executor: Executor, nvme: NvmeStores, ranks: RankGroup) -> None:
        super().__init__(executor, nvme)
        units = executor.all_units
        self._counters = ranks.update_counters(len(units))
        self._index = {unit: i for i, unit in enumerate(units)}
        self._numbers = [0] * len(units)
        self._waiter = UpdateWorker()

    def submit(self, unit: Unit, arrived: dict[UnitTensor, Arrival], scalars: StepScalars, gradients_done) -> Ticket:
        index, label = self._index[unit], f"optimizer update of {unit.name}"
        number = self._numbers[index] = self._numbers[index] + 1

        def update() -> None:
            self._update(unit, arrived, scalars)
            self._counters.count(index, number)

        own = self._executor.worker.submit(update, label)

        def finish() -> None:
            own.wait()
            self._counters.wait(index, number, unit.name)
            self._publish(unit, arrived, gradients_done)

        return self._waiter.submit(finish, label)

    def close(self) -> None:
        self._waiter.close()
