"""Solves the placement of one step as a mixed-integer program with HiGHS; reads like docs/formulation.md."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import highspy

from lazytrain_plugin.plan import capacity, timing_backward, timing_forward, variables
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.choices import HOMES, STEM_HOMES, home_of
from lazytrain_plugin.plan.counting import CountBounds
from lazytrain_plugin.plan.greedy import empty_plan, explained, fits, leanest_plan, plan_greedily
from lazytrain_plugin.plan.objective import set_objective
from lazytrain_plugin.plan.patterns import polished, search_patterns
from lazytrain_plugin.plan.problem import PlacementProblem, build_problem
from lazytrain_plugin.plan.refusal import infeasible, rebuilder
from lazytrain_plugin.plan.relaxation import RelaxationError, Relaxed, relax, rounded
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.vocab import Activations, Tier

logger = logging.getLogger(__name__)

GAP_FRAC = 0.005
"""Proven distance from the best step time at which the search ends."""
TIME_LIMIT_S = 10.0
DEEP_UNITS = 16
DEEP_GAP_FRAC = 0.01
"""With more units the search over single units has never closed a gap that counts left; it is spared where the gap is
this small."""
LEAST_SEARCH_S = 1.0
"""For bounds and the whole program, where patterns took all the time."""
REFUSAL_S = 0.5
"""For the whole program where no pattern was found that fits, but fractions of units do."""
MAX_COUNT_NODES = 300
WEIGHT_SLOT_CHOICES = (2, 3, 4, 6)
GRADIENT_SLOT_CHOICES = (2, 3, 4)
RING_GAIN_FRAC = 0.005
"""A number of slots other than the usual must make the step faster by this much."""


class QuietHighs(highspy.Highs):
    """HiGHS prints its banner as soon as callbacks are enabled, before an option could be set; stdout is for plans."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the solver said."""

    status: str
    gap_frac: float | None = None
    """Relative distance between the placement found and the bound; None: no placement found."""
    bound_s: float | None = None
    """No placement of the program has a shorter step."""
    plan: PlacementPlan | None = None
    step_s: float | None = None
    """Step time of the placement in the program's own terms."""


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
        time_limit_s: search time; the best placement so far is taken then, and its gap is in the plan.
        gap_frac: the search ends when the placement is proven to be this close to the best.

    Raises:
        InfeasiblePlanError: nothing fits; need and have per tier and the nearest remedies are in the message.
    """
    problem = build_problem(model, hardware, request)
    return solve_problem(problem, rebuilder(model, hardware, request), time_limit_s=time_limit_s, gap_frac=gap_frac)


def solve_problem(
    problem: PlacementProblem, rebuild=None, *, time_limit_s: float = TIME_LIMIT_S, gap_frac: float = GAP_FRAC
) -> PlacementPlan:
    """As `solve_plan`, from a problem."""
    if not problem.units:
        greedy = plan_greedily(problem)
        if greedy is None:
            raise infeasible(problem, rebuild)
        return greedy  # nothing streams
    started_s = time.monotonic()
    outcome, candidates = _search(problem, started_s + time_limit_s, gap_frac)
    if not candidates:
        # Fewer slots are the last memory to be had.
        tight = replace(problem, weight_slots=WEIGHT_SLOT_CHOICES[0], gradient_slots=GRADIENT_SLOT_CHOICES[0])
        outcome, candidates = _search(tight, started_s + 2 * time_limit_s, gap_frac)
    if not candidates:
        raise infeasible(problem, rebuild)
    best, step_s = _with_best_rings(problem, *_fastest(problem, candidates))
    solver = {
        "name": "highs",
        "status": outcome.status,
        "gap_frac": _gap_frac(outcome, step_s),
        "time_limit_s": time_limit_s,
    }
    return replace(explained(problem, best, step_s), solver=solver)


def _search(problem: PlacementProblem, until_s: float, gap_frac: float) -> tuple[Outcome, list[PlacementPlan]]:
    """The bound, and what was found: the best pattern first, then the whole program from there for the time left."""
    model, v = build_program(problem)
    _configure(model)
    try:
        relaxed = relax(model)
    except RelaxationError:
        # Without bound and mixture: the whole program alone, for all of the time.
        outcome = _run(problem, model, v, start=None, time_limit_s=until_s - time.monotonic(), gap_frac=gap_frac)
        return outcome, [outcome.plan] if outcome.plan is not None and fits(problem, outcome.plan) else []
    if relaxed is None:
        return Outcome(status="infeasible"), []
    timed = _timed(problem, _find_patterns(problem, v, relaxed))
    best_s, best = _quickest(timed)
    outcome = Outcome(status="bound by counts", bound_s=relaxed.bound_ms / 1e3)
    if best is not None and 1 - outcome.bound_s / best_s > gap_frac:
        # Bounds by counts and a bit of order are cheap; what is left of the time is for the whole program.
        until_s = max(until_s, time.monotonic() + LEAST_SEARCH_S)
        counts = CountBounds(problem, model, v)
        enough_ms = 1e3 * best_s * (1 - gap_frac)
        half_s = time.monotonic() + (until_s - time.monotonic()) / 2
        bound_ms = counts.raise_bound(relaxed, enough_ms, until_s=half_s, max_nodes=MAX_COUNT_NODES)
        outcome = replace(outcome, bound_s=bound_ms / 1e3)
        if counts.deepest is not None:
            timed += _timed(
                problem, [search_patterns(problem, rounded(problem, v, counts.deepest, leanest_plan(problem)))]
            )
        timed += _timed(problem, [polished(problem, _quickest(timed)[1])])
        best_s, best = _quickest(timed)
    candidates = [plan for _, plan in timed]
    if 1 - outcome.bound_s / best_s > (gap_frac if len(problem.units) <= DEEP_UNITS else max(gap_frac, DEEP_GAP_FRAC)):
        bound_s = outcome.bound_s
        left_s = until_s - time.monotonic()
        if best is None:
            left_s = min(left_s, REFUSAL_S)  # nothing fits, or next to nothing does: a refusal must not take long
        outcome = _run(problem, model, v, start=best, time_limit_s=left_s, gap_frac=gap_frac)
        outcome = replace(outcome, bound_s=max(outcome.bound_s or 0.0, bound_s))
        candidates += [outcome.plan] if outcome.plan is not None else []
    return outcome, [plan for plan in candidates if fits(problem, plan)]


def _timed(problem: PlacementProblem, plans: Iterable[PlacementPlan | None]) -> list[tuple[float, PlacementPlan]]:
    """Those that are there, each with its step time by the simulator."""
    return [(simulate(problem, plan).step_s, plan) for plan in plans if plan is not None]


def _quickest(timed: list[tuple[float, PlacementPlan]]) -> tuple[float, PlacementPlan | None]:
    return min(timed, key=lambda item: item[0], default=(math.inf, None))


def _find_patterns(problem: PlacementProblem, v: variables.Variables, relaxed: Relaxed) -> list[PlacementPlan | None]:
    """Patterns from the relaxation's mixture; with fewer ways to save at first, which are found more easily."""
    lean = leanest_plan(problem)
    simple = replace(
        problem.capabilities,
        strategies=problem.capabilities.strategies - {Activations.ATTENTION, Activations.MATMULS},
        offloaded_saved=False,
    )
    found = [search_patterns(problem, rounded(problem, v, relaxed, lean))]
    if simple != problem.capabilities:
        plain = replace(problem, capabilities=simple)
        model, columns = build_program(plain)
        _configure(model)
        try:
            fewer = relax(model)
        except RelaxationError:
            fewer = None
        start = fewer and search_patterns(plain, rounded(plain, columns, fewer, lean))
        found += [start, search_patterns(problem, start)] if start else []
    return found


def _gap_frac(outcome: Outcome, step_s: float) -> float | None:
    """Distance of a replayed step from the program's bound. The program is on the safe side of the simulator, so that
    a plan may even be faster than its bound."""
    return None if outcome.bound_s is None else round(max(0.0, 1 - outcome.bound_s / step_s), 4)


def build_program(problem: PlacementProblem) -> tuple[highspy.Highs, variables.Variables]:
    """The whole program, in the order of docs/formulation.md."""
    model = QuietHighs()
    v = variables.Variables()
    variables.define_homes(model, problem, v)
    variables.define_activations(model, problem, v)
    variables.define_stem_states(model, problem, v)
    variables.define_slot_sizes(model, problem, v)
    variables.define_times(model, problem, v)
    capacity.add_one_home(model, problem, v)
    capacity.add_one_strategy(model, problem, v)
    capacity.add_saving_order(model, problem, v)
    capacity.add_slot_sizes(model, problem, v)
    capacity.add_host_capacity(model, problem, v)
    capacity.add_nvme_capacity(model, problem, v)
    capacity.add_loss_capacity(model, problem, v)
    capacity.add_backward_capacity(model, problem, v)
    capacity.add_evaluation_capacity(model, problem, v)
    timing_forward.add_updates(model, problem, v)
    timing_forward.add_disk(model, problem, v)
    timing_forward.add_forward_weights(model, problem, v)
    timing_forward.add_forward(model, problem, v)
    timing_forward.add_forward_returns(model, problem, v)
    timing_backward.add_backward_weights(model, problem, v)
    timing_backward.add_backward(model, problem, v)
    timing_backward.add_gradients(model, problem, v)
    timing_backward.add_accumulation(model, problem, v)
    timing_backward.add_repeated_forward(model, problem, v)
    timing_backward.add_step_time(model, problem, v)
    set_objective(model, problem, v)
    return model, v


def run_highs(
    problem: PlacementProblem, *, start: PlacementPlan | None, time_limit_s: float, gap_frac: float
) -> Outcome:
    """Builds and solves the program once. `start`: a placement to begin with."""
    model, v = build_program(problem)
    _configure(model)
    return _run(problem, model, v, start=start, time_limit_s=time_limit_s, gap_frac=gap_frac)


def _configure(model: highspy.Highs) -> None:
    # One thread and a fixed seed: the same inputs give the same plan. The scheduler is global to the process, and would
    # refuse another number of threads than the one it was started with.
    highspy.Highs.resetGlobalScheduler(True)
    for option, value in (("threads", 1), ("random_seed", 0)):
        model.setOptionValue(option, value)


def _run(
    problem: PlacementProblem,
    model: highspy.Highs,
    v: variables.Variables,
    *,
    start: PlacementPlan | None,
    time_limit_s: float,
    gap_frac: float,
) -> Outcome:
    for option, value in (("mip_rel_gap", gap_frac), ("time_limit", max(0.1, time_limit_s))):
        model.setOptionValue(option, value)
    if start is not None:
        _set_start(model, v, start)
    model.run()
    status = model.getModelStatus()
    info = model.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    names = {
        highspy.HighsModelStatus.kOptimal: "optimal within the gap",
        highspy.HighsModelStatus.kTimeLimit: "time limit",
        highspy.HighsModelStatus.kInfeasible: "infeasible",
        highspy.HighsModelStatus.kUnboundedOrInfeasible: "infeasible",
    }
    if status not in names and not found:
        raise RuntimeError(f"HiGHS ended with {model.modelStatusToString(status)}; report this with the plan's inputs")
    text = names.get(status, model.modelStatusToString(status).lower())
    if not found:
        return Outcome(status=text, bound_s=info.mip_dual_bound / 1e3 if math.isfinite(info.mip_dual_bound) else None)
    values = model.getSolution().col_value
    return Outcome(
        status=text,
        gap_frac=info.mip_gap,
        bound_s=info.mip_dual_bound / 1e3,
        plan=_read_plan(problem, v, values),
        step_s=values[v.step_ms.index] / 1e3,
    )


def _set_start(model: highspy.Highs, v: variables.Variables, plan: PlacementPlan) -> None:
    """Gives HiGHS the binaries of a placement; it completes the times itself."""
    chosen: list[tuple[variables.Column, bool]] = []
    for u, unit in enumerate(plan.units):
        home = home_of(unit)
        chosen += [(columns[u], name == home) for name, columns in v.homes.items()]
        chosen += [(column, key == (unit.activations, unit.saved)) for key, column in v.saved[u].items()]
        chosen.append((v.boundary_on_cpu[u], unit.boundary == Tier.CPU))
    for s, unit in enumerate(plan.stem):
        chosen += [(v.stem_on_gpu[s], unit.states == Tier.GPU), (v.stem_streams[s], unit.streams_states)]
    start = {column.index: float(value) for column, value in chosen if not isinstance(column, int)}
    indices = sorted(start)
    model.setSolution(len(indices), indices, [start[index] for index in indices])


def _read_plan(problem: PlacementProblem, v: variables.Variables, values: list[float]) -> PlacementPlan:
    def chosen(column: variables.Column) -> bool:
        return not isinstance(column, int) and values[column.index] > 0.5

    units = []
    for u, cost in enumerate(problem.units):
        home = next(name for name, columns in v.homes.items() if chosen(columns[u]))
        activations, saved = next(
            (key for key, column in v.saved[u].items() if chosen(column)), (Activations.RECOMPUTE, Tier.GPU)
        )
        units.append(
            UnitPlan(
                name=cost.name,
                **HOMES[home],
                state_bits=cost.state_bits,
                activations=activations,
                saved=saved,
                saved_bits=cost.planned_bits(activations),
                boundary=Tier.CPU if chosen(v.boundary_on_cpu[u]) else Tier.GPU,
            )
        )
    stem = []
    for s, cost in enumerate(problem.stem):
        home = "gpu" if chosen(v.stem_on_gpu[s]) else "stream_update" if chosen(v.stem_streams[s]) else "cpu"
        fields = STEM_HOMES[home] if problem.has_gpu else HOMES["stream"]
        stem.append(UnitPlan(name=cost.name, **fields, state_bits=cost.state_bits))
    return empty_plan(problem, units, stem)


def _with_best_rings(problem: PlacementProblem, plan: PlacementPlan, step_s: float) -> tuple[PlacementPlan, float]:
    """The same placement with another number of slots, where that is clearly faster.

    The program takes the number of slots as given. Fewer slots than usual may look as fast to the simulator, but leave
    nothing in hand for a late copy; they are taken only if they are worth it.
    """
    best, best_s = plan, step_s
    for weight_slots in WEIGHT_SLOT_CHOICES:
        for gradient_slots in GRADIENT_SLOT_CHOICES:
            variant = replace(plan, weight_slots=weight_slots, gradient_slots=gradient_slots)
            if not fits(problem, variant):
                continue
            variant_s = simulate(problem, variant).step_s
            if variant_s < best_s * (1 - RING_GAIN_FRAC):
                best, best_s = variant, variant_s
    return best, best_s


def _fastest(problem: PlacementProblem, plans: list[PlacementPlan]) -> tuple[PlacementPlan, float]:
    """By the simulator; among those within 0.1 % the easiest to read, then the one that needs the least GPU memory."""
    timed = _timed(problem, plans)
    limit_s = min(step_s for step_s, _ in timed) * 1.001
    step_s, plan = min(
        ((step_s, plan) for step_s, plan in timed if step_s <= limit_s),
        key=lambda item: (_num_runs(item[1]), account(problem, item[1]).total_bytes()["gpu"]),
    )
    return plan, step_s


def _num_runs(plan: PlacementPlan) -> int:
    """Runs of neighbours with equal decisions."""
    return sum(1 for _ in groupby(plan.units, key=decisions))


def decisions(unit: UnitPlan) -> tuple:
    """All that sets a unit's placement apart from its neighbour's."""
    return (unit.weights, unit.states, unit.updater, unit.activations, unit.saved, unit.boundary)
