"""The model of the all-reduce against AGoQ's published table, and against the kernels' formats."""

import pytest

from lazytrain_plugin.comm.between_nodes import coded_bytes
from lazytrain_plugin.comm.predict import coded_bytes_per_element, predicted_speedup

MIB, KIB = 2**20, 2**10


@pytest.mark.parametrize(
    "message_bytes, gbit, full_ms, quantized_ms",
    [(32 * MIB, 200, 131.23, 39.17), (32 * MIB, 10, 1603.78, 432.36), (32 * KIB, 200, 0.83, 0.81)],
)
def test_the_ratios_of_agoqs_table(message_bytes, gbit, full_ms, quantized_ms):
    assert predicted_speedup(message_bytes, gbit) == pytest.approx(full_ms / quantized_ms, rel=0.2)


def test_the_bytes_are_those_of_the_codes():
    """The share of a node among 2, 3 and 8, of a bucket of whole blocks."""
    for nodes in (2, 3, 8):
        numel = 8 * 3 * 2**20
        predicted = (nodes - 1) / nodes * coded_bytes_per_element(nodes) * numel
        assert coded_bytes(numel, nodes) == pytest.approx(predicted, rel=1e-9)


def test_limits():
    """A slow link gives the ratio of the bytes, an empty bucket nothing; bf16 gradients have half as much to gain."""
    assert predicted_speedup(32 * MIB, 1e-3) == pytest.approx(2 * 4 / coded_bytes_per_element(8), rel=1e-4)
    assert predicted_speedup(32 * MIB, 1e-3, element_bytes=2) == pytest.approx(4 / coded_bytes_per_element(8), rel=1e-4)
    assert predicted_speedup(4, 200) == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match="two nodes"):
        predicted_speedup(MIB, 10, nodes=1)
