"""Without the solver's package the greedy planner stands in, and says so."""

import importlib.util
import logging

import pytest

from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.request import PlanRequest
from tests.plan import builders


def test_without_highspy_the_greedy_planner_stands_in(monkeypatch, caplog):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "highspy" else find_spec(name))
    with caplog.at_level(logging.WARNING):
        plan = make_plan(builders.model(3), builders.hardware(), PlanRequest(max_tokens=64))
    assert plan.solver == {}
    assert "pip install highspy" in caplog.text


def test_with_highspy_the_plan_carries_its_gap():
    pytest.importorskip("highspy")
    plan = make_plan(builders.model(3), builders.hardware(), PlanRequest(max_tokens=64))
    assert plan.solver["gap_frac"] <= 0.01
