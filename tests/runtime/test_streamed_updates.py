"""Units whose states rest in host memory and are updated by the GPU: the same bits as under every other plan."""

from __future__ import annotations

import functools

import pytest
import torch

from lazytrain_plugin.runtime import streamed_updates
from lazytrain_plugin.runtime.train_state import ExecutorState
from tests.runtime.rig import (
    DEVICES,
    Model,
    batches,
    make_executor,
    plan_for,
    train,
)

devices = pytest.mark.parametrize("device", DEVICES)
STREAMED = ["streamed", "streamed from gpu", "every kind"]
homes = pytest.mark.parametrize("home", STREAMED)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """Units of the tests pass in several chunks."""
    monkeypatch.setattr(streamed_updates, "STEM_STAGING_BYTES", 12 << 10)


def make(**kwargs) -> Model:
    torch.manual_seed(0)
    return Model(**kwargs)


def contents(executor) -> dict[str, torch.Tensor]:
    """Masters and states of every parameter, as a checkpoint sees them."""
    state, found = ExecutorState(executor), {}
    state.flush()
    for record in state.records:
        found[record.name] = state.read_master(record).clone()
        for key, value in state.read_state(record).items():
            found[f"{record.name} {key}"] = torch.as_tensor(value).clone()
    return found


def assert_same_contents(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [key for key in got if not torch.equal(got[key], expected[key])]
    assert not different


@functools.cache
def trained(home: str, accumulation: int, *, device="cpu", state_bits=32, dtype=None, max_norm=0.0, delay_s=0.0):
    """Contents after training under `home`, and the norms."""
    data = batches(3 * accumulation, device)
    model = make(num_layers=5).to(device)
    plan = plan_for(model, home=home, state_bits=state_bits, device=device)
    executor = make_executor(model, plan, device=device, native=True, dtype=dtype, transfer_delay_s=delay_s)
    steps = [data[i : i + accumulation] for i in range(0, len(data), accumulation)]
    norms = train(executor, steps, max_norm=max_norm)
    found = contents(executor)
    executor.close()
    return found, norms


@devices
@homes
@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_bit_equal_to_updates_by_the_cpu_and_to_resident_states(device, home, state_bits, accumulation, max_norm):
    for dtype in (torch.bfloat16, torch.float32):
        options = {"device": device, "state_bits": state_bits, "dtype": dtype, "max_norm": max_norm}
        got, norms = trained(home, accumulation, **options)
        for other in ("cpu", "gpu"):
            expected, expected_norms = trained(other, accumulation, **options)
            assert norms == expected_norms
            assert_same_contents(got, expected)
