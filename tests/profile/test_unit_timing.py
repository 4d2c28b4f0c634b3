"""Real times of one unit per kind, from a model that has no memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from lazytrain_plugin.errors import UnsupportedModelError
from lazytrain_plugin.profile import unit_timing
from lazytrain_plugin.profile.unit_timing import measure_units, time_unit
from lazytrain_plugin.runtime.discovery import discover
from tests.profile.test_extract import SMALL, profile_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on_meta(config, dtype=torch.bfloat16):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model, [(unit.name, unit.module) for unit in discover(model).units]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Gemma2Config(**SMALL, head_dim=12)], ids=["llama", "gemma2"])
def test_every_unit_gets_times_and_the_model_stays_on_meta(device, config):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    model, units = on_meta(config)
    profile = measure_units(profile_of(model), model, units, torch.device(device), batch_size=2, sequence_length=37)
    assert all(0 < unit.forward_s_per_token < 1e-2 and 0 < unit.backward_s_per_token < 1e-2 for unit in profile.units)
    launches = [s for unit in profile.units for s in (unit.forward_launch_s, unit.backward_launch_s)]
    assert all(0 < s < 1e-2 for s in launches) if device == "cuda" else launches == [None] * len(launches)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all("forward" not in vars(module) and not module._forward_pre_hooks for module in model.modules())


def test_units_of_one_kind_are_timed_once_and_others_for_themselves(monkeypatch):
    model, units = on_meta(LlamaConfig(**SMALL))
    model.model.layers[1].mlp.down_proj.weight.requires_grad_(False)
    timed = []
    monkeypatch.setattr(
        "lazytrain_plugin.profile.unit_timing.time_unit",
        lambda module, *rest, **options: timed.append(module) or time_unit(module, *rest, **options),
    )
    profile = measure_units(profile_of(model), model, units, torch.device("cpu"), batch_size=1, sequence_length=16)
    assert timed == [units[0][1], units[1][1]]
    assert profile.units[0].forward_s_per_token == profile.units[2].forward_s_per_token


class Slow(nn.Module):
    """10 ms forward, 20 ms backward, by a clock that nothing else moves."""

    def __init__(self, clock):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))
        self.clock = clock

    def forward(self, x):
        return _Work.apply(x * self.weight, self.clock)

    def __deepcopy__(self, memo):
        return Slow(self.clock)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        clock.now_s += 0.01
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now_s += 0.02
        return gradient, None


def test_times_are_those_of_the_unit(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    clock.perf_counter = lambda: clock.now_s
    monkeypatch.setattr(unit_timing, "time", clock)
    times = time_unit(Slow(clock), (torch.empty(2, 3, device="meta", requires_grad=True),), {}, torch.device("cpu"))
    assert times.forward_s == pytest.approx(0.01) and times.backward_s == pytest.approx(0.02)
    assert clock.now_s == pytest.approx(0.03 * (unit_timing.WARM_UP_RUNS + unit_timing.TIMED_RUNS))


def test_a_model_that_does_not_run_on_meta_tensors_is_refused_with_the_way_out():
    model, units = on_meta(LlamaConfig(**SMALL))
    inner = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: inner(hidden * float(hidden.sum()))
    profile = profile_of(model)
    with pytest.raises(UnsupportedModelError, match="without --measure"):
        measure_units(profile, model, units, torch.device("cpu"), batch_size=1, sequence_length=8)
