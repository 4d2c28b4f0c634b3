"""Hardware profiles: the shipped files, JSON, and mistakes in hand-written ones."""

import json
from pathlib import Path

import pytest

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.units import GIB
from tests.plan import builders

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
FILES = sorted(HARDWARE.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_files_load_and_say_where_figures_come_from(path):
    profile = HardwareProfile.load(path)
    assert profile.source.startswith(("measured", "estimate"))
    assert HardwareProfile.from_json(profile.to_json()) == profile


def test_six_machines_are_shipped():
    assert len(FILES) == 6
    assert [HardwareProfile.load(path).has_gpu for path in FILES].count(False) == 1


def test_gib_keys_and_free_memory_default_to_all():
    raw = json.loads(builders.hardware().to_json())
    for key in ("gpu_bytes", "gpu_free_bytes", "cpu_free_bytes"):
        del raw[key]
    profile = HardwareProfile.from_json(json.dumps({**raw, "gpu_gib": 2.5}))
    assert profile.gpu_bytes == profile.gpu_free_bytes == int(2.5 * GIB)
    assert profile.cpu_free_bytes == profile.cpu_bytes


def test_digest_follows_the_figures():
    assert builders.hardware().digest == builders.hardware().digest != builders.hardware(gpu_gib=9).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu_bytes": -1}, "can't be negative"),
        ({"h2d_bytes_per_s": 0}, "h2d_bytes_per_s must be above 0"),
        ({"layer_flop_frac": 1.5}, "share in"),
        ({"gpu_memory": 3}, 'unknown key "gpu_memory"; did you mean'),
        ({"gpu_gib": 24}, "both gpu_gib and gpu_bytes"),
        ({"h2d_bytes_per_s": "25e9"}, 'h2d_bytes_per_s is "25e9"; give a number, without quotes'),
        ({"h2d_bytes_per_s": float("nan")}, "h2d_bytes_per_s is NaN"),
        ({"matmul_flop_per_s": float("inf")}, "matmul_flop_per_s is Infinity"),
        ({"nvme_gib": "100"}, 'nvme_gib is "100"; give a number, without quotes'),
        ({"cpu_threads": True}, "cpu_threads is true; give a whole number"),
        ({"cpu_threads": 2.5}, "cpu_threads is 2.5; give a whole number"),
        ({"cpu_threads": None}, "cpu_threads is null"),
        ({"nvme_bytes": [1]}, "nvme_bytes is .1."),
        ({"name": 3}, "name is 3; give a string"),
        ({"gpu_free_bytes": 2**50}, "no more can be free than there is"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        HardwareProfile.from_json(json.dumps({**json.loads(builders.hardware().to_json()), **change}))


def test_what_is_missing_is_named():
    raw = json.loads(builders.hardware().to_json())
    del raw["cpu_threads"], raw["source"]
    with pytest.raises(ConfigError, match="it has no source, cpu_threads; compare with a file in configs/hardware/"):
        HardwareProfile.from_json(json.dumps(raw))


def test_whole_numbers_may_have_an_exponent():
    raw = json.loads(builders.hardware().to_json())
    profile = HardwareProfile.from_json(json.dumps({**raw, "cpu_bytes": 1e12, "nvme_bytes": 2e12}))
    assert profile.cpu_bytes == 10**12 and isinstance(profile.cpu_bytes, int) and isinstance(profile.nvme_bytes, int)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_other_files_are_refused(text):
    with pytest.raises(ConfigError, match="not a hardware profile"):
        HardwareProfile.from_json(text)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="can't be read.*leave --hardware out"):
        HardwareProfile.load(tmp_path / "none.json")


def test_a_wrong_file_is_named(tmp_path):
    path = tmp_path / "box.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=f"{path}: not a hardware profile"):
        HardwareProfile.load(path)


def test_a_disk_whose_shared_rates_are_not_known_takes_turns():
    raw = json.loads((HARDWARE / "h100_1x.json").read_text())
    del raw["nvme_read_shared_bytes_per_s"], raw["nvme_write_shared_bytes_per_s"]
    machine = HardwareProfile.from_json(json.dumps(raw))
    problem = build_problem(builders.model(2), machine, PlanRequest(max_tokens=8))
    assert problem.nvme_read_delay_s(1e9) == pytest.approx(problem.nvme_write_s(1e9))
    assert problem.nvme_write_delay_s(1e9) == pytest.approx(problem.nvme_read_s(1e9))
