"""Updates of states that rest on the GPUs of a node: each rank has a part of them, and updates it.

A rank holds the whole weights, and the states and mean gradients of its part. Its update changes its part of the
weights; those of the other ranks come from their GPUs, in whole chunks, before anything reads the unit again. Both run
where gradients meet (`CommLane`), in forward order, so that all ranks launch the same collectives in one order, and
beside whatever the forward computes meanwhile: a unit's parameters are pending until they are whole.

Where states are divided over the job a rank first gets, from the other nodes, the parts that ranks at its position
have, and then, inside the node, those of the other positions: so each part crosses the network once for each node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lazytrain_plugin.comm.hops import Hops
from lazytrain_plugin.comm.overlap import overlapped
from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.comm_lane import LaneTicket
from lazytrain_plugin.runtime.gradient_exchange import common_dtype, overlaps
from lazytrain_plugin.runtime.layout import ALIGNMENT_ELEMENTS, UnitTensor
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.update import StepScalars
from lazytrain_plugin.units import align_up

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor

GATHERED_BYTES = 2**27
"""Of weights that are gathered at once. The host launches all of a step's before the next forward, so there are few.
Two are under way at a time, in the memory through which gradients meet in backward (plan/problem.py)."""


class ResidentUpdates:
    """Of one executor; every rank makes one, and submits the same updates in the same order.

    Args:
        sent: gets the bytes that each gather sends to other nodes.
    """

    def __init__(self, executor: Executor, ranks: RankGroup, sent: Callable[[int], None]) -> None:
        self._executor, self._ranks, self._sent = executor, ranks, sent

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
                self._gather(unit)

        ticket = self._executor.exchange.lane.begin(work, f"optimizer update of {unit.name}")
        unit.publish_event = ticket.event
        return ticket

    def _gather(self, unit: Unit) -> None:
        """Brings every rank's part of the unit's weights to every rank."""
        ranks, home = self._ranks, unit.home
        hops, position = ranks.hops, ranks.local_rank
        if ranks.shards_job:
            parts = [home.part(position * ranks.num_nodes + node) for node in range(ranks.num_nodes)]
            own = ranks.own_part - position * ranks.num_nodes
            self._sent((ranks.num_nodes - 1) * (parts[own][1] - parts[own][0]) * common_dtype(unit).itemsize)
            overlapped(gather_weights(unit, parts, own, hops, hops.across, "all-gather of weights between nodes"))
        if hops.inside is not None:
            parts = [unit.layout.part(local_rank, ranks.local_size) for local_rank in range(ranks.local_size)]
            overlapped(
                gather_weights(unit, parts, position, hops, hops.inside, "all-gather of weights inside the node")
            )


Part = tuple[int, int]


def gather_weights(
    unit: Unit, parts: list[Part], own: int, hops: Hops, group: dist.ProcessGroup, phase: str
) -> Iterator[Iterator[None]]:
    """Steps of each chunk; when all are done, every rank of `group` has each one's part of the unit's weights.

    Args:
        parts: [first, end) of the trained elements that each rank of the group has, in their order.
        own: which of them is this rank's.
    """
    longest = max(end - first for first, end in parts)
    most = GATHERED_BYTES // (common_dtype(unit).itemsize * len(parts))
    size = align_up(max(1, min(most, longest)), ALIGNMENT_ELEMENTS)
    for start in range(0, longest, size):
        pieces = [(first + start, min(first + start + size, end)) for first, end in parts]
        yield _chunk(unit, pieces, own, min(size, longest - start), hops, group, phase)


def _chunk(
    unit: Unit, pieces: list[Part], own: int, size: int, hops: Hops, group: dist.ProcessGroup, phase: str
) -> Iterator[None]:
    """At most `size` elements of each part."""
    weights = unit.home.gpu_weights
    everyone = torch.empty(len(pieces), size, dtype=common_dtype(unit), device=hops.device)
    sent = torch.empty_like(everyone[0])
    places = [list(overlaps(unit.trained, first, end)) for first, end in pieces]
    for tensor, here, there in places[own]:
        sent[there].copy_(weights[tensor][here])
    wait = hops.gather(phase, everyone.view(-1), sent, group)
    yield
    wait()
    for number, row in enumerate(everyone):
        for tensor, here, there in places[number] if number != own else ():
            weights[tensor][here].copy_(row[there])
