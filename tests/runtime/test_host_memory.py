"""Host buffers: exact size, and page locks that fail without being taken for a GPU shortage."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import psutil
import pytest
import torch

from lazytrain_plugin.runtime import host_memory
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.units import MIB


class FakeCuda:
    """The CUDA runtime's page locks, failing for the registrations that `fails(number, nbytes)` picks."""

    def __init__(self, fails, how) -> None:
        self.fails, self.how = fails, how
        self.locked: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls += 1
        if not self.fails(self.calls, nbytes):
            self.locked[address] = nbytes
            return 0
        if self.how == "raises":
            raise RuntimeError("CUDA error: out of memory")
        return 2  # cudaErrorMemoryAllocation

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


@pytest.fixture(params=["returns an error", "raises"])
def fake_cuda(request, monkeypatch):
    def make(fails):
        fake = FakeCuda(fails, request.param)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
        monkeypatch.setattr(host_memory, "_absorb_cuda_error", lambda: False)  # it launches a kernel
        monkeypatch.setattr(host_memory, "_PIN_CHUNK_BYTES", 3 * mmap.PAGESIZE)
        monkeypatch.setattr(host_memory, "_warned_unpinned", False)
        return fake

    return make


NBYTES = 10 * mmap.PAGESIZE + 123


def check_transfers(buffer: HostBuffer) -> None:
    """Bytes go in and out whatever the pieces that one transfer may cover."""
    values = torch.randint(0, 256, (buffer.nbytes,), dtype=torch.uint8)
    buffer.write(0, values)
    for offset, count in [(0, 1), (3 * mmap.PAGESIZE - 1, 2), (5, buffer.nbytes - 5), (buffer.nbytes - 1, 1)]:
        piece = torch.randint(0, 256, (count,), dtype=torch.uint8)
        buffer.write(offset, piece)
        values[offset : offset + count] = piece
    device_flat = torch.zeros(buffer.nbytes + 7, dtype=torch.uint8)
    buffer.read_into(device_flat)
    assert torch.equal(device_flat[: buffer.nbytes], values)
    assert not device_flat[buffer.nbytes :].any()


def test_one_lock_for_all_where_that_works(fake_cuda, caplog):
    fake = fake_cuda(lambda number, nbytes: False)
    buffer = HostBuffer(NBYTES, pin=True)
    assert buffer.pinned and list(fake.locked.values()) == [11 * mmap.PAGESIZE]
    check_transfers(buffer)
    buffer.unpin()
    assert not fake.locked and not caplog.records


def test_smaller_pieces_where_one_lock_is_too_big(fake_cuda, caplog):
    """S-09: a platform that locks no more than some bytes at once (WSL2)."""
    fake = fake_cuda(lambda number, nbytes: nbytes > 3 * mmap.PAGESIZE)
    buffer = HostBuffer(NBYTES, pin=True)
    assert buffer.pinned and sum(fake.locked.values()) == 11 * mmap.PAGESIZE and len(fake.locked) == 4
    check_transfers(buffer)
    buffer.unpin()
    assert not fake.locked and not caplog.records


@pytest.mark.parametrize("lasting", [1, 3, 0], ids=["after one piece", "after three pieces", "from the start"])
def test_no_lock_is_one_warning_about_the_host(fake_cuda, lasting, caplog):
    """S-09: it goes on in pageable memory, gives back what it had locked, and never speaks of GPU memory."""
    fake = fake_cuda(lambda number, nbytes: nbytes > 3 * mmap.PAGESIZE or number > 1 + lasting)
    with caplog.at_level(logging.WARNING):
        buffers = [HostBuffer(NBYTES, pin=True) for _ in range(2)]
    for buffer in buffers:
        assert not buffer.pinned
        check_transfers(buffer)
        buffer.unpin()
    assert not fake.locked
    (record,) = caplog.records
    assert "not a GPU shortage" in record.getMessage() and "slower" in record.getMessage()


@pytest.mark.parametrize("nbytes", [33 * MIB + 1, 16 * MIB + 4097, 1])
def test_memory_is_what_was_asked_for(nbytes):
    """S-08: just over a power of two costs no more than a huge page above it, not twice as much."""
    before = psutil.Process().memory_info().rss
    buffers = [HostBuffer(nbytes, pin=False) for _ in range(8)]
    for buffer in buffers:
        buffer.tensor(torch.uint8, 0, nbytes).fill_(1)
    grown = psutil.Process().memory_info().rss - before
    assert grown <= 8 * (nbytes + 2 * MIB) + 4 * MIB
    if nbytes > MIB:
        assert grown >= 0.9 * 8 * nbytes
    del buffer, buffers
    assert psutil.Process().memory_info().rss - before <= 0.2 * 8 * nbytes + 4 * MIB


def test_a_forked_worker_has_none_of_it():
    """DataLoader workers: the child's memory map lacks the buffer, so nothing is copied when the parent writes."""
    buffer = HostBuffer(16 * MIB, pin=False)
    address = buffer.tensor(torch.uint8, 0, 1).data_ptr()

    def mapped() -> bool:
        spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        return any(int(start, 16) <= address < int(end, 16) for start, end in spans)

    assert mapped()
    child = os.fork()
    if child == 0:
        os._exit(int(mapped()))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
