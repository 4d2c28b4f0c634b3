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
        ({"gpu_memory": 3}, "gpu_memory"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        HardwareProfile.from_json(json.dumps({**json.loads(builders.hardware().to_json()), **change}))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_other_files_are_refused(text):
    with pytest.raises(ConfigError, match="not a hardware profile"):
        HardwareProfile.from_json(text)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        HardwareProfile.load(tmp_path / "none.json")


def test_a_disk_whose_shared_rates_are_not_known_takes_turns():
    raw = json.loads((HARDWARE / "h100_1x.json").read_text())
    del raw["nvme_read_shared_bytes_per_s"], raw["nvme_write_shared_bytes_per_s"]
    machine = HardwareProfile.from_json(json.dumps(raw))
    problem = build_problem(builders.model(2), machine, PlanRequest(max_tokens=8))
    assert problem.nvme_read_delay_s(1e9) == pytest.approx(problem.nvme_write_s(1e9))
    assert problem.nvme_write_delay_s(1e9) == pytest.approx(problem.nvme_read_s(1e9))
