"""How well and how fast the planner solves: models x hardware files, greedy and program, proven gap, search and build.

    python benchmarks/solve_table.py [--limit 10] [--capabilities runtime|everything] [--only 7b,32b] > table.md

Needs no GPU. Figures are predictions by the simulator; only the solver's times are measured, in CPU seconds of a core,
and so is `--limit`, however long it takes on a busy machine.
"""

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.plan import deadline
from lazytrain_plugin.plan.greedy import plan_greedily
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.program import build_program
from lazytrain_plugin.plan.request import RUNTIME_CAPABILITIES, Capabilities, PlanRequest
from lazytrain_plugin.plan.solve import solve_problem
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.units import GIB
from tests.plan.shapes import profile

HARDWARE = Path(__file__).parents[1] / "configs" / "hardware"
CASES = [
    # Model, hardware file, sequences of 1024 tokens, micro-batches, state bits, GPU and host budget in GiB or None.
    ("7b", "h200_1x", 32, 1, 32, 31, None),
    ("7b", "h200_1x", 8, 1, 8, 70, None),
    ("7b", "h200_1x", 8, 4, 8, 70, None),
    ("14b", "h200_1x", 32, 1, 8, 130, None),
    ("32b", "h200_1x", 8, 1, 8, 130, 300),
    ("32b", "h200_1x", 8, 4, 8, 60, 420),
    ("32b", "h200_1x", 8, 4, 8, 130, 300),
    ("70b", "h200_1x", 8, 1, 8, 130, 700),
    ("70b", "h200_1x", 8, 4, 8, 130, 700),
    ("moe", "h200_1x", 8, 1, 8, 130, 300),
    ("7b", "h100_1x", 16, 1, 8, None, None),
    ("14b", "h100_1x", 8, 1, 8, None, None),
    ("32b", "h100_1x", 8, 1, 8, None, 300),
    ("70b", "h100_1x", 8, 1, 8, None, 700),
    ("moe", "h100_1x", 8, 1, 8, None, 300),
    ("7b", "a100_80gb_1x", 16, 1, 8, None, None),
    ("14b", "a100_80gb_1x", 8, 1, 8, None, 160),
    ("32b", "a100_80gb_1x", 8, 1, 8, None, 300),
    ("70b", "a100_80gb_1x", 4, 1, 8, None, 700),
    ("moe", "a100_80gb_1x", 8, 1, 8, None, 300),
    ("7b", "rtx4090_128gb", 4, 1, 8, None, None),
    ("14b", "rtx4090_128gb", 2, 1, 8, None, 160),
    ("32b", "rtx4090_128gb", 1, 1, 8, None, 300),
    ("70b", "rtx4090_128gb", 1, 1, 8, None, 700),
    ("moe", "rtx4090_128gb", 2, 1, 8, None, 300),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=10.0, help="search time in seconds")
    parser.add_argument("--capabilities", choices=("runtime", "everything"), default="runtime")
    parser.add_argument("--only", default="", help="models, separated by commas")
    parser.add_argument("--accumulated", action="store_true", help="only the cases with several micro-batches")
    arguments = parser.parse_args()
    deadline.BUSY_FACTOR = math.inf
    capabilities = RUNTIME_CAPABILITIES if arguments.capabilities == "runtime" else Capabilities.everything()
    print(
        "| model, batch x 1024, states, hardware, GPU / host GiB | greedy s/step | plan s/step | proven gap | "
        "greedy CPU s | build CPU s | all CPU s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model, file, batch, accumulation, bits, gpu_gib, cpu_gib in CASES:
        if arguments.only and model not in arguments.only.split(","):
            continue
        if arguments.accumulated and accumulation == 1:
            continue
        machine = HardwareProfile.load(HARDWARE / f"{file}.json")
        request = PlanRequest(
            max_tokens=batch * 1024,
            gpu_budget_bytes=gpu_gib and gpu_gib * GIB,
            cpu_budget_bytes=cpu_gib and cpu_gib * GIB,
            fidelity="balanced",
            state_bits=bits,
            accumulation_steps=accumulation,
            capabilities=capabilities,
        )
        problem = build_problem(profile(model), machine, request)
        size = f"{batch} x {accumulation}" if accumulation > 1 else f"{batch}"
        budgets = f"{problem.gpu_budget_bytes / GIB:.0f} / {problem.cpu_budget_bytes / GIB:.0f}"
        case = f"{model}, {size}, {bits}-bit, {file}, {budgets}"
        started_s = time.process_time()
        greedy = plan_greedily(problem)
        greedy_s = time.process_time() - started_s
        started_s = time.process_time()
        build_program(problem)
        build_s = time.process_time() - started_s
        started_s = time.process_time()
        try:
            plan = solve_problem(problem, time_limit_s=arguments.limit)
        except InfeasiblePlanError as error:
            print(f"| {case} | - | - | {str(error)[:90]} | {greedy_s:.1f} | {build_s:.2f} | - |", flush=True)
            continue
        total_s = time.process_time() - started_s
        greedy_step = f"{greedy.predicted_step_s:.3f}" if greedy else "none"
        gap = plan.solver["gap_frac"]
        print(
            f"| {case} | {greedy_step} | {plan.predicted_step_s:.3f} | {'-' if gap is None else f'{gap:.1%}'} "
            f"| {greedy_s:.1f} | {build_s:.2f} | {total_s:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
