"""A search in a process of its own finds the same plan, and its failure is told."""

import time

import pytest

from lazytrain_plugin.errors import LazyTrainError
from lazytrain_plugin.plan.background import BackgroundSolve
from lazytrain_plugin.plan.planner import make_plan
from lazytrain_plugin.plan.request import PlanRequest
from tests.plan import builders

pytestmark = pytest.mark.multiprocess


def result_of(search: BackgroundSolve):
    try:
        for _ in range(600):
            plan = search.poll()
            if plan is not None:
                return plan
            time.sleep(0.1)
        raise AssertionError("no plan within a minute")
    finally:
        search.cancel()


def test_the_same_plan_as_in_this_process():
    arguments = builders.model(3), builders.hardware(), PlanRequest(max_tokens=512)
    assert result_of(BackgroundSolve(*arguments)) == make_plan(*arguments)


def test_a_search_that_fails_says_why():
    search = BackgroundSolve(builders.model(3), builders.hardware(cpu_gib=0.01), PlanRequest(max_tokens=512))
    with pytest.raises(LazyTrainError, match="background failed.*host memory: need"):
        result_of(search)


def test_a_search_can_be_given_up():
    search = BackgroundSolve(builders.model(3), builders.hardware(), PlanRequest(max_tokens=512))
    search.cancel()
    search.cancel()
