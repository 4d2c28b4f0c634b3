"""Exact plans give the same bits whatever happens around training: random sequences of it (tests/runtime/sequences.py).

`LAZYTRAIN_SEEDS=1000:2000` runs these seeds instead of the few that are always run.
"""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest

from lazytrain_plugin.runtime import activation_store, streamed_updates
from tests.runtime.rig import DEVICES
from tests.runtime.sequences import Op, Setting, draw_sequence, draw_setting, find_failure, shrink

SEEDS = range(*map(int, os.environ.get("LAZYTRAIN_SEEDS", "0:8").split(":")))


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    """Activations leave the device though they are small, and states pass it in several chunks."""
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(streamed_updates, "STEM_STAGING_BYTES", 48 << 10)


def check(setting: Setting, plan_seed: int, sequence: list[Op], device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        why = find_failure(setting, plan_seed, sequence, Path(folder), device)
        if why is not None:
            shorter = shrink(setting, plan_seed, sequence, Path(folder), device)
            lines = [str(setting), *map(str, shorter), find_failure(setting, plan_seed, shorter, Path(folder), device)]
            pytest.fail("\n".join(map(str, [why, "without what it does not need:", *lines])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", SEEDS)
def test_same_bits(seed, device):
    rng = random.Random(seed)
    setting = draw_setting(rng)
    check(setting, seed, draw_sequence(rng, len(setting.kinds), rng.randint(5, 30)), device)
