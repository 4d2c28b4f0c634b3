"""The short table of a plan: what a person reads in the log before training starts."""

import re
from dataclasses import replace

import pytest

from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.greedy import greedy_plan, leanest_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.summary import summarize_plan
from lazytrain_plugin.units import GIB, format_bytes
from lazytrain_plugin.vocab import Tier
from tests.plan import builders


def summary(gpu_gib: float, cpu_gib: float, **changes):
    hardware = builders.hardware(gpu_gib=gpu_gib, cpu_gib=cpu_gib, **changes)
    request = PlanRequest(max_tokens=512, capabilities=Capabilities.everything())
    problem = build_problem(builders.model(8), hardware, request)
    plan = replace(greedy_plan(builders.model(8), hardware, request), solver={"gap_frac": 0.0134})
    times = simulate(problem, plan)
    return problem, plan, times, summarize_plan(problem, plan, times)


@pytest.mark.parametrize("gpu_gib", [1.6, 8, 0])
def test_every_unit_and_every_tier_is_told(gpu_gib):
    problem, plan, times, text = summary(gpu_gib, 16)
    counts = [int(found) for found in re.findall(r"^  (\d+) x ", text, re.MULTILINE)]
    assert sum(counts) == len(plan.units)
    need = account(problem, plan).need_bytes()
    for name, tier, have in (
        ("GPU", "gpu", problem.gpu_budget_bytes), ("host", "cpu", problem.cpu_budget_bytes)
    ):  # fmt: skip
        line = re.search(rf"^  {name}: +need +(.*?), have +(.*?) \(", text, re.MULTILINE)
        assert (line is not None) == bool(need.get(tier))
        assert line is None or line.groups() == (format_bytes(need[tier]), format_bytes(have))
    assert f"step: {times.step_s:.3g} s" in text and "at most 1.3% above the best" in text
    assert plan.units[0].reason in text


def test_what_rests_on_a_disk_is_told():
    disk = {"nvme_bytes": 50 * GIB, "nvme_read_bytes_per_s": 2e9, "nvme_write_bytes_per_s": 1e9}
    problem, plan, _, text = summary(1.7, 16, **disk)
    assert "NVMe" not in text
    plan = leanest_plan(problem)
    plan = replace(plan, units=(*plan.units[:5], *(replace(unit, states=Tier.NVME) for unit in plan.units[5:])))
    text = summarize_plan(problem, plan, simulate(problem, plan))
    need = format_bytes(account(problem, plan).need_bytes()["nvme"])
    assert re.search(rf"^  NVMe: +need +{need}, have  50.0 GiB ", text, re.MULTILINE)
    assert "  3 x weights host, states NVMe 32 bit, recompute" in text and "NVMe writes" in text
