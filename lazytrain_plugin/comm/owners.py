"""The quantized reduction where each element's mean is needed by one rank only, as ZeRO stages 1 and 2 need it.

For a rank that owns n elements, at position l of node m:

    inside a node    the elements of all owners at position l to the rank at position l, in the gradient's precision,
                     added in fp32                                              (only if it has several ranks)
    between nodes    the owner's elements to the owner in 8-bit codes, decoded and added in fp32, divided

No result travels, and nothing is rounded a second time: the error is that of one quantization of each node's
contribution. What enters the owner's node grows with the number of nodes and with what the node owns of the bucket,
while an all-reduce spreads its bytes evenly; `owners_are_cheaper` compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lazytrain_plugin.comm.hops import Hops
from lazytrain_plugin.comm.parts import CONTRIBUTION_BITS, blocks_of_part, chunk_count
from lazytrain_plugin.comm.predict import coded_bytes_per_element
from lazytrain_plugin.comm.stats import CommStats
from lazytrain_plugin.kernels import gradient_codes as codes


def owners_are_cheaper(owned_elements: Sequence[int], nodes: Sequence[Sequence[int]]) -> bool:
    """Whether the busiest direction of any node's link carries fewer bytes than with an all-reduce of the same bucket.

    Args:
        owned_elements: how many elements of the bucket each rank owns.
        nodes: the ranks of each node.
    """
    total = sum(owned_elements)
    busiest = 0
    for node in nodes:
        owned = sum(owned_elements[rank] for rank in node)
        busiest = max(busiest, owned * (len(nodes) - 1), total - owned)
    all_reduce = (len(nodes) - 1) / len(nodes) * total * coded_bytes_per_element(len(nodes)) * codes.BLOCK
    return busiest * codes.BYTES_PER_BLOCK[CONTRIBUTION_BITS] <= all_reduce


def chunks_of(owned: Sequence[torch.Tensor], device_type: str) -> list[list[torch.Tensor]]:
    """Parts of a bucket that are under way at once: views of so many elements of each rank's; whole blocks."""
    count = chunk_count(sum(tensor.numel() for tensor in owned), device_type)
    sizes = [max(1, codes.num_blocks(-(-tensor.numel() // count))) * codes.BLOCK for tensor in owned]
    return [
        [tensor[size * number : size * (number + 1)] for tensor, size in zip(owned, sizes, strict=True)]
        for number in range(count)
    ]


def reduce_to_owners(hops: Hops, owned: Sequence[torch.Tensor], divisor: float, stats: CommStats) -> Iterator[None]:
    """Reduces what this rank has of each rank's elements; yields where a collective is under way.

    Args:
        owned: for each rank a flat tensor, all of one dtype; that of this rank holds the sum / `divisor` afterwards,
            the others what they held.
    """
    mine = owned[hops.rank]
    position = hops.position(hops.inside)
    for_node = [owned[node[position]] for node in hops.node_ranks]
    if hops.inside is not None:
        shard_sizes = [
            sum(owned[node[place]].numel() for node in hops.node_ranks) for place in range(hops.ranks_per_node)
        ]
        sent = torch.cat([owned[node[place]] for place in range(hops.ranks_per_node) for node in hops.node_ranks])
        numel = shard_sizes[position]
        received = torch.empty(hops.ranks_per_node * numel, dtype=sent.dtype, device=sent.device)
        phase = "full-precision exchange inside a node"
        wait = hops.exchange(phase, received, sent, hops.inside, [numel] * hops.ranks_per_node, shard_sizes)
        stats.node_bytes += (sent.numel() - numel) * sent.element_size()
        yield
        wait()
        contributions = received.view(hops.ranks_per_node, numel)
        shard = contributions[0].to(torch.float32, copy=True)
        for contribution in contributions[1:]:
            shard += contribution
        for_node = list(shard.split([tensor.numel() for tensor in for_node]))

    blocks = [blocks_of_part(tensor.numel(), 1) for tensor in for_node]
    row_bytes = [codes.row_bytes(count, CONTRIBUTION_BITS) for count in blocks]
    rows = torch.empty(sum(row_bytes), dtype=torch.uint8, device=mine.device)
    for tensor, count, row in zip(for_node, blocks, rows.split(row_bytes), strict=True):
        codes.encode(tensor, CONTRIBUTION_BITS, count, row.view(1, -1))
    my_blocks = blocks_of_part(mine.numel(), 1)
    my_bytes = codes.row_bytes(my_blocks, CONTRIBUTION_BITS)
    received = torch.empty(hops.nodes * my_bytes, dtype=torch.uint8, device=mine.device)
    phase = "quantized exchange between nodes"
    wait = hops.exchange(phase, received, rows, hops.across, [my_bytes] * hops.nodes, row_bytes)
    sent_bytes = rows.numel() - my_bytes
    stats.reduce_scatter_bytes += sent_bytes
    stats.wire_bytes += sent_bytes
    yield
    wait()
    mean = torch.empty(my_blocks * codes.BLOCK, dtype=torch.float32, device=mine.device)
    codes.decode_mean(received.view(hops.nodes, my_bytes), CONTRIBUTION_BITS, my_blocks, divisor, mean)
    mine.copy_(mean[: mine.numel()])
