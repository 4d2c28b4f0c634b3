"""Save, resume and export: what was saved is what loads, in whole, under any format of the states."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections import OrderedDict, namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lazytrain_plugin.errors import CheckpointError
from lazytrain_plugin.integration import checkpoint_folder
from lazytrain_plugin.integration import checkpoint_layout as layout
from lazytrain_plugin.integration.checkpoint import (
    COUNTERS,
    consolidated_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from lazytrain_plugin.integration.checkpoint_mixin import CheckpointMixin
from lazytrain_plugin.runtime import streamed_file
from lazytrain_plugin.runtime.streamed_file import StreamedSave
from lazytrain_plugin.runtime.zip_checksums import records_of
from tests.integration.checkpoint_fakes import DictState, Toy, decode, encode
from tests.runtime.nvme import conftest as disks

mount = disks.mount  # a fixture
COUNTS = {"global_steps": 7, "global_samples": 56, "skipped_steps": 1}


def _save(state, folder, tag="global_step7", **options):
    options = {"counters": COUNTS, "param_groups": state.param_groups, "ds_config": {"lazytrain": {}}} | options
    return save_checkpoint(state, state.module, folder, tag, **options)


def _load(state, folder, tag=None, **options):
    return load_checkpoint(state, state.module, folder, tag, param_groups=state.param_groups, **options)


def _freeze(module, *names):
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return module


class LowRank(nn.Module):
    """A frozen bf16 base under a small fp32 adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(9, 5).bfloat16().requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, 9))
        self.lora_b = nn.Parameter(torch.zeros(5, 2))
        self.register_buffer("running", torch.randn(3))


CASES = {
    "tied": Toy,
    "untied": lambda: Toy(tied=False),
    "bf16": lambda: Toy(dtype=torch.bfloat16),
    "half frozen": lambda: _freeze(Toy(dtype=torch.bfloat16), "embed", "inner.0"),
    "lora": LowRank,
}


def _assert_same_run(got: DictState, expected: DictState):
    """Masters, weights, states and persistent buffers are bit-equal."""
    assert got.masters.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        assert torch.equal(got.masters[name], master), name
        assert got.states[name].keys() == expected.states[name].keys(), name
        for key, value in expected.states[name].items():
            same = (
                torch.equal(got.states[name][key], value) if torch.is_tensor(value) else got.states[name][key] == value
            )
            assert same, (name, key)
    for (name, value), here in zip(expected.module.state_dict().items(), got.module.state_dict().values(), strict=True):
        assert here.dtype == value.dtype and torch.equal(here, value), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bits", [32, 8])
def test_resume_is_bit_equal(tmp_path, case, bits):
    torch.manual_seed(0)
    saved = DictState(CASES[case](), bits=bits, num_groups=2).train().train()
    _save(saved, tmp_path, client_state={"note": [1, torch.arange(3)]})
    torch.manual_seed(1)
    fresh = DictState(CASES[case](), bits=bits, num_groups=2)
    loaded = _load(fresh, tmp_path)
    _assert_same_run(fresh, saved)
    assert loaded.counters == COUNTS
    assert loaded.client_state.keys() == {"note"} and loaded.client_state["note"][1].tolist() == [0, 1, 2]
    if case == "tied":
        assert fresh.module.head.weight is fresh.module.embed.weight


def test_decoded_8bit_moments_alone_would_not_resume_bit_equal():
    """Why codec entries exist: with this map, a block whose extreme is negative gets another scale next time."""
    values = -torch.linspace(0.01, 1, 256)
    codes, scales = encode(values)
    again, scales_again = encode(decode(codes, scales))
    assert not torch.equal(scales, scales_again) and not torch.equal(codes, again)


@pytest.mark.parametrize("bits", [32, 8])
def test_large_tensors_are_written_in_pieces(tmp_path, bits):
    saved = DictState(Toy(width=64), bits=bits).train()
    assert max(len(saved.spans(record)) for record in saved.records) == 3
    _save(saved, tmp_path)
    fresh = DictState(Toy(width=64), bits=bits)
    _load(fresh, tmp_path)
    _assert_same_run(fresh, saved)


@pytest.mark.parametrize(("bits_saved", "bits_now"), [(32, 8), (8, 32)])
def test_states_of_another_width_load(tmp_path, bits_saved, bits_now):
    saved = DictState(Toy(), bits=bits_saved).train()
    _save(saved, tmp_path)
    fresh = DictState(Toy(), bits=bits_now)
    _load(fresh, tmp_path)
    for record in saved.records:
        if not record.numel:
            continue
        there, here = saved.read_state(record), fresh.read_state(record)
        if bits_now == 32:
            assert here.keys() == {"step", "exp_avg", "exp_avg_sq"}
            torch.testing.assert_close(here["exp_avg"], there["exp_avg"], rtol=0, atol=0)
        else:
            torch.testing.assert_close(here["exp_avg"], decode(*encode(there["exp_avg"])), rtol=0, atol=0)


def test_parameters_without_state_stay_without(tmp_path):
    saved = DictState(Toy()).train(skip=("scale", "inner.0.weight"))
    _save(saved, tmp_path)
    fresh = DictState(Toy()).train()
    _load(fresh, tmp_path)
    assert fresh.states["scale"] == {} and fresh.states["inner.0.weight"] == {}
    assert fresh.states["inner.0.bias"]["step"] == 1


def test_save_before_the_first_step(tmp_path):
    saved = DictState(Toy())
    _save(saved, tmp_path)
    fresh = DictState(Toy()).train()
    _load(fresh, tmp_path)
    _assert_same_run(fresh, saved)


def test_state_of_any_torch_optimizer(tmp_path):
    """Adafactor's factored moments, SGD's missing buffer, a tensor step: kept as they are."""
    saved, fresh = DictState(Toy()), DictState(Toy())
    saved.states["inner.0.weight"] = {"step": torch.tensor(3.0), "row": torch.randn(7, 1), "col": torch.randn(1, 6)}
    saved.states["bias"] = {"momentum_buffer": torch.randn(1), "nesterov": True}
    _save(saved, tmp_path)
    _load(fresh, tmp_path)
    _assert_same_run(fresh, saved)


def _fp32_weights(folder):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder))


@pytest.mark.parametrize("case", CASES)
def test_zero_to_fp32_gives_the_masters(tmp_path, case):
    saved = DictState(CASES[case]()).train()
    _save(saved, tmp_path, bf16=case == "bf16")
    converted = _fp32_weights(tmp_path)
    names = saved.module.state_dict()
    assert converted.keys() == names.keys()
    for record in saved.records:
        expected = (
            record.parameter
            if record.group is None or not record.numel
            else saved.masters[record.name].view(record.shape)
        )
        for name in (record.name, *record.aliases):
            assert torch.equal(converted[name], expected), name
            assert converted[name].dtype == expected.dtype
    assert torch.equal(converted["running"], saved.module.running)


def test_the_copied_script_runs(tmp_path):
    saved = DictState(Toy()).train()
    _save(saved, tmp_path)
    command = [sys.executable, "zero_to_fp32.py", ".", "out"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=_cpu_environment())
    assert run.returncode == 0, run.stderr
    weights = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert torch.equal(weights["inner.0.weight"].view(-1), saved.masters["inner.0.weight"])


def _cpu_environment():
    return {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def test_universal_conversion(tmp_path):
    """DeepSpeed's own converter: fp32 and moments of every parameter, untouched ones as zeros."""
    from deepspeed.checkpoint import ds_to_universal

    saved = DictState(Toy(), num_groups=2).train(skip=("scale",)).train(skip=("scale",))
    _save(saved, tmp_path)
    arguments = SimpleNamespace(
        input_folder=str(tmp_path / "global_step7"),
        output_folder=str(tmp_path / "universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    ds_to_universal.main(arguments)
    for name, master in saved.masters.items():
        if not master.numel():
            continue
        folder = tmp_path / "universal" / "zero" / name
        assert torch.equal(torch.load(folder / "fp32.pt"), master)
        for key in ("exp_avg", "exp_avg_sq"):
            expected = saved.states[name].get(key, torch.zeros_like(master))
            assert torch.equal(torch.load(folder / f"{key}.pt"), expected)
    common = torch.load(tmp_path / "universal" / "zero" / "optimizer_state.pt", weights_only=False)
    assert [group["lr"] for group in common["param_groups"]] == [0.1, 0.2]


@pytest.mark.parametrize("ranks", [1, 3])
def test_checkpoints_of_deepspeed_itself_load(tmp_path, ranks):
    """Groups that span parameters, pieces of ceil(numel / ranks) elements, the last one padded."""
    saved = DictState(_freeze(Toy(), "inner.0")).train()
    trained = [record for record in saved.records if record.group is not None and record.numel]
    frozen = [record for record in saved.records if record.group is None]
    groups = [trained[:2], trained[2:]]

    def piece(flat, rank):
        count = -(-flat.numel() // ranks)
        return nn.functional.pad(flat, (0, count * ranks - flat.numel()))[rank * count : (rank + 1) * count]

    def joined(group, rank, key):
        values = saved.masters if key == "master" else {n: s.get(key) for n, s in saved.states.items()}
        return torch.cat([piece(values[record.name], rank) for record in group])

    (tmp_path / "step").mkdir()
    for rank in range(ranks):
        states = {
            i: {"step": torch.tensor(1.0), **{key: joined(group, rank, key) for key in ("exp_avg", "exp_avg_sq")}}
            for i, group in enumerate(groups)
        }
        optim = {
            "partition_count": ranks,
            "optimizer_state_dict": {"state": states, "param_groups": [{"lr": 0.5, "params": [0, 1]}]},
            "fp32_flat_groups": [joined(group, rank, "master") for group in groups],
        }
        model = {
            "module": OrderedDict(running=saved.module.running, count=saved.module.count),
            "buffer_names": ["running", "count"],
            "param_shapes": [OrderedDict((record.name, record.shape) for record in group) for group in groups],
            "frozen_param_shapes": OrderedDict(
                [*((r.name, r.shape) for r in frozen), ("empty", saved.module.empty.shape)]
            ),
            "frozen_param_fragments": OrderedDict(
                [*((r.name, piece(r.parameter.detach().view(-1), rank)) for r in frozen), ("empty", torch.empty(0))]
            ),
            "shared_params": {"head.weight": "embed.weight"},
            **COUNTS,
        }
        stem = tmp_path / "step" / f"zero_pp_rank_{rank}_mp_rank_00_"
        torch.save({"optimizer_state_dict": optim}, f"{stem}optim_states.pt")
        torch.save(model, f"{stem}model_states.pt")
    counters = []

    class Recording(DictState):
        def write_state(self, record, state):
            counters.append(state["step"])
            super().write_state(record, state)

    fresh = Recording(_freeze(Toy(), "inner.0"))
    _load(fresh, tmp_path, "step")
    # torch counts a step in place: one counter for two parameters would count twice.
    assert len({counter.data_ptr() for counter in counters}) == len(counters) == len(trained)
    for record in trained:
        assert torch.equal(fresh.masters[record.name], saved.masters[record.name])
        assert torch.equal(fresh.states[record.name]["exp_avg"], saved.states[record.name]["exp_avg"])
        assert fresh.states[record.name]["step"] == 1
    for record in frozen:
        here = dict(fresh.module.named_parameters())[record.name]
        assert torch.equal(here, record.parameter)
    assert fresh.param_groups[0]["lr"] == 0.5


# --- whole or not at all -------------------------------------------------------------------------------------------


def _checkpoint_after_one_step(folder):
    state = DictState(Toy()).train()
    _save(state, folder, "one", counters={**COUNTS, "global_steps": 1})
    masters = {name: master.clone() for name, master in state.masters.items()}
    state.train()
    return state, masters


def _assert_loads(folder, masters, tag=None):
    fresh = DictState(Toy())
    assert _load(fresh, folder, tag).counters["global_steps"] == 1
    assert all(torch.equal(fresh.masters[name], master) for name, master in masters.items())


@pytest.mark.parametrize("fails_at", [0, 3, 9, 12])
@pytest.mark.parametrize("tag", ["two", "one"])
def test_a_save_that_dies_leaves_the_previous_checkpoint(tmp_path, monkeypatch, fails_at, tag):
    state, masters = _checkpoint_after_one_step(tmp_path)
    write, calls = StreamedSave.write, []

    def dying_write(self, key_path, tensor):
        if len(calls) == fails_at:
            raise KeyboardInterrupt
        calls.append(key_path)
        write(self, key_path, tensor)

    monkeypatch.setattr(StreamedSave, "write", dying_write)
    with pytest.raises(KeyboardInterrupt):
        _save(state, tmp_path, tag)
    monkeypatch.undo()
    _assert_loads(tmp_path, masters)
    assert not list(tmp_path.glob(".*partial")) and not list(tmp_path.glob(".*old"))
    _save(state, tmp_path, tag)  # and the next save is not in its way
    assert (tmp_path / "latest").read_text() == tag


def test_what_a_killed_process_leaves_is_not_resumed_from(tmp_path):
    """SIGKILL runs no clean-up: a half-written folder stays, under a name that nothing reads."""
    state, masters = _checkpoint_after_one_step(tmp_path)
    (tmp_path / ".two.partial").mkdir()
    (tmp_path / ".two.partial" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"torn")
    _assert_loads(tmp_path, masters)
    with pytest.raises(CheckpointError, match="no checkpoint .*two; load one of the tags one"):
        _load(state, tmp_path, "two")
    _save(state, tmp_path, "two")
    assert not (tmp_path / ".two.partial").exists()


def test_killed_between_the_renames_of_a_replacement(tmp_path):
    _, masters = _checkpoint_after_one_step(tmp_path)
    (tmp_path / "one").rename(tmp_path / ".one.old")
    _assert_loads(tmp_path, masters)


def test_ranks_put_the_older_checkpoint_back_at_once(tmp_path, monkeypatch):
    _, masters = _checkpoint_after_one_step(tmp_path)
    (tmp_path / "one").rename(tmp_path / ".one.old")
    rename = Path.rename

    def second(path, target):
        rename(path, target)  # the other rank's
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", second)
    _assert_loads(tmp_path, masters)


def test_saving_twice_under_one_tag_keeps_the_second(tmp_path):
    state, _ = _checkpoint_after_one_step(tmp_path)
    _save(state, tmp_path, "one")
    _save(state, tmp_path, "one")
    fresh = DictState(Toy())
    _load(fresh, tmp_path)
    _assert_same_run(fresh, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "zero_to_fp32.py", "zero_to_torch.py"]


def test_without_save_latest_the_older_one_stays_latest(tmp_path):
    state, masters = _checkpoint_after_one_step(tmp_path)
    _save(state, tmp_path, "two", save_latest=False)
    _assert_loads(tmp_path, masters)


def test_disk_too_small_is_refused_before_writing(tmp_path, monkeypatch):
    state, masters = _checkpoint_after_one_step(tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**30, 2**30 - 1000, 1000))
    with pytest.raises(CheckpointError, match=r"two not started: it needs 2\.\d MiB and the disk has 1000 B free"):
        _save(state, tmp_path, "two")
    monkeypatch.undo()
    _assert_loads(tmp_path, masters)


def test_disk_that_runs_full_is_reported_and_undone(tmp_path, monkeypatch):
    state, masters = _checkpoint_after_one_step(tmp_path)
    pwrite, calls = os.pwrite, []

    def full_disk(fd, view, offset):
        calls.append(offset)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", full_disk)
    with pytest.raises(CheckpointError, match="two undone: it needs .* earlier checkpoints are untouched"):
        _save(state, tmp_path, "two")
    monkeypatch.undo()
    _assert_loads(tmp_path, masters)
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("kind", ["too small", "smaller than it says"])
def test_mount_that_is_full_at_save(mount, kind):
    """S-14 on a real disk: the save is refused or undone with path, need and free; the one before loads."""
    folder = mount(200, backed_mib=60) if kind == "smaller than it says" else mount(64)
    state = DictState(Toy(width=40_000)).train()  # 20 MiB to save
    _save(state, folder, "one", counters={**COUNTS, "global_steps": 1})
    masters = {name: master.clone() for name, master in state.masters.items()}
    state.train()
    if kind == "too small":
        (folder / "other").write_bytes(bytes(36 << 20))
        says = rf"{folder}.*two not started: it needs .* MiB and the disk has .* MiB free"
    else:
        with (folder / "other").open("wb") as file:
            file.write(os.urandom(32 << 20))
            os.fsync(file.fileno())
        says = rf"{folder}.*two undone"
    with pytest.raises(CheckpointError, match=says):
        _save(state, folder, "two")
    assert (folder / "latest").read_text() == "one" and not list(folder.glob(".*partial"))
    fresh = DictState(Toy(width=40_000))
    assert _load(fresh, folder).counters["global_steps"] == 1
    assert all(torch.equal(fresh.masters[name], master) for name, master in masters.items())


@pytest.mark.parametrize("damage", ["truncate", "remove optim", "remove model", "garbage"])
def test_damaged_checkpoints_are_refused(tmp_path, damage):
    state, _ = _checkpoint_after_one_step(tmp_path)
    before = {name: master.clone() for name, master in state.masters.items()}
    optim = tmp_path / "one" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    if damage == "truncate":
        os.truncate(optim, optim.stat().st_size // 2)
    elif damage == "garbage":
        optim.write_bytes(b"x" * 1000)
    else:
        (tmp_path / "one" / f"zero_pp_rank_0_mp_rank_00_{damage.split()[1]}_states.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        _load(state, tmp_path)
    assert ("damaged" if damage in ("truncate", "garbage") else "incomplete") in str(caught.value)
    assert "load one of the tags" not in str(caught.value)  # there is no other
    assert all(torch.equal(state.masters[name], master) for name, master in before.items())


@pytest.mark.parametrize("small_bytes", [streamed_file._SMALL_BYTES, 0], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_other_bytes_than_were_saved_are_never_loaded(tmp_path, monkeypatch, kind, small_bytes):
    """One byte of each record in turn, as a failing disk or another program leaves it: masters, moments, codes of 8-bit
    states, frozen weights, buffers, scheduler."""
    monkeypatch.setattr(streamed_file, "_SMALL_BYTES", small_bytes)
    state = DictState(_freeze(Toy(dtype=torch.bfloat16), "embed", "inner.0"), bits=8).train()
    _save(state, tmp_path, "older")
    _save(state, tmp_path, "one")
    (path,) = (tmp_path / "one").glob(f"*{kind}_states.pt")
    tensors = [record for record in records_of(path) if record.num_bytes and record.name.startswith("data/")]
    assert len(tensors) >= 5
    whole = [record for record in records_of(path) if record.num_bytes]
    for record in tensors if small_bytes == 0 else whole:
        at = record.offset + record.num_bytes // 2
        with open(path, "r+b") as file:
            (good,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([good ^ 16]), at)
            with pytest.raises(CheckpointError, match=f"{path.parent}.*load (one of the tags older|an earlier tag)"):
                _load(DictState(_freeze(Toy(dtype=torch.bfloat16), "embed", "inner.0"), bits=8), tmp_path)
            os.pwrite(file.fileno(), bytes([good]), at)
    _load(state, tmp_path)


def test_checkpoints_without_checksums_load(tmp_path, monkeypatch):
    """Of versions before they were written: the archive has zeros there."""
    skeleton = layout.optim_skeleton

    def without_mark(*args):
        made = skeleton(*args)
        del made["lazytrain"]["crc32"]
        return made

    monkeypatch.setattr(layout, "optim_skeleton", without_mark)
    monkeypatch.setattr(streamed_file, "write_crc32", lambda *_: None)
    state = DictState(Toy()).train()
    _save(state, tmp_path)
    fresh = DictState(Toy())
    _load(fresh, tmp_path)
    _assert_same_run(fresh, state)


def test_no_latest_and_a_stage2_checkpoint(tmp_path):
    state = DictState(Toy())
    with pytest.raises(CheckpointError, match="no file 'latest'"):
        _load(state, tmp_path)
    (tmp_path / "s2").mkdir()
    (tmp_path / "s2" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="stage 0, 1 or 2"):
        _load(state, tmp_path, "s2")


# --- fits the model or is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Toy(width=5), r"other shape: embed.weight \(17, 6\) saved, \(17, 5\) here, .* and \d more"),
        (lambda: Toy(tied=False), "missing there: head.weight. Build the model"),
        (lambda: _freeze(Toy(), "scale"), "frozen or trained: scale trained there, not here. Freeze the same"),
        (LowRank, "missing there: lora_a, lora_b.*unknown here: "),
    ],
    ids=["shape", "untied", "frozen", "another model"],
)
def test_a_checkpoint_of_another_model_is_refused_untouched(tmp_path, other, message):
    _save(DictState(Toy()).train(), tmp_path)
    run = DictState(other()).train()
    before = {name: master.clone() for name, master in run.masters.items()}
    with pytest.raises(CheckpointError, match=message):
        _load(run, tmp_path)
    assert all(torch.equal(run.masters[name], master) for name, master in before.items())


def test_untied_checkpoint_into_a_tied_model_is_refused(tmp_path):
    _save(DictState(Toy(tied=False)).train(), tmp_path)
    with pytest.raises(CheckpointError, match="tied here, separate there: embed.weight and head.weight"):
        _load(DictState(Toy()), tmp_path)


def test_other_number_of_optimizer_groups_is_refused(tmp_path):
    _save(DictState(Toy(), num_groups=2).train(), tmp_path)
    with pytest.raises(CheckpointError, match="2 optimizer groups, this run 1"):
        _load(DictState(Toy()), tmp_path)


def test_buffer_of_another_shape_is_refused(tmp_path):
    _save(DictState(Toy()).train(), tmp_path)
    run = DictState(Toy())
    run.module.running = torch.zeros(4)
    with pytest.raises(CheckpointError, match=r"running \(3,\) saved, \(4,\) here"):
        _load(run, tmp_path)


def test_frozen_weights_can_be_left_out(tmp_path):
    """S-49: an adapter's checkpoint does not carry the backbone, and resumes on top of it."""
    saved = DictState(LowRank()).train()
    _save(saved, tmp_path / "small", exclude_frozen_parameters=True)
    fresh = DictState(LowRank())
    base = fresh.module.base.weight.clone()
    with pytest.raises(CheckpointError, match="base.weight.*load_module_strict=False"):
        _load(fresh, tmp_path / "small")
    _load(fresh, tmp_path / "small", load_module_strict=False)
    assert torch.equal(fresh.module.base.weight, base)
    assert torch.equal(fresh.masters["lora_b"], saved.masters["lora_b"])
    assert "base.weight" not in _fp32_weights(tmp_path / "small")


def test_module_only_and_without_states(tmp_path):
    saved = DictState(Toy()).train().train()
    _save(saved, tmp_path)
    for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
        run = DictState(Toy(), seed=5).train()
        states = {name: dict(values) for name, values in run.states.items()}
        run.param_groups[0]["lr"] = 42.0
        loaded = _load(run, tmp_path, **options)
        assert torch.equal(run.masters["inner.2.weight"], saved.masters["inner.2.weight"])
        assert all(run.states[name] == values or not values for name, values in states.items() if name == "scale")
        assert torch.equal(run.states["bias"]["exp_avg"], states["bias"]["exp_avg"])
        assert run.param_groups[0]["lr"] == 42.0
        assert loaded.counters == ({} if "load_module_only" in options else COUNTS)


def test_module_only_crosses_frozen_and_trained(tmp_path):
    saved = DictState(_freeze(Toy(), "inner.0")).train()
    _save(saved, tmp_path)
    run = DictState(_freeze(Toy(), "inner.2"))
    _load(run, tmp_path, load_module_only=True)
    for (name, here), there in zip(run.module.named_parameters(), saved.module.parameters(), strict=True):
        assert torch.equal(here, there), name
    assert torch.equal(run.masters["inner.0.weight"], saved.module.inner[0].weight.reshape(-1))


# --- learning rate ---------------------------------------------------------------------------------------------------


def test_schedule_and_hyperparameters_resume_in_the_live_dicts(tmp_path):
    """S-40: the scheduler and the update must see the same restored learning rate."""

    def run():
        model = nn.Linear(2, 2)
        model.register_buffer("running", torch.zeros(1))
        state = DictState(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state.param_groups = optimizer.param_groups
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return state, optimizer, scheduler

    def advance(optimizer, scheduler, count):
        rates = []
        for _ in range(count):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return rates

    state, optimizer, scheduler = run()
    advance(optimizer, scheduler, 7)
    _save(state, tmp_path, lr_scheduler=scheduler)
    expected = advance(optimizer, scheduler, 3)

    state, optimizer, scheduler = run()
    group = optimizer.param_groups[0]
    _load(state, tmp_path, lr_scheduler=scheduler)
    assert optimizer.param_groups[0] is group
    assert advance(optimizer, scheduler, 3) == expected

    state, optimizer, scheduler = run()
    _load(state, tmp_path, lr_scheduler=scheduler, load_lr_scheduler_states=False)
    assert scheduler.last_epoch == 0


# --- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_consolidated_state_dict_is_the_modules_without_copies(case):
    state = DictState(CASES[case]()).train()
    exported = consolidated_state_dict(state, state.module)
    expected = state.module.state_dict()
    assert list(exported) == list(expected) and state.flushes
    for name, value in expected.items():
        assert torch.equal(exported[name], value) and exported[name].dtype == value.dtype
        assert exported[name].data_ptr() == value.data_ptr() and not exported[name].requires_grad
    without = consolidated_state_dict(state, state.module, exclude_frozen_parameters=True)
    names = state.module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in names if not parameter.requires_grad}
    assert set(without) == set(exported) - frozen


# --- the engine's methods --------------------------------------------------------------------------------------------


class Engine(CheckpointMixin):
    """The attributes of DeepSpeedEngine that the mixin uses."""

    def __init__(self, state, scheduler=None):
        self.lazytrain, self.module, self.lr_scheduler = state, state.module, scheduler
        self.optimizer = SimpleNamespace(param_groups=state.param_groups)
        self.config, self.training_dataloader = {"zero_optimization": {"stage": 3}}, None
        for name in COUNTERS:
            setattr(self, name, 0)

    def bfloat16_enabled(self):
        return True

    def load_universal_checkpoint(self):
        return False


def test_engine_methods_follow_deepspeeds_contract(tmp_path):
    engine = Engine(DictState(Toy()).train())
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)
    engine.global_steps, engine.global_samples = 3, 24
    assert engine.save_checkpoint(str(tmp_path), client_state={"epoch": 2}) is True
    assert (tmp_path / "latest").read_text() == "global_step3"
    files = sorted(path.name for path in (tmp_path / "global_step3").iterdir())
    assert files == [
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    ]
    other = Engine(DictState(Toy()))
    path, client_state = other.load_checkpoint(str(tmp_path))
    assert path.endswith("model_states.pt") and client_state == {"epoch": 2}
    assert (other.global_steps, other.global_samples) == (3, 24)
    _assert_same_run(other.lazytrain, engine.lazytrain)
    other.lazytrain.train()
    other.load_checkpoint(str(tmp_path), "global_step3")  # on a live engine, as load_best_model_at_end does
    _assert_same_run(other.lazytrain, engine.lazytrain)
    with pytest.raises(ValueError, match="non-empty"):
        engine.save_checkpoint("")
    with pytest.raises(CheckpointError, match="client_state holds module"):
        engine.save_checkpoint(str(tmp_path), client_state={"module": 1})


def test_signatures_are_deepspeeds():
    import inspect

    from deepspeed import DeepSpeedEngine

    for method in ("save_checkpoint", "load_checkpoint", "_zero3_consolidated_16bit_state_dict"):
        theirs = inspect.signature(getattr(DeepSpeedEngine, method)).parameters
        ours = inspect.signature(getattr(CheckpointMixin, method)).parameters
        assert list(ours) == list(theirs), method
        defaults = [(a.default, b.default) for a, b in zip(ours.values(), theirs.values(), strict=True)]
        assert all(a == b or (a is None and b == {}) for a, b in defaults), method


MEMORY_PROBE = """
import resource, sys, tempfile, torch
from torch import nn
from lazytrain_plugin.integration.checkpoint import load_checkpoint, save_checkpoint
from lazytrain_plugin.runtime.state import ParamRecord
from lazytrain_plugin.runtime.streamed_file import TensorSpec

COUNT, NUMEL = 40, 1_000_000  # fp32 master and two moments of 4 MB each: 480 MB in the file


class Endless:
    '''States computed on demand, so that the process itself holds next to nothing.'''

    def __init__(self):
        self.module = nn.ParameterDict({f"p{i}": nn.Parameter(torch.zeros(1).expand(NUMEL)) for i in range(COUNT)})
        self.records = [
            ParamRecord(name=n, parameter=p, shape=p.shape, numel=NUMEL, dtype=p.dtype, group=0)
            for n, p in self.module.named_parameters()
        ]

    def value(self, record, shift):
        return torch.full((NUMEL,), float(record.name[1:]) + shift)

    def spans(self, record):
        return [slice(0, NUMEL)]

    def read_master(self, record, span=None):
        return self.value(record, 0.25)

    def state_specs(self, record):
        return {"step": 1} | dict.fromkeys(("exp_avg", "exp_avg_sq"), TensorSpec(torch.Size([NUMEL]), torch.float32))

    def read_state(self, record, span=None):
        return {"step": 1, "exp_avg": self.value(record, 0.5), "exp_avg_sq": self.value(record, 0.75)}

    def write_master(self, record, values):
        assert torch.equal(values, self.read_master(record))

    def write_state(self, record, state):
        assert all(torch.equal(state[key], value) for key, value in self.read_state(record).items() if key != "step")

    def flush(self):
        pass


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def save(state, folder):
    groups = [{"params": [], "lr": 0.1}]
    save_checkpoint(state, state.module, folder, "t", counters={}, param_groups=groups, ds_config={})


def load(state, folder):
    load_checkpoint(state, state.module, folder, param_groups=[{"params": [], "lr": 0.1}])


COUNT, full = 1, COUNT
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as warm:
    save(Endless(), warm)
    load(Endless(), warm)
COUNT, before = full, peak_mib()
save(Endless(), sys.argv[1])
print("save", peak_mib() - before)
load(Endless(), sys.argv[1])
print("load", peak_mib() - before)
"""


def test_memory_stays_at_one_parameter(tmp_path):
    """S-37, S-38: neither a save nor a resume needs room for the state that it moves."""
    command = [sys.executable, "-c", textwrap.dedent(MEMORY_PROBE), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=_cpu_environment())
    assert run.returncode == 0, run.stderr
    grown = dict(line.split() for line in run.stdout.splitlines() if line.startswith(("save", "load")))
    assert (tmp_path / "t").is_dir() and float(grown["save"]) < 60 and float(grown["load"]) < 60, grown


def test_host_memory_does_not_creep_with_saves(tmp_path):
    """S-10: a probe of objects, not of the allocator: nothing of a save or load stays alive."""
    import gc

    def tensors():
        gc.collect()
        return sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor))

    state = DictState(Toy()).train()
    for _ in range(2):
        _save(state, tmp_path)
        _load(state, tmp_path)
    before = tensors()
    for _ in range(5):
        _save(state, tmp_path)
        _load(state, tmp_path)
    assert tensors() == before
    maps = [line for line in open("/proc/self/maps") if str(tmp_path) in line]
    assert not maps, "a mapping of a checkpoint file is still there"


def test_partial_folder_name_is_never_a_tag(tmp_path):
    """Trainer globs `global_step*` to see whether there is something to resume from."""
    with pytest.raises(RuntimeError), checkpoint_folder.complete_or_nothing(tmp_path, "global_step1", need_bytes=0):
        assert not list(tmp_path.glob("global_step*"))
        raise RuntimeError
