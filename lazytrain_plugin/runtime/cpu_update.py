"""What the update thread does for one unit."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.update import StepScalars
from lazytrain_plugin.runtime.worker import Ticket, UpdateWorker

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor
    from lazytrain_plugin.runtime.nvme.stores import NvmeStores


class CpuUpdates:
    """Updates on the update thread of one executor."""

    def __init__(self, executor: Executor, nvme: NvmeStores) -> None:
        self._executor, self._nvme = executor, nvme

    def submit(self, unit: Unit, arrived: dict[UnitTensor, Arrival], scalars: StepScalars, gradients_done) -> Ticket:
        """The ticket is done when the unit's weights at home are new, and on their way to the GPU if they rest there.

        Args:
            gradients_done: event after everything that reads the old weights on the GPU.
        """

        def work() -> None:
            self._update(unit, arrived, scalars)
            self._publish(unit, arrived, gradients_done)

        return self._executor.worker.submit(work, f"optimizer update of {unit.name}")

    def _update(self, unit: Unit, arrived: dict[UnitTensor, Arrival], scalars: StepScalars) -> None:
        """On the update thread. The weights at home may still be on their way to a slot of the step before."""
        unit.gradient_event.synchronize()
        if unit.upload_event is not None:
            unit.upload_event.synchronize()
        self._nvme.before_update(unit)
        worker, streams = self._executor.worker, self._executor.streams
        home, kinds = unit.home, arrived.values()
        with contextlib.ExitStack() as in_memory:
            if Arrival.WHOLE in kinds:
                in_memory.enter_context(home.gradients_in_memory())
            if Arrival.SUMMED in kinds:
                in_memory.enter_context(home.sums_in_memory(changes=False))
            for index in home.pieces:
                with home.states_in_memory(index, changes=True, write_now=True):
                    start_s = time.perf_counter()
                    with streams.span(f"update {unit.name}", Resource.WORKER):
                        self._executor.updater.update(unit, arrived, scalars, index)
                    worker.update_s += time.perf_counter() - start_s
            worker.updated_parameters += sum(tensor.numel for tensor in arrived)
        if home.nvme_gradients is not None:
            home.drop_gradients()
        home.let_go(updated=True)

    def _publish(self, unit: Unit, arrived: dict[UnitTensor, Arrival], gradients_done) -> None:
        """Starts bringing GPU-resident weights up to date."""
        if not unit.home.on_gpu:
            return
        streams = self._executor.streams
        with streams.on(streams.h2d):
            streams.wait(streams.h2d, gradients_done)
            with streams.span(f"publish {unit.name}", Resource.H2D, stream=streams.h2d):
                for tensor in arrived:
                    unit.home.publish(tensor)
        unit.publish_event = streams.record(streams.h2d)

    @property
    def own_threads(self) -> tuple[UpdateWorker, ...]:
        """Those that update beside the update thread, and wait for no other rank."""
        return ()

    def close(self) -> None:
        """Ends threads of its own."""
