"""Checks a plan against a model, a machine and budgets. Trusts neither the planner nor the plan's own figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from lazytrain_plugin.errors import InfeasiblePlanError, PlanMismatchError
from lazytrain_plugin.plan.accounting import Ledger, account, nvme_bytes_allowed_per_step, nvme_written_bytes
from lazytrain_plugin.plan.choices import WEIGHTS_AND_JOB
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Fidelity, Shard, Tier


def check_plan(
    plan: PlacementPlan,
    model: ModelProfile,
    hardware: HardwareProfile,
    request: PlanRequest | None = None,
) -> Ledger:
    """Recomputes the plan's bytes per tier; returns them line by line.

    Args:
        request: budgets and sizes to check for; `max_tokens` None means the plan's own. Fidelity, bits and
            numbers of slots are the plan's in any case.

    Raises:
        PlanMismatchError: other units than the model's, a stem whose weights are off the GPU, or a lossy choice that
            the plan's fidelity forbids.
        InfeasiblePlanError: a tier's budget is exceeded; the message has need and have.
    """
    request = request or PlanRequest()
    tokens = request.max_tokens or plan.max_tokens
    if tokens is None:
        raise PlanMismatchError("the plan has no max_tokens; pass the tokens of a micro-batch")
    _check_names(plan, model)
    every_unit = (*plan.units, *plan.stem)
    state_bits = {unit.state_bits for unit in every_unit}
    if plan.fidelity == Fidelity.EXACT and 8 in state_bits:
        lossy = next(unit.name for unit in every_unit if unit.state_bits == 8)
        raise PlanMismatchError(
            f'{lossy}: 8-bit states in a plan of fidelity "exact"; plan with "fidelity": "balanced" to allow them'
        )
    if hardware.has_gpu and any(unit.weights != Tier.GPU for unit in plan.stem):
        raise PlanMismatchError("a stem unit's weights are off the GPU; they are read there between steps")
    problem = problem_of(plan, model, hardware, replace(request, max_tokens=tokens))
    ledger = account(problem, plan)
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
    for tier, need_bytes in ledger.need_bytes().items():
        if need_bytes > have[tier]:
            fullest = max(getattr(ledger, tier).items(), key=lambda line: line[1])
            raise InfeasiblePlanError(
                f"the plan needs {format_bytes(need_bytes)} of {tier} memory and has {format_bytes(have[tier])} "
                f"(most of it: {fullest[0]}, {format_bytes(fullest[1])}); plan again for this machine"
            )
    written, allowed = nvme_written_bytes(problem, plan), nvme_bytes_allowed_per_step(problem)
    if written > allowed:
        raise InfeasiblePlanError(
            f"a step writes {format_bytes(written)} to NVMe, and its write budget allows {format_bytes(int(allowed))}; "
            "plan again, or allow more writes a day"
        )
    return ledger


def load_plan_file(
    path: str, unit_names: set[str], *, state_bits: int, gradient_bits: int, activation_bits: int, shard: Shard
) -> PlacementPlan:
    """The plan that a user gives for a job, if it is of this model and keeps what the job asks for.

    Args:
        unit_names: the model's units, and those of its stem.
        state_bits, gradient_bits, activation_bits: the fewest that the job allows.
        shard: over which ranks this job divides states.

    Raises:
        PlanMismatchError: other units than the model's, fewer bits than the job allows, or a plan for states that are
            divided over more ranks.
    """
    plan = PlacementPlan.load(path)
    every_unit = (*plan.units, *plan.stem)
    planned = {unit.name for unit in every_unit}
    if unit_names != planned:
        missing, extra = sorted(unit_names - planned), sorted(planned - unit_names)
        odd = [f"lacks {', '.join(missing[:3])}"] if missing else []
        odd += [f"has {', '.join(extra[:3])}, which this model has not"] if extra else []
        raise PlanMismatchError(
            f"{path} is not a plan of this model: it {' and '.join(odd)}; make one with `lazytrain plan`"
        )
    if plan.shard == Shard.JOB and shard == Shard.NODE:
        raise PlanMismatchError(
            f"{path} is for optimizer states that are divided over {plan.nodes} nodes, and here each node has all of "
            'them; set "shard": "job" in a job of several nodes, or plan again'
        )
    if shard == Shard.JOB and any(unit.weights == Tier.NVME for unit in plan.units):
        raise PlanMismatchError(f"{path} has {WEIGHTS_AND_JOB}")
    for what, key, least, bits_of in (
        ("optimizer states", "optimizer.state_bits", state_bits, lambda unit: unit.state_bits),
        ("gradients", "gradients.bits", gradient_bits, lambda unit: unit.gradient_bits),
        ("activations", "activations.bits", activation_bits, lambda unit: unit.saved_bits),
        ("inputs", "activations.bits", activation_bits, lambda unit: unit.boundary_bits),
    ):
        lossy = [unit for unit in every_unit if bits_of(unit) < least]
        if lossy:
            raise PlanMismatchError(
                f"{path} keeps the {what} of {lossy[0].name} (and {len(lossy) - 1} more) in {bits_of(lossy[0])} "
                f'bits, and this job asks for {least}; set "{key}" or a lower "fidelity", or plan again'
            )
    return plan


def _check_names(plan: PlacementPlan, model: ModelProfile) -> None:
    for part, units, profiles in (("unit", plan.units, model.units), ("stem", plan.stem, model.stem)):
        planned, present = [unit.name for unit in units], [profile.name for profile in profiles]
        if planned != present:
            odd = next((a or b for a, b in zip_longest(planned, present) if a != b), "?")
            raise PlanMismatchError(
                f"the plan is for another model: {len(planned)} {part} entries against {len(present)}, "
                f"first difference at {odd!r}; plan for this model again"
            )


def problem_of(
    plan: PlacementPlan, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest
) -> PlacementProblem:
    """The problem with each unit's moments and gradients in the plan's own bits (a hand-written plan may mix them).

    Raises:
        PlanMismatchError: the plan is for another model.
    """
    _check_names(plan, model)
    request = replace(
        request, max_tokens=request.max_tokens or plan.max_tokens, fidelity=plan.fidelity, activation_bits=None
    )

    def problem(state_bits: int, gradient_bits: int) -> PlacementProblem:
        bits = {"state_bits": state_bits, "embedding_state_bits": state_bits, "gradient_bits": gradient_bits}
        return build_problem(model, hardware, replace(request, **bits))

    every_unit = (*plan.units, *plan.stem)
    by_bits = {
        bits: problem(*bits) for bits in {(unit.state_bits, unit.gradient_bits) for unit in every_unit} | {(32, 16)}
    }

    def costs(part: str) -> tuple[UnitCost, ...]:
        units = enumerate(getattr(plan, part))
        return tuple(getattr(by_bits[unit.state_bits, unit.gradient_bits], part)[index] for index, unit in units)

    return replace(by_bits[32, 16], units=costs("units"), stem=costs("stem"))
