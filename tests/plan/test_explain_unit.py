"""What another choice for one unit would change, against plans that make that choice."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.plan import explain_unit
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.explain import find_unit
from lazytrain_plugin.plan.explain_unit import alternatives, explain_choice
from lazytrain_plugin.plan.greedy import fits, leanest_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.plan import builders

MODEL = builders.model(6)


def lean(**changes):
    request = PlanRequest(max_tokens=4096, **changes)
    problem = build_problem(MODEL, builders.hardware(), request)
    return problem, leanest_plan(problem)


def test_an_alternative_is_the_plan_with_that_choice():
    problem, plan = lean(capabilities=Capabilities(offloaded_boundaries=True))
    found = {other.text: other for other in alternatives(problem, plan, "layers.2")}
    assert set(found) == {
        "weights and states on the GPU",
        "weights on the GPU, states on the host",
        "save keep",
        "input waits in host memory",
    }
    changes = {
        "weights and states on the GPU": {"weights": Tier.GPU, "states": Tier.GPU, "updater": Updater.GPU},
        "save keep": {"activations": Activations.KEEP},
        "input waits in host memory": {"boundary": Tier.CPU},
    }
    for text, fields in changes.items():
        units = list(plan.units)
        units[2] = replace(units[2], **fields)
        changed = replace(plan, units=tuple(units))
        assert found[text].step_s == simulate(problem, changed).step_s
        difference = account(problem, changed).need_bytes()["gpu"] - account(problem, plan).need_bytes()["gpu"]
        assert found[text].change_bytes["gpu"] == difference
        assert found[text].fits == fits(problem, changed)
    steps = [other.step_s for other in alternatives(problem, plan, "layers.2")]
    assert steps == sorted(steps)


def test_what_does_not_fit_says_so():
    problem, plan = lean()
    need = account(problem, plan).need_bytes()["gpu"]
    tight = replace(problem, gpu_budget_bytes=need)
    assert not any(o.fits for o in alternatives(tight, plan, "layers.2") if o.change_bytes["gpu"] > 0)
    assert any(o.change_bytes["gpu"] > 0 for o in alternatives(tight, plan, "layers.2"))


def test_stem_units_and_every_family():
    problem, plan = lean(capabilities=Capabilities.everything())
    stem = [other.text for other in alternatives(problem, plan, "stem.embed")]
    assert sorted(stem) == ["weights and states on the GPU", "weights on the GPU, states pass it for their update"]
    layer = [other.text for other in alternatives(problem, plan, "layers.0")]
    assert "on the host, states pass the GPU for their update" in layer and "save keep in host memory" in layer


def test_a_small_tensor_of_the_stem_is_found_by_the_model_alone():
    _, plan = lean()
    unit, tensor = find_unit(plan, "embed", MODEL)
    assert (unit.name, tensor.shape) == ("stem.embed", (4096, builders.MATRIX))
    assert find_unit(plan, "layers.3.w1", MODEL)[1].name == "layers.3.w1"
    assert find_unit(plan, "layers.3.w1") == (plan.unit("layers.3"), None)
    with pytest.raises(PlanMismatchError, match="no unit"):
        find_unit(plan, "norm", MODEL)


def test_what_changes_next_to_nothing_is_called_as_fast():
    """Predictions can't be told apart by a thousandth: nobody should move a layer for it."""
    assert explain_unit._change(0.9986, 1.0) == explain_unit._change(1.0014, 1.0) == "as fast"
    assert explain_unit._change(0.99, 1.0) == "-10.0 ms" and explain_unit._change(1.01, 1.0) == "+10.0 ms"
    problem, plan = lean()
    within = replace(problem, gpu_budget_bytes=1 << 40)
    profile = next(unit for unit in MODEL.units if unit.name == "layers.2")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(explain_choice(within, plan, profile))
    rows = {o.text: o.step_s for o in alternatives(within, plan, "layers.2")}
    step_s = simulate(problem, plan).step_s
    for line in console.export_text().splitlines():
        text = line.strip("│ ").split("  ")[0]
        if text in rows:
            assert ("as fast" in line) == (abs(rows[text] / step_s - 1) < explain_unit.LEAST_CHANGE_FRAC)
