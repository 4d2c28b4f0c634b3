"""What is said about a lower fidelity: a gain that a plan of it really has, and nothing where there is none."""

from __future__ import annotations

import re

from lazytrain_plugin.plan.advice import fidelity_advice
from lazytrain_plugin.plan.greedy import greedy_plan
from lazytrain_plugin.vocab import Fidelity
from tests.plan.builders import hardware, model
from tests.plan.test_formats import WORK, request


def test_a_gain_is_named_and_can_be_had():
    profile = model(12, **WORK, boundary_bytes_per_token=8 * 512)
    exact, compact = request(Fidelity.EXACT, 1.75), request(Fidelity.COMPACT, 1.75)
    plan = greedy_plan(profile, hardware(), exact)
    lines = fidelity_advice(plan, profile, hardware(), exact)
    gain = {word: float(x) for word, x in re.findall(r'"(\w+)" would be ([\d.]+)x as fast', "\n".join(lines))}
    assert gain["compact"] > 1.05
    had = plan.predicted_step_s / greedy_plan(profile, hardware(), compact).predicted_step_s
    assert gain["compact"] <= had * 1.02


def test_nothing_is_said_where_nothing_is_gained():
    profile = model(4, **WORK)
    plan = greedy_plan(profile, hardware(), request(Fidelity.COMPACT))
    assert fidelity_advice(plan, profile, hardware(), request(Fidelity.COMPACT)) == []
    roomy = request(Fidelity.EXACT)
    lines = fidelity_advice(greedy_plan(profile, hardware(), roomy), profile, hardware(), roomy)
    assert all("balanced" in line or "compact" in line for line in lines)
