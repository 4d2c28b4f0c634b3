"""Weights on NVMe: `parameter.data` always holds true values, training has the same bits, memory is let go."""

from __future__ import annotations

import copy
import ctypes
import io
import mmap
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lazytrain_plugin.errors import StorageError
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.units import MIB
from lazytrain_plugin.vocab import Tier
from tests.runtime.nvme import rig
from tests.runtime.nvme.rig import (
    assert_same,
    assert_trains_the_same_on,
    big_model,
    executor_for,
    full_state,
    make_model,
    windows,
)
from tests.runtime.rig import DEVICES, assert_same_weights, plan_for, train


def on_nvme(plan: PlacementPlan, *, states: Tier = Tier.CPU, slots: int = 2, every: int = 1) -> PlacementPlan:
    """Weights of every `every`-th layer on NVMe, its states at `states`."""
    return rig.on_nvme(plan, slots=slots, every=every, weights=Tier.NVME, states=states)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", ["none", "mixed"])
@pytest.mark.parametrize(
    ("states", "slots", "every", "accumulation"),
    [(Tier.CPU, 1, 1, 1), (Tier.NVME, 3, 1, 1), (Tier.CPU, 2, 2, 2), (Tier.NVME, 1, 2, 1)],
)
def test_the_same_bits_as_in_memory(disk, device, dtype, keep, states, slots, every, accumulation):
    """S-12, S-15, S-20: every disk request and every transfer late, so that a missing wait shows."""
    assert_trains_the_same_on(
        disk,
        lambda plan: on_nvme(plan, states=states, slots=slots, every=every),
        device=device, dtype=dtype, accumulation=accumulation, keep=keep,
    )  # fmt: skip


def scale_in_place(model) -> None:
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.mul_(0.97)


def write_through_data(model) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.5, 0.5)


def load(model) -> None:
    state = {name: value * 0.9 for name, value in model.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, weights_only=True))


def average(model) -> None:
    mean = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.data.mul_(1.01)
    model.load_state_dict(mean)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", [scale_in_place, write_through_data, load, average])
@pytest.mark.parametrize("states", [Tier.CPU, Tier.NVME])
def test_weights_changed_from_outside_count(disk, device, change, states):
    """Right after a step, while updates are pending, through every door; and between two evaluations."""
    models = []
    for nvme in (False, True):
        model = make_model()
        plan = plan_for(model, device=device)
        tier = NvmeTier([disk], block_bytes=8192, delay_s=0.002) if nvme else None
        executor = executor_for(model, on_nvme(plan, states=states) if nvme else plan, device=device, tier=tier)
        for ids in (window[0] for window in windows(device)[:3]):
            executor.begin_forward()
            executor.set_last_micro_batch(True)
            type(model).loss(model, ids).backward()
            executor.step(0.0)
            change(model)
            with torch.no_grad():
                executor.begin_forward()
                seen = type(model).loss(model, ids)
        executor.flush()
        executor.close()
        models.append((model, seen))
    assert torch.equal(models[0][1], models[1][1])
    assert_same_weights(models[1][0], models[0][0])


def test_moves_between_tiers_keep_every_bit(disk):
    steps, straight_model, model = windows("cpu"), make_model(), make_model()
    straight = executor_for(straight_model, plan_for(straight_model), dtype=torch.bfloat16)
    norms = train(straight, steps)
    cpu = plan_for(model)
    tier = NvmeTier([disk], block_bytes=8192, delay_s=0.001)
    executor = executor_for(model, on_nvme(cpu), dtype=torch.bfloat16, tier=tier)
    moved = train(executor, steps[:2])
    plans = [on_nvme(cpu, states=Tier.NVME, slots=1), on_nvme(cpu, every=2, slots=3), cpu]
    for plan, part in zip(plans, (steps[2:3], steps[3:5], steps[5:]), strict=True):
        executor.place(plan)
        moved += train(executor, part)
    assert moved == norms
    assert_same(full_state(executor), full_state(straight))
    assert tier.used_bytes == 0
    straight.close()
    executor.close()


def resident_frac(path: str) -> float:
    """Share of a file's pages in the page cache, by a mapping that nobody has touched."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        num_pages = len(mapping) // mmap.PAGESIZE
        found = (ctypes.c_ubyte * num_pages)()
        first = ctypes.c_char.from_buffer(mapping)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(first))
        assert libc.mincore(address, ctypes.c_size_t(len(mapping)), found) == 0
        del first
        return sum(page & 1 for page in found) / num_pages


def test_memory_is_let_go_behind_each_update(disk):
    """S-17: neither placing nor training leaves the weights in memory."""
    model = big_model(6)
    executor = executor_for(model, on_nvme(plan_for(model), states=Tier.NVME), tier=NvmeTier([disk]))
    regions = [unit.home.nvme_weights.region for unit in executor.units]
    paths = [region.files[0][2] for region in regions]
    for _ in range(2):
        for region in regions:
            region.wait()
        assert max(map(resident_frac, paths)) < 0.1
        train(executor, windows("cpu")[:2])
    assert executor._nvme._weights.buffers.allocated_bytes <= 2 * (MIB + 8192)
    executor.close()


def test_updated_weights_wait_for_their_slot_in_memory(disk):
    """They would come back from the disk, which has states to read."""
    model = big_model(6)
    executor = executor_for(model, on_nvme(plan_for(model), states=Tier.NVME, slots=3), tier=NvmeTier([disk]))
    train(executor, windows("cpu")[:2])
    executor.worker.drain()
    first = executor.units[0].home.nvme_weights
    assert first.staged
    buffer = first.staging.buffers.acquire(first)
    assert torch.equal(buffer.memory.tensor(torch.uint8, 0, first.nbytes), first.tensor(torch.uint8, 0, first.nbytes))
    first.staging.buffers.release(buffer)
    executor.close()


def test_a_truncated_file_is_an_error_not_a_signal(disk):
    """What would end the process with SIGBUS comes back as an error of the read before it."""
    model = make_model()
    executor = executor_for(model, on_nvme(plan_for(model), slots=1), tier=NvmeTier([disk]))
    train(executor, windows("cpu")[:1])
    weights = executor.units[3].home.nvme_weights
    weights.region.wait()
    path = weights.region.files[0][2]
    with open(path, "r+b") as file:
        file.truncate(0)
    with pytest.raises(Exception, match=r"the file ends before that") as error:
        train(executor, windows("cpu")[1:])
    assert path in str(error.value)
    assert isinstance(error.value, StorageError) or isinstance(error.value.__cause__, StorageError)
    executor.close()
    assert not list(disk.iterdir())


REPOSITORY = Path(__file__).parents[3]
FAULT = """
import mmap, os, sys
from tests.runtime.nvme.test_weights import *
folder, whose = sys.argv[1:]
model = make_model(2)
executor = executor_for(model, on_nvme(plan_for(model), slots=1), tier=NvmeTier([folder]))
region = executor.units[1].home.nvme_weights.region
region.wait()
os.truncate(region.files[0][2], 0)
print(region.files[0][2], flush=True)
if whose == "ours":
    model.layers[1].wide.weight.sum()
else:
    file = open(os.path.join(folder, "theirs"), "wb+")
    file.truncate(4096)
    theirs = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    theirs[0]
"""


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_disk_that_fails_under_a_weight_that_someone_reads_is_named(disk, whose):
    """No program can go on there; ours says which file it was, and claims no fault of others."""
    result = subprocess.run(
        [sys.executable, "-c", FAULT, str(disk), whose], capture_output=True, text=True, timeout=100, cwd=REPOSITORY
    )
    assert result.returncode == -signal.SIGBUS, result.stderr
    said = f"the disk under {result.stdout.strip()} failed" in result.stderr
    assert said == (whose == "ours")
    assert ("resume from the last checkpoint" in result.stderr) == said


def test_saving_one_weight_does_not_write_the_unit(disk):
    model = make_model(2)
    executor = executor_for(model, on_nvme(plan_for(model)), tier=NvmeTier([disk]))
    buffer = io.BytesIO()
    torch.save(model.layers[0].scale, buffer)
    assert len(buffer.getvalue()) < 4096
    executor.close()
