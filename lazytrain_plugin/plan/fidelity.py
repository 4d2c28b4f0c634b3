"""What fewer bits gain: each lossy choice of a plan against the same placement without it, and what a lower fidelity
would win."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.check import problem_of
from lazytrain_plugin.plan.formats import GradientErrors, describe_errors, gradient_error
from lazytrain_plugin.plan.greedy import fits, greedy_plan
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Fidelity

WORTH_SAYING_FRAC = 0.05
"""A lower fidelity is named where it makes a step this much faster."""
STATE_ERRORS = (0.011, 0.0065)
"""rms error of first and second moments in 8 bits, of their rms, for normally distributed gradients and nearest
rounding (kernels/state8.py)."""
GRADIENT_CODE_ERROR = 0.0060
"""The same of a gradient in 8-bit codes (kernels/gradient_codes.py)."""


@dataclass(frozen=True, slots=True)
class LossyChoice:
    """One lossy choice of a plan, compared with the same placement without it."""

    what: str
    num_units: int
    saved_s: float
    """Of the step; below 0: it costs time, and is there for its memory."""
    saved_bytes: dict[str, int]
    """Per tier, at its fullest moment."""
    needed: bool
    """Without it the placement exceeds a budget."""
    error: str

    def __str__(self) -> str:
        memory = ", ".join(
            f"{abs(num_bytes) / GIB:.1f} GiB {'less' if num_bytes > 0 else 'more'} {NAMES[tier]}"
            for tier, num_bytes in self.saved_bytes.items()
            if abs(num_bytes) >= 0.05 * GIB
        )
        time = f"{1e3 * abs(self.saved_s):.0f} ms {'less' if self.saved_s >= 0 else 'more'} per step"
        needed = "; without it this placement doesn't fit" if self.needed else ""
        return f"{self.what} ({self.num_units} units): {', '.join(filter(None, (time, memory)))}{needed}; {self.error}"


NAMES = {"gpu": "GPU memory", "cpu": "host memory", "nvme": "NVMe"}


@dataclass(frozen=True, slots=True)
class Advice:
    """What a lower fidelity would win at least."""

    fidelity: Fidelity
    speedup: float
    saved_bytes: int
    """Over all tiers; below 0: it would use more."""

    def __str__(self) -> str:
        change = f"{abs(self.saved_bytes) / GIB:.0f} GiB {'less' if self.saved_bytes >= 0 else 'more'}"
        return f'"fidelity": "{self.fidelity}" would win at least {self.speedup:.2f}x, {change}'


def lossy_choices(
    plan: PlacementPlan, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest
) -> list[LossyChoice]:
    """One entry for each kind of lossy choice in `plan`. Errors: as `problem_of`."""
    problem = problem_of(plan, model, hardware, request)
    with_s, with_bytes = simulate(problem, plan).step_s, account(problem, plan).total_bytes()
    choices = []
    for what, is_lossy, undo, error in _kinds(request.gradient_errors):
        lossy = [unit for unit in (*plan.units, *plan.stem) if is_lossy(unit)]
        if not lossy:
            continue
        other = _changed(plan, undo)
        exact = problem_of(other, model, hardware, request)
        if what == ACTIVATIONS:
            exact = _without_coding(exact)
        without_bytes = account(exact, other).total_bytes()
        choices.append(
            LossyChoice(
                what=what,
                num_units=len(lossy),
                saved_s=simulate(exact, other).step_s - with_s,
                saved_bytes={tier: without_bytes.get(tier, 0) - with_bytes.get(tier, 0) for tier in NAMES},
                needed=not fits(exact, other),
                error=error(lossy),
            )
        )
    return choices


ACTIVATIONS = "activations in fewer bits"
Kind = tuple[
    str, Callable[[UnitPlan], bool], Callable[[UnitPlan], UnitPlan], Callable[[list[UnitPlan]], str]
]  # what, whether a unit has it, the unit without it, its error


def _kinds(measured: GradientErrors | None) -> Iterator[Kind]:
    yield (
        "8-bit optimizer states",
        lambda unit: unit.state_bits == 8,
        lambda unit: replace(unit, state_bits=32),
        lambda units: "moments off by {:.1%} and {:.1%} of their rms".format(*STATE_ERRORS),
    )
    yield (
        "8-bit gradients",
        lambda unit: unit.gradient_bits == 8,
        lambda unit: replace(unit, gradient_bits=16),
        lambda units: f"gradients off by {GRADIENT_CODE_ERROR:.1%} of their rms, the norm exact",
    )
    yield (
        ACTIVATIONS,
        lambda unit: min(unit.saved_bits, unit.boundary_bits) < 16,
        lambda unit: replace(unit, saved_bits=16, boundary_bits=16),
        lambda units: _activation_error(units, measured),
    )


def _activation_error(units: list[UnitPlan], measured: GradientErrors | None) -> str:
    bits = min(min(unit.saved_bits, unit.boundary_bits) for unit in units)
    largest = gradient_error(bits, measured)
    return f"gradients of single operators off by up to {largest:.1%} ({describe_errors(bits, measured)})"


def advise(plan: PlacementPlan, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> Advice | None:
    """The lower fidelity that would win the most, if that is more than 5 % of the step; None otherwise.

    Plans with the greedy planner, once for each lower fidelity; `plan` was made for `request`. Errors: as `problem_of`.
    """
    if not hardware.has_gpu:
        return None
    problem = problem_of(plan, model, hardware, request)
    step_s, num_bytes = simulate(problem, plan).step_s, sum(account(problem, plan).total_bytes().values())
    best = None
    order = list(Fidelity)
    for fidelity in order[order.index(request.fidelity) + 1 :]:
        lower = replace(request, fidelity=fidelity, state_bits=None, gradient_bits=None, activation_bits=None)
        try:
            candidate = greedy_plan(model, hardware, lower)
        except InfeasiblePlanError:
            continue  # a request may leave no room for a step that another planner found
        speedup = step_s / candidate.predicted_step_s
        if best is None or speedup > best.speedup + 1e-3:
            best = Advice(fidelity, speedup, num_bytes - sum(candidate.predicted_bytes.values()))
    return best if best is not None and best.speedup > 1 + WORTH_SAYING_FRAC else None


def _changed(plan: PlacementPlan, change: Callable[[UnitPlan], UnitPlan]) -> PlacementPlan:
    return replace(plan, units=tuple(map(change, plan.units)), stem=tuple(map(change, plan.stem)))


def _without_coding(problem: PlacementProblem) -> PlacementProblem:
    """Nothing is encoded and decoded."""

    def exact(strategies):
        return {name: replace(strategy, coding_frac=0.0, bits=16) for name, strategy in strategies.items()}

    return replace(problem, units=tuple(replace(cost, strategies=exact(cost.strategies)) for cost in problem.units))
