"""DeepSpeed's debug API (`safe_get_full_fp32_param` and its siblings) answers for weights that LazyTrain places."""

import copy
import io

import pytest
import torch
from deepspeed import utils
from torch import nn

from integration_tests.loops import KEPT, MIXED, RESIDENT, STREAMED, adamw, initialize, model_loss, random_batches
from integration_tests.test_failure_cases_model_shapes import build
from lazytrain_plugin.errors import LazyTrainError

placements = pytest.mark.parametrize("placement", [STREAMED, KEPT, RESIDENT, MIXED], ids=str)
BATCHES = random_batches(2)


@placements
def test_masters_states_and_gradients_are_those_of_plain_torch(placement, tmp_path):
    model = build()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain.parameters())
    engine = initialize(model, adamw(model.parameters()), tmp_path, placement=placement, accumulation=2)
    pairs = list(zip(model.parameters(), plain.parameters()))
    assert all(utils.safe_get_full_optimizer_state(ours, "exp_avg") is None for ours, _ in pairs)
    for _ in range(2):
        for batch in BATCHES:
            (model_loss(plain, batch) / 2).backward()
            engine.backward(model_loss(engine, batch))
            for ours, theirs in pairs:
                assert torch.equal(utils.safe_get_full_grad(ours), theirs.grad)
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
        # Read while updates may still be pending.
        for ours, theirs in pairs:
            assert torch.equal(utils.safe_get_full_fp32_param(ours), theirs)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(utils.safe_get_full_optimizer_state(ours, key), optimizer.state[theirs][key])
            assert utils.safe_get_full_grad(ours) is None
    engine.destroy()


@pytest.mark.parametrize("state_bits", [32, 8])
def test_values_that_are_set_train_on(state_bits, tmp_path):
    model = build()
    engine = initialize(model, adamw(model.parameters()), tmp_path, implementation="native", state_bits=state_bits)
    run_step(engine)
    weight = model.layers[1].up.weight
    master = torch.randn(weight.shape)
    utils.safe_set_full_fp32_param(weight, master)
    utils.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")
    assert torch.equal(weight, master)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), master)
    assert not utils.safe_get_full_optimizer_state(weight, "exp_avg").any()
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg_sq").any()
    run_step(engine)
    assert 0 < (weight - master).abs().max() < 0.05
    engine.destroy()


def test_what_can_not_be_done_says_so(tmp_path):
    model = build()
    weight = model.layers[0].up.weight
    engine = initialize(model, adamw(model.parameters()), tmp_path)
    with pytest.raises(LazyTrainError, match=r"layers\.0\.up\.weight has no optimizer state 'exp_avg'.*first update"):
        utils.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")
    with pytest.raises(LazyTrainError, match=r"shape \(41, 32\) and was given \(3,\)"):
        utils.safe_set_full_fp32_param(weight, torch.zeros(3))
    engine.backward(model_loss(engine, BATCHES[0]))
    with pytest.raises(LazyTrainError, match="register_hook"):
        utils.safe_set_full_grad(weight, torch.zeros(weight.shape))
    engine.destroy()
    with pytest.raises(LazyTrainError, match="engine was destroyed"):
        utils.safe_get_full_fp32_param(weight)


def test_other_parameters_are_left_to_deepspeed(tmp_path):
    model = build()
    engine = initialize(model, adamw(model.parameters()), tmp_path)
    assert utils.safe_get_full_fp32_param(nn.Parameter(torch.zeros(3))) is None
    assert utils.safe_get_full_fp32_param(copy.deepcopy(model.layers[0].up.weight)) is None
    # A pickled parameter holds nothing of the engine.
    file = io.BytesIO()
    torch.save(nn.ParameterList(model.parameters()).state_dict(), file)
    assert b"lazytrain" not in file.getvalue()
    engine.destroy()


def run_step(engine):
    engine.backward(model_loss(engine, BATCHES[0]))
    engine.step()
