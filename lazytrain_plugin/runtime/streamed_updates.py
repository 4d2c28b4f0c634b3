"""Updates by the GPU of units whose optimizer states rest in host memory.

`step()` only notes such an update. It begins ahead of the unit's next forward: states and gradient come into a state
slot, the weights into the weight slot that the forward uses (or they rest on the GPU), the kernel runs, and what
changed goes home while the unit computes. No host core takes part.

[Note: order] Three chains of events, one per kind of work, keep chunks in the order in which they are needed: the next
one comes only when the one before is there, so that it never takes half of the link from it. They also make the
events of a unit's last chunk stand for all of its chunks. A unit's states come after its weights: chunks that came
while the weights wait for their slot would fill all state slots, and the link would stand still until the first one
has left (10 ms a layer at 7B).

[Note: states ahead] The clip factor, which an update needs, is known after the last gradient; its states are at home
long before. So in the last backward of a window, when all that it needs itself is on its way, the states of the first
updates come into the slots, which are free then. They are dropped where they turn out to be of no use: another update
comes first, a tensor has no gradient or one of another kind than its neighbours, someone wrote to the states at home
(`HomeStates.state_writes`). Until then they wait, also through steps that are skipped and windows that are discarded.

[Note: who waits for what]
- the states' next arrival, and the weights' next way to a slot: for their return (`unit.returned_event`);
- states that come ahead: for what the running backward still fetches, too;
- gradients of the next backward, on the way home: until the update has read the last ones (`gradients_read_event`);
- a weight slot's next unit: until the weights have left (`WeightSlot.left`); the unit's forward: for the update
  (`WeightSlot.ready`, or `publish_event` where weights rest on the GPU);
- the update: for the gradients' arrival at home, and for all that `step()` found launched on the compute stream, which
  read the old weights;
- outside readers of a weight at home: for its return, by the host. Between the unit's forward and the return its
  parameters are pending again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.kernels.adamw import AdamWStep, Batch
from lazytrain_plugin.plan.problem import STEM_STAGING_BYTES
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.homes import UnitHome
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.run_order import BACKWARD, FORWARD
from lazytrain_plugin.runtime.slots import WeightSlot, WeightSlots
from lazytrain_plugin.runtime.state_slots import BLOCK, Chunk, Staged, StateSlot, bytes_per_block, cut, exact_bytes
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.update import NativeAdamW, StepScalars, update_span


class StreamedUpdate:
    """One update of one unit, from `step()` until its weights are known to be home."""

    def __init__(
        self,
        unit: Unit,
        steps: dict[UnitTensor, AdamWStep],
        chunks: Iterable[Chunk],
        stepped,
        begin: Callable[[], None],
        resolve: Callable[[], None],
    ) -> None:
        self._unit = unit
        self.steps = steps
        self.chunks = deque(chunks)
        """What has not begun yet."""
        self.stepped = stepped
        """When everything that read the old weights is done."""
        self.begin = begin
        self.resolve = resolve
        """What a reader of a pending weight calls."""

    @property
    def begun(self) -> bool:
        return not self.chunks

    @property
    def returned(self) -> bool:
        """Whether everything that it changed is at home."""
        return self.begun and self._unit.returned_event.query()


class StreamedUpdates:
    """Begins them in forward order, ahead of need; lets readers wait for them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._slots: list[StateSlot] = []
        """The one that was used the longest ago first."""
        self._slot_bytes = 0
        self._slot_streams: list = []
        """Every plan's slots take the same ones: a GPU has eight queues for all streams of a process, and streams that
        share one wait for each other."""
        self._weight_slots: WeightSlots | None = None
        self._place: dict[Unit, int] = {}
        self._streaming: list[Unit] = []
        self.queued: list[Unit] = []
        """Units whose update has not begun."""
        # See [Note: order].
        self._arrived = self._updated = self._returned = None
        # A pending weight may be read from any thread.
        self._one_begins = threading.RLock()

    @staticmethod
    def check(plan: PlacementPlan, *, native: bool) -> None:
        """Raises PlanMismatchError where the plan streams states that the native kernels don't keep."""
        streams = next((unit.name for unit in (*plan.units, *plan.stem) if unit.streams_states), None)
        if streams is not None and not native:
            raise PlanMismatchError(
                f"{streams}: states that pass the GPU for their update need the native kernels, and the client's own "
                'optimizer keeps its states itself; set "optimizer": {"implementation": "native"}, or let the CPU '
                'update it (updater: "cpu")'
            )

    def make_slots(self, plan: PlacementPlan, forward_order: list[Unit], weight_slots: WeightSlots | None) -> None:
        """Staging buffers for a plan that was placed. Nothing may be queued."""
        self._place = {unit: i for i, unit in enumerate(forward_order)}
        self._weight_slots = weight_slots
        streaming = self._streaming = [unit for unit in forward_order if unit.home.plan.streams_states and unit.trained]
        sizes = [
            self._bytes_per_block(unit.home) * (self._numel(unit.home) // BLOCK) + exact_bytes(unit.home)
            for unit in streaming
        ]
        self._slot_bytes = min(max(sizes, default=0), STEM_STAGING_BYTES)
        count = plan.state_slots if streaming else 0
        while len(self._slot_streams) < count:
            self._slot_streams.append(self._streams.slot_stream())
        self._slots = [
            StateSlot(self._slot_bytes, self._streams, stream, with_weights=self._with_weights)
            for stream in self._slot_streams[:count]
        ]

    _with_weights = False
    """Whether weights pass with their states, instead of in a weight slot."""

    def _bytes_per_block(self, home: UnitHome) -> int:
        return bytes_per_block(home, with_weights=self._with_weights)

    def _max_blocks(self, home: UnitHome) -> int:
        """Blocks of 256 elements that a slot has room for, beside all of the unit's small tensors."""
        return (self._slot_bytes - exact_bytes(home)) // self._bytes_per_block(home)

    def _numel(self, home: UnitHome) -> int:
        """Trained elements of a unit that pass."""
        return home.layout.state_numel

    def close(self) -> None:
        """Gives the staging buffers back. Everything must be at rest."""
        self._slots, self._streaming, self._weight_slots = [], [], None

    def follow(self, unit: Unit, phase: str, *, ends_window: bool) -> None:
        """`unit` is about to run, with its weights: starts what comes after them.

        Args:
            phase: as in runtime/run_order.py.
            ends_window: its backward is the last one before `step()`.
        """
        if phase == FORWARD:
            self.begin_following(unit)
        elif phase == BACKWARD and ends_window:
            self.bring_ahead()

    def bring_ahead(self) -> None:
        """Starts bringing the states of the next step's first updates; never waits. See [Note: states ahead].

        Called when the running backward needs nothing more from host memory than is on its way.
        """
        if self.queued or not all(unit.update_ticket is None or unit.update_ticket.done for unit in self._streaming):
            return  # the slots have other work, maybe on another thread
        free = [slot for slot in self._slots if slot.is_free]
        if not free:
            return
        streams, upcoming = self._streams, self._expected_chunks()
        fetched = streams.record(streams.h2d)
        for slot, (unit, chunk) in zip(free, (found for found in upcoming if not self._is_here(*found)), strict=False):
            with streams.on(slot.stream):
                for event in (self._arrived, unit.returned_event, fetched):
                    streams.wait(slot.stream, event)
                num_bytes = slot.state_bytes(unit.home, chunk)
                with streams.span(f"states {unit.name} (ahead)", Resource.H2D, stream=slot.stream, num_bytes=num_bytes):
                    slot.bring(unit.home, chunk)
            self._arrived = streams.record(slot.stream)

    def _expected_chunks(self) -> Iterator[tuple[Unit, Chunk]]:
        """Of the next step's updates in their order, if the gradients that are missing come, and are of one kind."""
        for unit in self._streaming:
            arrived = unit.arrived
            if not arrived or unit.module is None:  # of the stem, the embedding's is still to come
                arrived = dict.fromkeys(unit.trained, Arrival.WHOLE) | arrived
            for chunk in self._cut(unit, arrived):
                yield unit, chunk

    def _is_here(self, unit: Unit, chunk: Chunk) -> bool:
        return any(slot.holds(unit.home, chunk) for slot in self._slots)

    def _cut(self, unit: Unit, arrived: dict[UnitTensor, Arrival]) -> list[Chunk]:
        return cut(arrived, unit.layout, self._max_blocks(unit.home))

    def _take_slot(self, unit: Unit, chunk: Chunk) -> StateSlot:
        """The one that holds the chunk's states, else the one that was used the longest ago."""
        slot = next((slot for slot in self._slots if slot.holds(unit.home, chunk)), self._slots[0])
        others = [other for other in self._slots if other is not slot]
        for other in others:
            other.forget(unit.home, chunk)
        self._slots = [*others, slot]
        return slot

    def queue(
        self,
        unit: Unit,
        arrived: dict[UnitTensor, Arrival],
        scalars: StepScalars,
        updater: NativeAdamW,
        stepped,
        resolve: Callable[[], None],
    ) -> None:
        """Notes an update; units come in forward order.

        Args:
            stepped: event after everything that reads the old weights.
            resolve: waits for the update and calls `unit.settle`.
        """
        steps = {tensor: updater.next_step(tensor, scalars) for tensor in arrived}
        chunks = self._cut(unit, arrived)
        if not chunks:
            return  # tensors without elements
        unit.mark_streamed(StreamedUpdate(unit, steps, chunks, stepped, partial(self.begin, unit), resolve))
        self.queued.append(unit)

    def begin_following(self, unit: Unit | None) -> None:
        """Begins the next updates after `unit` in forward order (None: the first ones), as many as there are slots.

        One whose weights have no slot yet comes with its weights' prefetch; those behind it wait, or they would come
        before what is needed sooner.
        """
        if not self.queued:
            return
        here = -1 if unit is None else self._place[unit]
        for upcoming in [queued for queued in self.queued if self._place[queued] > here][: len(self._slots)]:
            if streams_weights(upcoming) and not self._weight_slots.holds(upcoming):
                return
            self.begin(upcoming)

    def begin_all(self) -> None:
        """Begins every update that has not begun."""
        for unit in list(self.queued):
            self.begin(unit)

    def begin(self, unit: Unit) -> None:
        """Launches the unit's update, unless that was done; never waits for the device."""
        with self._one_begins:
            update = unit.streamed_update
            if update is None or unit not in self.queued:
                return
            weights = self._weight_slots.hold(unit) if streams_weights(unit) else None
            before, came = unit.returned_event, None if weights is None else weights.ready
            with self._streams.host_waits("update"):
                while update.chunks:
                    self._pass(unit, update, update.chunks[0], weights, before, came)
                    update.chunks.popleft()  # not earlier: an interrupt may come, and this goes on where it stopped
            self.queued.remove(unit)

    def _pass(self, unit: Unit, update: StreamedUpdate, chunk: Chunk, weights: WeightSlot | None, before, came) -> None:
        """`before`: the last states are home; `came`: the weights are in their slot."""
        streams, home = self._streams, unit.home
        slot = self._take_slot(unit, chunk)
        with streams.on(slot.stream):
            for event in (self._arrived, unit.gradient_event, before, came):
                streams.wait(slot.stream, event)
            num_bytes = slot.missing_bytes(home, chunk)
            with streams.span(f"states {unit.name}", Resource.H2D, stream=slot.stream, num_bytes=num_bytes):
                staged = slot.load(home, chunk)
        self._arrived = streams.record(slot.stream)
        with streams.on(slot.stream):
            for event in (self._updated, update.stepped, weights.ready if weights is not None else None):
                streams.wait(slot.stream, event)
            with streams.span(f"update {unit.name}", Resource.COMPUTE, stream=slot.stream):
                self._update(home, update, chunk, staged, weights)
        self._updated = streams.record(slot.stream)
        with streams.on(slot.stream):
            streams.wait(slot.stream, self._returned)
            start, end = chunk.byte_range("weight_offset_bytes") if weights is not None or slot.with_weights else (0, 0)
            num_bytes = slot.state_bytes(home, chunk) + end - start
            with streams.span(f"states {unit.name} (back)", Resource.D2H, stream=slot.stream, num_bytes=num_bytes):
                slot.store(home, chunk)
                if weights is not None:
                    home.host_buffer.write(start, weights.flat[start:end])
        self._returned = streams.record(slot.stream)
        unit.gradients_read_event, unit.returned_event = self._arrived, self._returned
        if weights is not None:
            weights.ready, weights.left = self._updated, self._returned
        elif not slot.with_weights:
            unit.publish_event = self._updated

    @staticmethod
    def _update(
        home: UnitHome, update: StreamedUpdate, chunk: Chunk, staged: Staged, weights: WeightSlot | None
    ) -> None:
        batch = Batch()
        for span in chunk.spans:
            tensor = span.tensor
            weight = staged.weight(span)
            if weight is None:
                whole = tensor.weight_view(weights.flat) if weights is not None else home.weight(tensor)
                weight = whole[span.start : span.start + span.numel]
            update_span(
                tensor,
                weight,
                staged.remainder(span),
                staged.gradient(span),
                (staged.moment("exp_avg", span), staged.moment("exp_avg_sq", span)),
                update.steps[tensor],
                start=span.start,
                batch=batch,
            )
        batch.run()

    def finish(self, unit: Unit) -> None:
        """Until the unit's weights at rest are new: for the host where they rest there, else see `publish_event`."""
        self.begin(unit)
        if streams_weights(unit):
            with self._streams.host_waits("update"):
                unit.returned_event.synchronize()


def streams_weights(unit: Unit) -> bool:
    """Whether the unit's weights rest off the device, and come to it in a slot."""
    return unit.module is not None and not unit.home.on_gpu
