"""What the quantized all-reduce gains over a full-precision one, from the bandwidth of the link alone. No torch.

    time(full)       = latency_s + 2 (n-1)/n * elements * element_bytes * ranks_per_link / bandwidth
    time(quantized)  = latency_s + (n-1)/n * elements * (66 + 82)/64 * ranks_per_link / bandwidth

66/64 bytes gather an element's contributions in 8-bit codes and 82/64 bring its sum in 10-bit codes
(kernels/gradient_codes.py); two nodes send each other 66/64 bytes and no sums. `ranks_per_link` ranks of a node reduce
at the same time over the same link.

The defaults are the set-up of AGoQ's communication table (arXiv 2605.00539, table 4: 8 nodes of 8 GPUs, tensor
parallel inside the node, fp32 all-reduce among the 8 of a data-parallel group), and the latency is that of its 32 KB
row, where neither side is limited by the link.
"""

from __future__ import annotations

TABLE_LATENCY_S = 0.7e-3


def coded_bytes_per_element(nodes: int, *, of_parts: bool = False) -> float:
    """Both ways together, of which a node sends (nodes - 1) / nodes; a test compares it with what is sent.

    Args:
        of_parts: each rank needs the sum of its own part only, so that nothing comes back.
    """
    if of_parts:
        return 66 / 64
    return (2 * 66 if nodes == 2 else 66 + 82) / 64


def predicted_speedup(
    message_bytes: float,
    gbit: float,
    *,
    nodes: int = 8,
    ranks_per_link: int = 8,
    element_bytes: int = 4,
    latency_s: float = TABLE_LATENCY_S,
) -> float:
    """Time of a full-precision all-reduce over that of the quantized one.

    Args:
        message_bytes: size of the bucket in its own precision.
        gbit: bandwidth of a node's link in one direction, in Gbit/s.
        nodes: nodes that take part, at least 2.
        ranks_per_link: ranks of one node that reduce buckets of their own over that link at the same time.
        element_bytes: bytes of one element in full precision, 4 or 2.
        latency_s: what a reduction of an empty bucket takes, in seconds.

    Raises:
        ValueError: fewer than two nodes, or a size or bandwidth that isn't positive.
    """
    if nodes < 2 or message_bytes <= 0 or gbit <= 0:
        raise ValueError(f"nodes={nodes}, message_bytes={message_bytes}, gbit={gbit}: need two nodes and a bandwidth.")
    byte_s = ranks_per_link * (nodes - 1) / nodes / (gbit * 1e9 / 8)
    full_s = latency_s + 2 * message_bytes * byte_s
    quantized_s = latency_s + message_bytes / element_bytes * coded_bytes_per_element(nodes) * byte_s
    return full_s / quantized_s
