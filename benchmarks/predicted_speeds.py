"""Predicted steps of public shapes on one H200 in several GPU budgets, and what fills them.

    python benchmarks/predicted_speeds.py > table.md
    python benchmarks/predicted_speeds.py 7b:31:32:compact 7b:22:16:balanced     # SHAPE:GPU_GIB:BATCH:FIDELITY

Needs no GPU: the planner's plans for `configs/hardware/h200_1x.json`, 125 GiB of host memory, sequences of 1024 tokens,
32-bit states for exact, 8-bit for the others. "waste": the step over that of the same plan with everything on the GPU.
"again" is what backward computes again, with coding; H2D, D2H and worker are how much of the step each of them works.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lazytrain_plugin.plan import deadline
from lazytrain_plugin.plan.accounting import again_s
from lazytrain_plugin.plan.choices import home_of
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.plan.solve import solve_problem
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.plan.shapes import profile

HARDWARE = Path(__file__).parents[1] / "configs" / "hardware" / "h200_1x.json"
CELLS = [
    f"7b:{gpu_gib}:32:{fidelity}" for fidelity in ("exact", "balanced", "compact") for gpu_gib in (31, 70, 130)
] + ["7b:22:16:exact", "7b:22:16:balanced", "7b:70:8:balanced", "14b:110:32:balanced"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS, metavar="SHAPE:GPU_GIB:BATCH:FIDELITY")
    parser.add_argument("--limit", type=float, default=10.0, help="search time in CPU seconds")
    arguments = parser.parse_args()
    deadline.BUSY_FACTOR = math.inf
    print("| model, GPU GiB, batch, fidelity | s/step | TFLOP/s | forward | again | waits | waste | H2D, D2H, worker |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for cell in arguments.cells:
        shape, gpu_gib, batch, fidelity = cell.split(":")
        request = PlanRequest(
            max_tokens=int(batch) * 1024, gpu_budget_bytes=int(float(gpu_gib) * GIB), fidelity=fidelity
        )
        model = profile(shape)
        problem = build_problem(model, HardwareProfile.load(HARDWARE), request)
        plan = solve_problem(problem, time_limit_s=arguments.limit)
        print(row(cell, model, problem, plan), flush=True)
        print(f"{cell}: {summary(plan)}", file=sys.stderr, flush=True)


def row(cell: str, model, problem: PlacementProblem, plan: PlacementPlan) -> str:
    times = simulate(problem, plan)
    parameters = sum(unit.num_parameters for unit in (*model.units, *model.stem))
    tflops = 6 * parameters * problem.max_tokens / times.step_s / 1e12
    again = sum(again_s(cost, unit) for cost, unit in zip(problem.units, plan.units))
    waste = times.step_s / simulate(problem, all_on_gpu(plan)).step_s
    busy = ", ".join(f"{times.busy_s[resource] / times.step_s:.0%}" for resource in ("h2d", "d2h", "worker"))
    seconds = [times.forward_s, again, times.step_s - times.compute_s]
    return (
        f"| {cell.replace(':', ', ')} | {times.step_s:.3f} | {tflops:.0f} | "
        + " | ".join(f"{value:.2f}" for value in seconds)
        + f" | {waste:.3f} | {busy} |"
    )


def all_on_gpu(plan: PlacementPlan) -> PlacementPlan:
    """The same plan as if all it places fitted the GPU; what is computed again stays so."""
    on_gpu = dict.fromkeys(("weights", "states", "saved", "boundary"), Tier.GPU) | {
        "updater": Updater.GPU,
        "gradients": None,
    }
    units, stem = (tuple(replace(unit, **on_gpu) for unit in part) for part in (plan.units, plan.stem))
    return replace(plan, units=units, stem=stem)


def summary(plan: PlacementPlan) -> str:
    """How many units have which home, and save what where."""
    found: dict[str, int] = {}
    for unit in plan.units:
        found[home_of(unit)] = found.get(home_of(unit), 0) + 1
        if unit.activations != Activations.RECOMPUTE:
            saves = f"{unit.activations} in {unit.saved_bits} bits on {unit.saved}"
            found[saves] = found.get(saves, 0) + 1
    found["inputs in host memory"] = sum(unit.boundary == Tier.CPU for unit in plan.units)
    return ", ".join(f"{count} {what}" for what, count in found.items())


if __name__ == "__main__":
    main()
