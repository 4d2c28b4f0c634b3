"""Streamed weights used outside their layer: their gradients count, wherever the weight rests when it is used."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.rig import DEVICES, Model, batches, make_executor, plan_for, train, train_plain


def penalized(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """An L2 penalty over all weights; where they rest on the host, so does its share."""
    return Model.loss(model, ids) + 0.1 * sum(p.square().sum().to(ids.device) for p in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("home", ["cpu", "gpu", "mixed"])
@pytest.mark.parametrize("keep", ["none", "all"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_penalty_over_all_weights(device, home, keep, accumulation):
    torch.manual_seed(0)
    model = Model().to(device)
    data = batches(3 * accumulation, device)
    steps = [data[i : i + accumulation] for i in range(0, len(data), accumulation)]
    reference, expected_norms = train_plain(model, steps, max_norm=0.5, loss=penalized)
    executor = make_executor(model, plan_for(model, home=home, keep=keep, device=device), device=device)
    norms = train(executor, steps, max_norm=0.5, loss=penalized)
    # A gradient that is summed outside and inside of the layer is rounded once more than autograd's one sum.
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=0, atol=3e-5)
    executor.close()


@pytest.mark.parametrize("device", DEVICES)
def test_penalty_shrinks_a_layer_that_did_not_run(device):
    torch.manual_seed(0)
    model = Model(num_layers=3).to(device)
    executor = make_executor(model, plan_for(model, device=device), device=device)
    executor.begin_forward()
    before = model.layers[2].up.weight.detach().abs().sum().item()
    model.layers[2].up.weight.square().sum().backward()
    norm, applied = executor.step(0.0)
    executor.flush()
    assert applied and norm.total > 0
    assert model.layers[2].up.weight.detach().abs().sum().item() < before
    executor.close()
