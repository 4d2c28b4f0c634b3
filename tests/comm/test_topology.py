import pytest

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


def test_the_threshold_is_where_codes_win_for_good():
    sizes = (1, 4, 16, 64)
    assert choose(sizes, [1, 1, 2, 4], [2, 2, 1, 1]) == 16
    assert choose(sizes, [1, 1, 2, 4], [2, 0.9, 3, 1]) == 64  # not the lucky 4
    assert choose(sizes, [1, 1, 1, 1], [2, 2, 2, 2]) == NEVER
    assert choose(sizes, [2, 2, 2, 2], [1, 1, 1, 1]) == 1


def test_measuring_stops_at_its_budget():
    tried = []
    _, rows = measure(lambda size, quantized: tried.append(size), lambda s: [*s[:2], 0.3], sizes=(1, 4, 16), budget_s=1)
    assert [size for size, _, _ in rows] == [1] and set(tried) == {1}
