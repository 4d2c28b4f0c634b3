"""Disk, copy engines, kernels and host threads never race for a staging buffer: found by the waits alone."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace

import pytest
import torch

from lazytrain_plugin.runtime import activation_store, executor
from lazytrain_plugin.runtime.nvme.activations import NvmeActivations
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.vocab import Activations, Tier
from tests.runtime import race_check
from tests.runtime.nvme.disk_race_check import install_disk
from tests.runtime.nvme.rig import EVERYTHING
from tests.runtime.race_check import RaceCheck, install
from tests.runtime.rig import Model, batches, make_executor, plan_for

ON_DISK = {
    "activations": {"boundary": Tier.NVME, "saved": Tier.NVME, "activations": Activations.KEEP},
    "gradients": {"states": Tier.NVME, "gradients": Tier.NVME},
    "all": EVERYTHING,
}


def train_checked(check: RaceCheck, monkeypatch, disk, fields, *, slots: int, accumulation: int) -> None:
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)
    install(check, monkeypatch)
    install_disk(check, monkeypatch)
    torch.manual_seed(0)
    model = Model(num_layers=5)
    plan = replace(plan_for(model).with_units(**fields), nvme_slots=slots)
    trainer = make_executor(model, plan, native=True, nvme=NvmeTier([disk], block_bytes=4096, delay_s=0.0005))
    data = batches(3 * accumulation, "cpu")
    for first in range(0, len(data), accumulation):
        for i, ids in enumerate(data[first : first + accumulation]):
            trainer.begin_forward()
            trainer.set_last_micro_batch(i == accumulation - 1)
            model.loss(ids).backward()
        trainer.step(0.05)
    trainer.close()


@pytest.mark.parametrize("what", ON_DISK)
@pytest.mark.parametrize(("slots", "accumulation"), [(1, 1), (3, 1), (2, 2)])
def test_every_access_is_ordered(disk, monkeypatch, what, slots, accumulation):
    check = RaceCheck()
    train_checked(check, monkeypatch, disk, ON_DISK[what], slots=slots, accumulation=accumulation)
    assert any("disk request" in actor for actor in check.actors)
    assert not check.races, sorted(set(check.races))[:10]


@pytest.mark.parametrize("waits", [True, False])
def test_bytes_are_asked_for_before_they_have_left(disk, monkeypatch, waits):
    """Reading a staging buffer comes after the copy that fills it, whoever asks; without that wait it is found."""
    check = RaceCheck(drop=lambda frame_locals, event: not waits and "group" in frame_locals and event is left)
    install(check, monkeypatch)
    install_disk(check, monkeypatch)
    synchronize = race_check.CheckedEvent.synchronize
    monkeypatch.setattr(race_check.CheckedEvent, "synchronize", lambda self: (time.sleep(0.05), synchronize(self)))
    tier = NvmeTier([disk])
    nvme = NvmeActivations(executor.Streams(torch.device("cpu")), tier)
    (ticket,) = nvme.put([torch.arange(100, dtype=torch.uint8)])
    left = ticket.left
    (found,), _ = nvme.get([ticket])
    assert torch.equal(found, torch.arange(100, dtype=torch.uint8))
    assert bool(check.races) != waits
    assert all(re.match("upload by h2d .* arrival at home by d2h", race) for race in check.races)
    nvme.close()
    tier.close()


@pytest.mark.parametrize("what", ["activations", "gradients"])
def test_the_disk_writes_what_has_arrived(disk, monkeypatch, what):
    """Without the wait of the thread that gives buffers back, its request to the disk would be found."""
    synchronize = race_check.CheckedEvent.synchronize

    def hasty(self):
        if threading.current_thread().name not in ("lazytrain-activations", "lazytrain-gradients"):
            synchronize(self)

    monkeypatch.setattr(race_check.CheckedEvent, "synchronize", hasty)
    check = RaceCheck()
    train_checked(check, monkeypatch, disk, ON_DISK[what], slots=2, accumulation=1)
    assert any(re.match(f"write of {what}.* by disk request .* arrival at home by d2h", race) for race in check.races)
