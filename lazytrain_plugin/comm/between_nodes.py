"""The mean of a flat over nodes: in 8-bit codes where those are the faster, else in fp32.

Two nodes send each other the whole flat in 8-bit codes, and each adds the two up: 66 bytes for 64 elements leave a
node, and each element is rounded once. With more nodes the parts of the flat go to one node each, which adds them up
and sends the mean back in 10-bit codes (why: comm/reducer.py): (M-1)/M * 148 bytes for 64 elements, where sending
everything everywhere would be (M-1) * 66. Contributions are added in fp32, in the order of nodes, from the same codes
on all of them: identical bits.

Where states are divided over the whole job each rank needs the mean of its own part only (comm/part_mean.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from lazytrain_plugin.comm import threshold
from lazytrain_plugin.comm.hops import Hops
from lazytrain_plugin.comm.overlap import overlapped
from lazytrain_plugin.comm.part_mean import mean_of_part, part_bytes
from lazytrain_plugin.comm.parts import CONTRIBUTION_BITS, RESULT_BITS, blocks_of_part, chunk_numel
from lazytrain_plugin.comm.stats import CommStats
from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.kernels import gradient_codes as codes


def coded_mean(
    hops: Hops, flat: torch.Tensor, blocks: int, divisor: float, mean_out: torch.Tensor, stats: CommStats
) -> Iterator[None]:
    """Takes the sum of `flat` over nodes / `divisor` in codes; yields where a collective is under way.

    Args:
        flat: this node's contribution, [n] in fp32, bf16 or fp16, n <= nodes * blocks * 64. What is missing is zero.
        blocks: of 64 elements in each node's part; the same on all ranks of `hops.across`.
        mean_out: [m] in any of these dtypes, m <= nodes * blocks * 64; may be `flat`.
    """
    steps = _each_to_each if hops.nodes == 2 else _by_parts
    return steps(hops, flat, blocks, divisor, mean_out, stats)


def _rows(flat: torch.Tensor, count: int, blocks: int, bits: int) -> torch.Tensor:
    return torch.empty(count, codes.row_bytes(blocks, bits), dtype=torch.uint8, device=flat.device)


def _each_to_each(
    hops: Hops, flat: torch.Tensor, blocks: int, divisor: float, mean_out: torch.Tensor, stats: CommStats
) -> Iterator[None]:
    blocks *= hops.nodes
    mine = _rows(flat, 1, blocks, CONTRIBUTION_BITS)
    received = _rows(flat, hops.nodes, blocks, CONTRIBUTION_BITS)
    codes.encode(flat, CONTRIBUTION_BITS, blocks, mine)
    wait = hops.gather("quantized exchange between nodes", received.view(-1), mine.view(-1), hops.across)
    sent_bytes = (hops.nodes - 1) * mine.numel()
    stats.reduce_scatter_bytes += sent_bytes
    stats.wire_bytes += sent_bytes
    yield
    wait()
    mean = torch.empty(blocks * codes.BLOCK, dtype=torch.float32, device=flat.device)
    codes.decode_mean(received, CONTRIBUTION_BITS, blocks, divisor, mean)
    mean_out.copy_(mean[: mean_out.numel()])


def _by_parts(
    hops: Hops, flat: torch.Tensor, blocks: int, divisor: float, mean_out: torch.Tensor, stats: CommStats
) -> Iterator[None]:
    nodes = hops.nodes
    sent, received = (_rows(flat, nodes, blocks, CONTRIBUTION_BITS) for _ in range(2))
    codes.encode(flat, CONTRIBUTION_BITS, blocks, sent)
    wait = hops.exchange("quantized exchange between nodes", received.view(-1), sent.view(-1), hops.across)
    yield
    wait()
    mean = torch.empty(blocks * codes.BLOCK, dtype=torch.float32, device=flat.device)
    codes.decode_mean(received, CONTRIBUTION_BITS, blocks, divisor, mean)

    mine, received = _rows(flat, 1, blocks, RESULT_BITS), _rows(flat, nodes, blocks, RESULT_BITS)
    codes.encode(mean, RESULT_BITS, blocks, mine)
    wait = hops.gather("all-gather of means between nodes", received.view(-1), mine.view(-1), hops.across)
    sent_bytes = (nodes - 1) * codes.row_bytes(blocks, CONTRIBUTION_BITS)
    stats.reduce_scatter_bytes += sent_bytes
    stats.wire_bytes += sent_bytes + (nodes - 1) * codes.row_bytes(blocks, RESULT_BITS)
    yield
    wait()
    codes.decode(received, RESULT_BITS, blocks, mean_out)


def coded_bytes(numel: int, nodes: int) -> int:
    """What a rank sends to other nodes to average so many elements in codes."""
    blocks = blocks_of_part(numel, nodes)
    if nodes == 2:
        return codes.row_bytes(2 * blocks, CONTRIBUTION_BITS)
    return (nodes - 1) * (codes.row_bytes(blocks, CONTRIBUTION_BITS) + codes.row_bytes(blocks, RESULT_BITS))


def ring_bytes(numel: int, nodes: int, element_bytes: int) -> int:
    """What a rank sends to other nodes in a ring's all-reduce of so many elements among `nodes` ranks."""
    return round(2 * (nodes - 1) / nodes * numel * element_bytes)


class BetweenNodes:
    """How the ranks of a job average their nodes' sums of gradients. Every rank makes one at the same point.

    Args:
        bits: 8, or 16 for fp32 throughout.
        smallest_bucket_elements: what has fewer elements, over all ranks of a node, is averaged in fp32; default:
            measured on all ranks, by the first one over these groups.
        of_parts: each rank gets the mean of its own part only, and not that of all parts at its position of the nodes.

    Raises:
        ConfigError: other bits. CommunicationError: a rank is gone.
    """

    def __init__(
        self, hops: Hops, bits: int, smallest_bucket_elements: int | None = None, *, of_parts: bool = False
    ) -> None:
        if bits not in (8, 16):
            raise ConfigError(f"Gradients travel in 8 or 16 bits, not {bits}.")
        self._hops = hops
        self.of_parts = of_parts and hops.across is not None
        self.off_because = "one node" if hops.across is None else "bits: 16" if bits == 16 else None
        """Why nothing is sent in codes, whatever its size; None: large enough buckets are."""
        self.smallest_bucket_elements = smallest_bucket_elements or 0
        self._stats = CommStats()
        self._one_counts = threading.Lock()
        if self.off_because is None and smallest_bucket_elements is None:
            if hops.smallest_coded_elements is None:
                hops.smallest_coded_elements, _ = threshold.measure(self.timed_run, hops.slowest)
            self.smallest_bucket_elements = hops.smallest_coded_elements

    def stats(self) -> CommStats:
        """A copy of the counters of this rank."""
        return self._stats.copy()

    def uses_codes(self, numel: int) -> bool:
        """Whether a bucket of so many elements, over all ranks of a node, travels in codes."""
        return self.off_because is None and numel >= max(1, self.smallest_bucket_elements)

    def sent_bytes(self, numel: int) -> int:
        """What a node sends to average a bucket of so many elements, over all its ranks, to a few blocks."""
        if self._hops.across is None:
            return 0
        if self.of_parts:
            return part_bytes(numel, self._hops.nodes, coded=self.uses_codes(numel))
        if self.uses_codes(numel):
            return coded_bytes(numel, self._hops.nodes)
        return ring_bytes(numel, self._hops.nodes, torch.float32.itemsize)

    def bf16_bytes(self, numel: int) -> int:
        """What a node would send in bf16."""
        return ring_bytes(numel, self._hops.nodes, torch.bfloat16.itemsize) // (2 if self.of_parts else 1)

    def weight_bytes(self, numel: int) -> int:
        """What a node sends of so many updated weights in bf16."""
        return ring_bytes(numel, self._hops.nodes, torch.bfloat16.itemsize) // 2 if self.of_parts else 0

    def count(self, numel: int, inside_bytes: int) -> None:
        """Counts one bucket that is about to be averaged; `inside_bytes`: sent to ranks of this node for it."""
        if self._hops.across is None:
            return
        if self.uses_codes(numel):
            self._stats.quantized_buckets += 1
            self._stats.quantized_elements += numel
            self._stats.node_bytes += inside_bytes
            return
        self._stats.full_precision_buckets += 1
        self._stats.fallbacks[self.off_because or "small bucket"] += 1

    def count_weights(self, num_bytes: int) -> None:
        """Counts updated weights that are sent to other nodes."""
        with self._one_counts:
            self._stats.weight_bytes += num_bytes

    def mean(self, total: torch.Tensor, divisor: float, mean_out: torch.Tensor, *, coded: bool) -> Iterator[None]:
        """Writes the sum of `total` over nodes / `divisor` to `mean_out`; yields where a collective is under way.

        Args:
            total: fp32 [n], this rank's part of the node's sum; used up. With `of_parts` as many of each node's
                part, one after the other, whole blocks of 64.
            mean_out: [n] in fp32, bf16 or fp16; with `of_parts` those of this rank's part, [n / nodes].
            coded: as `uses_codes` says for the bucket that this is a part of.

        Raises:
            CommunicationError: ranks could not exchange their gradients.
        """
        hops = self._hops
        if self.of_parts:
            yield from mean_of_part(hops, total, divisor, mean_out, self._stats, coded=coded)
            return
        if hops.across is not None and coded:
            blocks = blocks_of_part(total.numel(), hops.nodes)
            yield from coded_mean(hops, total, blocks, divisor, mean_out, self._stats)
            return
        if hops.across is not None:
            wait = hops.sum_across("full-precision exchange between nodes", total)
            self._stats.wire_bytes += ring_bytes(total.numel(), hops.nodes, total.element_size())
            yield
            wait()
        torch.div(total, divisor, out=mean_out)  # rounded on the way: one pass over memory

    @torch.no_grad()
    def timed_run(self, numel: int, quantized: bool) -> None:
        """Averages a made-up bucket of so many elements, over all ranks of a node, in codes or in fp32."""
        before = self._stats.copy()
        device, share = self._hops.device, -(-numel // self._hops.ranks_per_node)
        generator = torch.Generator(device).manual_seed(numel)
        nodes = self._hops.nodes if self.of_parts else 1
        if self.of_parts:
            share = codes.num_blocks(-(-share // nodes)) * codes.BLOCK * nodes
        values = torch.randn(share, device=device, generator=generator)
        size = chunk_numel(share // nodes, device.type) * nodes if quantized else max(share, 1)
        overlapped(self.mean(part, 1.0, part[: part.numel() // nodes], coded=quantized) for part in values.split(size))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._stats = before
