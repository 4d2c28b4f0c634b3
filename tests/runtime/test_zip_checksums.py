"""CRCs of archives in pieces: equal to zlib's, whatever the pieces."""

import random
import zlib

import pytest

from lazytrain_plugin.runtime import zip_checksums
from lazytrain_plugin.runtime.zip_checksums import Crc32Pool, combine


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0), (1, 1), (7, 4096), (65537, 3), (100_000, 1_000_003)])
def test_two_strings_end_to_end(lengths):
    draw = random.Random(0)
    first, second = (draw.randbytes(length) for length in lengths)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 1000, 1001, 12_345])
def test_pieces_on_several_threads(monkeypatch, num_bytes):
    monkeypatch.setattr(zip_checksums, "_PIECE_BYTES", 1000)
    content = random.Random(1).randbytes(num_bytes)
    pool = Crc32Pool()
    assert pool.crc32(memoryview(content)) == zlib.crc32(content)
    assert pool.finish(pool.begin(memoryview(content)), zlib.crc32(b"before")) == zlib.crc32(b"before" + content)
    pool.close()
