"""Gradients on NVMe between backward and update: the same bits, also over micro-batches, in bounded memory."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.train_state import ExecutorState
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
from tests.runtime.rig import DEVICES, Model, batches, plan_for, train

on_nvme = functools.partial(rig.on_nvme, states=Tier.NVME, gradients=Tier.NVME)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("slots", "every", "accumulation"), [(1, 1, 1), (3, 2, 1), (1, 1, 3), (2, 1, 2)])
def test_the_same_bits_as_in_memory(disk, device, dtype, slots, every, accumulation):
    """S-18, S-20: with one buffer and several, one micro-batch and several, every request and transfer late."""

    def look(executor, tier):
        assert all(u.home.gradient_buffer is None and u.home.accumulator is None for u in executor.units[::every])

    assert_trains_the_same_on(
        disk,
        lambda plan: on_nvme(plan, slots=slots, every=every),
        device=device, dtype=dtype, accumulation=accumulation, look=look,
    )  # fmt: skip


class Tied(Model):
    """The embedding is the head too: its gradient arrives twice in each backward, first from the end."""

    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.head.weight = self.embedding.weight

    def run_layers(self, x):
        for layer in (*self.layers, self.layers[0]):  # one layer runs twice
            x = layer(x)
        return x


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_arrive_twice_in_one_backward(disk, device):
    results = []
    for nvme in (False, True):
        torch.manual_seed(0)
        model = Tied().to(device)
        plan = plan_for(model, device=device)
        tier = NvmeTier([disk], block_bytes=4096, delay_s=0.001)
        executor = executor_for(model, on_nvme(plan, slots=1) if nvme else plan, device=device, tier=tier)
        norms = train(executor, windows(device)[:3], max_norm=0.5)
        results.append((norms, full_state(executor)))
        executor.close()
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_windows_that_are_skipped_moved_or_looked_at(disk, accumulation):
    """A non-finite gradient skips a step; another plan comes inside a window; a user reads gradients."""
    steps, results = windows("cpu", accumulation), []
    for nvme in (False, True):
        model = make_model()
        cpu = plan_for(model)
        plan = on_nvme(cpu, slots=1) if nvme else cpu
        executor = executor_for(model, plan, dtype=torch.bfloat16, tier=NvmeTier([disk], delay_s=0.001))
        seen = []

        def backward(ids, last, executor=executor, model=model, factor=1.0):
            executor.begin_forward()
            executor.set_last_micro_batch(last)
            (model.loss(ids) * factor).backward()

        for number, window in enumerate(steps):
            for i, ids in enumerate(window):
                backward(ids, last=i == len(window) - 1, factor=float("inf") if number == 1 else 1.0)
                if number == 2 and i == 0 and nvme:
                    executor.place(on_nvme(cpu, slots=3, every=2))
                elif number == 2 and i == 0:
                    executor.place(replace(cpu, weight_slots=3))
            if number == 3:
                state = ExecutorState(executor)
                executor.flush()
                found = [state.read_gradient(record) for record in state.records]
                seen = [None if gradient is None else gradient.clone() for gradient in found]
                executor.discard_gradients()
                continue
            _, applied = executor.step(0.5)
            assert applied == (number != 1)
        executor.flush()
        results.append((full_state(executor), {str(i): g for i, g in enumerate(seen) if g is not None}))
        executor.close()
    assert results[0][1]
    assert_same(results[1][1], results[0][1])
    assert_same(results[1][0], results[0][0])


def test_memory_holds_the_slots_and_no_more(disk):
    """S-17: neither gradients nor sums of all units are ever in memory together."""
    model = big_model(8)
    tier = NvmeTier([disk])
    executor = executor_for(model, on_nvme(plan_for(model), slots=2), tier=tier)
    train(executor, windows("cpu", 2)[:2])
    staging = executor._nvme._gradients
    largest = max(unit.layout.gradient_bytes for unit in executor.all_units)
    assert largest > MIB
    assert staging.allocated_bytes <= 4 * (largest + 4096)  # two of gradients, two of sums (both fp32 here)
    assert not any(unit.home.state_buffers for unit in executor.all_units)
    executor.close()


def test_gradients_that_are_summed_are_not_written(disk):
    """What goes into a sum at once is of no use on the disk; what waits for the update is there while it waits."""
    model = Model(layers=[nn.Linear(24, 24) for _ in range(4)])
    tier = NvmeTier([disk], block_bytes=4096)
    executor = executor_for(model, on_nvme(plan_for(model), slots=8, stem=False), tier=tier)
    written = []
    for last in (False, True):
        executor.begin_forward()
        executor.set_last_micro_batch(last)
        model.loss(batches(1, "cpu")[0]).backward()
        executor.worker.drain()
        executor._nvme._gradients.releases.wait()
        written.append(tier.engine.moved_bytes()[1])
    assert written == [0, 0]  # the sums wait in their buffers
    executor.step(0.0)
    executor.flush()
    executor._nvme._staging.drain()
    before = tier.engine.moved_bytes()[1]
    executor.begin_forward()
    model.loss(batches(1, "cpu")[0]).backward()
    executor._nvme._gradients.releases.wait()
    executor._nvme._gradients.arrivals.drain()
    assert tier.engine.moved_bytes()[1] - before == 4 * 4096
    executor.step(0.0)
    executor.close()


def test_mount_that_fills_up_stops_training(mount):
    """S-14: whoever waits next gets the error; nothing hangs, nothing is left."""
    model = big_model(20)
    tier = NvmeTier([mount(200, backed_mib=24)])
    executor = executor_for(model, on_nvme(plan_for(model), slots=2), tier=tier)
    with pytest.raises(Exception, match=r"writing .*\.bin: .*free.*resume from the last checkpoint"):
        train(executor, windows("cpu"))
    with pytest.raises(Exception, match="resume from the last checkpoint"):
        executor.close()
    assert not list(tier.paths[0].glob("lazytrain-run-*"))
