"""How much larger a micro-batch fits where inputs may be dropped and computed again. No GPU needed.

    python benchmarks/dropped_inputs.py

Per model and machine: the largest batch (of sequences of 1024 tokens) that fits without and with dropped inputs, and
the tokens per second that the simulator predicts for both.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the shapes are the tests'

from lazytrain_plugin.plan.greedy import closest_plans, fits  # noqa: E402
from lazytrain_plugin.plan.last_resort import dropping_plan, without_dropping  # noqa: E402
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem  # noqa: E402
from lazytrain_plugin.plan.refusal import feasible  # noqa: E402
from lazytrain_plugin.plan.request import PlanRequest  # noqa: E402
from lazytrain_plugin.plan.result import PlacementPlan  # noqa: E402
from lazytrain_plugin.plan.simulate import simulate  # noqa: E402
from lazytrain_plugin.profile.hardware import HardwareProfile  # noqa: E402
from lazytrain_plugin.units import GIB  # noqa: E402
from lazytrain_plugin.vocab import Fidelity  # noqa: E402
from tests.plan.shapes import profile  # noqa: E402

SEQUENCE = 1024
CASES = (
    ("7b", "rtx4090_128gb", 96, Fidelity.EXACT),
    ("7b", "rtx4090_128gb", 119, Fidelity.EXACT),
    ("7b", "rtx3090_64gb", 59, Fidelity.BALANCED),
    ("14b", "h100_1x", 200, Fidelity.EXACT),
    ("7b", "h200_1x", 90, Fidelity.EXACT),
)
"""Model, machine, host memory in GiB, fidelity."""


def largest(holds) -> int:
    """The largest batch for which `holds`; 0: not even one."""
    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def main() -> None:
    print("| model, hardware, host GiB, states | without: batch | tokens/s | with: batch | tokens/s | dropped inputs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        print_row(*case)


def print_row(model: str, machine: str, host_gib: int, fidelity: Fidelity) -> None:
    hardware = HardwareProfile.load(ROOT / "configs" / "hardware" / f"{machine}.json")
    request = PlanRequest(max_tokens=SEQUENCE, cpu_budget_bytes=int(host_gib * GIB), fidelity=fidelity)

    def problem(batch: int) -> PlacementProblem:
        return build_problem(profile(model), hardware, replace(request, max_tokens=batch * SEQUENCE))

    plain = largest(lambda batch: feasible(without_dropping(problem(batch))))
    more = largest(lambda batch: batch <= plain or dropping_plan(problem(batch)) is not None)
    fitting = [plan for plan in closest_plans(problem(plain)) if fits(problem(plain), plan)] if plain else []
    dropping = dropping_plan(problem(more)) if more > plain else None
    before = max((tokens_per_s(problem(plain), plan) for plan in fitting), default=0)
    after = tokens_per_s(problem(more), dropping) if dropping else before
    dropped = sum(unit.boundary is None for unit in dropping.units) if dropping else 0
    case = f"{model}, {machine}, {host_gib}, {request.state_bits}-bit"
    print(f"| {case} | {plain} | {before:.0f} | {more} | {after:.0f} | {dropped} |", flush=True)


def tokens_per_s(problem: PlacementProblem, plan: PlacementPlan) -> float:
    return problem.max_tokens / simulate(problem, plan).step_s


if __name__ == "__main__":
    main()
