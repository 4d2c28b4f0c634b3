"""What the planner gains over fixed policies on the same simulator: models x hardware files, step times and the gain.

    python benchmarks/policies_table.py [--limit 10] [--only 7b,32b] > table.md

Needs no GPU; all figures are the simulator's. Exits with 1 if any policy that fits is faster than the plan.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.plan.policies import POLICIES, evaluate
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.solve import solve_problem
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.units import GIB
from tests.plan.shapes import profile

HARDWARE = Path(__file__).parents[1] / "configs" / "hardware"
BATCHES = {"h200_1x": 16, "h100_1x": 8, "a100_80gb_1x": 8, "rtx4090_128gb": 2}
"""Sequences of 1024 tokens."""
HOST_GIB = {"7b": 60, "14b": 110, "32b": 300, "70b": 700, "moe": 300}
"""For 8-bit states; where the machine has less, as if it had this much."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=10.0, help="search time in seconds")
    parser.add_argument("--only", default="", help="models, separated by commas")
    arguments = parser.parse_args()
    names = [policy.name for policy in POLICIES]
    print(f"| model, batch x 1024, hardware, host GiB | plan s/step | {' | '.join(names)} | gain over the best |")
    print("| --- | --- |" + " --- |" * (len(names) + 1))
    slower = 0
    for model, host_gib in HOST_GIB.items():
        if arguments.only and model not in arguments.only.split(","):
            continue
        for file, batch in BATCHES.items():
            slower += not _print_row(model, file, batch, host_gib, arguments.limit)
    sys.exit(1 if slower else 0)


def _print_row(model: str, file: str, batch: int, host_gib: int, limit_s: float) -> bool:
    """One line of the table; whether no policy is faster."""
    machine = HardwareProfile.load(HARDWARE / f"{file}.json")
    cpu_bytes = max(machine.cpu_free_bytes, host_gib * GIB)
    request = PlanRequest(max_tokens=batch * 1024, cpu_budget_bytes=cpu_bytes, fidelity="balanced")
    problem = build_problem(profile(model), machine, request)
    outcomes = [evaluate(policy, problem, machine.host_memory_bytes_per_s) for policy in POLICIES]
    cells = [f"{o.times.step_s:.3f}" if o.fits else f"({o.times.step_s:.3f})" for o in outcomes]
    case = f"{model}, {batch}, {file}, {cpu_bytes / GIB:.0f}"
    try:
        step_s = simulate(problem, solve_problem(problem, time_limit_s=limit_s)).step_s
    except InfeasiblePlanError:
        print(f"| {case} | does not fit | {' | '.join(cells)} | - |", flush=True)
        return not any(outcome.fits for outcome in outcomes)
    best_s = min((o.times.step_s for o in outcomes if o.fits), default=None)
    gain = "only one that fits" if best_s is None else f"{best_s / step_s - 1:.0%}"
    print(f"| {case} | {step_s:.3f} | {' | '.join(cells)} | {gain} |", flush=True)
    return best_s is None or step_s <= best_s * (1 + 1e-9)


if __name__ == "__main__":
    main()
