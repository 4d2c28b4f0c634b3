import pytest

from lazytrain_plugin.comm.links import line_through
from lazytrain_plugin.comm.threshold import NEVER, choose, measure
from lazytrain_plugin.comm.topology import Topology, node_key
from lazytrain_plugin.errors import ConfigError


def test_nodes_from_keys_and_sizes():
    assert Topology.from_keys([5, 9, 5, 9]).nodes == ((0, 2), (1, 3))
    assert Topology.consecutive(6, 2).nodes == ((0, 1), (2, 3), (4, 5))
    assert Topology.consecutive(6, 2).describe() == "3 nodes of 2 ranks"
    assert Topology(((0,), (1, 2))).ranks_per_node is None
    with pytest.raises(ConfigError, match="6 ranks can't be parted into nodes of 4"):
        Topology.consecutive(6, 4)
    with pytest.raises(ConfigError, match="exactly once"):
        Topology(((0, 1), (1, 2)))


def test_a_node_is_a_host_and_a_launcher():
    assert node_key({"GROUP_RANK": "1"}, "a") == node_key({"GROUP_RANK": "1", "RANK": "7"}, "a")
    assert node_key({"GROUP_RANK": "1"}, "a") != node_key({"GROUP_RANK": "0"}, "a")  # two launchers on one host
    assert node_key({"GROUP_RANK": "0"}, "a") != node_key({"GROUP_RANK": "0"}, "b")  # a launcher for each host
    assert node_key({}, "a") == node_key({}, "a") != node_key({}, "b")
    assert 0 <= node_key() < 2**62


def test_the_threshold_is_where_the_lines_cross():
    sizes = (2**12, 2**14, 2**16, 2**18, 2**20)
    full, quantized = [1e-3 + 4e-8 * n for n in sizes], [3e-3 + 2e-8 * n for n in sizes]
    assert choose(sizes, full, quantized) == pytest.approx(100_000, rel=1e-3)
    assert choose(sizes, full, [t / 10 for t in full]) == 2**12
    assert choose(sizes, full, [2 * t for t in full]) == NEVER
    disturbed = [*quantized[:-1], 1.4 * quantized[-1]]  # the largest size, which tells most, met another process
    assert 50_000 < choose(sizes, full, disturbed) < 500_000
    # a busy CPU: small sizes alone would put the lines' slopes the wrong way round
    assert choose((2**12, 2**14, 2**16), [1e-3, 1.6e-3, 4.1e-3], [1e-3, 5e-3, 4e-3]) == 2**16
    assert choose((2**12, 2**14, 2**16), [1e-3, 1.6e-3, 4.1e-3], [1e-3, 5e-3, 9e-3]) == NEVER
    assert choose((100,), [2.0], [1.0]) == 100 and choose((100,), [1.0], [2.0]) == NEVER


def test_a_link_is_as_fast_as_its_largest_exchanges():
    line = line_through((1000, 100_000, 1_000_000), (2e-3, 5e-3, 50e-3))
    assert line.element_s == pytest.approx(45e-3 / 900_000) and line.latency_s == pytest.approx(2e-3 - 1000 * 5e-8)
    late = line_through((1000, 100_000, 1_000_000), (2e-3, 25e-3, 50e-3))  # the middle one met another process
    assert late.element_s == pytest.approx(48e-3 / 999_000)
    assert line_through((1000,), (2e-3,)).element_s == 2e-6
    assert line_through((1000, 4000), (2e-3, 1e-3)).element_s == 1e-3 / 4000  # the small one met another process


def test_measuring_stops_at_its_budget():
    tried = []
    _, rows = measure(lambda size, quantized: tried.append(size), lambda s: [*s[:2], 0.3], sizes=(1, 4, 16), budget_s=1)
    assert [size for size, _, _ in rows] == [1] and set(tried) == {1}
