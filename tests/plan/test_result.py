"""A plan file is taken as it is, or refused with its name and what is wrong in it."""

import json

import pytest

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.vocab import Tier, Updater


def unit(name):
    return UnitPlan(name=name, weights=Tier.CPU, states=Tier.CPU, updater=Updater.CPU)


def plan():
    return PlacementPlan(units=(unit("layers.0"), unit("layers.1")), stem=(unit("stem"),))


def test_a_file_gives_the_plan_back(tmp_path):
    plan().save(tmp_path / "plan.json")
    assert PlacementPlan.load(tmp_path / "plan.json") == plan()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda raw: raw["units"][0].pop("weights"), "it has no weights"),
        (lambda raw: raw.pop("schema_version"), "not a LazyTrain plan"),
        (lambda raw: raw["units"][0].update(state_bits="8"), 'state_bits is "8"; give a whole number, without quotes'),
        (lambda raw: raw.update(max_tokens=4096.5), "max_tokens is 4096.5; give a whole number"),
        (lambda raw: raw.update(weight_slot=3), 'unknown key "weight_slot"; did you mean "weight_slots"?'),
        (lambda raw: raw["units"][0].update(weights="CPU"), "'CPU' is not a valid Tier"),
        (lambda raw: raw.update(schema_version=1), "plan again with this version"),
        (lambda raw: raw["units"].append(raw["units"][0]), "the plan has layers.0 twice"),
        (lambda raw: raw.update(weight_slots=1), "at least 2 weight slots"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, edit, says):
    path = tmp_path / "plan.json"
    raw = json.loads(plan().to_json())
    edit(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(PlanMismatchError) as caught:
        PlacementPlan.load(path)
    assert str(path) in str(caught.value) and says in str(caught.value)
