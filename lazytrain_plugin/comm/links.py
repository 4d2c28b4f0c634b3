"""What the exchange of a unit's gradients takes on this job's links: the reductions of training, timed at the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lazytrain_plugin.comm.between_nodes import BetweenNodes
from lazytrain_plugin.comm.hops import Hops
from lazytrain_plugin.comm.overlap import overlapped

SIZES = (2**14, 2**17, 2**20, 2**22, 2**24)
"""Elements of the units that are tried, smallest first."""
SMALL_ELEMENTS, SMALL_REPEATS, REPEATS = 2**18, 8, 3
"""Small ones take no time to repeat, and other processes show in their times more than in those of large ones."""
BUDGET_S = 2.0
"""No larger size is tried once this much time is spent, for each of the ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Time of one exchange by the number of a unit's elements."""

    latency_s: float
    element_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Of the slowest rank, all ranks at work; the same on every rank."""

    inside: Line | None
    """Contributions of bf16 to the ranks of a node that add them up; None: a node has one rank."""
    fp32: Line | None
    """The mean over nodes; None: one node."""
    coded: Line | None
    """In codes; None where nothing travels in them."""
    weights: Line | None = None
    """Updated weights to the other nodes, in bf16; None: each node updates all of them."""


def sum_inside(hops: Hops, sent: torch.Tensor, phase: str = "exchange inside the node") -> Iterator[None]:
    """Returns the sum of this rank's rows of the node's contributions, in fp32, in the order of ranks; yields where the
    collective is under way.

    Args:
        sent: [ranks of the node, n], row i for the rank at position i.
    """
    if hops.inside is None:
        return sent[0].to(torch.float32, copy=True)
    received = torch.empty_like(sent)
    wait = hops.exchange(phase, received.view(-1), sent.view(-1), hops.inside)
    yield
    wait()
    total = received[0].to(torch.float32, copy=True)
    for row in received[1:]:
        total += row
    return total


def measure_links(hops: Hops, between: BetweenNodes, *, network: bool = True) -> Links:
    """Times each way once for the groups of `hops`; every rank calls it at the same point.

    Args:
        network: False: only inside the node.

    Raises:
        CommunicationError: a rank is gone.
    """

    def inside(numel: int) -> None:
        shape = hops.ranks_per_node, -(-numel // hops.ranks_per_node)
        rows = torch.zeros(shape, dtype=torch.bfloat16, device=hops.device)
        overlapped([sum_inside(hops, rows)])

    def weights(numel: int) -> None:
        share = -(-numel // (hops.ranks_per_node * hops.nodes))
        sent = torch.zeros(share, dtype=torch.bfloat16, device=hops.device)
        phase = "all-gather of weights between nodes"
        hops.gather(phase, sent.new_empty(hops.nodes * share), sent, hops.across)()

    def time_of(key: str, run: Callable[[int], None]) -> Line:
        if key not in hops.lines:
            hops.lines[key] = _line(run, hops)
        return hops.lines[key]

    between_nodes = network and hops.across is not None
    return Links(
        inside=time_of("inside", inside) if hops.inside is not None else None,
        fp32=time_of("fp32", lambda numel: between.timed_run(numel, quantized=False)) if between_nodes else None,
        coded=time_of("coded", lambda numel: between.timed_run(numel, quantized=True))
        if between_nodes and between.uses_codes(SIZES[-1])
        else None,
        weights=time_of("weights", weights) if between_nodes and between.of_parts else None,
    )


def _line(run: Callable[[int], None], hops: Hops) -> Line:
    def seconds(numel: int) -> float:
        begin = time.perf_counter()
        run(numel)
        if hops.device.type == "cuda":
            torch.cuda.synchronize(hops.device)
        return time.perf_counter() - begin

    sizes, times, spent_s = [], [], 0.0
    for size in SIZES:
        repeats = SMALL_REPEATS if size < SMALL_ELEMENTS else REPEATS
        samples = [seconds(size) for _ in range(1 + repeats)]  # the first warms up
        best_s, took_s = hops.slowest([min(samples[1:]), sum(samples)])
        sizes.append(size)
        times.append(best_s)
        spent_s += took_s
        if spent_s + 4 * took_s > BUDGET_S:
            break
    return line_through(sizes, times)


def line_through(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The steepest slope to the largest size, and the latency of the smallest: a small size may pass a buffer faster
    than the link, which flattens the slope from it, and one that met another process flattens the slope from it too."""
    slopes = [
        (seconds[-1] - took_s) / (sizes[-1] - size) for size, took_s in zip(sizes[:-1], seconds[:-1], strict=True)
    ]
    element_s = max(slopes, default=0.0)
    if element_s <= 0:
        element_s = seconds[-1] / sizes[-1]
    return Line(latency_s=max(0.0, seconds[0] - sizes[0] * element_s), element_s=element_s)
