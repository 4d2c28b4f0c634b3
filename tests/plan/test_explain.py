"""What a person reads: one screen, equal units together, reasons on request."""

from dataclasses import replace

import pytest
from rich.console import Console

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.explain import explain_plan, explain_unit
from lazytrain_plugin.plan.greedy import greedy_plan
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.units import MIB, format_bytes
from tests.plan import builders

MODEL, MACHINE = builders.model(40), builders.hardware()
BUDGET = builders.GPU_RESERVE_BYTES + 540 * MIB
PLAN = greedy_plan(MODEL, MACHINE, PlanRequest(max_tokens=2048, gpu_budget_bytes=BUDGET))


def text_of(renderable) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(renderable)
    return console.export_text()


def test_forty_layers_fit_one_screen():
    ledger = check_plan(PLAN, MODEL, MACHINE, PlanRequest(gpu_budget_bytes=BUDGET))
    text = text_of(explain_plan(PLAN, ledger=ledger, have_bytes={"gpu": BUDGET, "cpu": MACHINE.cpu_free_bytes}))
    assert len(text.splitlines()) <= 40
    assert format_bytes(BUDGET) in text and "16.0 GiB" in text  # have, per tier
    assert "layers.39" not in text and ".. 39" in text
    assert "stem.embed" in text and PLAN.stem[0].reason in " ".join(text.split())


@pytest.mark.parametrize("name", ["layers.3", "layers.3.w0", "layers.39", "stem.head", "head"])
def test_one_unit_by_its_name_or_a_tensor(name):
    text = " ".join(text_of(explain_unit(PLAN, name)).split())
    unit = PLAN.unit({"layers.3.w0": "layers.3", "head": "stem.head"}.get(name, name))
    assert f"unit {unit.name} weights" in text and unit.reason in text


@pytest.mark.parametrize(
    ("fidelity", "says"), [("exact", "exact but for 8-bit optimizer states,"), ("balanced", "balanced,")]
)
def test_states_in_fewer_bits_than_the_fidelity_says(fidelity, says):
    """A job may set "optimizer.state_bits" alone; its plan is not what "exact" promises."""
    plan = replace(PLAN.with_units(state_bits=8), fidelity=fidelity)
    assert f"fidelity {says}" in text_of(explain_plan(plan))
    assert "fidelity exact, " in text_of(explain_plan(PLAN))


def test_unknown_unit():
    with pytest.raises(PlanMismatchError, match="layers.99"):
        explain_unit(PLAN, "layers.99")
