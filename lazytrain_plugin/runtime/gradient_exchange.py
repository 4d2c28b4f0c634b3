"""`GradientExchange`: gradients of several ranks meet before they leave the GPU.

[Note: one order] Ranks must launch the same collectives in the same order, whatever layers and experts each of them
used. So there is a canonical order, the head and then the units backwards, and a place in it. A unit whose gradient
comes when its turn is, or later than that of units that did not come, is reduced at once, and those before it with
nothing from this rank. Whatever comes after its turn (a layer that runs twice), and what is only complete at the end
(embeddings, small tensors), waits for the end of backward; there the ranks agree how many rounds each unit needs.

[Note: the mean] Inside a node an all-to-all brings each part of a unit to the rank that updates it, where the
contributions are added in fp32, in the order of ranks. That takes the bytes of a reduce-scatter and depends neither on
the size of chunks nor on the backend. Between nodes the ranks that update the same part average their sums: in fp32,
or in 8-bit codes for a unit that is large enough (comm/between_nodes.py). The mean is rounded once, to the gradient's
dtype. Where states are divided over the job no two ranks update the same part: then what a rank gets inside the node
are the parts of all ranks at its position of the nodes, and between nodes each part goes to its rank.

All of that happens beside the rest of backward (`CommLane`); so does what the sink then does with the means. What the
norm sums up is the mean, so clipping knows the gradient that is applied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from lazytrain_plugin.comm.between_nodes import BetweenNodes
from lazytrain_plugin.comm.links import sum_inside
from lazytrain_plugin.comm.overlap import overlapped
from lazytrain_plugin.comm.parts import chunk_numel
from lazytrain_plugin.runtime.comm_lane import CommLane
from lazytrain_plugin.runtime.gradients import Gradients, GradientSink, in_storage_order
from lazytrain_plugin.runtime.layout import ALIGNMENT_ELEMENTS, UnitTensor
from lazytrain_plugin.runtime.norms import GradientNorm, Squares
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.unit_table import UnitTable
from lazytrain_plugin.units import align_up

CHUNK_ELEMENTS, CODED_CHUNK_ELEMENTS = 2**24, 2**23
"""Elements that are sent at once, in full precision and in codes. Two or three chunks are under way at a time, with 10
and 16 bytes for each element of bf16 gradients (plan/problem.py)."""

Contribution = dict[UnitTensor, torch.Tensor]
"""One gradient per tensor, 1-D in storage order."""


class GradientExchange:
    """Stands before the gradient sink.

    Args:
        between: how nodes average.
        average: False: the sum instead of the mean.
    """

    def __init__(
        self,
        ranks: RankGroup,
        between: BetweenNodes,
        sink: GradientSink,
        streams: Streams,
        table: UnitTable,
        *,
        average: bool,
    ) -> None:
        if between.of_parts != ranks.shards_job:
            raise ValueError("Nodes average what their ranks update: of_parts must be as states are divided.")
        self._ranks = ranks
        self.between = between
        self._lane = CommLane(streams, ranks.hops.answer)
        self._sink = sink
        self._streams = streams
        if streams.is_cuda:  # on the CPU the backend itself gives up
            streams.patience = partial(ranks.give_up_on_others, "exchange of gradients")
        self._in_order = [unit for unit in (*reversed(table.head), *reversed(table.units)) if unit.trained]
        self.units = [*self._in_order, *(unit for unit in table.stem if unit.trained and unit not in table.head)]
        self._place = {unit: i for i, unit in enumerate(self._in_order)}
        self._next = 0
        """Place of the unit whose turn it is."""
        self._waiting: dict[Unit, list[Contribution]] = defaultdict(list)
        self._under_way = False
        self._contributed: set[UnitTensor] = set()
        """Tensors with a gradient of this rank in this window."""
        self._divisor = ranks.size if average else 1
        self.before_window: Callable[[], None] = lambda: None
        """Called before the first collective of a window; see [Note: one order] (runtime/weights_between_nodes.py)."""
        self._window_begun = False

    def deliver(self, unit: Unit, gradients: Gradients) -> None:
        """Takes gradients of one backward of one unit of this rank. Launches on the current (compute) stream."""
        if not gradients:
            return
        with self._sink.one_delivery:
            self._under_way = True
            contribution = {tensor: in_storage_order(tensor, gradient) for tensor, gradient in gradients}
            self._contributed.update(contribution)
            place = self._place.get(unit, -1)
            if place < self._next:
                self._wait(unit, contribution)
                return
            self._advance(place)
            self._reduce(unit, contribution)
            self._next = place + 1

    def _wait(self, unit: Unit, contribution: Contribution) -> None:
        for tensor, gradient in contribution.items():
            rounds = self._waiting[unit]
            free = next((earlier for earlier in rounds if tensor not in earlier), None)
            if free is None:
                rounds.append(free := {})
            free[tensor] = gradient

    def _advance(self, place: int) -> None:
        """Units whose turn is before `place` did not come: this rank has nothing for them."""
        for missed in self._in_order[self._next : place]:
            self._reduce(missed, {})

    def end_backward(self) -> None:
        """Every rank calls it after each of its backwards."""
        with self._sink.one_delivery:
            self._under_way = False
            self._advance(len(self._in_order))
            self._next = 0
            self._lane.launched()
            rounds = [len(self._waiting[unit]) for unit in self.units]
            for unit, count in zip(self.units, self._ranks.maximum(rounds, "end of backward"), strict=True):
                mine = self._waiting[unit]
                for i in range(count):
                    self._reduce(unit, mine[i] if i < len(mine) else {})
            self._waiting.clear()
            self._lane.launched()

    def discard(self, units: list[Unit]) -> None:
        """Forgets what arrived in this window; every rank does so, if one does."""
        self._window_begun = False
        self._lane.finish()
        self._contributed.clear()
        self._sink.discard(units)

    def complete(self, units: list[Unit]) -> GradientNorm:
        """The norm over all ranks. Every rank calls it once per window.

        When it returns, no rank of the node reads weights of this window any more: the updates may begin.
        """
        if self._under_way:
            self.end_backward()
        self._window_begun = False
        self._lane.finish()
        for stream in (None, self._streams.h2d):
            self._streams.reach(self._streams.record(stream))
        return self._sink.complete(units, self._agree)

    def _agree(self, squares: Squares) -> Squares:
        """Sums of squares over all ranks; a tensor that got no gradient anywhere is taken back."""
        tensors = [(unit, tensor) for unit in self.units for tensor in unit.trained]
        mine = torch.zeros(2, len(tensors), dtype=torch.float64)
        for i, (_, tensor) in enumerate(tensors):
            mine[0, i] = squares.get(tensor, 0.0)
            mine[1, i] = tensor in self._contributed
        self._contributed.clear()
        everyone = self._ranks.gather(mine, "comparison of gradient norms")
        contributed = (everyone[:, 1].sum(0) > 0).tolist()
        # Each node has the whole sum; or all ranks together, in the order of their parts.
        ranks = self._ranks
        owners = ranks.owners if ranks.shards_job else ranks.hops.node_ranks[0]
        of_owners = everyone[list(owners), 0].T.tolist()
        agreed = {}
        for (unit, tensor), one, several in zip(tensors, contributed, of_owners, strict=True):
            if one:
                agreed[tensor] = sum(several)
            else:
                unit.arrived.pop(tensor, None)
        return agreed

    @property
    def lane(self) -> CommLane:
        """Where all collectives are launched."""
        return self._lane

    @property
    def num_nodes(self) -> int:
        return self._ranks.num_nodes

    def use_slots(self, spare: int) -> int:
        """Takes the gradient slots besides the one that is being filled, and returns how many means may be on their way
        home: one, for which plans of several ranks keep memory."""
        self._lane.slots = spare
        return min(spare, 1)

    def close(self) -> None:
        """Ends the thread, if there is one."""
        self._lane.close()

    # One unit.

    def _reduce(self, unit: Unit, contribution: Contribution) -> None:
        if not self._window_begun:
            self.before_window()
        self._window_begun = True
        reduction = _Reduction(self._ranks, self.between, unit, contribution, self._divisor)

        def reduce() -> None:
            overlapped(reduction.chunks())
            self._sink.take(unit, list(reduction.own_elements()))

        self._lane.submit(reduce, unit.name, contribution.values())


class _Reduction:
    """Of one unit's gradients, over all ranks."""

    def __init__(
        self, ranks: RankGroup, between: BetweenNodes, unit: Unit, contribution: Contribution, divisor: float
    ) -> None:
        self._ranks, self._between, self._unit, self._divisor = ranks, between, unit, divisor
        self._contribution = contribution
        home = unit.home
        self._parts = [home.part(number) for number in range(ranks.num_parts)]
        self._coded = between.uses_codes(home.layout.state_numel)
        self._dtype = common_dtype(unit)
        self._first, self._end = self._parts[ranks.own_part]

    def chunks(self) -> Iterator[Iterator[None]]:
        """Steps of each chunk; when all are done, `own_elements` are there."""
        self._result = torch.empty(self._end - self._first, dtype=self._dtype, device=self._ranks.device)
        longest = max(end - first for first, end in self._parts)
        most = (CODED_CHUNK_ELEMENTS if self._coded else CHUNK_ELEMENTS) // len(self._parts)
        size = min(most, chunk_numel(longest, self._ranks.device.type) if self._coded else longest)
        size = align_up(max(size, 1), ALIGNMENT_ELEMENTS)
        local_size = self._ranks.local_size
        sent_inside = (local_size - 1) * (len(self._parts) // local_size) * longest * self._dtype.itemsize
        self._between.count(self._unit.home.layout.state_numel, sent_inside)
        for start in range(0, longest, size):
            yield self._chunk(start, min(size, longest - start))

    def _chunk(self, start: int, size: int) -> Iterator[None]:
        """Elements [start, start + size) of every part."""
        hops = self._ranks.hops
        sent = torch.empty(len(self._parts), size, dtype=self._dtype, device=self._ranks.device)
        for row, (first, end) in zip(sent, self._parts, strict=True):
            begin = first + start
            pieces = list(overlaps(self._contribution, begin, min(begin + size, end)))
            if sum(there.stop - there.start for _, _, there in pieces) < size:
                row.zero_()
            for tensor, here, there in pieces:
                row[there].copy_(self._contribution[tensor][here])
        total = yield from sum_inside(hops, sent.view(self._ranks.local_size, -1))
        own = min(size, max(self._end - self._first - start, 0))
        in_place = own == size
        mean = self._result[start : start + own] if in_place else torch.empty_like(sent[0])
        yield from self._between.mean(total, self._divisor, mean, coded=self._coded)
        if not in_place:
            self._result[start : start + own].copy_(mean[:own])

    def own_elements(self) -> Iterator[tuple[UnitTensor, torch.Tensor]]:
        """Of each tensor, the means of the elements that this rank updates."""
        for tensor in self._unit.trained:
            span = self._unit.home.span(tensor)
            begin = tensor.state_offset + span.start - self._first
            yield tensor, self._result[begin : begin + span.stop - span.start].to(tensor.dtype)


def common_dtype(unit: Unit) -> torch.dtype:
    """In which gradients and weights of its trained tensors travel side by side, exactly."""
    dtypes = {tensor.dtype for tensor in unit.trained}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def overlaps(tensors: Iterable[UnitTensor], first: int, end: int) -> Iterator[tuple[UnitTensor, slice, slice]]:
    """Of each tensor in [first, end) of the unit's trained elements: its own elements, and their place in the range."""
    for tensor in tensors:
        begin = max(first, tensor.state_offset)
        stop = min(end, tensor.state_offset + tensor.numel)
        if begin < stop:
            offset = tensor.state_offset
            yield tensor, slice(begin - offset, stop - offset), slice(begin - first, stop - first)
