"""Updated weights in host memory meet those of other nodes, where states are divided over all ranks of the job.

A node has one copy of the weights, and each of its ranks has updated a part of it. The ranks at one position of the
nodes send each other their parts, through their GPUs, and write what they get to the copy that their node has.

[Note: one order] That happens in a thread of its own, while the forward runs, with a process group and a stream of its
own. NCCL asks for more: a GPU may have to end one group's collective before it begins another's, so all ranks must
launch those of all groups in one order. It is: the updates of states on the GPUs, whose weights meet in the lane of
gradients; then these; then the gradients of the next window. The first of these waits for the lane, and the first
gradient, by which time the forward has needed nearly all weights, for the last of these. What the program itself
launches beside a forward (a gather of metrics) can't be put in this order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lazytrain_plugin.plan.problem import WEIGHTS_EXCHANGE_BYTES
from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.comm_lane import Fence
from lazytrain_plugin.runtime.rank_group import POLL_S, RankGroup
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.units import align_up

PHASE = "all-gather of weights between nodes"


class WeightsBetweenNodes:
    """Of one executor; every rank makes one, and brings the same units in the same order.

    Args:
        sent: gets the bytes that are sent to other nodes for each unit.
    """

    def __init__(self, ranks: RankGroup, streams: Streams, sent: Callable[[int], None]) -> None:
        self._ranks, self._streams, self._sent = ranks, streams, sent
        self._stream = streams.slot_stream()
        self._piece_bytes = align_up(WEIGHTS_EXCHANGE_BYTES // ranks.num_nodes, 16)
        count = (ranks.num_nodes + 1) * self._piece_bytes
        self._memory = torch.empty(count, dtype=torch.uint8, device=ranks.device)
        # Connections are made now, while no other thread has collectives under way.
        one = torch.zeros(1, dtype=torch.uint8, device=ranks.device)
        ranks.hops.gather(PHASE, one.new_empty(ranks.num_nodes), one, ranks.weights_group)()

    @torch.no_grad()
    def bring(self, unit: Unit, after: Fence) -> None:
        """Returns when the other nodes' parts are in this node's memory. This rank's part must be; one thread calls it.

        Args:
            after: collectives that come before; see [Note: one order].

        Raises:
            CommunicationError: a rank is gone.
        """
        ranks, streams = self._ranks, self._streams
        home, nodes = unit.home, ranks.num_nodes
        column = ranks.local_rank * nodes
        places = [home.layout.weight_bytes_of(home.part(column + node)) for node in range(nodes)]
        longest = max(place.stop - place.start for place in places)
        if not longest:
            return
        own = places[ranks.own_part - column]
        self._sent((nodes - 1) * (own.stop - own.start))
        size = min(longest, self._piece_bytes)
        after.stops(self._stream)
        with (
            streams.on(self._stream),
            streams.span(f"weights {unit.name} (nodes)", Resource.EXCHANGE, stream=self._stream, num_bytes=longest),
        ):
            rows = self._memory[: (nodes + 1) * size].view(nodes + 1, size)
            for start in range(0, longest, size):
                self._bring(unit, [_piece(place, start, size) for place in places], rows)
        streams.reach(streams.record(self._stream), POLL_S)

    def _bring(self, unit: Unit, pieces: list[slice], rows: torch.Tensor) -> None:
        """One piece of each node's part; the first row is what is sent."""
        ranks, buffer = self._ranks, unit.home.host_buffer
        own = ranks.own_part - ranks.local_rank * ranks.num_nodes
        sent, everyone = rows[0], rows[1:]
        buffer.read(pieces[own].start, sent[: pieces[own].stop - pieces[own].start])
        ranks.hops.gather(PHASE, everyone.view(-1), sent, ranks.weights_group)()
        for node, (piece, row) in enumerate(zip(pieces, everyone, strict=True)):
            if node != own:
                buffer.write(piece.start, row[: piece.stop - piece.start])


def _piece(place: slice, start: int, size: int) -> slice:
    first = min(place.start + start, place.stop)
    return slice(first, min(first + size, place.stop))
