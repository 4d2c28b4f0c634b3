"""The mean over nodes where each rank needs its own part of it only: half the bytes of a mean that all need, or fewer.

Contributions to a part go to the rank that has it, which adds them up in fp32 in the order of nodes. In 8-bit codes
each element is rounded once, whatever the number of nodes, and nothing is sent back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lazytrain_plugin.comm.hops import Hops
from lazytrain_plugin.comm.parts import CONTRIBUTION_BITS
from lazytrain_plugin.comm.stats import CommStats
from lazytrain_plugin.kernels import gradient_codes as codes


def mean_of_part(
    hops: Hops, total: torch.Tensor, divisor: float, mean_out: torch.Tensor, stats: CommStats, *, coded: bool
) -> Iterator[None]:
    """Takes the sum over nodes / `divisor` of the elements of this rank's part; yields where a collective is under way.

    Args:
        total: fp32, this node's sums of [nodes, n] elements, row i those of the rank at this position of node i; n is a
            multiple of 64 where they are coded.
        mean_out: [n] in fp32, bf16 or fp16.
    """
    nodes = hops.nodes
    if coded:
        blocks = total.numel() // nodes // codes.BLOCK
        sent = torch.empty(nodes, codes.row_bytes(blocks, CONTRIBUTION_BITS), dtype=torch.uint8, device=total.device)
        codes.encode(total, CONTRIBUTION_BITS, blocks, sent)
        phase = "quantized exchange between nodes"
    else:
        sent, phase = total, "full-precision exchange between nodes"
    received = torch.empty_like(sent)
    wait = hops.exchange(phase, received.view(-1), sent.view(-1), hops.across)
    sent_bytes = (nodes - 1) * sent.nbytes // nodes
    stats.wire_bytes += sent_bytes
    stats.reduce_scatter_bytes += sent_bytes if coded else 0
    yield
    wait()
    if coded:
        mean = torch.empty(blocks * codes.BLOCK, dtype=torch.float32, device=total.device)
        codes.decode_mean(received, CONTRIBUTION_BITS, blocks, divisor, mean)
        mean_out.copy_(mean)
        return
    first, *others = received.view(nodes, -1)
    for row in others:
        first += row
    torch.div(first, divisor, out=mean_out)


def part_bytes(numel: int, nodes: int, *, coded: bool) -> int:
    """What a rank sends to other nodes for `numel` elements, over the parts of all nodes, to a few blocks."""
    each = codes.BYTES_PER_BLOCK[CONTRIBUTION_BITS] / codes.BLOCK if coded else torch.float32.itemsize
    return round((nodes - 1) / nodes * numel * each)
