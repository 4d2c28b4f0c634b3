"""States on NVMe train bit for bit like states in memory, in bounded memory, and fail by name."""

from __future__ import annotations

import pytest
import torch

from lazytrain_plugin.errors import PlanMismatchError, StorageError
from lazytrain_plugin.runtime import train_state
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.state import TrainState
from lazytrain_plugin.runtime.streamed_file import TensorSpec
from lazytrain_plugin.runtime.train_state import ExecutorState
from lazytrain_plugin.vocab import Tier
from tests.runtime.nvme.rig import (
    assert_same,
    assert_trains_the_same_on,
    big_model,
    executor_for,
    full_state,
    in_three,
    make_model,
    on_nvme,
    windows,
)
from tests.runtime.rig import DEVICES, assert_same_weights, make_executor, plan_for, train


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("slots", "every", "accumulation"), [(1, 1, 1), (3, 2, 1), (2, 1, 2)])
def test_the_same_bits_as_in_memory(disk, device, state_bits, dtype, slots, every, accumulation):
    """S-12, S-15: parameters, masters and moments, not only the loss; every disk request and transfer late (S-20)."""

    def look(executor, tier):
        assert tier.used_bytes > 0 and tier.engine.moved_bytes()[1] > 0

    assert_trains_the_same_on(
        disk,
        lambda plan: on_nvme(plan, slots=slots, every=every),
        device=device, dtype=dtype, accumulation=accumulation, state_bits=state_bits, look=look,
    )  # fmt: skip


def test_memory_holds_the_slots_and_no_more(disk):
    """S-13, S-17: buffers are sized by the largest piece; the states never are in memory, from the first second on."""
    model = big_model(6)
    tier = NvmeTier([disk], pieces=in_three)
    executor = executor_for(model, on_nvme(plan_for(model), slots=2), tier=tier)
    staging = executor._nvme._staging
    largest = max(states.nbytes for unit in executor.all_units for states in unit.home.nvme_states)
    assert not any(unit.home.state_buffers for unit in executor.all_units)
    assert staging.nbytes == largest and staging.allocated_bytes == 0
    train(executor, windows("cpu"))
    full_state(executor)
    assert staging.allocated_bytes <= 2 * largest
    assert tier.used_bytes > 6 * 3 * largest * 0.9
    executor.close()


@pytest.mark.parametrize("state_bits", [32, 8])
def test_moves_between_tiers_keep_every_bit(disk, state_bits):
    """S-39: CPU -> NVMe -> NVMe with other slots -> CPU in the middle of training."""
    steps = windows("cpu")
    straight_model, model = make_model(), make_model()
    straight = executor_for(straight_model, plan_for(straight_model, state_bits=state_bits), dtype=torch.bfloat16)
    norms = train(straight, steps)
    cpu = plan_for(model, state_bits=state_bits)
    tier = NvmeTier([disk], block_bytes=8192, pieces=in_three, delay_s=0.001)
    executor = executor_for(model, cpu, dtype=torch.bfloat16, tier=tier)
    moved_norms = train(executor, steps[:1])
    for plan, part in ((on_nvme(cpu), steps[1:3]), (on_nvme(cpu, slots=1, every=2), steps[3:5]), (cpu, steps[5:])):
        executor.place(plan)
        moved_norms += train(executor, part)
    assert moved_norms == norms
    assert_same(full_state(executor), full_state(straight))
    assert tier.used_bytes == 0
    straight.close()
    executor.close()


def copy_over(source: TrainState, target: TrainState) -> None:
    """What saving and loading a checkpoint does, tensor by tensor."""
    for record, other in zip(source.records, target.records, strict=True):
        target.write_master(other, source.read_master(record))
        target.write_state(other, source.read_state(record))


@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("direction", ["from", "to", "both"])
def test_a_checkpoint_passes_through(disk, tmp_path, state_bits, direction):
    """S-16: save with states on NVMe, resume on another disk, go on bit for bit."""
    steps = windows("cpu")
    straight_model = make_model()
    straight = executor_for(straight_model, plan_for(straight_model, state_bits=state_bits), dtype=torch.bfloat16)
    train(straight, steps)
    second_disk = tmp_path / "another"
    second_disk.mkdir()
    executors = []
    for folder, nvme in ((disk, direction != "to"), (second_disk, direction != "from")):
        model = make_model()
        plan = plan_for(model, state_bits=state_bits)
        tier = NvmeTier([folder], block_bytes=8192, pieces=in_three) if nvme else None
        executors.append(executor_for(model, on_nvme(plan) if nvme else plan, dtype=torch.bfloat16, tier=tier))
    first, second = executors
    train(first, steps[:3])
    copy_over(ExecutorState(first), ExecutorState(second))
    first.close()
    train(second, steps[3:])
    assert_same(full_state(second), full_state(straight))
    assert_same_weights(second.model, straight_model)
    second.close()
    straight.close()


@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("nvme", [False, True])
def test_a_checkpoint_reads_large_tensors_in_pieces(disk, monkeypatch, nvme, state_bits):
    """A piece may end in the middle of what comes from the disk at a time; what no piece can be made of is whole."""
    monkeypatch.setattr(train_state, "SAVE_ELEMENTS", 2048)
    model = make_model(2)
    plan = plan_for(model, state_bits=state_bits)
    tier = NvmeTier([disk], block_bytes=8192, pieces=in_three) if nvme else None
    executor = executor_for(model, on_nvme(plan) if nvme else plan, dtype=torch.bfloat16, tier=tier)
    train(executor, windows("cpu")[:2])
    state, num_spans = ExecutorState(executor), {}
    for record in (record for record in state.records if record.group is not None):
        spans = state.spans(record)
        num_spans[record.name] = len(spans)
        whole = {"master": state.read_master(record)} | state.read_state(record)
        parts = [{"master": state.read_master(record, span)} | state.read_state(record, span) for span in spans]
        specs = state.state_specs(record)
        for key, value in whole.items():
            if torch.is_tensor(value):
                assert torch.equal(torch.cat([part[key] for part in parts]), value), (record.name, key)
                assert key == "master" or specs[key] == TensorSpec.like(value)
            else:
                assert specs[key] == value
        assert specs.keys() | {"master"} == whole.keys()
    assert num_spans["layers.0.wide.weight"] == 12 and num_spans["layers.0.back"] == 1  # a transpose
    executor.close()


@pytest.mark.parametrize("problem", ["no folder", "no folder for activations", "own optimizer"])
def test_what_cannot_rest_there_is_refused_with_the_remedy(disk, problem):
    model = make_model(2)
    plan = on_nvme(plan_for(model))
    if problem == "no folder for activations":
        plan = plan_for(model).with_units(boundary=Tier.NVME)
    says = "native" if problem == "own optimizer" else "nvme_path"
    tier = None if "no folder" in problem else NvmeTier([disk])
    with pytest.raises(PlanMismatchError, match=says):
        make_executor(model, plan, native=problem != "own optimizer", nvme=tier)


def test_mount_too_small_is_refused_before_the_first_step(mount):
    """S-14: 300 MB of states for a disk of 200 MB."""
    model = big_model(150)
    with pytest.raises(StorageError, match=r"no room on NVMe for states of layers\.\d+: .* needed .* free"):
        executor_for(model, on_nvme(plan_for(model)), tier=NvmeTier([mount(200)]))


def test_mount_that_fills_up_at_a_later_step_stops_training(mount):
    """S-14: the disk promised space that it hasn't got. The error names it; what was saved before still loads."""
    model = big_model(16)
    tier = NvmeTier([mount(200, backed_mib=30)])
    executor = executor_for(model, on_nvme(plan_for(model), slots=2), tier=tier)
    steps = windows("cpu")
    state = ExecutorState(executor)
    saved = [state.read_master(record).clone() for record in state.records]
    with pytest.raises(Exception, match=r"writing .*\.bin: .*free.*resume from the last checkpoint") as error:
        train(executor, steps)
    assert isinstance(error.value, StorageError) or isinstance(error.value.__cause__, StorageError)
    with pytest.raises(Exception, match="resume from the last checkpoint"):  # and nothing goes on as if it had worked
        train(executor, steps)
    with pytest.raises(Exception, match="resume from the last checkpoint"):
        executor.close()
    assert not list(tier.paths[0].glob("lazytrain-run-*"))
    resumed_model = big_model(16)
    resumed = executor_for(resumed_model, plan_for(resumed_model))
    for record, master in zip(ExecutorState(resumed).records, saved, strict=True):
        ExecutorState(resumed).write_master(record, master)
    train(resumed, steps[:1])
    resumed.close()


def test_a_damaged_block_stops_training_by_name(disk):
    model = make_model()
    executor = executor_for(model, on_nvme(plan_for(model), slots=1), tier=NvmeTier([disk]))
    steps = windows("cpu")
    train(executor, steps[:2])
    executor._nvme._staging.drain()
    _, _, path = executor.units[2].home.nvme_states[0].region.files[0]
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"oops")
    with pytest.raises(Exception, match=r"not what was written there.*resume from the last checkpoint") as error:
        train(executor, steps[2:])
    assert path in str(error.value)
    with pytest.raises(Exception, match="not what was written there"):
        executor.close()
    assert not list(disk.iterdir())


def test_states_of_a_tensor_that_is_frozen_now_harm_no_other():
    model = make_model(2)
    executor = executor_for(model, plan_for(model))
    train(executor, windows("cpu")[:2])
    before, state = full_state(executor), ExecutorState(executor)
    frozen = next(record for record in state.records if record.name == "layers.0.frozen")
    state.write_state(frozen, {"step": 3.0, "exp_avg": torch.ones(7), "exp_avg_sq": torch.ones(7)})
    assert_same(full_state(executor), before)
    executor.close()
