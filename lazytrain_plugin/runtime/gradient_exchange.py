"""`GradientExchange`: gradients of several ranks meet before they leave the GPU.

[Note: one order] Ranks must launch the same collectives in the same order, whatever layers and experts each of them
used. So there is a canonical order, the head and then the units backwards, and a place in it. A unit whose gradient
comes when its turn is, or later than that of units that did not come, is reduced at once, and those before it with
nothing from this rank. Whatever comes after its turn (a layer that runs twice), and what is only complete at the end
(embeddings, small tensors), waits for the end of backward; there the ranks agree how many rounds each unit needs.

[Note: the mean] An all-to-all brings each part of a unit to the rank that updates it, where the contributions are
added in fp32, in the order of ranks, and the mean is rounded once. That takes the bytes of a reduce-scatter and
depends neither on the size of chunks nor on the backend. Where every rank updates the whole unit (its states rest on
the GPU) the means are gathered: all ranks then hold the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from lazytrain_plugin.runtime.gradients import Gradients, GradientSink, in_storage_order
from lazytrain_plugin.runtime.layout import ALIGNMENT_ELEMENTS, UnitTensor
from lazytrain_plugin.runtime.norms import GradientNorm, Squares
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.unit_table import UnitTable

CHUNK_ELEMENTS = 2**25
"""Elements that are sent at once; bounds the buffers: 8 bytes for each with bf16 gradients."""

Contribution = dict[UnitTensor, torch.Tensor]
"""One gradient per tensor, 1-D in storage order."""


class GradientExchange:
    """Stands before the gradient sink.

    Args:
        average: False: the sum instead of the mean.
    """

    def __init__(
        self, ranks: RankGroup, sink: GradientSink, streams: Streams, table: UnitTable, *, average: bool
    ) -> None:
        self._ranks = ranks
        self._sink = sink
        self._streams = streams
        self._in_order = [unit for unit in (*reversed(table.head), *reversed(table.units)) if unit.trained]
        self._all = [*self._in_order, *(unit for unit in table.stem if unit.trained and unit not in table.head)]
        self._place = {unit: i for i, unit in enumerate(self._in_order)}
        self._next = 0
        """Place of the unit whose turn it is."""
        self._waiting: dict[Unit, list[Contribution]] = defaultdict(list)
        self._under_way = False
        self._contributed: set[UnitTensor] = set()
        """Tensors with a gradient of this rank in this window."""
        self._divisor = ranks.size if average else 1

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
            rounds = [len(self._waiting[unit]) for unit in self._all]
            for unit, count in zip(self._all, self._ranks.maximum(rounds, "end of backward"), strict=True):
                mine = self._waiting[unit]
                for i in range(count):
                    self._reduce(unit, mine[i] if i < len(mine) else {})
            self._waiting.clear()

    def discard(self, units: list[Unit]) -> None:
        """Forgets what arrived in this window; every rank does so, if one does."""
        self._contributed.clear()
        self._sink.discard(units)

    def complete(self, units: list[Unit]) -> GradientNorm:
        """The norm over all ranks. Every rank calls it once per window.

        When it returns, no rank of the node reads weights of this window any more: the updates may begin.
        """
        if self._under_way:
            self.end_backward()
        if self._streams.is_cuda:
            self._streams.h2d.synchronize()
        return self._sink.complete(units, self._agree)

    def _agree(self, squares: Squares) -> Squares:
        """Sums of squares over all ranks; a tensor that got no gradient anywhere is taken back."""
        tensors = [(unit, tensor) for unit in self._all for tensor in unit.trained]
        mine = torch.zeros(2, len(tensors), dtype=torch.float64)
        for i, (_, tensor) in enumerate(tensors):
            mine[0, i] = squares.get(tensor, 0.0)
            mine[1, i] = tensor in self._contributed
        self._contributed.clear()
        everyone = self._ranks.gather(mine, "comparison of gradient norms")
        contributed = (everyone[:, 1].sum(0) > 0).tolist()
        # Each node has the whole sum; so has each rank of it for what it updates whole.
        of_node = everyone[: self._ranks.local_size, 0].T.tolist()
        agreed = {}
        for (unit, tensor), one, several in zip(tensors, contributed, of_node, strict=True):
            if one:
                agreed[tensor] = sum(several) if unit.home.is_shared else several[0]
            else:
                unit.arrived.pop(tensor, None)
        return agreed

    # One unit.

    def _reduce(self, unit: Unit, contribution: Contribution) -> None:
        ranks, home = self._ranks, unit.home
        parts = self._parts(unit)
        longest = max(end - first for first, end in parts)
        chunk = min(longest, max(CHUNK_ELEMENTS // len(parts) // ALIGNMENT_ELEMENTS, 1) * ALIGNMENT_ELEMENTS)
        dtypes = {tensor.dtype for tensor in unit.trained}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        first, end = (0, home.layout.state_numel) if not home.is_shared else parts[ranks.local_rank]
        result = torch.empty(end - first, dtype=dtype, device=ranks.device)
        for start in range(0, longest, max(chunk, 1)):
            size = min(chunk, longest - start)
            sent = torch.zeros(len(parts), size, dtype=dtype, device=ranks.device)
            for row, part in zip(sent, parts, strict=True):
                for tensor, here, there in _overlaps(
                    contribution, part[0] + start, min(part[0] + start + size, part[1])
                ):
                    row[there].copy_(contribution[tensor][here])
            mean = self._mean(sent)
            if home.is_shared:
                own = min(size, max(end - first - start, 0))
                result[start : start + own].copy_(mean[:own])
                continue
            everyone = mean.unsqueeze(0)
            if ranks.hops.inside is not None:
                everyone = torch.empty_like(sent)
                ranks.hops.gather("all-gather inside the node", everyone.view(-1), mean, ranks.hops.inside)()
            for row, (begin, stop) in zip(everyone, parts, strict=True):
                count = min(size, max(stop - begin - start, 0))
                result[begin + start : begin + start + count].copy_(row[:count])
        self._sink.take(unit, list(self._own_elements(unit, result, first)))

    def _parts(self, unit: Unit) -> list[tuple[int, int]]:
        return [unit.home.part(rank) for rank in range(self._ranks.local_size)]

    def _mean(self, sent: torch.Tensor) -> torch.Tensor:
        """[elements] of this rank's part, from [ranks of the node, elements] of this rank's gradient."""
        hops = self._ranks.hops
        if hops.inside is not None:
            received = torch.empty_like(sent)
            hops.exchange("exchange inside the node", received.view(-1), sent.view(-1), hops.inside)()
            total = received[0].float()
            for row in received[1:]:
                total += row
        else:
            total = sent[0].float()
        if hops.across is not None:
            with hops.phase("exchange between nodes"):
                dist.all_reduce(total, group=hops.across)
        return total.div_(self._divisor).to(sent.dtype)

    @staticmethod
    def _own_elements(unit: Unit, result: torch.Tensor, first: int) -> Iterator[tuple[UnitTensor, torch.Tensor]]:
        for tensor in unit.trained:
            span = unit.home.span(tensor)
            begin = tensor.state_offset + span.start - first
            yield tensor, result[begin : begin + span.stop - span.start].to(tensor.dtype)


def _overlaps(tensors: Iterable[UnitTensor], first: int, end: int) -> Iterator[tuple[UnitTensor, slice, slice]]:
    """Of each tensor in [first, end) of the unit's trained elements: its own elements, and their place in the range."""
    for tensor in tensors:
        begin = max(first, tensor.state_offset)
        stop = min(end, tensor.state_offset + tensor.numel)
        if begin < stop:
            offset = tensor.state_offset
            yield tensor, slice(begin - offset, stop - offset), slice(begin - first, stop - first)
