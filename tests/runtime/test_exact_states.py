"""Tensors that are too small for 8-bit states keep 32-bit ones under an 8-bit plan, wherever states rest."""

import copy

import pytest
import torch

from lazytrain_plugin.kernels.adamw import Moment8
from lazytrain_plugin.profile.model import LEAST_CODED_NUMEL, TensorProfile, UnitProfile
from lazytrain_plugin.runtime.layout import lay_out
from lazytrain_plugin.runtime.state_layout import MOMENTS, state_flats
from lazytrain_plugin.runtime.train_state import ExecutorState
from tests.runtime.rig import DEVICES, HOMES, Model, assert_same_weights, batches, make_executor, plan_for, train

LEAST = 500
"""Between the biases and norms (24 to 50 elements) and the matrices (888 and more) of the rig's model."""


def trained(home: str, device: str, *, state_bits: int = 8, least: int = LEAST, num_steps: int = 4):
    torch.manual_seed(0)
    model = Model().to(device)
    plan = plan_for(model, home=home, state_bits=state_bits, device=device)
    executor = make_executor(model, plan, device=device, native=True, dtype=torch.bfloat16, least_coded_numel=least)
    train(executor, [[ids] for ids in batches(num_steps, device)], max_norm=1.0)
    return model, executor


def states_of(executor) -> dict[str, dict]:
    state = ExecutorState(executor)
    return {record.name: {k: copy.copy(v) for k, v in state.read_state(record).items()} for record in state.records}


@pytest.mark.parametrize("device", DEVICES)
def test_small_tensors_have_fp32_moments_and_large_ones_codes(device):
    _, executor = trained("cpu", device)
    for unit in executor.all_units:
        for tensor in unit.layout.trained:
            for name, _ in MOMENTS:
                assert isinstance(unit.home.moment(tensor, name), Moment8) == (tensor.numel >= LEAST), tensor.name
    for name, state in states_of(executor).items():
        assert ("exp_avg.codes" in state) == (state["exp_avg"].numel() >= LEAST), name
    executor.close()


@pytest.mark.parametrize("device", DEVICES)
def test_after_one_step_their_moments_are_those_of_32_bit_states(device):
    (_, mixed), (_, exact) = trained("cpu", device, num_steps=1), trained("cpu", device, state_bits=32, num_steps=1)
    of_mixed, of_exact = states_of(mixed), states_of(exact)
    for name, state in of_mixed.items():
        same = all(torch.equal(state[moment], of_exact[name][moment]) for moment, _ in MOMENTS)
        assert same == (state["exp_avg"].numel() < LEAST), name
    mixed.close(), exact.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("home", [*(home for home in HOMES if home != "cpu"), "every kind"])
def test_homes_give_the_same_bits(home, device):
    (model, executor), (other, reference) = trained(home, device), trained("cpu", device)
    assert_same_weights(model, other)
    for (name, state), expected in zip(states_of(executor).items(), states_of(reference).values(), strict=True):
        assert state.keys() == expected.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[key])), (name, key)
    executor.close(), reference.close()


def test_a_move_between_homes_keeps_them():
    model, executor = trained("cpu", "cpu")
    before = states_of(executor)
    executor.place(plan_for(model, home="streamed", state_bits=8))
    after = states_of(executor)
    assert all(torch.equal(before[name]["exp_avg"], after[name]["exp_avg"]) for name in before)
    executor.close()


@pytest.mark.parametrize(("saved_with", "resumed_with"), [(0, LEAST), (LEAST, 0), (LEAST, LEAST)])
def test_states_resume_between_them(saved_with, resumed_with):
    """A checkpoint of a run that had codes for everything, and the other way round."""
    _, first = trained("cpu", "cpu", least=saved_with)
    saved, expected = ExecutorState(first), states_of(first)
    _, second = trained("cpu", "cpu", least=resumed_with, num_steps=1)
    state = ExecutorState(second)
    for record, own in zip(saved.records, state.records, strict=True):
        state.write_master(own, saved.read_master(record))
        state.write_state(own, saved.read_state(record))
    for name, values in states_of(second).items():
        assert values["step"] == expected[name]["step"]
        for moment, _ in MOMENTS:
            wanted = expected[name][moment]
            small = wanted.numel() < LEAST
            # What becomes codes is rounded; all else arrives as it was.
            coded_now = resumed_with == 0 and saved_with > 0 and small
            torch.testing.assert_close(
                values[moment], wanted, rtol=0, atol=float(wanted.abs().max()) / 20 if coded_now else 0
            )
    first.close(), second.close()


def test_the_planner_counts_their_bytes():
    sizes = {"matrix": (64, 64), "bias": (37,), "norm": (LEAST_CODED_NUMEL - 1,)}
    profile = UnitProfile(
        name="unit",
        tensors=tuple(
            TensorProfile(name=name, shape=shape, dtype="bfloat16", trainable=True) for name, shape in sizes.items()
        ),
    )
    parameters = [torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)) for shape in sizes.values()]
    layout = lay_out(list(zip(sizes, parameters)), {p: p.dtype for p in parameters}, lambda p: True)
    plan = plan_for(Model(), state_bits=8).units[0]
    flats = {key: dtype.itemsize * numel for key, dtype, numel in state_flats(layout, plan, native=True)}
    assert flats.pop("remainder") == profile.remainder_bytes
    assert sum(flats.values()) == profile.moment_bytes(8)
