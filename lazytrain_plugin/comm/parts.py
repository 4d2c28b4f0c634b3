"""How a bucket is parted: in equal parts of whole blocks, one per rank, and in chunks that are under way at once."""

from __future__ import annotations

from lazytrain_plugin.kernels import gradient_codes as codes

CONTRIBUTION_BITS, RESULT_BITS = 8, 10
CHUNKS = 4
"""Parts of a bucket under way at once: while the link carries one, the next is encoded and the last decoded."""
SMALLEST_CHUNK = {"cpu": 2**18, "cuda": 2**21}
LARGEST_CHUNK = 2**24
"""Elements of a chunk: above the first its latency hardly shows, the second bounds the buffers."""
ALIGNED_BLOCKS = 8
"""Parts of many blocks are a multiple of this, so that rows of codes begin at multiples of 16 bytes."""


def blocks_of_part(numel: int, parts: int) -> int:
    """Blocks of 64 in each of `parts` equal parts that hold `numel` elements."""
    blocks = -(-numel // (codes.BLOCK * parts))
    return blocks if blocks < 128 * ALIGNED_BLOCKS else -(-blocks // ALIGNED_BLOCKS) * ALIGNED_BLOCKS


def chunk_count(numel: int, device_type: str) -> int:
    """Chunks of a bucket of `numel` elements."""
    return max(1, min(CHUNKS, numel // SMALLEST_CHUNK[device_type]), -(-numel // LARGEST_CHUNK))


def chunk_numel(numel: int, device_type: str) -> int:
    """Elements of each chunk, but the last; whole blocks."""
    return codes.num_blocks(-(-numel // chunk_count(numel, device_type))) * codes.BLOCK
