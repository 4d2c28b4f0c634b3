"""Error prices measured on the model that trains: found in an early step, without a trace in the training, kept."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest
import torch
import transformers

from lazytrain_plugin.integration.error_prices import FIRST_STEP, ErrorPrices
from lazytrain_plugin.integration.fused_modules import fuse_rms_norms, fuse_swiglus
from lazytrain_plugin.integration.plan_cache import PlanCache
from lazytrain_plugin.plan.formats import GRADIENT_ERROR
from lazytrain_plugin.runtime import activation_store
from lazytrain_plugin.runtime.operator_errors import OperatorErrors, watch_operators
from lazytrain_plugin.vocab import Activations, Fidelity
from tests.plan import builders
from tests.runtime.rig import DEVICES, make_executor, plan_for


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)


def trained(device, *, bits=4, measures=True, num_steps=FIRST_STEP + 2, num_layers=3):
    """Weights after some steps, and what was found, once for each time."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).train()
    fuse_rms_norms(model), fuse_swiglus(model)
    plan = plan_for(model, device=device)
    units = tuple(
        dataclasses.replace(unit, activations=Activations.MATMULS, saved_bits=bits, boundary_bits=bits)
        for unit in plan.units
    )
    executor = make_executor(model, dataclasses.replace(plan, units=units, fidelity=Fidelity.COMPACT), device=device)
    found = []
    prices = ErrorPrices(executor, found.append)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        ids = torch.randint(0, 64, (2, 16), generator=generator).to(device)
        executor.begin_forward()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        executor.step(1.0)
        if measures:
            prices.step_ended()
    executor.flush()
    weights = [p.detach().cpu().clone() for p in model.parameters()]
    executor.close()
    return weights, found


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_measures_its_classes_once_and_training_does_not_notice(device):
    weights, found = trained(device)
    (errors,) = found
    assert errors.keys() == GRADIENT_ERROR.keys()
    for name, row in errors.items():
        assert row.keys() == GRADIENT_ERROR[name].keys()
        assert 0.001 < row[4] < 0.5 and row[4] > 2 * row[8] > 0, name
        if name != "norm":  # there, what is off is the mean square, where roundings cancel more or less by luck
            assert row[4] > row[5] > row[6] > row[8] and row[4] / row[8] > 8, name
    undisturbed, nothing = trained(device, measures=False)
    assert nothing == []
    assert all(torch.equal(a, b) for a, b in zip(weights, undisturbed, strict=True))


def test_of_a_long_sequence_the_first_tokens_are_looked_at(monkeypatch):
    """The layer runs on all of it; fp32 copies are made of some rows."""
    errors = OperatorErrors(("fp4",), most_rows=3)
    linear = torch.nn.Linear(128, 4, bias=False)
    (handle,) = watch_operators(torch.nn.Sequential(linear), errors)
    x = torch.randn(2, 5, 128)
    linear(x).sum().backward()
    handle.remove()
    once = OperatorErrors(("fp4",))
    once.measure("gemm", lambda x: (torch.ones(3, 4).T @ x,), (x.flatten(0, 1)[:3],), (0,))
    assert errors.table()["gemm"]["fp4"] == pytest.approx(once.table()["gemm"]["fp4"], rel=1e-6)
    monkeypatch.setattr("lazytrain_plugin.integration.error_prices.MOST_ROWS", 4)
    (found,) = trained("cpu")[1]
    assert found.keys() == GRADIENT_ERROR.keys()


def test_three_layers_measure_and_their_errors_are_averaged(monkeypatch):
    seen = []

    def measured(call, inputs, output_gradients):
        seen.append(call.unit.name)
        if len(seen) == 2:
            raise ValueError("this one can't")
        return {"gemm": {4: 0.3, 8: 0.1}} if len(seen) == 1 else {"gemm": {4: 0.4, 8: 0.1}, "norm": {4: 0.2, 8: 0.1}}

    monkeypatch.setattr("lazytrain_plugin.integration.error_prices.measure", measured)
    _, (found,) = trained("cpu", num_layers=5)
    assert seen == ["model.layers.4", "model.layers.2", "model.layers.0"]  # as backward comes to them
    assert found["gemm"] == pytest.approx({4: (0.5 * (0.3**2 + 0.4**2)) ** 0.5, 8: 0.1})
    assert found["norm"] == {4: 0.2, 8: pytest.approx(0.1)}


def test_a_layer_that_does_not_run_keeps_the_others_prices(monkeypatch):
    """The step after the one that measured ends: what is known counts."""
    executor = types.SimpleNamespace(on_backward=None, units=[object(), object(), object()])
    monkeypatch.setattr("lazytrain_plugin.integration.error_prices._saves_codes", lambda unit: True)
    monkeypatch.setattr("lazytrain_plugin.integration.error_prices.measure", lambda *_: {"gemm": {4: 0.3, 8: 0.1}})
    found = []
    prices = ErrorPrices(executor, found.append)
    for _ in range(FIRST_STEP):
        prices.step_ended()
    executor.on_backward(types.SimpleNamespace(unit=executor.units[1], keep=False), [], [])
    assert not found
    prices.step_ended()
    assert found == [{"gemm": pytest.approx({4: 0.3, 8: 0.1})}] and executor.on_backward is None
    prices.step_ended()
    assert executor.on_backward is None and len(found) == 1


def test_without_codes_nothing_is_measured():
    assert trained("cpu", bits=16)[1] == []


def test_a_layer_that_can_not_be_sampled_says_so(caplog, monkeypatch):
    monkeypatch.setattr("lazytrain_plugin.integration.error_prices.MOST_TOKENS", 4)
    with caplog.at_level("INFO"):
        assert trained("cpu")[1] == []
    assert "a sequence has 16 tokens" in caplog.text and "error prices stay those of the plan" in caplog.text


def test_they_are_kept_for_the_next_run(tmp_path):
    model = builders.model(2)
    errors = {name: {bits: 2 * error for bits, error in row.items()} for name, row in GRADIENT_ERROR.items()}
    cache = PlanCache(tmp_path)
    assert cache.load_errors(model) is None
    cache.store_errors(model, errors)
    assert cache.load_errors(model) == errors
    assert cache.load_errors(builders.model(3)) is None
    (file,) = tmp_path.iterdir()
    for damaged in ("{", "[]", json.dumps({"norm": {"4": 0.1}}), json.dumps({"other": errors["norm"]})):
        file.write_text(damaged)
        assert cache.load_errors(model) is None
