"""Disks' part of docs/failure-cases.md, each case as its whole kind: S-12, S-13, S-16, S-17, S-20, S-44, S-53."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lazytrain_plugin.runtime.nvme.activations import NvmeActivations
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.units import MIB
from lazytrain_plugin.vocab import Tier
from tests.runtime.nvme.rig import all_on_nvme, assert_same, big_model, executor_for, full_state
from tests.runtime.rig import DEVICES, Block, Model, batches, plan_for, train

pytestmark = pytest.mark.usefixtures("everything_is_large")
REPOSITORY = Path(__file__).parents[3]


def test_s03_disks_need_no_library_of_asynchronous_io(disk):
    """Nothing to install, detect or compile: the kernel is asked directly."""
    tier = NvmeTier([disk])
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    tier.close()
    assert not [path for path in libraries if "libaio" in path or "liburing" in path]


class Odd(nn.Module):
    """1 element, 1,000,003 elements, primes; none is a multiple of a page, a block or a lane."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1, dtype=dtype))
        self.long = nn.Parameter(torch.full((1_000_003,), 0.01, dtype=dtype))
        self.prime = nn.Linear(24, 131, dtype=dtype)
        self.back = nn.Linear(131, 24, bias=False, dtype=dtype)

    def forward(self, x):
        x = x.to(self.one.dtype)
        return x + torch.tanh(self.back(self.prime(x))) * self.one + self.long[: x.shape[-1]]


class OddModel(Model):
    """A vocabulary of 50,257, or 256k: one embedding that is larger than all layers together."""

    def __init__(self, vocab: int, dtype: torch.dtype, layer=Odd) -> None:
        super().__init__(layers=[layer(dtype) for _ in range(2)])
        self.embedding = nn.Embedding(vocab, 24, dtype=dtype)
        self.head = nn.Linear(24, 53, dtype=dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_s12_odd_sizes_everywhere_on_disk(disk, device, dtype):
    """Five steps with everything on NVMe under the default block size are the same bits as in memory."""
    results = []
    for nvme in (False, True):
        torch.manual_seed(0)
        model = OddModel(50_257, dtype).to(device)
        plan = plan_for(model, device=device)
        tier = NvmeTier([disk]) if nvme else None
        executor = executor_for(model, all_on_nvme(plan) if nvme else plan, device=device, dtype=dtype, tier=tier)
        norms = train(executor, [[ids] for ids in batches(5, device)], max_norm=0.5)
        results.append(full_state(executor) | {"norms": torch.tensor(norms)})
        executor.close()
    assert_same(results[1], results[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [[1], [4095, 1, 4097], [1_000_003, 2, 50_257 * 2], [3 * MIB + 1] * 3])
def test_s12_activations_of_odd_sizes_come_back(disk, device, sizes):
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator).to(device) for n in sizes]
    tier = NvmeTier([disk], block_bytes=64 << 10)
    nvme = NvmeActivations(Streams(torch.device(device)), tier, count=1)
    tickets = [nvme.put([part]) for part in sources] + [nvme.put(sources)]
    for group, wanted in zip(tickets, [*([part] for part in sources), sources], strict=True):
        found, arrived = nvme.get(group)
        arrived.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        nvme.drop(group[0])
    nvme.close()
    tier.close()


def test_s13_one_tensor_larger_than_all_others_together(disk):
    """256k x 24 in the stem beside layers of kilobytes: the buffers follow the model, no knob is needed."""
    results = []
    for nvme in (False, True):
        torch.manual_seed(0)
        model = OddModel(262_144, torch.float32, layer=lambda dtype: Block())
        tier = NvmeTier([disk]) if nvme else None
        plan = plan_for(model)
        executor = executor_for(model, all_on_nvme(plan) if nvme else plan, tier=tier)
        train(executor, [[ids] for ids in batches(2, "cpu")])
        results.append(full_state(executor))
        if nvme:
            assert executor._nvme._staging.nbytes >= 262_144 * 24 * 8
        executor.close()
    assert_same(results[1], results[0])


START = """
import sys
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
sys.stdin.readline()
tier = NvmeTier([sys.argv[1]], block_bytes=4096)
region = tier.region(4096, what="states")
print(tier.folders[0].path, flush=True)
sys.stdin.readline()
print(tier.folders[0].path.exists() and (tier.folders[0].path / "00000.bin").exists(), flush=True)
tier.close()
"""


def test_s16_ranks_that_start_together_on_one_disk(disk):
    """Each has a folder of its own, and none takes another's for a dead run's."""
    command = [sys.executable, "-c", START, str(disk)]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        for _ in range(3)
    ]
    for _ in range(2):  # let go together: once to start, once to look
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        said = [rank.stdout.readline().strip() for rank in ranks]
    assert said == ["True"] * 3
    assert all(rank.wait(60) == 0 for rank in ranks)
    assert not list(disk.iterdir())


MEMORY = """
import resource, sys
from tests.runtime.nvme.rig import *
from lazytrain_plugin.runtime.nvme.tier import NvmeTier

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

model = big_model(100)  # 100 MiB of weights
small = big_model(2)
train(executor_for(small, all_on_nvme(plan_for(small)), tier=NvmeTier([sys.argv[1]])), [batches(1, "cpu")])
before = peak_mib()
changes = {"weights": Tier.CPU, "activations": Activations.RECOMPUTE}
executor = executor_for(model, all_on_nvme(plan_for(model), **changes), tier=NvmeTier([sys.argv[1]]))
placed = peak_mib()
train(executor, [[ids] for ids in batches(2, "cpu")])
print(before, placed, peak_mib())
executor.close()
"""


def test_s17_memory_peaks_stay_low_from_the_first_second(disk):
    """300 MiB of states and gradients on disk: neither placing nor training ever has them in memory (peak RSS)."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(disk)], capture_output=True, text=True, timeout=200, cwd=REPOSITORY
    )
    assert result.returncode == 0, result.stderr[-2000:]
    before, placed, trained = map(float, result.stdout.split())
    # Weights are copied home one unit at a time; beyond that only a few units' worth may be held.
    assert placed - before < 130 and trained - before < 150, (before, placed, trained)


@pytest.mark.parametrize("device", DEVICES)
def test_s20_forty_steps_with_delays_that_change(disk, device):
    """Disk requests late by another time in every step, transfers late on a GPU: the same bits as with none late."""
    results = []
    for late in (False, True):
        torch.manual_seed(0)
        model = Model(num_layers=5).to(device)
        tier = NvmeTier([disk], block_bytes=4096)
        plan = all_on_nvme(plan_for(model, device=device), slots=1 + late)
        delay_s = 0.001 if late else 0.0
        executor = executor_for(model, plan, device=device, dtype=torch.bfloat16, tier=tier, delay_s=delay_s)
        norms = []
        for number, ids in enumerate(batches(40, device)):
            delay_us = number * 37 % 11 * 60 if late else 0
            tier.engine.library.lazytrain_io_set_delay(tier.engine.handle, delay_us)
            executor.begin_forward()
            model.loss(ids).backward()
            norms.append(executor.step(0.5)[0].total)
        executor.flush()
        results.append(full_state(executor) | {"norms": torch.tensor(norms)})
        executor.close()
    assert_same(results[1], results[0])


class Many(nn.Module):
    """2,000 small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((3,), 0.01)) for _ in range(2000))

    def forward(self, x):
        return x + torch.stack(list(self.parts)).sum()


def test_s44_thousands_of_small_tensors_and_a_long_path(tmp_path):
    """One file per unit and kind, not per tensor, in a folder with a long name, blanks and other letters."""
    folder = tmp_path / ("a long näme with blanks " * 8).strip() / "and yet another one" / "文件夹"
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = Model(layers=[Many()])
    tier = NvmeTier([folder])
    threads = threading.active_count()
    executor = executor_for(model, all_on_nvme(plan_for(model)), tier=tier)
    train(executor, [batches(1, "cpu")])
    assert len(list(tier.folders[0].path.glob("*.bin"))) <= 3 * len(executor.all_units) + 3
    executor.close()
    assert threading.active_count() <= threads and not list(folder.iterdir())


def test_s53_memory_follows_the_share_on_disk(disk):
    """Of ten units 0, 1, .. 10 on disk: each takes its part from host memory and no other's."""
    held = []
    for count in range(11):
        model = big_model(10)
        plan = plan_for(model)
        moved = [replace(u, states=Tier.NVME, gradients=Tier.NVME) for u in plan.units[:count]]
        plan = replace(plan, units=(*moved, *plan.units[count:]), nvme_slots=2)
        tier = NvmeTier([disk])
        executor = executor_for(model, plan, tier=tier)
        buffers = []
        for unit in executor.all_units:
            unit.home.for_each_host_buffer(buffers.append)
        held.append((sum(buffer.nbytes for buffer in buffers), tier.used_bytes))
        executor.close()
    host = [before[0] - after[0] for before, after in zip(held, held[1:], strict=False)]
    on_disk = [after[1] - before[1] for before, after in zip(held, held[1:], strict=False)]
    assert len(set(host)) == 1 and host[0] > 2 * MIB
    assert len(set(on_disk)) == 1 and 0 <= on_disk[0] - host[0] <= 4 * 4096
