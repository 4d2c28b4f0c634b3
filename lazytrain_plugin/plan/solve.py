"""Solves the placement of one step: patterns for good placements, the program of docs/formulation.md for the bound."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace

from lazytrain_plugin.plan.bits import ERROR_WORTH_FRAC, is_lossy, may_code, plan_error, without_codes
from lazytrain_plugin.plan.counting import CountBounds
from lazytrain_plugin.plan.deadline import Deadline
from lazytrain_plugin.plan.greedy import explained, leanest_plan, plan_greedily
from lazytrain_plugin.plan.inputs_only import decide_inputs
from lazytrain_plugin.plan.last_resort import dropping_plan, without_dropping
from lazytrain_plugin.plan.policies import POLICIES
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.program import Outcome, build_program, configure, run_program
from lazytrain_plugin.plan.refusal import Rebuilder, infeasible
from lazytrain_plugin.plan.relaxation import RelaxationError, relax, rounded
from lazytrain_plugin.plan.replay import Judge
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.search import polished, search_patterns
from lazytrain_plugin.plan.simplify import LEAST_GAIN_FRAC, simplest
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.vocab import Activations, Tier

logger = logging.getLogger(__name__)

GAP_FRAC = 0.005
"""Proven distance from the best step time at which the search ends."""
TIME_LIMIT_S = 10.0
DEEP_UNITS = 16
"""With more units the search over single units has never found or proven what counts left."""
REFUSAL_S = 0.5
"""For the whole program where no pattern was found that fits, but fractions of units do."""
INPUTS_S = 3.0
"""For inputs alone, where nothing fits without dropping some."""
ROUNDS = 6
"""Of searching on from the best placement, and for a better bound, in turn."""
NODES_A_ROUND = 60
ROUNDS_FRAC = 0.75
"""Of the time that is left when they begin; the rest is for searches with fewer families."""
FEWER_TRIES_FRAC = 0.3
"""Of the tries of a search, where a family is left out."""
FEWER_ROUNDS = 3
FEWER_ERRORS_TRIES = 3
"""Of the fastest plans found, how many get their bits chosen, for the one whose error is the least."""
FAMILIES = (
    "streamed_states",
    "offloaded_boundaries",
    "offloaded_saved",
    "nvme",
    "nvme_boundaries",
    "nvme_saved",
    "nvme_gradients",
)
"""Of choices that a search may do without, as `Capabilities` names them."""
SLOTS = ("weight_slots", "gradient_slots", "state_slots", "nvme_slots")
FEWEST_SLOTS = 2
WEIGHT_SLOT_CHOICES = (2, 3, 4, 6)
GRADIENT_SLOT_CHOICES = (2, 3, 4)
RING_GAIN_FRAC = 0.005
"""A number of slots other than the usual must make the step faster by this much."""


def solve_plan(
    model: ModelProfile,
    hardware: HardwareProfile,
    request: PlanRequest,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    gap_frac: float = GAP_FRAC,
) -> PlacementPlan:
    """The fastest placement that the program finds; never slower, by the simulator, than the greedy one.

    Args:
        time_limit_s: search time, in computing (on a busy machine up to three times as much on the clock); the best
            placement so far is taken then, and its gap is in the plan.
        gap_frac: the search ends when the placement is proven to be this close to the best.

    Raises:
        InfeasiblePlanError: nothing fits; need and have per tier and the nearest remedies are in the message.
    """
    problem = build_problem(model, hardware, request)
    return solve_problem(problem, Rebuilder(model, hardware, request), time_limit_s=time_limit_s, gap_frac=gap_frac)


def solve_problem(
    problem: PlacementProblem,
    rebuild: Rebuilder | None = None,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    gap_frac: float = GAP_FRAC,
) -> PlacementPlan:
    """As `solve_plan`, from a problem."""
    if not problem.units:
        greedy = plan_greedily(problem)
        if greedy is None:
            raise infeasible(problem, rebuild)
        return greedy  # nothing streams
    resort, problem = problem, without_dropping(problem)
    outcome, found = _search(problem, Deadline(time_limit_s), gap_frac)
    if found.best is None:
        # Fewer slots are the last memory to be had.
        tight = replace(
            problem,
            weight_slots=WEIGHT_SLOT_CHOICES[0],
            gradient_slots=GRADIENT_SLOT_CHOICES[0],
            state_slots=min(problem.state_slots, FEWEST_SLOTS),
        )
        outcome, found = _search(tight, Deadline(time_limit_s), gap_frac)
    if found.best is None:
        dropping = _drop_inputs(resort, gap_frac)
        if dropping is None:
            raise infeasible(problem, rebuild)
        return dropping
    best, step_s = _with_least_error(problem, found)
    solver = {
        "name": "highs",
        "status": outcome.status,
        "gap_frac": _gap_frac(outcome, step_s),
        "time_limit_s": time_limit_s,
    }
    return replace(best, solver=solver)


def _with_least_error(problem: PlacementProblem, found: _Found) -> tuple[PlacementPlan, float]:
    """The simplest of the fastest plans, explained, and its step time. Where activations may wait in codes, it is that
    of the plans which are fast enough whose error is the least once their bits are chosen."""
    plans = [plan for _, plan in found.timed]

    def finished(plans: list[PlacementPlan]) -> PlacementPlan:
        best, step_s = _with_best_rings(problem, *simplest(problem, plans, never_above_s=found.others_s))
        return explained(problem, best, step_s, never_above_s=found.others_s)

    best = finished(plans)
    if not any(map(is_lossy, best.units)):
        return best, best.predicted_step_s
    limit_s = max(best.predicted_step_s, min((1 + ERROR_WORTH_FRAC) * found.best_s, found.others_s))
    fast = sorted((item for item in found.timed if item[0] <= limit_s), key=lambda item: item[0])
    candidates = [best, *(finished([plan]) for _, plan in fast[:FEWER_ERRORS_TRIES])]
    in_time = [plan for plan in candidates if plan.predicted_step_s <= limit_s]
    best = min(in_time, key=lambda plan: (round(plan_error(plan, problem.gradient_errors), 4), plan.predicted_step_s))
    return best, best.predicted_step_s


def _drop_inputs(problem: PlacementProblem, gap_frac: float) -> PlacementPlan | None:
    """The last resort; None: that does not fit either."""
    start = dropping_plan(problem)
    if start is None:
        return None
    outcome, decided = decide_inputs(problem, start, time_limit_s=INPUTS_S, gap_frac=gap_frac)
    plans = [plan for plan in (start, decided) if plan is not None]
    step_s, best = min(((simulate(problem, plan).step_s, plan) for plan in plans), key=lambda item: item[0])
    # A bound for these homes alone is none for the plan.
    solver = {"name": "highs", "status": f"inputs: {outcome.status}", "gap_frac": None, "time_limit_s": INPUTS_S}
    return replace(explained(problem, best, step_s), solver=solver)


class _Found:
    """The placements found that fit, each with its step time."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.judge = Judge(problem)
        self.timed: list[tuple[float, PlacementPlan]] = []
        self.best_s, self.best = math.inf, None
        self.others_s = math.inf
        """The fastest of what others would do: no plan may be slower."""

    def add(self, plan: PlacementPlan | None, *, of_others: bool = False) -> None:
        if plan is None or not self.judge.fits(plan):
            return
        step_s = self.judge.step_s(plan)
        if of_others:
            self.others_s = min(self.others_s, step_s)
        self.timed.append((step_s, plan))
        if step_s < self.best_s:
            self.best_s, self.best = step_s, plan

    def polish(self, deadline: Deadline) -> None:
        """The best one in a better order."""
        if self.best is not None:
            self.add(polished(self.judge.problem, self.best, seed=len(self.timed), deadline=deadline))


def _search(problem: PlacementProblem, deadline: Deadline, gap_frac: float) -> tuple[Outcome, _Found]:
    """The bound, and what was found."""
    model, v = build_program(problem)
    configure(model)
    found = _Found(problem)
    try:
        relaxed = relax(model)
    except RelaxationError:
        # Without bound and mixture: the whole program alone, for all of the time.
        outcome = run_program(problem, model, v, start=None, time_limit_s=deadline.left_s, gap_frac=gap_frac)
        found.add(outcome.plan)
        return outcome, found
    if relaxed is None:
        return Outcome(status="infeasible"), found
    lean = leanest_plan(problem)
    # First of all: where time is short it finds the best placement, and the greedy family takes as much of it.
    first = search_patterns(problem, rounded(problem, v, relaxed, lean), deadline=deadline)
    for policy in POLICIES:
        found.add(policy.place(problem), of_others=True)
    found.add(plan_greedily(problem), of_others=True)
    starts = [found.best or lean]
    found.add(first)
    found.polish(deadline)
    counts = CountBounds(problem, model, v, relaxed)
    rounds_deadline = deadline.part(ROUNDS_FRAC)
    for round_ in range(1, ROUNDS + 1):
        enough_ms = 1e3 * found.best_s * (1 - gap_frac)
        if not counts.is_exhausted:
            counts.raise_bound(enough_ms, deadline=rounds_deadline, max_nodes=NODES_A_ROUND)
        if found.best is None and round_ > 1 or counts.bound_ms >= enough_ms or rounds_deadline.has_passed:
            break
        if counts.deepest is not None:
            starts.append(rounded(problem, v, counts.deepest, lean))
            counts.deepest = None
        start = starts.pop() if starts else found.best
        found.add(search_patterns(problem, start or lean, seed=round_, deadline=rounds_deadline))
        if round_ % 2 == 0:
            found.polish(rounds_deadline)
    _search_with_fewer_slots(problem, found, deadline)
    _search_without_families(problem, found, deadline)
    outcome = Outcome(status="bound by counts", bound_s=counts.bound_ms / 1e3)
    counts.restore()
    left_s = deadline.left_s
    if found.best is None:
        left_s = min(left_s, REFUSAL_S)  # nothing fits, or next to nothing does: a refusal must not take long
    small = len(problem.units) <= DEEP_UNITS and counts.bound_ms < 1e3 * found.best_s * (1 - gap_frac)
    if found.best is None or (small and left_s > 0):
        outcome = run_program(problem, model, v, start=found.best, time_limit_s=left_s, gap_frac=gap_frac)
        outcome = replace(outcome, bound_s=max(outcome.bound_s or 0.0, counts.bound_ms / 1e3))
        found.add(outcome.plan)
    return outcome, found


def _search_without_families(problem: PlacementProblem, found: _Found, deadline: Deadline) -> None:
    """Looks without each family: more freedom must not lead to a slower plan, and with less to choose from a search
    gets further. Again from what was found so, as long as that helps."""
    fewer_freedoms = [replace(problem, capabilities=fewer) for fewer in fewer_capabilities(problem.capabilities)]
    if may_code(problem):
        fewer_freedoms.append(without_codes(problem))
    for _ in range(FEWER_ROUNDS):
        before_s = found.best_s
        for fewer in fewer_freedoms:
            if found.best is not None:
                of_others = not allows(fewer, found.best)
                plan = search_patterns(fewer, found.best, tries_frac=FEWER_TRIES_FRAC, deadline=deadline)
                found.add(plan, of_others=of_others)
        if found.best_s >= before_s * (1 - LEAST_GAIN_FRAC):
            break
        found.add(search_patterns(problem, found.best, deadline=deadline))
        found.polish(deadline)


def _search_with_fewer_slots(problem: PlacementProblem, found: _Found, deadline: Deadline) -> None:
    """Where states rest on a disk, its bytes are the step: memory of slots that leave something in hand is worth more
    to a unit that then need not rest there."""
    if found.best is None or all(unit.states != Tier.NVME for unit in found.best.units):
        return
    slots = {kind: min(FEWEST_SLOTS, getattr(found.best, kind)) for kind in SLOTS}
    start = replace(found.best, **slots)
    plan = search_patterns(replace(problem, **slots), start, tries_frac=FEWER_TRIES_FRAC, deadline=deadline)
    if plan is not None and found.judge.step_s(plan) < found.best_s * (1 - RING_GAIN_FRAC):
        found.add(plan)


def fewer_capabilities(capabilities: Capabilities) -> Iterator[Capabilities]:
    """The same without one of the optional families."""
    for family in FAMILIES:
        if getattr(capabilities, family) and (capabilities.nvme or not family.startswith("nvme")):
            yield replace(capabilities, **{family: False})
    plain = frozenset({Activations.RECOMPUTE, Activations.KEEP})
    if capabilities.strategies - plain:
        yield replace(capabilities, strategies=capabilities.strategies & plain)


def allows(problem: PlacementProblem, plan: PlacementPlan) -> bool:
    """Whether the plan uses only families that the problem has."""
    has = problem.capabilities
    units = plan.units
    return (
        (has.streamed_states or not any(unit.streams_states for unit in (*units, *plan.stem)))
        and (has.offloaded_boundaries or all(unit.boundary != Tier.CPU for unit in units))
        and (has.offloaded_saved or all(unit.saved != Tier.CPU for unit in units))
        and (has.nvme or all(Tier.NVME not in (unit.weights, unit.states) for unit in units))
        and (has.nvme_boundaries or all(unit.boundary != Tier.NVME for unit in units))
        and (has.nvme_saved or all(unit.saved != Tier.NVME for unit in units))
        and (has.nvme_gradients or all(unit.gradient_tier != Tier.NVME for unit in units))
        and all(unit.activations in has.strategies for unit in units)
        and (may_code(problem) or not any(map(is_lossy, units)))
    )


def _gap_frac(outcome: Outcome, step_s: float) -> float | None:
    """Distance of a replayed step from the program's bound. The program is on the safe side of the simulator, so that
    a plan may even be faster than its bound."""
    return None if outcome.bound_s is None else round(max(0.0, 1 - outcome.bound_s / step_s), 4)


def _with_best_rings(problem: PlacementProblem, plan: PlacementPlan, step_s: float) -> tuple[PlacementPlan, float]:
    """The same placement with another number of slots, where that is clearly faster.

    The program takes the number of slots as given. Fewer slots than usual may look as fast to the simulator, but leave
    nothing in hand for a late copy; they are taken only if they are worth it.
    """
    best, best_s, judge = plan, step_s, Judge(problem)
    for weight_slots in WEIGHT_SLOT_CHOICES:
        for gradient_slots in GRADIENT_SLOT_CHOICES:
            variant = replace(plan, weight_slots=weight_slots, gradient_slots=gradient_slots)
            if not judge.fits(variant):
                continue
            variant_s = judge.step_s(variant)
            if variant_s < best_s * (1 - RING_GAIN_FRAC):
                best, best_s = variant, variant_s
    return best, best_s
