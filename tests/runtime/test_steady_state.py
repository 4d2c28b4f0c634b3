"""In steady state nothing is allocated and nothing synchronises: buffers, slots and files are of the first steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from lazytrain_plugin.runtime import activation_store, host_memory, slots, state_slots
from lazytrain_plugin.runtime.nvme.folder import RunFolder
from lazytrain_plugin.runtime.nvme.staging import StagingBuffer
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.vocab import Activations, Tier
from tests.runtime.rig import DEVICES, Model, batches, make_executor, plan_for, train
from tests.runtime.test_saving import Layer

NVME = {"states": Tier.NVME, "gradients": Tier.NVME}
PLANS = {
    "recompute": {"home": "cpu"},
    "every kind of home": {"home": "every kind"},
    "boundaries in host memory": {"home": "mixed", "boundary": Tier.CPU},
    "saved in host memory": {"saved": Tier.CPU, "activations": Activations.MATMULS, "boundary": Tier.CPU},
    "kept": {"activations": Activations.KEEP},
    "activations on NVMe": {"saved": Tier.NVME, "activations": Activations.KEEP, "boundary": Tier.NVME},
    "all on NVMe": {**NVME, "weights": Tier.NVME, "boundary": Tier.NVME},
}


def executor_of(model, device, disk, fields, **options):
    fields = dict(fields)
    plan = plan_for(model, device=device, home=fields.pop("home", "cpu")).with_units(**fields)
    plan = replace(plan, nvme_slots=2)
    return make_executor(model, plan, device=device, native=True, nvme=NvmeTier([disk], block_bytes=4096), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_no_buffer_slot_or_file_after_the_first_steps(tmp_path, monkeypatch, device, accumulation, fields):
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)
    made = Counter()
    for kind in (host_memory.HostBuffer, slots.WeightSlot, state_slots.StateSlot, StagingBuffer):
        init = kind.__init__

        def counted(self, *args, init=init, name=kind.__name__, **kwargs):
            made[name] += 1
            init(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", counted)
    create = RunFolder.create
    monkeypatch.setattr(RunFolder, "create", lambda self, *a, **k: made.update(files=1) or create(self, *a, **k))
    torch.manual_seed(0)
    model = Model([Layer() for _ in range(4)]).to(device)
    executor = executor_of(model, device, tmp_path, fields)
    data = batches(8 * accumulation, device)
    steps = [data[i : i + accumulation] for i in range(0, len(data), accumulation)]
    train(executor, steps[:3], max_norm=0.5)
    assert made, "else nothing was counted"
    before = dict(made)
    train(executor, steps[3:], max_norm=0.5)
    assert dict(made) == before
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_the_driver_is_not_asked_for_memory(tmp_path, monkeypatch, fields):
    """cudaMalloc and cudaFree stall the device: torch's allocator serves from what it has, without retries."""
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)
    model = Model([Layer() for _ in range(6)]).cuda()
    executor = executor_of(model, "cuda", tmp_path, fields)
    data = batches(1, "cuda") * 12
    train(executor, [[ids] for ids in data[:4]], max_norm=0.5)
    names = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_ooms")
    before = {name: torch.cuda.memory_stats()[name] for name in names}
    peak = torch.cuda.max_memory_allocated()
    train(executor, [[ids] for ids in data[4:]], max_norm=0.5)
    assert {name: torch.cuda.memory_stats()[name] for name in names} == before
    if Tier.NVME not in fields.values():  # how early bytes come back from a disk is up to the disk
        assert torch.cuda.max_memory_allocated() == peak
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["recompute", "every kind of home", "saved in host memory", "kept"])
def test_forward_and_backward_do_not_wait_for_the_device(tmp_path, monkeypatch, name):
    """The clip factor in `step` is the one value that the host asks the device for."""
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)
    model = Model([Layer() for _ in range(6)]).cuda()
    executor = executor_of(model, "cuda", tmp_path, PLANS[name])
    data = batches(1, "cuda") * 6
    train(executor, [[ids] for ids in data[:2]], max_norm=0.5)
    for step, ids in enumerate(data[2:]):
        if step:  # the first forward after a flush compares all weights: someone may have written into them
            torch.cuda.set_sync_debug_mode("error")
        try:
            executor.begin_forward()
            model.loss(ids).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        executor.step(0.5)
    executor.flush()
    executor.close()
