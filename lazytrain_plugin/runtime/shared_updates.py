"""Updates that the ranks of a node share: a unit is up to date once each rank has updated its part of it.

Where states are divided over all ranks of the job, a rank's part counts as updated once it has come to the other nodes,
and theirs to this one: no rank sees a unit of which some weights are old.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.comm_lane import Fence
from lazytrain_plugin.runtime.cpu_update import CpuUpdates
from lazytrain_plugin.runtime.divided_updates import DividedUpdates
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.update import StepScalars
from lazytrain_plugin.runtime.weights_between_nodes import WeightsBetweenNodes
from lazytrain_plugin.runtime.worker import Ticket, UpdateWorker

Arrivals = dict[UnitTensor, Arrival]

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor
    from lazytrain_plugin.runtime.nvme.stores import NvmeStores


class SharedUpdates(CpuUpdates):
    """Every rank makes one at the same point, and submits the same updates in the same order.

    A second thread waits for the other ranks, unit by unit in forward order, so that neither the updates nor the model
    do. A third one launches the updates of states that pass the GPU, and a fourth one waits until they are home. A
    fifth one brings updated weights to the other nodes, if `between` is given.
    """

    def __init__(
        self,
        executor: Executor,
        nvme: NvmeStores,
        ranks: RankGroup,
        streamed: DividedUpdates,
        between: WeightsBetweenNodes | None = None,
    ) -> None:
        super().__init__(executor, nvme)
        self._between = between
        self._streamed = streamed
        begin = executor.streams.use_device
        self._sender = None
        if between is not None:
            self._sender = UpdateWorker("weights", begin=begin)
            executor.exchange.before_window = self._sender.drain
        self._launcher, self._homeward = UpdateWorker(begin=begin), UpdateWorker(begin=begin)
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
        count = lambda: self._counters.count(index, number)  # noqa: E731
        if self._sender is None:
            own_part = start(unit, arrived, scalars, label, count)
        else:
            fence = self._executor.exchange.lane.fence()
            own_part = self._send(unit, start(unit, arrived, scalars, label, _nothing), fence, count)

        def finish() -> None:
            own_part()
            self._counters.wait(index, number, unit.name)
            self._publish(unit, arrived, gradients_done)

        return self._waiter.submit(finish, label)

    def _send(
        self, unit: Unit, updated: Callable[[], None], fence: Fence, count: Callable[[], None]
    ) -> Callable[[], None]:
        """After `updated`, and what is before `fence`, brings this rank's part to the other nodes, and theirs here.

        Returns what waits for that.
        """

        def send() -> None:
            try:
                updated()
                self._between.bring(unit, fence)
            except BaseException:
                self._counters.fail(self._index[unit])  # or the others of this node would wait for it
                raise
            count()

        return self._sender.submit(send, f"exchange of weights of {unit.name}").wait

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
        """As `_start_on_cpu`."""
        steps = {tensor: self._executor.updater.next_step(tensor, scalars) for tensor in arrived}
        at_home = []
        launched = self._launcher.submit(lambda: at_home.append(self._streamed.launch(unit, arrived, steps)), label)

        def finish() -> None:
            try:
                launched.wait()
                if at_home[0] is not None:
                    at_home[0].synchronize()
            except BaseException:
                self._counters.fail(self._index[unit])  # or the others would wait for it
                raise
            count()

        return self._homeward.submit(finish, label).wait

    @property
    def own_threads(self) -> tuple[UpdateWorker, ...]:
        return self._launcher, self._homeward

    def close(self) -> None:
        self._launcher.close()
        self._homeward.close()
        if self._sender is not None:
            self._sender.close(wait=False)  # other nodes may be gone
        self._waiter.close()


def _nothing() -> None:
    """Its part counts once it has come to the other nodes."""
