"""Activations on NVMe: the same bits whatever is late, bounded memory and disk space, errors by name."""

from __future__ import annotations

import functools
import gc
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lazytrain_plugin.errors import StorageError
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.nvme.region import Region
from lazytrain_plugin.runtime.nvme.staging import Staging
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.size_pool import SizePool
from lazytrain_plugin.units import MIB
from lazytrain_plugin.vocab import Activations, Fidelity, Tier
from tests.runtime.rig import DEVICES, Block, Model, assert_same_weights, batches, make_executor, plan_for, train
from tests.runtime.test_saving import Layer

pytestmark = pytest.mark.usefixtures("everything_is_large")
devices = pytest.mark.parametrize("device", DEVICES)
HIDDEN_BYTES = 2 * 7 * 24 * 4
"""Of the hidden states of one of the rig's batches."""


def plan_of(model, device="cpu", *, nvme_slots=1, slots=1, every=1, home="cpu", **fields):
    """`fields` for every `every`-th unit, and the opposite tier (host memory) for the others."""
    plan = plan_for(model, device=device, home=home)
    others = {key: Tier.CPU if value == Tier.NVME else value for key, value in fields.items()}
    units = tuple(replace(unit, **(others if i % every else fields)) for i, unit in enumerate(plan.units))
    fidelity = Fidelity.COMPACT if "saved_bits" in fields else Fidelity.EXACT
    return replace(plan, units=units, activation_slots=slots, nvme_slots=nvme_slots, fidelity=fidelity)


def trained(plan_fields, disk, device, steps, *, delay_s=0.0) -> tuple[Model, list[float]]:
    torch.manual_seed(0)
    model = Model([Layer() for _ in range(6)]).to(device)
    tier = NvmeTier([disk], block_bytes=4096, delay_s=delay_s)
    plan = plan_of(model, device, **plan_fields)
    executor = make_executor(model, plan, device=device, native=True, nvme=tier, transfer_delay_s=delay_s)
    torch.manual_seed(1)
    norms = train(executor, steps, max_norm=0.5)
    uses_disk = Tier.NVME in plan_fields.values()
    assert (tier.used_bytes > 0) == uses_disk
    executor.close()
    assert tier.used_bytes == 0 and not list(disk.iterdir())
    return model, norms


def three_steps(device):
    return [batches(2 if seed == 1 else 1, device, seed=seed) for seed in range(3)]


@functools.cache
def trained_on_device(fields: tuple, device: str) -> tuple[Model, list[float]]:
    with tempfile.TemporaryDirectory() as unused:
        return trained(dict(fields), Path(unused), device, three_steps(device))


@devices
@pytest.mark.parametrize("delay_s", [0.0, 0.002])
@pytest.mark.parametrize(
    "fields",
    [
        {"boundary": Tier.NVME},
        {"boundary": Tier.NVME, "home": "mixed", "nvme_slots": 3, "slots": 2},
        {"boundary": Tier.NVME, "activations": Activations.KEEP},
        {"saved": Tier.NVME, "activations": Activations.KEEP, "nvme_slots": 2},
        {"saved": Tier.NVME, "activations": Activations.ATTENTION, "boundary": Tier.CPU, "slots": 2},
        {"saved": Tier.NVME, "activations": Activations.MATMULS, "boundary": Tier.NVME, "nvme_slots": 3},
        {"saved": Tier.NVME, "activations": Activations.KEEP, "boundary": Tier.NVME, "every": 2, "home": "gpu"},
        {"saved": Tier.NVME, "activations": Activations.KEEP, "saved_bits": 4, "boundary_bits": 8, "nvme_slots": 2},
    ],
    ids=lambda fields: " ".join(f"{key}={value}" for key, value in fields.items()),
)
def test_the_same_bits_as_on_the_device(disk, device, fields, delay_s):
    """S-15, S-20: every disk request and every transfer late, one staging buffer or several, all strategies."""
    on_device = {key: Tier.GPU if value == Tier.NVME else value for key, value in fields.items()}
    reference, expected = trained_on_device(tuple((on_device | {"boundary": Tier.GPU}).items()), device)
    model, norms = trained(fields, disk, device, three_steps(device), delay_s=delay_s)
    assert norms == expected
    assert_same_weights(model, reference)


def test_a_missing_wait_for_the_disk_would_show(disk, monkeypatch):
    """The delays of the test above expose what they are meant to: buffers that serve others while being written."""
    steps = [batches(1, "cpu", seed=seed) for seed in range(2)]
    reference, _ = trained({}, disk, "cpu", steps)
    fields = {"boundary": Tier.NVME}

    def impatient(self, holder, *, fresh=False):
        with self._changed:
            if (buffer := self._find(holder)) is None:
                while (buffer := self._pick(at_rest=False)) is None:
                    self._changed.wait()
                self._fill(buffer, holder, read=not fresh)
            buffer.pins += 1
            return buffer

    monkeypatch.setattr(Staging, "acquire", impatient)
    with pytest.raises((AssertionError, StorageError)):
        model, _ = trained(fields, disk, "cpu", steps, delay_s=0.002)
        assert_same_weights(model, reference)


def executor_on(disk, model, device="cpu", *, delay_s=0.0, paths=None, **fields) -> tuple[Executor, NvmeTier]:
    tier = NvmeTier(paths or [disk], block_bytes=4096, delay_s=delay_s)
    return make_executor(model, plan_of(model, device, **fields), device=device, nvme=tier), tier


@devices
def test_a_graph_can_be_differentiated_twice(disk, device):
    totals = []
    for fields in ({}, {"boundary": Tier.NVME}, {"saved": Tier.NVME, "activations": Activations.KEEP}):
        torch.manual_seed(0)
        model = Model(num_layers=5).to(device)
        executor, _ = executor_on(disk, model, device, delay_s=0.001, **fields)
        executor.set_last_micro_batch(False)
        loss = model.loss(batches(1, device)[0])
        loss.backward(retain_graph=True)
        loss.backward()
        totals.append(executor.step(0.0)[0].total)
        executor.close()
    assert totals[1:] == totals[:1] * 2


@devices
def test_memory_holds_the_slots_and_the_disk_one_pass(disk, device):
    """Whatever is kept, failed or never differentiated: staging is bounded by the plan, disk space by what is alive."""
    model = Model(num_layers=6).to(device)
    executor, tier = executor_on(disk, model, device, nvme_slots=2, boundary=Tier.NVME)
    nvme, (ids,) = executor.activations.nvme, batches(1, device)
    used, losses = [], []
    for _ in range(3):
        losses.append(model.loss(ids))
        losses[-1].backward()
        executor.step(0.0)
        model.loss(ids)  # never differentiated
        gc.collect()
        executor.flush()
        used.append((tier.used_bytes, nvme.free_bytes))
        assert 0 < nvme._staging.allocated_bytes <= 2 * 4096
    assert used[0] == used[1] == used[2] == (6 * 4096, 6 * 4096)
    executor.place(plan_for(model, device=device))
    assert (tier.used_bytes, nvme._staging) == (0, None)
    executor.close()


@devices
def test_batches_of_every_length_share_one_set_of_regions(disk, device):
    """S-11: sequence lengths vary; neither host memory nor disk space creeps up."""
    model = Model(num_layers=4).to(device)
    for boundary in (Tier.NVME, Tier.CPU):
        executor, tier = executor_on(disk, model, device, boundary=boundary, slots=2, nvme_slots=3)
        held = []
        for length in (64, 3, 50, 1, 90, 17, 90, 89, 2, 64):
            model.loss(torch.zeros(2, length, dtype=torch.int64, device=device)).backward()
            executor.step(0.0)
            executor.flush()
            store = executor.activations
            held.append(tier.used_bytes if boundary == Tier.NVME else store.tier.free_bytes)
        longest = 4 * (-(-2 * 90 * 24 * 4 // 4096) * 4096 if boundary == Tier.NVME else 2 * 90 * 24 * 4)
        assert max(held) == held[-1] == longest
        executor.close()


def test_what_ran_last_is_not_read_from_the_disk(disk):
    """Backward begins with the units that ran last; their bytes are still in staging buffers."""
    model = Model(num_layers=6)
    executor, tier = executor_on(disk, model, nvme_slots=4, boundary=Tier.NVME)
    model.loss(batches(1, "cpu")[0]).backward()
    executor.activations.nvme._releases.wait()
    executor.activations.nvme._staging.drain()
    read, written = tier.engine.moved_bytes()
    assert written == 6 * 4096 and read == 2 * 4096
    executor.step(0.0)
    executor.close()


def test_reads_start_before_they_are_needed(disk, monkeypatch):
    """A unit's read is on its way while the unit after it runs backward."""
    started, reads_by_unit = [], {}
    read = Region.read

    def noted(self, *args, **kwargs):
        started.append(id(self))
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Region, "read", noted)
    model = Model(num_layers=8)
    executor, _ = executor_on(disk, model, nvme_slots=3, boundary=Tier.NVME)
    loss = model.loss(batches(1, "cpu")[0])
    # Units 7, 6, 5 are in memory; when unit i runs backward, those before it are read as far as buffers are free.
    expected = {i: min(8 - i, 5) - 1 for i in range(8)} | {4: max(2, 8 - 4 - 1), 0: 5}

    def note(i):
        until_s = time.monotonic() + 20  # the reads are another thread's: it may need a while, but not this unit's end
        while len(set(started)) < expected[i] and time.monotonic() < until_s:
            time.sleep(0.001)
        reads_by_unit[i] = len(set(started))

    for i, layer in enumerate(model.layers):
        layer.up.weight.register_hook(lambda grad, i=i: note(i))
    loss.backward()
    assert all(reads_by_unit[i] >= expected[i] for i in range(8)), reads_by_unit
    assert reads_by_unit[0] == 5
    executor.step(0.0)
    executor.close()


@devices
def test_a_plan_that_comes_between_forward_and_backward(disk, device):
    """What rests on disk is read back there, although the new plan has no use for the disk."""
    grads = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = Model(num_layers=4).to(device)
        executor, tier = executor_on(disk, model, device, boundary=Tier.NVME, delay_s=0.001)
        loss = model.loss(batches(1, device)[0])
        if moves:
            executor.place(plan_for(model, device=device))
        loss.backward()
        grads.append(executor.step(0.0)[0].total)
        del loss
        executor.place(plan_for(model, device=device, home="gpu"))
        assert tier.used_bytes == 0
        executor.close()
    assert grads[0] == grads[1]


def test_a_damaged_block_is_an_error_and_ends_training(disk):
    model = Model(num_layers=6)
    executor, tier = executor_on(disk, model, boundary=Tier.NVME)
    loss = model.loss(batches(1, "cpu")[0])
    executor.activations.nvme._releases.wait()
    executor.activations.nvme._staging.drain()
    for path in tier.folders[0].path.glob("*.bin"):
        path.write_bytes(b"oops" * 1024)
    with pytest.raises(StorageError, match=r"not what was written there.*resume from the last checkpoint"):
        loss.backward()
    with pytest.raises(StorageError, match="not what was written there"):  # nothing goes on as if it had worked
        model.loss(batches(1, "cpu")[0])
    executor.close()
    assert not list(disk.iterdir())


@pytest.mark.parametrize("backed_mib", [None, 30])
def test_mount_that_is_too_small_for_activations(mount, backed_mib):
    """S-14: no room, and room that was only promised: an error with path and free space, and nothing hangs."""
    model = Model([Block() for _ in range(40)])
    folder = mount(200, backed_mib=backed_mib)
    executor, tier = executor_on(None, model, paths=[folder], boundary=Tier.NVME, nvme_slots=2)
    ids = torch.zeros(64, 1024 if backed_mib is None else 512, dtype=torch.int64)  # 6 or 3 MiB a unit
    says = r"no room on NVMe for activations: .* needed .* free" if backed_mib is None else r"writing .*\.bin: .*free"
    with pytest.raises(StorageError, match=says), torch.autograd.graph.save_on_cpu():
        model.run_layers(model.embedding(ids)).sum().backward()
    executor.close()
    assert not list(folder.glob("lazytrain-run-*"))


def test_sizes_are_served_by_the_smallest_that_is_large_enough():
    made, ended = [], []
    pool = SizePool(lambda n: made.append(n) or n, ended.append)
    for nbytes in (10, 100, 10):
        assert pool.take(nbytes) == nbytes
    for nbytes in (10, 100, 10):
        pool.give(nbytes, nbytes)
    assert [pool.take(n) for n in (4, 7, 9)] == [10, 10, 100] and made == [10, 100, 10]
    for nbytes in (10, 100, 10):
        pool.give(nbytes, nbytes)
    assert pool.take(101) == 101 and sorted(ended) == [10, 10, 100] and pool.free_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_falls_by_the_inputs(disk):
    peaks = {}
    for name in ("gpu", "nvme"):
        model = Model([Block() for _ in range(24)]).cuda()
        executor, _ = executor_on(disk, model, "cuda", boundary=Tier(name), nvme_slots=3)
        ids = torch.randint(0, 50, (2048, 64), device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            executor.begin_forward()
            model.run_layers(model.embedding(ids)).sum().backward()
            executor.step(0.0)
        executor.flush()
        peaks[name] = torch.cuda.max_memory_allocated()
        assert executor.activations.nvme._staging.allocated_bytes <= 3 * (ids.numel() * 24 * 4 + MIB)
        executor.close()
    assert peaks["gpu"] - peaks["nvme"] > 15 * ids.numel() * 24 * 4
