import pytest

from lazytrain_plugin.profile.numa import count_nodes, node_of_pci_device

GPU = "0000:17:00.0"


@pytest.fixture
def machine(tmp_path):
    """Two sockets and a node of memory alone; the GPU's is written by the test."""

    def write(path, text):
        target = tmp_path / "sys" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    for node, cpus in enumerate(("0-3,8-11\n", "4-7,12-15\n", "\n")):
        write(f"devices/system/node/node{node}/cpulist", cpus)
    write(f"bus/pci/devices/{GPU}/numa_node", "1\n")
    return tmp_path, write


def test_the_gpus_node(machine):
    root, _ = machine
    node = node_of_pci_device(GPU, allowed_cpus=range(16), root=root)
    assert (node.index, node.num_nodes, node.cpus) == (1, 2, {4, 5, 6, 7, 12, 13, 14, 15})
    assert count_nodes(root) == 2


def test_a_launchers_binding_is_kept(machine):
    root, _ = machine
    assert node_of_pci_device(GPU, allowed_cpus=[3, 4, 5], root=root).cpus == {4, 5}
    assert node_of_pci_device(GPU, allowed_cpus=[0, 1], root=root) is None  # it was told to run elsewhere


@pytest.mark.parametrize("said", ["-1\n", "7\n", "", "?"])
def test_nothing_is_bound_where_the_kernel_does_not_know(machine, said):
    root, write = machine
    write(f"bus/pci/devices/{GPU}/numa_node", said)
    assert node_of_pci_device(GPU, allowed_cpus=range(16), root=root) is None
    assert node_of_pci_device("0000:99:00.0", allowed_cpus=range(16), root=root) is None


def test_nothing_is_bound_with_one_node(machine):
    root, write = machine
    write("devices/system/node/node0/cpulist", "")
    assert node_of_pci_device(GPU, allowed_cpus=range(16), root=root) is None
    assert count_nodes(root) == 1 and count_nodes(root / "nowhere") == 1
