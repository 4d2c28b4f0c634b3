"""Layers timed before training: each kind once, kept for the next run, and the model is left as it was."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lazytrain_plugin.integration import unit_times
from lazytrain_plugin.integration.plan_cache import PlanCache
from lazytrain_plugin.integration.unit_times import scaled, timed_profile
from lazytrain_plugin.profile import unit_timing
from lazytrain_plugin.profile.extract import extract_model_profile
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.units import GIB
from tests.plan import builders

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))


def timed(model, device, folder, **changes):
    found = discover(model)
    dtypes = dict.fromkeys(model.parameters(), torch.bfloat16)
    units = [(unit.name, unit.module) for unit in found.units]
    stem = [(unit.name, [p for _, p in unit.parameters]) for unit in found.stem]
    profile = extract_model_profile(model, units, stem, fused_kernels=False, dtypes=dtypes)
    options = {
        "machine": builders.hardware(), "cache": PlanCache(folder), "dtypes": dtypes, "fused_kernels": False,
        "num_tokens": 24, "sequence_length": 12, "budget_bytes": GIB, **changes,
    }  # fmt: skip
    return profile, timed_profile(profile, model, found, device, **options)


def test_every_layer_gets_times_and_the_model_stays_as_it_was(model, device, tmp_path, monkeypatch):
    before, identities = copy.deepcopy(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    dtypes = []
    original = unit_timing.time_unit
    monkeypatch.setattr(
        unit_timing,
        "time_unit",
        lambda module, *args, **kwargs: (
            dtypes.append({p.dtype for p in module.parameters()}) or original(module, *args, **kwargs)
        ),
    )
    profile, got = timed(model, device, tmp_path)
    assert dtypes == [{torch.bfloat16}], "one kind, in the dtype that it is trained in"
    assert all(0 < unit.forward_s_per_token and 0 < unit.backward_s_per_token for unit in got.units)
    assert got.stem == profile.stem
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all("forward" not in vars(m) and not m._forward_pre_hooks for m in model.modules())
    # The next run finds them; another shape does not.
    monkeypatch.setattr(unit_timing, "time_unit", None)
    assert timed(model, device, tmp_path)[1] == got
    assert timed(model, device, tmp_path, sequence_length=24)[1].units[0].forward_s_per_token is None


@pytest.mark.parametrize("what", ["memory", "kinds", "failure"])
def test_what_cant_be_timed_is_said_and_planned_by_flop(what, model, device, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    changes = {"budget_bytes": 10_000} if what == "memory" else {}
    if what == "kinds":
        monkeypatch.setattr(unit_times, "MOST_KINDS", 0)
    if what == "failure":
        monkeypatch.setattr(model.model.layers[0], "forward", lambda *args, **kwargs: 1 / 0)
    profile, got = timed(model, device, tmp_path, **changes)
    assert got == profile
    assert "times of layers are derived from their FLOP" in caplog.text
    assert not list(tmp_path.glob("units-*"))


def test_damaged_times_are_measured_again(model, device, tmp_path):
    _, first = timed(model, device, tmp_path)
    (path,) = tmp_path.glob("units-*.json")
    for text in ("", "[[1, 2]]", "[[1, 2], [3, -4], [5, 6]]", "{"):
        path.write_text(text)
        assert timed(model, device, tmp_path)[1].units[2].backward_s_per_token > 0
    assert scaled(first, 2.0).units[1].forward_s_per_token == 2 * first.units[1].forward_s_per_token
