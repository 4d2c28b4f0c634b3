"""What fewer bits gain: each lossy choice of a plan against the same placement without it, and what a lower fidelity
would win."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lazytrain_plugin.errors import InfeasiblePlanError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.bits import bits_of, is_lossy, plan_error
from lazytrain_plugin.plan.check import problem_of
from lazytrain_plugin.plan.formats import TENSOR_CLASSES, GradientErrors, describe_errors, tensor_error
from lazytrain_plugin.plan.greedy import fits
from lazytrain_plugin.plan.planner import plan_without_solver
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Activations, Fidelity, Tier

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
    """Of the step; below 0: it costs time, and is there for its memory. Where the same placement without it doesn't
    fit, against one in which as many of these units compute again what they saved as must."""
    saved_bytes: dict[str, int]
    """Per tier, at its fullest moment."""
    needed: bool
    """Without it the placement exceeds a budget."""
    error: str
    num_recomputing: int = 0
    """Of these units, how many would have to compute again what they save, for the placement to fit without it."""
    detail: str = ""
    """Which bits."""

    def __str__(self) -> str:
        memory = ", ".join(
            f"{abs(num_bytes) / GIB:.1f} GiB {'less' if num_bytes > 0 else 'more'} {NAMES[tier]}"
            for tier, num_bytes in self.saved_bytes.items()
            if abs(num_bytes) >= 0.05 * GIB
        )
        time = f"{1e3 * abs(self.saved_s):.0f} ms {'less' if self.saved_s >= 0 else 'more'} per step"
        needed = "; without it this placement doesn't fit" if self.needed else ""
        if self.needed and self.num_recomputing:
            needed = f"; without it {self.num_recomputing} of them would have to recompute"
        units = "; ".join(filter(None, (f"{self.num_units} units", self.detail)))
        return f"{self.what} ({units}): {', '.join(filter(None, (time, memory)))}{needed}; {self.error}"


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
    for what, has, undo, error in _kinds(plan, request.gradient_errors):
        lossy = [unit for unit in (*plan.units, *plan.stem) if has(unit)]
        if not lossy:
            continue
        other = _changed(plan, undo)
        exact = problem_of(other, model, hardware, request)
        without_bytes, needed, num_recomputing = account(exact, other).total_bytes(), not fits(exact, other), 0
        if needed and what == ACTIVATIONS:
            other, num_recomputing = _recomputing(exact, plan, other)
        choices.append(
            LossyChoice(
                what=what,
                num_units=len(lossy),
                saved_s=simulate(exact, other).step_s - with_s,
                saved_bytes={tier: without_bytes.get(tier, 0) - with_bytes.get(tier, 0) for tier in NAMES},
                needed=needed,
                error=error(lossy),
                num_recomputing=num_recomputing,
                detail=_bits_in_use(plan) if what == ACTIVATIONS else "",
            )
        )
    return choices


def _recomputing(problem: PlacementProblem, plan: PlacementPlan, exact: PlacementPlan) -> tuple[PlacementPlan, int]:
    """`exact`, in which so few of the units that save in codes in `plan` recompute that it fits, and how many; as it
    was, and 0, where that is not enough."""
    lossy = [u for u, unit in enumerate(plan.units) if is_lossy(unit)]

    def without(count: int) -> PlacementPlan:
        first = frozenset(lossy[:count])
        recomputes = {"activations": Activations.RECOMPUTE, "saved": Tier.GPU}
        units = (replace(unit, **recomputes) if u in first else unit for u, unit in enumerate(exact.units))
        return replace(exact, units=tuple(units))

    count = next((count for count in range(1, len(lossy) + 1) if fits(problem, without(count))), 0)
    return without(count), count


ACTIVATIONS = "activations in fewer bits"
Kind = tuple[
    str, Callable[[UnitPlan], bool], Callable[[UnitPlan], UnitPlan], Callable[[list[UnitPlan]], str]
]  # what, whether a unit has it, the unit without it, its error


def _kinds(plan: PlacementPlan, measured: GradientErrors | None) -> Iterator[Kind]:
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
        is_lossy,
        lambda unit: replace(unit, saved_bits=16, boundary_bits=16),
        lambda units: _activation_error(plan, units, measured),
    )


def _bits_in_use(plan: PlacementPlan) -> str:
    """How many units have each tensor in how many bits."""
    lossy = [unit for unit in plan.units if is_lossy(unit)]
    texts = []
    for tensor, name in (("saved", "products"), ("boundary", "inputs")):
        counts = Counter(bits_of(unit, tensor) for unit in lossy)
        texts.append(f"{name}: " + ", ".join(f"{counts[bits]} in {bits} bits" for bits in sorted(counts)))
    return "; ".join(texts)


def _activation_error(plan: PlacementPlan, units: list[UnitPlan], measured: GradientErrors | None) -> str:
    bits = min(min(unit.saved_bits, unit.boundary_bits) for unit in units)
    largest = max(tensor_error(tensor, bits_of(unit, tensor), measured) for unit in units for tensor in TENSOR_CLASSES)
    return (
        f"gradients of single operators off by up to {largest:.1%}, {plan_error(plan, measured):.1%} over all layers "
        f"({describe_errors(bits, measured)})"
    )


def advise(plan: PlacementPlan, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> Advice | None:
    """The lower fidelity that would win the most, if that is more than 5 % of the step; None otherwise.

    Plans without the solver (two seconds), once for each lower fidelity; `plan` was made for `request`. Errors: as
    `problem_of`.
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
            candidate = plan_without_solver(model, hardware, lower)
        except InfeasiblePlanError:
            continue  # a request may leave no room for a step that another planner found
        speedup = step_s / candidate.predicted_step_s
        if best is None or speedup > best.speedup + 1e-3:
            best = Advice(fidelity, speedup, num_bytes - sum(candidate.predicted_bytes.values()))
    return best if best is not None and best.speedup > 1 + WORTH_SAYING_FRAC else None


def _changed(plan: PlacementPlan, change: Callable[[UnitPlan], UnitPlan]) -> PlacementPlan:
    return replace(plan, units=tuple(map(change, plan.units)), stem=tuple(map(change, plan.stem)))
