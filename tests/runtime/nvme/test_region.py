"""Bytes that go to disk come back, or an error says which, where and why; then nothing more is done."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch

from lazytrain_plugin.errors import ConfigError, StorageError
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.nvme.io import hash_block
from lazytrain_plugin.runtime.nvme.region import padded
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.units import MIB

KIB = 1024


@pytest.fixture
def tier(disk):
    tier = NvmeTier([disk], block_bytes=64 * KIB)
    yield tier
    tier.close()


class Memory:
    """Page-aligned memory of the padded size."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        self.buffer = HostBuffer(padded(nbytes), pin=False)
        self.bytes = self.buffer.tensor(torch.uint8, 0, nbytes)
        self.address = self.bytes.data_ptr()
        if seed is not None:
            self.bytes.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def write(region, memory: Memory) -> None:
    region.write(memory.address, memory.buffer).wait()


def read(region) -> torch.Tensor:
    memory = Memory(region.nbytes)
    memory.bytes.fill_(77)
    region.read(memory.address, memory.buffer).wait()
    return memory.bytes


# S-12: sizes that no block, page or sector divides.
@pytest.mark.parametrize("nbytes", [1, 2, 4095, 4096, 4097, 64 * KIB, 64 * KIB + 2, 1_000_003, 50_257 * 24 * 2])
@pytest.mark.parametrize("num_folders", [1, 3])
def test_bytes_come_back_whatever_the_size(tmp_path, nbytes, num_folders):
    folders = [tmp_path / f"disk {i}" for i in range(num_folders)]
    for folder in folders:
        folder.mkdir()
    tier = NvmeTier(folders, block_bytes=64 * KIB)
    regions = [tier.region(nbytes, what=f"thing {i}") for i in range(3)]
    memories = [Memory(nbytes, seed=i) for i in range(3)]
    jobs = [region.write(memory.address, memory.buffer) for region, memory in zip(regions, memories)]
    for job in jobs:
        job.wait()
    for region, memory in zip(regions, memories):
        assert torch.equal(read(region), memory.bytes)
    on_disk = sum(os.stat(path).st_blocks * 512 for region in regions for _, _, path in region.files)
    assert on_disk >= 3 * padded(nbytes), "the space is not taken"
    tier.close()
    assert all(not list(folder.iterdir()) for folder in folders)


def test_stripes_lie_on_every_folder(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    tier = NvmeTier(folders, block_bytes=64 * KIB)
    region = tier.region(5 * 64 * KIB, what="thing")
    assert [os.stat(path).st_size for _, _, path in region.files] == [3 * 64 * KIB, 2 * 64 * KIB]
    tier.close()


def test_unwritten_is_zero_and_needs_no_disk(tier):
    region = tier.region(200 * KIB, what="thing")
    for _, _, path in region.files:
        os.truncate(path, 0)  # any read would fail
    assert torch.equal(read(region), torch.zeros(200 * KIB, dtype=torch.uint8))


def test_a_read_waits_for_the_write_before_it(disk):
    tier = NvmeTier([disk], block_bytes=64 * KIB, delay_s=0.02)
    region = tier.region(200 * KIB, what="thing")
    for seed in range(3):
        memory = Memory(200 * KIB, seed=seed)
        region.write(memory.address, memory.buffer)
        assert torch.equal(read(region), memory.bytes)
    tier.close()


@pytest.mark.parametrize("position", [0, 63 * KIB + 5, 64 * KIB, 200 * KIB - 1])
def test_a_changed_block_is_found(tier, position):
    region = tier.region(200 * KIB, what="states of layer 3")
    write(region, Memory(200 * KIB, seed=1))
    _, _, path = region.files[0]
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(
        StorageError, match=r"is not what was written there.*dmesg.*resume from the last checkpoint"
    ) as e:
        read(region)
    assert path in str(e.value)
    assert f"at {position // (64 * KIB) * 64 / 1024:.1f} MiB" in str(e.value)


def test_after_an_error_nothing_more_is_done(tier):
    broken, other = tier.region(64 * KIB, what="broken"), tier.region(64 * KIB, what="other")
    write(broken, Memory(64 * KIB, seed=1))
    os.truncate(broken.files[0][2], 4096)
    with pytest.raises(StorageError, match="the file ends before that"):
        read(broken)
    before = os.stat(other.files[0][2]).st_mtime_ns
    with pytest.raises(StorageError, match="the file ends before that"):  # the first error, wherever it is waited for
        write(other, Memory(64 * KIB, seed=2))
    assert os.stat(other.files[0][2]).st_mtime_ns == before


def test_close_ends_the_threads_and_later_work_is_refused(disk):
    before = len(os.listdir("/proc/self/task"))
    tier = NvmeTier([disk], block_bytes=64 * KIB)
    region = tier.region(64 * KIB, what="thing")
    assert len(os.listdir("/proc/self/task")) > before
    write(region, Memory(64 * KIB, seed=1))
    memory = Memory(64 * KIB)
    tier.close()
    tier.close()
    assert len(os.listdir("/proc/self/task")) == before
    with pytest.raises((StorageError, IndexError, ZeroDivisionError)):
        region.read(memory.address, memory.buffer).wait()


def test_space_is_given_back(tier):
    region = tier.region(MIB, what="thing")
    assert tier.used_bytes == MIB
    tier.give_back(region)
    assert tier.used_bytes == 0
    assert not [name for name in os.listdir(tier.folders[0].path) if name.endswith(".bin")]


def test_more_than_the_limit_is_refused(disk):
    tier = NvmeTier([disk], limit_bytes=MIB)
    tier.region(MIB // 2, what="first")
    with pytest.raises(StorageError, match=r"states of layer 9: 768.0 KiB needed, 512.0 KiB left of 1.0 MiB.*nvme_gib"):
        tier.region(768 * KIB, what="states of layer 9")
    tier.close()


# S-14: the disk is too small, or fails.


def test_mount_too_small_is_refused_before_training(mount):
    tier = NvmeTier([mount(200)])
    tier.region(150 * MIB, what="states of layer 0")
    with pytest.raises(
        StorageError, match=r"states of layer 1: 150.0 MiB needed at .*disk0.*, [34]\d\.\d MiB free"
    ) as e:
        tier.region(150 * MIB, what="states of layer 1")
    assert "nvme_path" in str(e.value)
    tier.region(20 * MIB, what="what fits")  # the refused one left nothing behind
    tier.close()


def test_mount_that_fills_up_while_writing(mount):
    """A thin-provisioned disk: it promised the space, and has none when it is written."""
    tier = NvmeTier([mount(200, backed_mib=40)])
    region = tier.region(100 * MIB, what="states of layer 0")
    reason = r"(No space left on device|Input/output error \(errno 5\)), .* free\."
    with pytest.raises(
        StorageError, match=rf"writing 4.0 MiB at .* of .*\.bin: {reason}.*resume from the last checkpoint"
    ):
        write(region, Memory(100 * MIB, seed=1))
    tier.close()


SHORT_WRITE = """
import resource, sys
from tests.runtime.nvme.test_region import *
tier = NvmeTier([sys.argv[1]], block_bytes=64 * KIB)
region = tier.region(256 * KIB, what="thing")
resource.setrlimit(resource.RLIMIT_FSIZE, (100 * KIB, 100 * KIB))
try:
    write(region, Memory(256 * KIB, seed=1))
except StorageError as error:
    print(error)
tier.close()
"""


def test_a_short_write_is_an_error(disk):
    result = subprocess.run([sys.executable, "-c", SHORT_WRITE, str(disk)], capture_output=True, text=True, timeout=100)
    assert "File too large" in result.stdout and "nvme_path" in result.stdout, result.stderr
    assert not list(disk.iterdir())


def test_a_slow_disk_is_reported_once(disk, caplog):
    tier = NvmeTier([disk], delay_s=1.3, slow_after_s=0.2)
    region = tier.region(64 * KIB, what="states of layer 5")
    with caplog.at_level(logging.WARNING):
        write(region, Memory(64 * KIB, seed=1))
    tier.close()
    slow = [record.getMessage() for record in caplog.records if "waiting for the disk" in record.getMessage()]
    assert len(slow) == 1 and "writing states of layer 5" in slow[0]


# S-44: folders that can't serve, and file systems without direct I/O.


def test_memory_is_no_disk():
    with pytest.raises(
        ConfigError, match=r'"lazytrain.nvme_path" is "/dev/shm", but /dev/shm is host memory \(tmpfs\)'
    ):
        NvmeTier(["/dev/shm"])


def test_without_direct_io_the_page_cache_serves_and_its_cost_is_said(disk, monkeypatch, caplog):
    real_open = os.open

    def no_direct_io(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_direct_io)
    tier = NvmeTier([disk], block_bytes=64 * KIB)
    with caplog.at_level(logging.WARNING):
        regions = [tier.region(1_000_003, what=f"thing {i}") for i in range(2)]
    assert sum("takes no direct I/O" in record.getMessage() for record in caplog.records) == 1
    for seed, region in enumerate(regions):
        memory = Memory(1_000_003, seed=seed)
        write(region, memory)
        assert torch.equal(read(region), memory.bytes)
    tier.close()


def test_the_hash_sees_every_byte_and_the_length():
    memory = Memory(1000, seed=4)
    seen = {hash_block(memory.address, n) for n in (0, 1, 8, 63, 64, 65, 999, 1000)}
    assert len(seen) == 8 and 0 not in seen
    whole = hash_block(memory.address, 1000)
    for position in range(1000):
        for bit in (1, 128):
            memory.bytes[position] ^= bit
            assert hash_block(memory.address, 1000) != whole
            memory.bytes[position] ^= bit
    words = memory.bytes[:960].view(torch.int64)
    words[[0, 8]] = words[[8, 0]]  # the same chain of the hash, in another order
    assert hash_block(memory.address, 1000) != whole


def test_an_interrupt_gets_through_while_waiting(disk):
    tier = NvmeTier([disk], delay_s=1.5)
    region = tier.region(4 * KIB, what="thing")
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    memory = Memory(4 * KIB, seed=1)
    # A shell starts background jobs with the signal ignored, and Python keeps that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            region.write(memory.address, memory.buffer).wait()
    finally:
        signal.signal(signal.SIGINT, before)
        tier.close()


def test_open_files_running_out_is_named(disk):
    tier = NvmeTier([disk])
    tier.region(4096, what="first")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(tier.folders[0]._lock_fd)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(StorageError, match="ulimit -n"):
            tier.region(4096, what="second")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        tier.close()


def test_both_directions_move_while_both_wait_and_urgent_reads_go_first(disk):
    # Each request is 20 ms late, and 64 reads wait for 8 threads: in one queue the others would come after them.
    tier = NvmeTier([disk], block_bytes=4 * KIB, delay_s=0.02)
    try:
        many, other = tier.region(256 * KIB, what="many"), tier.region(4 * KIB, what="other")
        weights = tier.region(4 * KIB, what="weights", direct=False)
        memories = [Memory(256 * KIB, seed=i) for i in range(3)]
        write(many, memories[0])
        reading = many.read(memories[0].address, memories[0].buffer)
        written = other.write(memories[1].address, memories[1].buffer)
        urgent = weights.read(memories[2].address, memories[2].buffer)
        for job in (written, urgent):
            job.wait()
            assert not reading.done
        reading.wait()
    finally:
        tier.close()
