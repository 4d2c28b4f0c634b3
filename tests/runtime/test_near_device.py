import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lazytrain_plugin.kernels import native
from lazytrain_plugin.profile.numa import NumaNode
from lazytrain_plugin.runtime import host_memory, near_device
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.worker import UpdateWorker


def allowed(thread: str = "self") -> set[int]:
    path = "/proc/thread-self/status" if thread == "self" else f"/proc/self/task/{thread}/status"
    text = re.search(r"Cpus_allowed_list:\s*(\S+)", Path(path).read_text())[1]
    return {cpu for part in text.split(",") for cpu in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)}


@pytest.fixture
def one_cpu():
    """A node of one of this process's processors."""
    return NumaNode(0, frozenset([max(os.sched_getaffinity(0))]), 2)


def test_threads_started_within_stay_on_the_node(one_cpu):
    before = os.sched_getaffinity(0)
    with near_device.threads_on(one_cpu):
        worker = UpdateWorker()
    try:
        seen = []
        worker.submit(lambda: seen.append(allowed()), "look").wait()
        assert seen == [one_cpu.cpus]
        assert os.sched_getaffinity(0) == before
    finally:
        worker.close()


def test_update_threads_are_started_where_they_belong(one_cpu):
    if native.kernel_info().library is None:
        pytest.skip("without the C++ library torch's own threads update")
    count = native.kernel_info().threads
    try:
        before = set(os.listdir("/proc/self/task"))
        with near_device.threads_on(one_cpu):
            native.restart_threads(3)
        new = set(os.listdir("/proc/self/task")) - before
        assert len(new) == 2 and all(allowed(thread) == one_cpu.cpus for thread in new)
        assert native.kernel_info().threads == 3
    finally:
        native.restart_threads(count)


def test_nothing_changes_with_one_node():
    before = os.sched_getaffinity(0)
    with near_device.threads_on(None):
        assert os.sched_getaffinity(0) == before
    assert near_device.node_of(torch.device("cpu")) is None


def test_the_gpu_is_found_by_its_pci_address(monkeypatch, tmp_path):
    for path, text in (
        ("devices/system/node/node0/cpulist", "1000"),
        ("devices/system/node/node1/cpulist", "0-999"),
        ("bus/pci/devices/0000:17:00.0/numa_node", "1"),
    ):
        (tmp_path / "sys" / path).parent.mkdir(parents=True)
        (tmp_path / "sys" / path).write_text(text)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    node = near_device.node_of(torch.device("cuda", 0), root=tmp_path)
    assert node.index == 1 and node.cpus == os.sched_getaffinity(0)


def policy_of(address: int) -> tuple[int, int] | None:
    """(mode, mask) of a page, by get_mempolicy; None where that is forbidden."""
    import ctypes
    import platform

    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    arguments = ctypes.byref(mode), mask, 1024, ctypes.c_void_p(address), 2  # MPOL_F_ADDR
    if number is None or ctypes.CDLL(None).syscall(ctypes.c_long(number), *arguments) != 0:
        return None
    return mode.value, mask[0]


def test_host_memory_prefers_the_node(caplog):
    caplog.set_level("INFO")
    host_memory.prefer_node(0)
    try:
        bound = HostBuffer(100_000, pin=False)
    finally:
        host_memory.prefer_node(None)
    free = HostBuffer(100_000, pin=False)
    assert bound.tensor(torch.uint8, 0, 100_000).sum() == 0
    found = [policy_of(buffer.tensor(torch.uint8, 0, 1).data_ptr()) for buffer in (bound, free)]
    if None in found or "NUMA node 0" in caplog.text:
        pytest.skip("memory policies are forbidden here")
    assert found == [(1, 1), (0, 0)]


def test_a_node_that_is_not_there_is_said_once(caplog):
    """A container that forbids the call fails alike."""
    caplog.set_level("INFO")
    host_memory.prefer_node(900)
    try:
        buffers = [HostBuffer(4096, pin=False) for _ in range(2)]
    finally:
        host_memory.prefer_node(None)
    assert all(buffer.tensor(torch.uint8, 0, 4096).sum() == 0 for buffer in buffers)
    assert caplog.text.count("NUMA node 900") == 1
