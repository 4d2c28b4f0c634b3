"""The whole program: built in the order of docs/formulation.md, run by HiGHS, read as a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import highspy

from lazytrain_plugin.plan import capacity, program_inputs, program_launches, timing_backward, timing_forward, variables
from lazytrain_plugin.plan.choices import HOMES, STEM_HOMES, home_of
from lazytrain_plugin.plan.greedy import empty_plan
from lazytrain_plugin.plan.objective import set_objective
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.vocab import Activations, Tier


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


def build_program(problem: PlacementProblem) -> tuple[highspy.Highs, variables.Variables]:
    """The whole program, in the order of docs/formulation.md."""
    model = QuietHighs()
    v = variables.Variables()
    variables.define_homes(model, problem, v)
    variables.define_activations(model, problem, v)
    program_inputs.define_inputs(model, problem, v)
    variables.define_stem_states(model, problem, v)
    variables.define_slot_sizes(model, problem, v)
    variables.define_uses(model, problem, v)
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
    timing_forward.add_spread(model, problem, v)
    timing_forward.add_disk(model, problem, v)
    timing_forward.add_forward_weights(model, problem, v)
    timing_forward.add_forward(model, problem, v)
    timing_forward.add_forward_returns(model, problem, v)
    timing_backward.add_backward_weights(model, problem, v)
    timing_backward.add_backward(model, problem, v)
    timing_backward.add_exchange(model, problem, v)
    timing_backward.add_gradients(model, problem, v)
    timing_backward.add_accumulation(model, problem, v)
    timing_backward.add_gradients_to_disk(model, problem, v)
    timing_backward.add_repeated_forward(model, problem, v)
    timing_backward.add_step_time(model, problem, v)
    program_launches.add_launches(model, problem, v)
    program_inputs.add_one_place(model, problem, v)
    program_inputs.add_coded_inputs(model, problem, v)
    program_inputs.add_edge_length(model, problem, v)
    program_inputs.add_found_again(model, problem, v)
    program_inputs.add_parked(model, problem, v)
    program_inputs.add_fetched(model, problem, v)
    set_objective(model, problem, v)
    return model, v


def configure(model: highspy.Highs) -> None:
    # One thread and a fixed seed: the same inputs give the same plan. The scheduler is global to the process, and would
    # refuse another number of threads than the one it was started with.
    highspy.Highs.resetGlobalScheduler(True)
    for option, value in (("threads", 1), ("random_seed", 0)):
        model.setOptionValue(option, value)


def run_program(
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
        inputs = ((v.boundary_on_cpu, Tier.CPU), (v.boundary_on_nvme, Tier.NVME), (v.dropped, None))
        chosen += [(columns[u], unit.boundary == place) for columns, place in inputs]
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
                **cost.planned_formats(activations),
                boundary=program_inputs.place_of_input(v, u, chosen),
            )
        )
    stem = []
    for s, cost in enumerate(problem.stem):
        home = "gpu" if chosen(v.stem_on_gpu[s]) else "stream_update" if chosen(v.stem_streams[s]) else "cpu"
        fields = STEM_HOMES[home] if problem.has_gpu else HOMES["stream"]
        stem.append(UnitPlan(name=cost.name, **fields, state_bits=cost.state_bits))
    return empty_plan(problem, units, stem)
