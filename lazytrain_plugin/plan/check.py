"""Checks a plan against a model, a machine and budgets. Trusts neither the planner nor the plan's own figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from lazytrain_plugin.errors import InfeasiblePlanError, PlanMismatchError
from lazytrain_plugin.plan.accounting import Ledger, account
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Fidelity, Tier


def check_plan(
    plan: PlacementPlan,
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    max_tokens: int | None = None,
    gpu_budget_bytes: int | None = None,
    cpu_budget_bytes: int | None = None,
    accumulation_steps: int = 1,
) -> Ledger:
    """Recomputes the plan's bytes per tier; returns them line by line.

    Args:
        max_tokens: tokens of the micro-batch to check for; None means the plan's own.

    Raises:
        PlanMismatchError: other units than the model's, a stem whose weights are off the GPU, or a lossy choice that
            the plan's fidelity forbids.
        InfeasiblePlanError: a tier's budget is exceeded; the message has need and have.
    """
    tokens = max_tokens or plan.max_tokens
    if tokens is None:
        raise PlanMismatchError("the plan has no max_tokens; pass the tokens of a micro-batch")
    for part, units, profiles in (("unit", plan.units, model.units), ("stem", plan.stem, model.stem)):
        planned, present = [unit.name for unit in units], [profile.name for profile in profiles]
        if planned != present:
            odd = next((a or b for a, b in zip_longest(planned, present) if a != b), "?")
            raise PlanMismatchError(
                f"the plan is for another model: {len(planned)} {part} entries against {len(present)}, "
                f"first difference at {odd!r}; plan for this model again"
            )
    every_unit = (*plan.units, *plan.stem)
    state_bits = {unit.state_bits for unit in every_unit}
    if plan.fidelity == Fidelity.EXACT and 8 in state_bits:
        lossy = next(unit.name for unit in every_unit if unit.state_bits == 8)
        raise PlanMismatchError(
            f'{lossy}: 8-bit states in a plan of fidelity "exact"; plan with "fidelity": "balanced" to allow them'
        )
    if hardware.has_gpu and any(unit.weights != Tier.GPU for unit in plan.stem):
        raise PlanMismatchError("a stem unit's weights are off the GPU; they are read there between steps")
    ledger = account(
        _problem(plan, model, hardware, tokens, gpu_budget_bytes, cpu_budget_bytes, accumulation_steps), plan
    )
    have = {
        "gpu": (gpu_budget_bytes or hardware.gpu_free_bytes) if hardware.has_gpu else 0,
        "cpu": cpu_budget_bytes or hardware.cpu_free_bytes,
    }
    for tier, need_bytes in ledger.total_bytes().items():
        if need_bytes > have[tier]:
            fullest = max(getattr(ledger, tier).items(), key=lambda line: line[1])
            raise InfeasiblePlanError(
                f"the plan needs {format_bytes(need_bytes)} of {tier} memory and has {format_bytes(have[tier])} "
                f"(most of it: {fullest[0]}, {format_bytes(fullest[1])}); plan again for this machine"
            )
    return ledger


def _problem(plan, model, hardware, tokens, gpu_budget_bytes, cpu_budget_bytes, accumulation_steps) -> PlacementProblem:
    """The problem with each unit's moments in the plan's own bits (a hand-written plan may mix them)."""

    def build(bits: int) -> PlacementProblem:
        return build_problem(
            model,
            hardware,
            max_tokens=tokens,
            gpu_budget_bytes=gpu_budget_bytes,
            cpu_budget_bytes=cpu_budget_bytes,
            fidelity=plan.fidelity,
            state_bits=bits,
            accumulation_steps=accumulation_steps,
        )

    by_bits = {bits: build(bits) for bits in (8, 32)}
    return replace(
        by_bits[32],
        units=tuple(by_bits[unit.state_bits].units[index] for index, unit in enumerate(plan.units)),
        stem=tuple(by_bits[unit.state_bits].stem[index] for index, unit in enumerate(plan.stem)),
    )
