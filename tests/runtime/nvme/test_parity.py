"""S-15: 20 steps are the same bits wherever weights, states, gradients and activations rest."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.runtime.nvme.rig import assert_same, everything
from tests.runtime.rig import DEVICES, Model, batches, make_executor, plan_for, train
from tests.runtime.test_saving import Layer

STEPS = 20
CPU, GPU, NVME = Tier.CPU, Tier.GPU, Tier.NVME
HOMES = [
    # weights, states, gradients, updater: all that a plan may ask for
    (CPU, CPU, None, Updater.CPU),
    (GPU, CPU, None, Updater.CPU),
    (NVME, CPU, None, Updater.CPU),
    (CPU, NVME, None, Updater.CPU),
    (CPU, NVME, NVME, Updater.CPU),
    (GPU, NVME, NVME, Updater.CPU),
    (NVME, NVME, None, Updater.CPU),
    (NVME, NVME, NVME, Updater.CPU),
    (CPU, CPU, None, Updater.GPU),
    (GPU, CPU, None, Updater.GPU),
    (GPU, GPU, None, Updater.GPU),
]


def trained(device, home, activations, disk=None):
    """Norms of 20 steps, then every master, moment and weight."""
    torch.manual_seed(0)
    model = Model([Layer() for _ in range(3)]).to(device)
    weights, states, gradients, updater = home
    plan = plan_for(model, device=device)
    rests = {"boundary": activations, "saved": activations, "activations": Activations.MATMULS}
    move = {"weights": weights, "states": states, "gradients": gradients, "updater": updater}
    plan = replace(plan.with_units(**move, **rests), weight_slots=2, activation_slots=1, nvme_slots=2)
    if states == NVME:
        stem = tuple(replace(part, states=states, gradients=gradients) for part in plan.stem)
        plan = replace(plan, stem=stem)
    tier = None if disk is None else NvmeTier([disk], block_bytes=4096)
    executor = make_executor(model, plan, device=device, native=True, dtype=torch.bfloat16, nvme=tier)
    data = batches(STEPS + 2, device)
    steps = [[ids] for ids in data[: STEPS - 2]] + [data[-4:-2], data[-2:]]  # the last two of two micro-batches
    norms = train(executor, steps, max_norm=0.5)
    found = everything(executor, norms)
    executor.close()
    return found


@functools.cache
def reference(device):
    return trained(device, HOMES[0], GPU)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("home", "activations"),
    [(home, tier) for i, home in enumerate(HOMES) for tier in (GPU, CPU, NVME) if tier != CPU or i % 3 == 0],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else f"activations {value}",
)
@pytest.mark.usefixtures("everything_is_large")
def test_twenty_steps_are_the_same_bits(disk, device, home, activations):
    assert_same(trained(device, home, activations, disk), reference(device))
    assert not list(disk.iterdir())
