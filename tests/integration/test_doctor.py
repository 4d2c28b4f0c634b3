"""Every finding that would have saved somebody's job, and the exit status that a script can act on."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from lazytrain_plugin import _bootstrap
from lazytrain_plugin.config import folders
from lazytrain_plugin.integration import cli, doctor
from lazytrain_plugin.integration.findings import Status
from lazytrain_plugin.integration.meta_model import profile_from_config
from lazytrain_plugin.kernels import native
from lazytrain_plugin.plan.greedy import greedy_plan
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.profile import capacity, numa
from lazytrain_plugin.runtime import near_device
from tests.plan import builders

PLAN = greedy_plan(builders.model(2), builders.hardware(), PlanRequest(max_tokens=64))
DS_CONFIG = {"zero_optimization": {"stage": 3}, "lazytrain": {"fidelity": "balanced"}}


def statuses(findings):
    return {finding.check: finding.status for finding in findings}


def only(findings):
    (finding,) = findings
    return finding


class TestVersions:
    def test_this_environment_is_in_the_tested_ranges(self):
        assert Status.ERROR not in statuses(doctor.check_versions()).values()

    def test_ranges_come_from_the_package_metadata(self, monkeypatch):
        requires = ["torch>=99", "surely-not-there<2", "packaging>=1", 'transformers>=99; extra == "transformers"']
        requires += ['pytest>=99; extra == "test"', 'surely-no-kernels; extra == "gpu"']
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
        found = {finding.check: finding for finding in doctor.check_versions()}
        assert found["torch"].status == found["transformers"].status == Status.ERROR
        assert "outside the tested range >=99" in found["torch"].detail
        assert found["torch"].remedy == "pip install 'torch>=99'"
        assert found["surely-not-there"].status == Status.ERROR
        assert found["surely-no-kernels"].status == Status.NOTE
        assert found["packaging"].status == Status.OK
        assert "pytest" not in found

    def test_a_folder_on_pythonpath_is_not_an_installation(self, monkeypatch):
        monkeypatch.setattr(doctor, "DISTRIBUTION", "surely-not-there")
        assert list(doctor.check_versions())[-1].status == Status.ERROR


class TestHook:
    def test_active_here(self):
        assert only(doctor.check_hook()).status == Status.OK

    @pytest.mark.parametrize(
        ("cause", "says"),
        [
            ("switch", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
            ("no entry point", "no torch.backends entry point"),
            ("no site", "python -S"),
            ("unknown", "torch did not call"),
        ],
    )
    def test_each_silent_cause_is_named(self, monkeypatch, cause, says):
        monkeypatch.setattr(_bootstrap, "is_installed", lambda: False)
        if cause == "switch":
            monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        if cause == "no entry point":
            monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
        if cause == "no site":
            monkeypatch.setattr(doctor.sys, "flags", SimpleNamespace(no_site=1))
        finding = only(doctor.check_hook())
        assert finding.status == Status.ERROR
        assert says in finding.detail
        assert "lazytrain launch" in finding.remedy

    def test_a_failed_patch_is_told(self, monkeypatch):
        monkeypatch.setitem(_bootstrap.failures, "deepspeed", RuntimeError("initialize has changed"))
        assert "initialize has changed" in only(doctor.check_hook()).detail

    def test_a_package_that_replaced_initialize_is_told(self, monkeypatch):
        import deepspeed

        monkeypatch.setattr(deepspeed, "initialize", lambda: None)
        assert only(doctor.check_hook()).status == Status.ERROR


class TestMachine:
    def test_missing_kernels_are_a_warning_with_the_command_that_builds_them(self, monkeypatch):
        monkeypatch.setattr(native, "kernel_info", lambda: native.KernelInfo("torch", 2, None))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        finding = only(doctor.check_cpu_kernels())
        assert finding.status == Status.WARNING
        assert "python -m lazytrain_plugin._build" in finding.remedy

    def test_threads_are_those_of_a_rank(self, monkeypatch):
        monkeypatch.setattr(native, "kernel_info", lambda: native.KernelInfo("avx2", 1, "x.so"))
        monkeypatch.setattr(native, "default_num_threads", lambda ranks: 16 // ranks)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        kernels, omp = doctor.check_cpu_kernels()
        assert kernels.detail == "avx2, 4 threads per rank"
        assert omp.status == Status.NOTE

    @pytest.mark.parametrize(("has_gpu", "status"), [(True, Status.WARNING), (False, Status.OK)])
    def test_a_tight_page_lock_limit_matters_with_a_gpu(self, monkeypatch, has_gpu, status):
        tight = capacity.HostCapacity(total_bytes=2**36, free_bytes=2**35, pin_limit_bytes=2**23)
        monkeypatch.setattr(capacity, "host_capacity", lambda: tight)
        monkeypatch.setattr(doctor, "_has_gpu", lambda: has_gpu)
        found = {finding.check: finding for finding in doctor.check_host()}
        assert found["pinned memory"].status == status
        assert "8.0 MiB" in found["pinned memory"].detail
        assert found["host memory"].detail.startswith("32.0 GiB usable of 64.0 GiB")

    @pytest.mark.parametrize(("mib", "says"), [(64, "64.0 MiB"), (None, "missing"), (8192, None)])
    def test_small_shared_memory(self, monkeypatch, mib, says):
        """S-43: loader workers and ranks die there with a bus error and no word."""

        def disk_usage(path):
            assert path == "/dev/shm"
            if mib is None:
                raise FileNotFoundError(path)
            return SimpleNamespace(total=mib * 2**20)

        monkeypatch.setattr(capacity.shutil, "disk_usage", disk_usage)
        found = {finding.check: finding for finding in doctor.check_host()}["/dev/shm"]
        if says is None:
            assert found.status == Status.OK
        else:
            assert (found.status, found.detail) == (Status.WARNING, says)
            assert "--shm-size" in found.remedy and "dataloader_num_workers=0" in found.remedy

    @pytest.mark.parametrize("found", [True, False])
    def test_the_node_of_a_gpu(self, monkeypatch, found):
        node = numa.NumaNode(1, frozenset(range(8)), 2) if found else None
        monkeypatch.setattr(numa, "count_nodes", lambda: 2)
        monkeypatch.setattr(near_device, "node_of", lambda device: node)
        finding = only(doctor._check_node(0))
        assert finding.status == (Status.OK if found else Status.WARNING)
        assert ("node 1 of 2" in finding.detail and "8 processors" in finding.detail) if found else finding.remedy

    def test_one_node_is_not_worth_a_line(self, monkeypatch):
        monkeypatch.setattr(numa, "count_nodes", lambda: 1)
        assert list(doctor._check_node(0)) == []


class TestConfig:
    @pytest.fixture
    def write(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        def write(content, name="ds.json"):
            path = tmp_path / name
            path.write_text(content if isinstance(content, str) else json.dumps(content))
            return path

        return write

    def test_a_right_one(self, write):
        finding = only(doctor.check_config(write(DS_CONFIG)))
        assert finding.status == Status.OK
        assert "balanced, 8-bit optimizer states" in finding.detail

    def test_8_bit_states_of_the_embedding_alone_are_told(self, write):
        block = {"fidelity": "exact", "optimizer": {"embedding_state_bits": 8}}
        right, note = doctor.check_config(write({**DS_CONFIG, "lazytrain": block}))
        assert right.status == Status.OK and note.status == Status.NOTE
        assert "embedding_state_bits" in note.detail and "8-bit optimizer class" in note.remedy

    def test_a_yaml_is_followed_to_its_json(self, write):
        write(DS_CONFIG)
        path = write("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n", "launch.yaml")
        assert only(doctor.check_config(path)).status == Status.OK

    @pytest.mark.parametrize(
        ("content", "name", "says"),
        [
            ({**DS_CONFIG, "lazytrain": {"fidelty": "exact"}}, "ds.json", 'did you mean "fidelity"'),
            ({**DS_CONFIG, "fp16": {"enabled": True}}, "ds.json", "bf16"),
            ({"zero_optimization": {"stage": 3}}, "ds.json", "no enabled"),
            ("{'single': 1}", "ds.json", "line 1 column 2"),
            ("[]", "ds.json", "JSON object"),
            ("deepspeed_config: {zero_stage: 3}", "launch.yaml", "deepspeed_config_file"),
            ("deepspeed_config: {deepspeed_config_file: gone.json}", "launch.yml", "start at the folder that the job"),
            ({**DS_CONFIG, "lazytrain": {"cpu_memory_gib": 1e9}}, "ds.json", "lower it"),
            (
                {**DS_CONFIG, "lazytrain": {"cpu_memory_gib": 0.5}},
                "ds.json",
                "of which each process takes",
            ),
        ],
    )
    def test_a_wrong_one(self, write, content, name, says):
        last = list(doctor.check_config(write(content, name)))[-1]
        assert last.status == Status.ERROR
        assert says in last.detail + last.remedy

    def test_a_missing_file_is_named_with_what_to_give(self, tmp_path):
        finding = only(doctor.check_config(tmp_path / "gone.json"))
        assert finding.status == Status.ERROR and "gone.json: No such file" in finding.detail
        assert "give a DeepSpeed JSON" in finding.remedy

    @pytest.mark.parametrize(
        ("change", "block", "says"),
        [
            ({}, {}, None),
            ({"states": "nvme", "updater": "cpu"}, {}, "puts a part on NVMe"),
            ({"boundary": "nvme"}, {}, "puts a part on NVMe"),
            ({"states": "nvme", "updater": "cpu"}, {"nvme_path": "."}, None),
            ({"state_bits": 8}, {}, "keeps the optimizer states of layers.0"),
            ({"state_bits": 8}, {"fidelity": "balanced"}, None),
            ({"weights": "GPU"}, {}, "not a LazyTrain plan"),
        ],
    )
    def test_a_plan_that_the_job_could_not_follow(self, write, tmp_path, monkeypatch, change, block, says):
        monkeypatch.setattr(folders, "filesystem_type", lambda path: "ext4")
        raw = json.loads(PLAN.to_json())
        raw["units"][0].update(change)
        write(raw, "plan.json")
        path = write({**DS_CONFIG, "lazytrain": {"plan": {"path": "plan.json"}, **block}})
        first, last = doctor.check_config(path)
        assert first.status == Status.OK
        if says is None:
            assert last.status == Status.NOTE and "not compared with a model" in last.detail
            assert last.remedy == "add --model MODEL"
        else:
            assert last.status == Status.ERROR and says in last.detail

    @pytest.mark.parametrize("layers", [2, 3])
    def test_a_plan_of_another_model(self, write, tmp_path, layers):
        config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
        write({**config, "num_hidden_layers": layers, "vocab_size": 100}, "config.json")
        model = profile_from_config(str(tmp_path))
        names = lambda units: [{**raw_unit, "name": unit.name} for unit in units]  # noqa: E731
        raw = json.loads(PLAN.to_json())
        raw_unit = raw["units"][0]
        raw.update(units=names(model.units)[:2], stem=names(model.stem))
        write(raw, "plan.json")
        path = write({**DS_CONFIG, "lazytrain": {"plan": {"path": "plan.json"}}})
        _, fits, last = doctor.check_config(path, model=str(tmp_path))
        assert fits.status == Status.OK and "fits, in a small batch" in fits.detail
        if layers == 2:
            assert last.status == Status.OK
        else:
            assert last.status == Status.ERROR and "lacks model.layers.2" in last.detail

    def test_a_model_that_the_budgets_do_not_hold(self, write, tmp_path):
        """Judged with the value that the message names."""
        config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 2}
        write({**config, "num_hidden_layers": 24, "vocab_size": 32000}, "config.json")

        def judged(gib, **budgets):
            path = write({**DS_CONFIG, "bf16": {"enabled": True}, "lazytrain": {"cpu_memory_gib": gib, **budgets}})
            *_, last = doctor.check_config(path, model=str(tmp_path))
            return last

        least = 3 if torch.cuda.is_available() else 1.1
        last = judged(least)
        assert last.status in (Status.WARNING, Status.ERROR) and "whatever the micro-batch" in last.detail
        enough = float(re.search(r'"cpu_memory_gib": ([\d.]+)', last.detail)[1])
        assert judged(enough).status == Status.OK
        assert judged(enough - 0.02).status == Status.WARNING

    def test_a_disabled_block_is_a_note(self, write):
        path = write({"lazytrain": {"enabled": False}})
        assert only(doctor.check_config(path)).status == Status.NOTE

    def test_a_right_block_without_the_hook_is_an_error(self, write):
        assert only(doctor.check_config(write(DS_CONFIG), hook_works=False)).status == Status.ERROR

    def test_exit_status_and_json(self, write):
        good, bad = write(DS_CONFIG), write({"lazytrain": {"x": 1}}, "bad.json")
        result = CliRunner().invoke(cli.app, ["doctor", str(good), "--json"])
        assert result.exit_code == 0
        assert {"check": "hook", "status": "ok"}.items() <= next(
            finding for finding in json.loads(result.stdout) if finding["check"] == "hook"
        ).items()
        result = CliRunner().invoke(cli.app, ["doctor", str(bad)])
        assert result.exit_code == 1
        assert "error" in result.stdout
        assert re.search(r"Unknown\s+key", result.stdout)  # wrapped wherever the path before it ends


def test_the_switch_that_turns_every_plug_in_off_is_found(tmp_path):
    """In a real process: nothing else in this environment makes up for it."""
    process = subprocess.run(
        [sys.executable, "-m", "lazytrain_plugin.integration.cli", "doctor", "--json"],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 1, process.stderr
    errors = [finding for finding in json.loads(process.stdout) if finding["status"] == "error"]
    assert [finding["check"] for finding in errors] == ["hook"]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in errors[0]["detail"]
