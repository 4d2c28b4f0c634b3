"""Updates of states that rest on the GPUs of a node: each rank has a part of them, and updates it.

A rank holds the whole weights, and the states and mean gradients of its part. Its update changes its part of the
weights; those of the other ranks come from their GPUs, in whole chunks, before anything reads the unit again. Both run
where gradients meet (`CommLane`), in forward order, so that all ranks launch the same collectives in one order, and
beside whatever the forward computes meanwhile: a unit's parameters are pending until they are whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lazytrain_plugin.comm.overlap import overlapped
from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.comm_lane import LaneTicket
from lazytrain_plugin.runtime.gradient_exchange import CHUNK_ELEMENTS, common_dtype, overlaps
from lazytrain_plugin.runtime.layout import ALIGNMENT_ELEMENTS, UnitTensor
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.update import StepScalars
from lazytrain_plugin.units import align_up

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor


class ResidentUpdates:
    """Of one executor; every rank makes one, and submits the same updates in the same order."""

    def __init__(self, executor: Executor, ranks: RankGroup) -> None:
        self._executor, self._ranks = executor, ranks

    def submit(self, unit: Unit, arrived: dict[UnitTensor, Arrival], scalars: StepScalars) -> LaneTicket:
        """Starts the update, after what the compute stream does until now; when the ticket's event has passed, the
        unit's weights are new."""
        streams = self._executor.streams
        stream = streams.comm if streams.is_cuda else None

        def work() -> None:
            with streams.span(f"update {unit.name}", Resource.COMPUTE, stream=stream):
                self._executor.updater.update(unit, arrived, scalars)
            unit.home.drop_gradients()
            with streams.span(f"gather {unit.name}", Resource.EXCHANGE, stream=stream):
                overlapped(gather_weights(self._ranks, unit))

        ticket = self._executor.exchange.lane.begin(work, f"optimizer update of {unit.name}")
        unit.publish_event = ticket.event
        return ticket


def gather_weights(ranks: RankGroup, unit: Unit) -> Iterator[Iterator[None]]:
    """Steps of each chunk; when all are done, every rank of the node has every part of the unit's weights."""
    parts = [unit.home.part(rank) for rank in range(ranks.local_size)]
    longest = max(end - first for first, end in parts)
    size = align_up(max(1, min(CHUNK_ELEMENTS // len(parts), longest)), ALIGNMENT_ELEMENTS)
    for start in range(0, longest, size):
        yield _chunk(ranks, unit, parts, start, min(size, longest - start))


def _chunk(ranks: RankGroup, unit: Unit, parts: list[tuple[int, int]], start: int, size: int) -> Iterator[None]:
    """Elements [start, start + size) of every part."""
    weights = unit.home.gpu_weights
    everyone = torch.empty(len(parts), size, dtype=common_dtype(unit), device=ranks.device)
    sent = torch.empty_like(everyone[0])
    places = [list(overlaps(unit.trained, first + start, min(first + start + size, end))) for first, end in parts]
    for tensor, here, there in places[ranks.local_rank]:
        sent[there].copy_(weights[tensor][here])
    wait = ranks.hops.gather("all-gather of weights inside the node", everyone.view(-1), sent, ranks.hops.inside)
    yield
    wait()
    for rank, row in enumerate(everyone):
        for tensor, here, there in places[rank] if rank != ranks.local_rank else ():
            weights[tensor][here].copy_(row[there])
