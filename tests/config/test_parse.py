import re
from dataclasses import fields

import pytest

from lazytrain_plugin.config.folders import filesystem_type
from lazytrain_plugin.config.parse import lazytrain_block, parse_block
from lazytrain_plugin.config.schema import LazyTrainConfig, OptimizerConfig, PlanConfig
from lazytrain_plugin.errors import ConfigError


def refusal(block: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_block(block)
    return str(caught.value)


def test_empty_block_gives_the_defaults():
    assert parse_block({}) == LazyTrainConfig()


def test_every_key_is_read(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    config = parse_block(
        {
            "enabled": True,
            "fidelity": "balanced",
            "gpu_memory_gib": 22.5,
            "cpu_memory_gib": 100,
            "nvme_path": [str(tmp_path)],
            "nvme_gib": 0.001,
            "max_tokens": 32768,
            "plan": {"path": str(plan)},
            "optimizer": {"state_bits": 32, "implementation": "native", "threads": 8},
            "fused_kernels": False,
            "watchdog_s": 0,
        }
    )
    assert config == LazyTrainConfig(
        fidelity="balanced",
        gpu_memory_gib=22.5,
        cpu_memory_gib=100,
        nvme_path=[str(tmp_path)],
        nvme_gib=0.001,
        max_tokens=32768,
        plan=PlanConfig(path=str(plan)),
        optimizer=OptimizerConfig(state_bits=32, threads=8),
        fused_kernels=False,
        watchdog_s=0,
    )


def test_null_means_the_default_where_a_key_allows_it():
    assert parse_block({"gpu_memory_gib": None, "max_tokens": None, "plan": {"path": None}}) == LazyTrainConfig()


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"fidelty": "exact"}, '"fidelty" in "lazytrain"; did you mean "fidelity"'),
        ({"gpu_memory_gb": 24}, 'did you mean "gpu_memory_gib" (budgets are in GiB'),
        ({"GPU_MEMORY_GIB": 24}, 'did you mean "gpu_memory_gib"'),
        ({"enable": False}, 'did you mean "enabled"'),
        ({"optimizer": {"thread": 4}}, '"thread" in "lazytrain.optimizer"; did you mean "threads"'),
        ({"state_bits": 8}, 'it belongs at "lazytrain.optimizer.state_bits"'),
        ({"optimizer": {"max_tokens": 8}}, 'it belongs at "lazytrain.max_tokens"'),
        ({"implementaton": "torch"}, 'did you mean "lazytrain.optimizer.implementation"'),
        ({"optimizer": {"bits": 8}}, 'did you mean "state_bits" or "lazytrain.gradients.bits" or'),
        ({"trace": {"nvme_path": "/x"}}, 'did you mean "path" or "lazytrain.nvme_path"'),
        ({"path": "/x"}, 'did you mean "nvme_path" or "lazytrain.plan.path" or "lazytrain.trace.path"'),
        ({"bits": 8}, 'belongs at "lazytrain.gradients.bits" or "lazytrain.activations.bits" or'),
        ({"xyzzy": 1}, "the keys are enabled, fidelity"),
        ({7: 1}, 'Unknown key "7"'),
    ],
)
def test_unknown_key_names_the_nearest(block, says):
    assert says in refusal(block)


SECTIONS = {item.name: item.metadata["section"] for item in fields(LazyTrainConfig) if "section" in item.metadata}


@pytest.mark.parametrize(("section", "key"), [(s, item.name) for s, kind in SECTIONS.items() for item in fields(kind)])
def test_one_word_of_a_key_is_taken_for_it_in_its_own_section_first(section, key):
    names = {item.name for item in fields(SECTIONS[section])}
    for word in {key.split("_")[0], key.split("_")[-1]} - names:
        asked = refusal({section: {word: 1}})
        assert (
            re.search(rf'did you mean "[a-z_]*{word}[a-z_]*"', asked) and f'"{section}.' not in asked.split("mean")[1]
        )


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"gpu_memory_gib": "24GB"}, "write the number of GiB: 22.35"),
        ({"gpu_memory_gib": "24 GiB"}, "write the number of GiB: 24"),
        ({"cpu_memory_gib": "512"}, "write the number of GiB: 512"),
        ({"gpu_memory_gib": "lots"}, "expected a number above 0, or null, without quotes"),
        ({"gpu_memory_gib": "auto"}, "write null"),
        ({"fused_kernels": "auto"}, "leave the key out"),
        ({"fidelity": "auto"}, "leave the key out"),
        ({"enabled": "false"}, "write false without quotes"),
        ({"enabled": 0}, '"lazytrain.enabled" is 0; expected true or false'),
        ({"gpu_memory_gib": True}, '"lazytrain.gpu_memory_gib" is true; expected a number above 0, or null'),
        ({"max_tokens": True}, "is true; expected an integer of at least 1, or null"),
        ({"max_tokens": 1024.0}, "is 1024.0; expected an integer"),
        ({"optimizer": {"state_bits": 8.0}}, '"lazytrain.optimizer.state_bits" is 8.0; expected 32 or 8, or null'),
        ({"optimizer": {"state_bits": 4}}, "is 4; expected 32 or 8, or null"),
        ({"optimizer": {"threads": 0}}, "is 0; expected an integer of at least 1"),
        ({"gpu_memory_gib": -1}, "is -1; expected a number above 0"),
        ({"gpu_memory_gib": 0}, "is 0; expected a number above 0"),
        ({"gpu_memory_gib": float("nan")}, "is NaN; expected a number"),
        ({"cpu_memory_gib": float("inf")}, "is Infinity; expected a number"),
        ({"watchdog_s": -0.5}, "is -0.5; expected a number of at least 0"),
        ({"watchdog_s": None}, "is null; expected a number of at least 0"),
        ({"shard": "jobs"}, 'is "jobs"; expected "node" or "job"'),
        ({"fidelity": "Exact"}, 'is "Exact"; expected "exact" or "balanced" or "compact"'),
        ({"plan": "plan.json"}, '"lazytrain.plan" is "plan.json"; expected an object'),
        ({"plan": None}, '"lazytrain.plan" is null; expected an object'),
    ],
)
def test_wrong_value_says_where_what_and_the_remedy(block, says):
    assert says in refusal(block)


@pytest.mark.parametrize(
    ("block", "state_bits", "gradient_bits", "activation_bits"),
    [
        ({}, 32, 16, 16),
        ({"fidelity": "balanced"}, 8, 16, 16),
        ({"fidelity": "compact"}, 8, 8, 4),
        ({"gradients": {"bits": 8}}, 32, 8, 16),
        ({"activations": {"bits": 5}}, 32, 16, 5),
        ({"fidelity": "compact", "gradients": {"bits": 16}, "optimizer": {"state_bits": 32}}, 32, 16, 4),
    ],
)
def test_single_switches_override_what_fidelity_says(block, state_bits, gradient_bits, activation_bits):
    config = parse_block(block)
    assert (config.state_bits, config.resting_gradient_bits) == (state_bits, gradient_bits)
    assert config.activation_bits == activation_bits


@pytest.mark.parametrize("block", [{"fidelity": "balanced"}, {"optimizer": {"state_bits": 8}}])
def test_torch_optimizer_has_no_8_bit_states(block):
    block["optimizer"] = {**block.get("optimizer", {}), "implementation": "torch"}
    assert 'use "native"' in refusal(block)


def test_torch_optimizer_with_32_bit_states_at_lower_fidelity():
    config = parse_block({"fidelity": "balanced", "optimizer": {"implementation": "torch", "state_bits": 32}})
    assert config.state_bits == 32


@pytest.mark.parametrize(
    ("block", "bits"),
    [
        ({}, 32),
        ({"fidelity": "balanced"}, 8),
        ({"optimizer": {"state_bits": 8}}, 8),
        ({"fidelity": "balanced", "optimizer": {"state_bits": 32}}, 32),
    ],
)
def test_state_bits_follow_fidelity_unless_overridden(block, bits):
    assert parse_block(block).state_bits == bits


def test_missing_plan_file_and_missing_folder_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path / 'plan.json'} is not a file" in refusal({"plan": {"path": "plan.json"}})
    assert f"the folder {tmp_path / 'plans'} does not exist" in refusal({"plan": {"path": "plans/plan.json"}})
    assert "is not a file" in refusal({"plan": {"path": str(tmp_path)}})


def test_the_folder_of_a_trace_is_there_before_anything_is_trained(tmp_path):
    assert parse_block({"trace": {"path": str(tmp_path / "trace.json")}}).trace.path
    text = refusal({"trace": {"path": str(tmp_path / "no" / "trace.json")}})
    assert f"the folder {tmp_path / 'no'} does not exist" in text and '"lazytrain.trace.path"' in text
    assert "that is a folder; name a file in it" in refusal({"trace": {"path": str(tmp_path)}})
    for kernels in ("/proc/trace.json", "/sys/trace.json"):
        assert re.search(r"is the kernel's own \((proc|sysfs)\)", refusal({"trace": {"path": kernels}}))


def test_a_trace_does_not_replace_the_plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{}")
    assert "are one file" in refusal({"trace": {"path": str(path)}, "plan": {"path": str(path)}})


def test_a_path_may_begin_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "plan.json").write_text("{}")
    block = {"plan": {"path": "~/plan.json"}, "trace": {"path": "~/trace.json"}, "nvme_path": ["~"], "nvme_gib": 0.001}
    config = parse_block(block)
    assert config.plan.path == str(tmp_path / "plan.json")
    assert config.trace.path == str(tmp_path / "trace.json")
    assert config.nvme_paths == (str(tmp_path),)


class TestLazytrainBlock:
    def test_absent(self):
        assert lazytrain_block({"zero_optimization": {"stage": 3}}) is None
        assert lazytrain_block(None) is None

    def test_switched_off(self):
        assert lazytrain_block({"lazytrain": {"enabled": False, "a key of a later version": 1}}) is None

    @pytest.mark.parametrize("block", [{}, {"enabled": True}, {"enabled": "false"}, {"enabled": 0}, {"enable": False}])
    def test_anything_but_a_literal_false_is_left_for_the_parser(self, block):
        assert lazytrain_block({"lazytrain": block}) is block

    @pytest.mark.parametrize("block", [True, None, "auto", []])
    def test_not_an_object(self, block):
        with pytest.raises(ConfigError, match=re.escape('write "lazytrain": {}')):
            lazytrain_block({"lazytrain": block})


def test_nvme_folders_are_one_or_several(tmp_path):
    second = tmp_path / "with a blank"
    second.mkdir()
    assert parse_block({}).nvme_paths == ()
    assert parse_block({"nvme_path": str(tmp_path)}).nvme_paths == (str(tmp_path),)
    both = [str(tmp_path), str(second)]
    assert parse_block({"nvme_path": both, "nvme_gib": 0.001}).nvme_paths == tuple(both)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("/no/such/folder", '"lazytrain.nvme_path" is "/no/such/folder", but /no/such/folder does not exist'),
        (__file__, "is a file; name an existing folder"),
        (["/dev/shm"], r"/dev/shm is host memory \(tmpfs\), not a disk"),
        ("/proc", r"is the kernel's own \(proc\); name a folder on a disk"),
        ("/sys/kernel", r"is the kernel's own \(sysfs\)"),
        ([], r'"lazytrain.nvme_path" is \[\]; expected a string or a list of strings, or null'),
        ([3], r"is \[3\]; expected a string or a list of strings"),
        ("auto", "write null"),
    ],
)
def test_nvme_folders_that_cannot_serve_are_refused(value, says):
    assert re.search(says, refusal({"nvme_path": value}))


def test_a_disk_named_twice_is_no_second_disk(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    disk, link = str(tmp_path / "disk"), str(tmp_path / "link")
    assert f'"{disk}" twice; name each disk once' in refusal({"nvme_path": [disk, disk]})
    assert f'"{disk}" and "{link}", which are one folder' in refusal({"nvme_path": [disk, link]})


def test_more_nvme_space_than_there_is_is_refused(tmp_path):
    text = refusal({"nvme_path": str(tmp_path), "nvme_gib": 1e7})
    assert '"lazytrain.nvme_gib" is 1e+07' in text and "free in" in text and str(tmp_path) in text
    assert '"lazytrain.nvme_path" is not' in refusal({"nvme_gib": 3})
    assert '"lazytrain.nvme_path" is not' in refusal({"nvme_write_gib_per_day": 3})
    assert "above 0" in refusal({"nvme_path": str(tmp_path), "nvme_write_gib_per_day": 0})


def test_an_evaluation_batch_is_a_number_of_tokens():
    assert parse_block({"plan": {"evaluation_tokens": 4096}}).plan.evaluation_tokens == 4096
    assert '"lazytrain.plan.evaluation_tokens" is 0' in refusal({"plan": {"evaluation_tokens": 0}})
    assert "integer" in refusal({"plan": {"evaluation_tokens": 2.5}})


def test_the_file_system_of_a_path_is_that_of_the_mount_it_lies_in(tmp_path):
    assert filesystem_type("/dev/shm") == "tmpfs"
    assert filesystem_type("/proc/self/fd") == "proc"
    assert filesystem_type(tmp_path) not in ("", "proc")
