"""Homes and memory: constraints of the program, one function per equation of docs/formulation.md. Bytes are in MiB."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import highspy

from lazytrain_plugin.plan.accounting import nvme_bytes_allowed_per_step
from lazytrain_plugin.plan.names import name
from lazytrain_plugin.plan.problem import (
    FRAGMENTATION_FRAC,
    SAVED_FRAGMENTATION_FRAC,
    PlacementProblem,
    UnitCost,
    mib,
)
from lazytrain_plugin.plan.program_inputs import coded_input, parked_mib, wider_mib
from lazytrain_plugin.plan.variables import Expression, Variables, kinds_of_use
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.vocab import Activations, Tier


def add_one_home(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Every unit has one home (Eq. 1): stream(u) + resident(u) + mirror(u) + ... = 1. Rows: `one_home(u)`."""
    for u in range(len(problem.units)):
        model.addConstr(sum(columns[u] for columns in v.homes.values()) == 1, name=name("one_home", u))
    for s, cost in enumerate(problem.stem):
        if not _is_zero(v.stem_streams[s]):
            model.addConstr(v.stem_on_gpu[s] + v.stem_streams[s] <= 1, name=name("one_home", cost.name))


def add_one_strategy(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Every unit saves its activations in one way at most (Eq. 2): sum over a of saved(a,u) <= 1; none: recompute."""
    for u, choices in enumerate(v.saved):
        if len(choices) > 1:
            model.addConstr(sum(choices.values()) <= 1, name=name("one_strategy", u))


def add_saving_order(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Among equal neighbours the later one saves more on the GPU (Eq. 3): saved bytes(u) <= saved bytes(u+1).

    Both save the same recompute, and backward frees the later one's earlier (Eq. 8). No symmetry but a dominance; it
    spares the search most. Rows: `saving_order(u)`.
    """
    for u, (cost, after) in enumerate(zip(problem.units, problem.units[1:])):
        alike = (cost.kept_bytes, cost.workspace_bytes, cost.forward_s, cost.strategies) == (
            after.kept_bytes,
            after.workspace_bytes,
            after.forward_s,
            after.strategies,
        )
        if alike and v.saved[u]:
            model.addConstr(
                saved_mib(cost, v, u, Tier.GPU) <= saved_mib(after, v, u + 1, Tier.GPU), name=name("saving_order", u)
            )


def add_slot_sizes(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """A slot holds the largest unit that uses it (Eq. 4). Rows: `weight_slot(u)`, `gradient_slot(u)`, ... In MiB.

    weight_slot >= weights(u) streamed(u);  gradient_slot >= gradients(u) sends(u), with several ranks gradients(u)
    state_slot >= chunk(u) streams_states(u), of all states and fp32 gradients 256 MiB at most
    activation_slot >= what leaves the GPU of u;  nvme_slot >= a piece of a rank's states of u on NVMe
    nvme_weight_slot >= weights(u) on NVMe;  nvme_gradient_slot >= a rank's gradients(u), with their sums, on NVMe
    The same with the smallest unit and uses(kind), which holds for fractions of units too. Rows: `slot_of(kind)`.
    """
    _add_least_slots(model, problem, v)
    for u, cost in enumerate(problem.units):
        model.addConstr(v.weight_slot_mib >= mib(cost.weight_bytes) * v.streamed(u), name=name("weight_slot", u))
        if cost.num_trainable:
            takes = 1 if cost.parts > 1 else v.sends(u)
            model.addConstr(v.gradient_slot_mib >= mib(cost.gradient_bytes) * takes, name=name("gradient_slot", u))
        if not _is_zero(v.streams_states(u)):
            states = mib(cost.state_slot_bytes) * v.streams_states(u)
            model.addConstr(v.state_slot_mib >= states, name=name("state_slot", u))
        leaving = offloaded_mib(cost, v, u)
        if not _is_zero(leaving):
            model.addConstr(v.activation_slot_mib >= leaving, name=name("activation_slot", u))
        if not _is_zero(v.on_nvme(u)):
            model.addConstr(v.nvme_slot_mib >= mib(cost.nvme_piece_bytes) * v.on_nvme(u), name=name("nvme_slot", u))
        if not _is_zero(v.weights_on_nvme(u)):
            weights = mib(cost.weight_bytes) * v.weights_on_nvme(u)
            model.addConstr(v.nvme_weight_slot_mib >= weights, name=name("nvme_weight_slot", u))
        if not _is_zero(v.gradients_on_nvme(u)):
            gradients = mib(_passing_gradient_bytes(cost)) * v.gradients_on_nvme(u)
            model.addConstr(v.nvme_gradient_slot_mib >= gradients, name=name("nvme_gradient_slot", u))
    for s, cost in enumerate(problem.stem):
        if not _is_zero(v.stem_streams[s]):
            chunk = mib(cost.state_slot_bytes) * v.stem_streams[s]
            model.addConstr(v.state_slot_mib >= chunk, name=name("state_slot", cost.name))


def _add_least_slots(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    def least(num_bytes: Callable[[UnitCost], float], columns: Sequence[Expression]) -> float:
        return min(mib(num_bytes(cost)) for cost, column in zip(problem.units, columns) if not _is_zero(column))

    slots = {
        "streamed": (v.weight_slot_mib, lambda cost: cost.weight_bytes),
        "sends": (v.gradient_slot_mib, lambda cost: cost.gradient_bytes),
        "passing": (v.state_slot_mib, lambda cost: cost.state_slot_bytes),
        "boundary_cpu": (v.activation_slot_mib, lambda cost: cost.boundary_bytes - cost.most_spared_input_bytes),
        "nvme": (v.nvme_slot_mib, lambda cost: cost.nvme_piece_bytes),
        "nvme_weights": (v.nvme_weight_slot_mib, lambda cost: cost.weight_bytes),
        "nvme_gradients": (v.nvme_gradient_slot_mib, _passing_gradient_bytes),
        "boundary_nvme": (v.activation_slot_mib, lambda cost: cost.boundary_bytes - cost.most_spared_input_bytes),
    }
    for kind, columns in kinds_of_use(problem, v).items():
        if kind not in v.used or kind == "worker":
            continue
        saved = next((a for a in Activations if kind in (f"{a}_{Tier.CPU}", f"{a}_{Tier.NVME}")), None)
        slot, num_bytes = slots.get(kind, (v.activation_slot_mib, lambda cost, a=saved: cost.saved_bytes(a)))
        model.addConstr(slot >= least(num_bytes, columns) * v.used[kind], name=name("slot_of", kind))


def _passing_gradient_bytes(cost: UnitCost) -> float:
    """A rank's gradients of a unit, and their sums."""
    return (cost.state_bytes - cost.rest_state_bytes) / cost.ranks


def add_host_capacity(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """What rests on the host fits it, in a step and while a checkpoint is written (Eq. 5).

    at rest + M (NVMe slots + offloaded activations) <= budget; at rest + M NVMe slots + save <= budget, for M ranks of
    the machine. Without a GPU everything is host memory, and Eq. 7 to 9 carry it. Rows: `capacity(CPU)`,
    `capacity(CPU,save)`.
    """
    if not problem.has_gpu:
        return
    ranks = problem.local_ranks
    slots = v.nvme_slot_mib + v.nvme_weight_slot_mib + v.nvme_gradient_slot_mib + v.parked_slot_mib
    rest = host_rest(problem, v) + ranks * problem.nvme_slots * slots
    budget = mib(problem.cpu_budget_bytes - problem.cpu_reserve_bytes)
    offloaded = ranks * sum(
        _boundary_mib(cost) * v.boundary_on_cpu[u] - _spared_off_gpu_mib(cost, v, u) + saved_mib(cost, v, u, Tier.CPU)
        for u, cost in enumerate(problem.units)
    )
    if not _is_constant(rest + offloaded):
        model.addConstr(rest + offloaded <= budget, name=name("capacity", "CPU"))
    if not _is_constant(rest) and problem.save_bytes:
        model.addConstr(rest + mib(problem.save_bytes) <= budget, name=name("capacity", "CPU", "save"))


def add_nvme_capacity(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """What rests on NVMe fits it, and wears it no faster than allowed (Eq. 6).

    sum of bytes on NVMe <= budget;  bytes written a step <= bytes allowed a day x fastest step / day, the fastest step
    being that of computing alone. Rows: `capacity(NVME)`, `wear(NVME)`.
    """
    if not problem.has_nvme or not problem.has_gpu:
        return
    parked = problem.local_ranks * sum(parked_mib(problem, v, u) for u in range(len(problem.units)))
    held = parked + sum(nvme_mib(cost, v, u) for u, cost in enumerate(problem.units))
    model.addConstr(held <= mib(problem.nvme_budget_bytes), name=name("capacity", "NVME"))
    allowed = nvme_bytes_allowed_per_step(problem)
    if problem.nvme_write_bytes_per_day is not None:
        written = problem.accumulation_steps * parked
        for u, cost in enumerate(problem.units):
            written += nvme_updated_mib(cost, v, u) if cost.num_trainable else 0
            gradients = problem.accumulation_steps * mib(cost.accumulator_bytes or cost.gradient_rest_bytes)
            written += gradients * v.gradients_on_nvme(u)
        model.addConstr(written <= mib(allowed), name=name("wear", "NVME"))


def add_loss_capacity(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """The device's memory during the loss (Eq. 7). Row: `capacity(GPU,loss)`. In MiB.

    rest + (1 + saved fragmentation) (inputs and saved activations on the GPU + activation slots)
    + (1 + fragmentation) logits <= budget.
    """
    lasting: Expression = 0.0
    for u, cost in enumerate(problem.units):
        lasting = lasting + _input_mib(cost, v, u) + saved_mib(cost, v, u, Tier.GPU)
    _add_device_row(model, problem, v, lasting, mib(problem.loss_bytes), name("capacity", "GPU", "loss"))


def add_backward_capacity(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """The device's memory during the backward of each unit u, and after it (Eq. 8). Rows: `capacity(GPU,u)`. In MiB.

    rest + (1 + saved fragmentation) (sum over w <= u of input(w) + sum over w < u of saved(w) + activation slots)
    + (1 + fragmentation) (workspace(u) + gradients on the GPU) <= budget. Later units' activations are freed by then.
    What u itself saved is a part of its workspace, and what was dropped is found again (Eq. 24). Gradients: those of
    the GPU-updated units from u on (u alone with accumulation), min(R, N - u) slots, and the head's. After unit 0: all
    of them, with the embedding's.
    """
    last = len(problem.units) - 1
    resting: Expression = 0.0
    gradients: list[Expression] = []
    for u in reversed(range(last + 1)):
        own = mib(problem.units[u].resident_gradient_bytes) * v.homes["resident"][u]
        resting = own if problem.has_accumulation else resting + own
        going = (1 + min(problem.gradient_slots - 1, last - u)) * v.gradient_slot_mib
        head = _head_gradient_mib(problem, v, on_its_way=last - u < problem.gradient_slots - 1)
        gradients.append(resting + going + head)
    gradients.reverse()
    activations: Expression = 0.0
    for u, cost in enumerate(problem.units):
        activations = activations + _input_mib(cost, v, u)
        lasting = activations + v.found_mib[u]
        decoded = _boundary_mib(cost) * coded_input(cost, v, u)
        passing = mib(cost.workspace_bytes) + decoded + wider_mib(problem, v, u) + gradients[u]
        _add_device_row(model, problem, v, lasting, passing, name("capacity", "GPU", u))
        activations = activations + saved_mib(cost, v, u, Tier.GPU)
    embedding = mib(sum(cost.gradient_bytes for cost in problem.stem if cost.role != UnitRole.HEAD))
    resting = 0.0 if problem.has_accumulation else resting
    end = resting + (problem.gradient_slots - 1) * v.gradient_slot_mib + embedding
    end = end + _head_gradient_mib(problem, v, on_its_way=False)
    _add_device_row(model, problem, v, 0.0, end, name("capacity", "GPU", "end"))


def add_evaluation_capacity(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Whole logits of an evaluation batch beside what rests (Eq. 9). Row: `capacity(GPU,evaluation)`. In MiB.

    Rest without the slots that only training needs + (1 + fragmentation) logits <= budget.
    """
    if problem.evaluation_bytes:
        logits = mib(problem.evaluation_bytes)
        row = name("capacity", "GPU", "evaluation")
        _add_device_row(model, problem, v, 0.0, logits, row, trains=False)


def saved_mib(cost: UnitCost, v: Variables, u: int, tier: Tier) -> Expression:
    """What unit u saves in a tier, beside its input."""
    return sum(
        mib(cost.saved_bytes(activations)) * column
        for (activations, home), column in v.saved[u].items()
        if home == tier
    )


def offloaded_mib(cost: UnitCost, v: Variables, u: int) -> Expression:
    """What leaves the GPU after the forward of unit u."""
    off_gpu = v.boundary_on_cpu[u] + v.boundary_on_nvme[u]
    saved = saved_mib(cost, v, u, Tier.CPU) + saved_mib(cost, v, u, Tier.NVME)
    return _boundary_mib(cost) * off_gpu - _spared_off_gpu_mib(cost, v, u) + saved


def _spared_off_gpu_mib(cost: UnitCost, v: Variables, u: int) -> Expression:
    if isinstance(v.coded_on_gpu[u], int):
        return 0
    return mib(cost.most_spared_input_bytes) * (coded_input(cost, v, u) - v.coded_on_gpu[u])


def host_rest(problem: PlacementProblem, v: Variables) -> Expression:
    """Weights, states and gradients at rest in host memory."""
    rest: Expression = 0
    for u, cost in enumerate(problem.units):
        weights = mib(cost.weight_bytes)
        states = mib(cost.state_bytes)
        both = v.homes["stream"][u] + v.homes["mirror"][u] + v.homes["stream_update"][u]
        mirror = weights if problem.divides_updates else 0.0
        rest = rest + (weights + states) * both + (mirror + states) * v.homes["mirror_update"][u]
        # Gradients and sums stay on the host, but where they go to the disk as well.
        rest = rest + weights * (v.homes["nvme_states"][u] + v.homes["nvme_gradients"][u])
        rest = rest + (states - mib(cost.rest_state_bytes)) * (v.homes["nvme_states"][u] + v.homes["nvme"][u])
    for s, cost in enumerate(problem.stem):
        # Frozen stem weights rest on the GPU alone.
        if cost.num_trainable or not problem.has_gpu:
            rest = rest + mib(cost.weight_bytes + cost.state_bytes) * v.stem_on_worker(s)
            mirror = cost.weight_bytes if problem.divides_updates else 0
            rest = rest + mib(mirror + cost.state_bytes) * v.stem_streams[s]
    return rest


def nvme_mib(cost: UnitCost, v: Variables, u: int) -> Expression:
    """What unit u has on NVMe."""
    states = mib(cost.rest_state_bytes) * v.on_nvme(u)
    states = states + mib(cost.state_bytes - cost.rest_state_bytes) * v.gradients_on_nvme(u)
    return states + mib(cost.weight_bytes) * v.weights_on_nvme(u)


def nvme_updated_mib(cost: UnitCost, v: Variables, u: int) -> Expression:
    """What an update of unit u brings to host memory and back: states, and weights."""
    return mib(cost.rest_state_bytes) * v.on_nvme(u) + mib(cost.weight_bytes) * v.weights_on_nvme(u)


def _add_device_row(
    model: highspy.Highs,
    problem: PlacementProblem,
    v: Variables,
    lasting: Expression,
    passing: Expression,
    row: str,
    *,
    trains: bool = True,
) -> None:
    """`lasting`: there from forward to backward. `passing`: comes and goes within a unit's backward."""
    rest: Expression = problem.weight_slots * v.weight_slot_mib
    for u, cost in enumerate(problem.units):
        weights = mib(cost.weight_bytes)
        states = mib(cost.resident_state_bytes)
        rest = rest + (weights + states) * v.homes["resident"][u]
        rest = rest + weights * (v.homes["mirror"][u] + v.homes["mirror_update"][u])
    if trains:
        rest = rest + problem.state_slots * v.state_slot_mib + mib(problem.exchange_bytes)
        lasting = lasting + problem.activation_slots * v.activation_slot_mib
    if problem.has_gpu:
        for s, cost in enumerate(problem.stem):
            rest = rest + mib(cost.weight_bytes) + mib(cost.resident_state_bytes) * v.stem_on_gpu[s]
        budget = problem.gpu_budget_bytes - problem.gpu_reserve_bytes
    else:
        ranks = problem.local_ranks
        rest = host_rest(problem, v) + ranks * rest
        lasting, passing = ranks * lasting, ranks * passing
        budget = problem.cpu_budget_bytes - problem.cpu_reserve_bytes
    held = rest + (1 + SAVED_FRAGMENTATION_FRAC) * lasting + (1 + FRAGMENTATION_FRAC) * passing
    model.addConstr(held <= mib(budget), name=row)


def _head_gradient_mib(problem: PlacementProblem, v: Variables, *, on_its_way: bool) -> Expression:
    """The head's gradient after the loss; `on_its_way`: in the windows in which it may not have left yet."""
    total: Expression = 0
    for s, cost in enumerate(problem.stem):
        if problem.tied and cost.role == UnitRole.EMBEDDING:
            total = total + mib(cost.gradient_bytes)
        elif cost.role == UnitRole.HEAD:
            stays = 0 if problem.has_accumulation else v.stem_on_gpu[s]
            leaves = (1 if cost.parts > 1 else 1 - v.stem_on_gpu[s]) if on_its_way else 0
            total = total + mib(cost.resident_gradient_bytes) * stays + mib(cost.gradient_bytes) * leaves
    return total


def _boundary_mib(cost: UnitCost) -> float:
    return mib(cost.boundary_bytes)


def _input_mib(cost: UnitCost, v: Variables, u: int) -> Expression:
    on_gpu = 1 - v.boundary_on_cpu[u] - v.boundary_on_nvme[u] - v.dropped[u]
    return _boundary_mib(cost) * on_gpu - mib(cost.most_spared_input_bytes) * v.coded_on_gpu[u]


def _is_constant(expression: Expression) -> bool:
    return isinstance(expression, (int, float))


def _is_zero(expression: Expression) -> bool:
    """A choice that the problem does not allow."""
    return _is_constant(expression) and expression == 0
