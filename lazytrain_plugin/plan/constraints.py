"""Constraints of the program, one function per equation of docs/formulation.md.

Bytes are in MiB and times in ms. An operation's finish time is at least that of what it waits for plus its duration;
because each resource works in program order, no big-M is needed for the order itself.
"""

from __future__ import annotations

from typing import Any

import highspy

from lazytrain_plugin.plan.accounting import backward_workspace_bytes
from lazytrain_plugin.plan.names import name
from lazytrain_plugin.plan.problem import FRAGMENTATION_FRAC, MIB_PER_BYTE, MS_PER_S, PlacementProblem, UnitCost
from lazytrain_plugin.plan.simulate import NEEDED_FIRST
from lazytrain_plugin.plan.variables import Variables
from lazytrain_plugin.vocab import Activations

Expression = Any


def add_one_home(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Every unit has one home (Eq. 1): stream(u) + resident(u) + mirror(u) = 1. Rows: `one_home(u)`."""
    for u in range(len(problem.units)):
        model.addConstr(v.stream[u] + v.resident[u] + v.mirror[u] == 1, name=name("one_home", u))


def add_slot_sizes(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """A slot holds the largest unit that uses it (Eq. 2). Rows: `weight_slot(u)`, `gradient_slot(u)`. In MiB.

    weight_slot_mib >= weights[u] stream(u);  gradient_slot_mib >= gradients[u] (stream(u) + mirror(u)).
    """
    for u, cost in enumerate(problem.units):
        weights, gradients = _mib(cost.weight_bytes), _mib(cost.gradient_bytes)
        model.addConstr(v.weight_slot_mib >= weights * v.stream[u], name=name("weight_slot", u))
        if cost.num_trainable:
            model.addConstr(v.gradient_slot_mib >= gradients * _on_cpu(v, u), name=name("gradient_slot", u))


def add_host_capacity(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """What rests on the host fits it (Eq. 3). Row: `capacity(CPU)`. In MiB.

    sum over u of (weights + states)[u] (stream(u) + mirror(u)) + the stem's mirrors and states + reserve <= budget.
    Without a GPU everything is host memory, and Eq. 4 and 5 carry it.
    """
    if not problem.has_gpu:
        return
    used = _host_rest(problem, v)
    budget = _mib(problem.cpu_budget_bytes - problem.cpu_reserve_bytes)
    model.addConstr(used <= budget, name=name("capacity", "CPU"))


def add_loss_capacity(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """The device's memory during the loss (Eq. 4). Row: `capacity(GPU,loss)`. In MiB.

    rest + (1 + fragmentation) (sum of inputs + sum over u of kept[u] keep(u) + logits) <= budget.
    """
    activations = _mib(problem.loss_bytes + sum(cost.boundary_bytes for cost in problem.units)) + sum(
        _mib(cost.kept_bytes) * v.keep[u] for u, cost in enumerate(problem.units)
    )
    _add_device_row(model, problem, v, activations, name("capacity", "GPU", "loss"))


def add_backward_capacity(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """The device's memory during the backward of each unit u (Eq. 5). Rows: `capacity(GPU,u)`. In MiB.

    rest + (1 + fragmentation) (sum over w <= u of input[w] + sum over w < u of kept[w] keep(w) + workspace[u])
    <= budget. Later units are freed by then; what u itself kept is a part of its workspace.
    """
    activations: Expression = 0.0
    for u, cost in enumerate(problem.units):
        activations = activations + _mib(cost.boundary_bytes)
        workspace = _mib(backward_workspace_bytes(cost, Activations.RECOMPUTE))
        _add_device_row(model, problem, v, activations + workspace, name("capacity", "GPU", u))
        activations = activations + _mib(cost.kept_bytes) * v.keep[u]


def add_updates(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """The worker updates in forward order, each unit once its gradients rest on the host (Eq. 6).

    updated(u) >= updated(u-1) + update[u] on_cpu(u)
    updated(u) >= arrived(u) - backward(0) + update[u] on_cpu(u) - tail (1 - on_cpu(u))
    `arrived` is the gradients' time in the backward before (the step repeats); `tail` bounds what the links and the
    worker still have to do when backward ends. Rows: `update_order(u)`, `update_gradients(u)`.
    """
    backward_end = v.backward_ms[0]
    arrived = v.accumulated_ms if problem.has_accumulation else v.gradients_sent_ms
    stem_arrived = v.stem_accumulated_ms if problem.has_accumulation else v.stem_sent_ms
    tail = _tail_ms(problem)

    def add(label: str | int, updated, before, gradients, cost: UnitCost, on_cpu: Expression) -> None:
        duration = _ms(cost.cpu_update_s) * on_cpu
        if before is not None:
            model.addConstr(updated >= before + duration, name=name("update_order", label))
        if cost.num_trainable:
            model.addConstr(
                updated >= gradients - backward_end + duration - tail * (1 - on_cpu),
                name=name("update_gradients", label),
            )

    before = None
    for s in _stem_indices(problem, first=True):
        cost = problem.stem[s]
        add(cost.name, v.stem_updated_ms[s], before, stem_arrived[s], cost, 1 - v.stem_on_gpu[s])
        before = v.stem_updated_ms[s]
    for u, cost in enumerate(problem.units):
        add(u, v.updated_ms[u], before, arrived[u], cost, _on_cpu(v, u))
        before = v.updated_ms[u]
    for s in _stem_indices(problem, first=False):
        cost = problem.stem[s]
        add(cost.name, v.stem_updated_ms[s], before, stem_arrived[s], cost, 1 - v.stem_on_gpu[s])
        before = v.stem_updated_ms[s]


def add_forward_weights(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Weights cross H2D in forward order, after their update and into a free slot (Eq. 7).

    forward_weights(u) >= forward_weights(u-1) + copy[u] (stream(u) + mirror(u))
    forward_weights(u) >= updated(u)           + copy[u] (stream(u) + mirror(u))
    forward_weights(u) >= forward(u-K)         + copy[u] stream(u)
    The stem's CPU-updated weights pay one copy too: the embedding's before the first unit, the head's after the last.
    Rows: `weights_order(u)`, `weights_updated(u)`, `weights_slot(u)`.
    """
    before = None
    for s in _stem_indices(problem, first=True):
        before = _add_stem_copy(model, problem, v, s, before)
    for u, cost in enumerate(problem.units):
        copy = _ms(cost.weight_h2d_s)
        arrives, duration = v.forward_weights_ms[u], copy * _on_cpu(v, u)
        if before is not None:
            model.addConstr(arrives >= before + duration, name=name("weights_order", u))
        model.addConstr(arrives >= v.updated_ms[u] + duration, name=name("weights_updated", u))
        if u >= problem.weight_slots:
            slot_free = v.forward_ms[u - problem.weight_slots]
            model.addConstr(arrives >= slot_free + copy * v.stream[u], name=name("weights_slot", u))
        before = arrives
    for s in _stem_indices(problem, first=False):
        before = _add_stem_copy(model, problem, v, s, before)


def add_forward(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Compute in forward order, each unit when its weights are there (Eq. 8).

    forward(u) >= forward(u-1) + forward[u];  forward(u) >= forward_weights(u) + forward[u]
    forward(0) >= the embedding's weights, and the GPU's own updates, which run first on the compute stream.
    loss >= forward(N-1) + loss time;  loss >= the head's weights + loss time. Rows: `forward_order(u)`, ...
    """
    gpu_updates = sum(_ms(cost.gpu_update_s) * v.resident[u] for u, cost in enumerate(problem.units)) + sum(
        _ms(cost.gpu_update_s) * v.stem_on_gpu[s] for s, cost in enumerate(problem.stem)
    )
    first = _ms(problem.units[0].forward_s)
    model.addConstr(v.forward_ms[0] >= gpu_updates + first, name="forward_after_gpu_updates")
    for s in _stem_indices(problem, first=True):
        model.addConstr(
            v.forward_ms[0] >= v.stem_weights_ms[s] + first, name=name("forward_stem", problem.stem[s].name)
        )
    for u, cost in enumerate(problem.units):
        duration = _ms(cost.forward_s)
        if u:
            model.addConstr(v.forward_ms[u] >= v.forward_ms[u - 1] + duration, name=name("forward_order", u))
        model.addConstr(v.forward_ms[u] >= v.forward_weights_ms[u] + duration, name=name("forward_weights", u))
    loss = _ms(sum(cost.forward_s + cost.backward_s for cost in problem.stem if cost.forward_s))
    model.addConstr(v.loss_ms >= v.forward_ms[-1] + loss, name="loss_order")
    for s in _stem_indices(problem, first=False):
        model.addConstr(v.loss_ms >= v.stem_weights_ms[s] + loss, name=name("loss_weights", problem.stem[s].name))


def add_backward_weights(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Weights cross H2D again in reverse order; the last K units are still in their slots (Eq. 9).

    backward_weights(u) >= backward_weights(u+1) + copy[u] stream(u)
    backward_weights(u) >= backward(u+K)         + copy[u] stream(u),   for u < N - K.
    Rows: `reload_order(u)`, `reload_slot(u)`.
    """
    slots = problem.weight_slots
    for u in reversed(range(max(0, len(problem.units) - slots))):
        duration = _ms(problem.units[u].weight_h2d_s) * v.stream[u]
        arrives = v.backward_weights_ms[u]
        model.addConstr(arrives >= v.backward_weights_ms[u + 1] + duration, name=name("reload_order", u))
        model.addConstr(arrives >= v.backward_ms[u + slots] + duration, name=name("reload_slot", u))


def add_backward(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Compute in reverse order, with the recompute of what was not kept (Eq. 10).

    backward(u) >= backward(u+1)       + backward[u] + forward[u] (1 - keep(u))
    backward(u) >= backward_weights(u) + backward[u] + forward[u] (1 - keep(u))
    backward(u) >= sent(u+G-1): gradients of G units at most are on the GPU. Rows: `backward_order(u)`, ...
    """
    last = len(problem.units) - 1
    for u in reversed(range(last + 1)):
        cost = problem.units[u]
        duration = _ms(cost.backward_s) + _ms(cost.forward_s) * (1 - v.keep[u])
        after = v.backward_ms[u + 1] if u < last else 0
        model.addConstr(v.backward_ms[u] >= after + duration, name=name("backward_order", u))
        model.addConstr(v.backward_ms[u] >= v.backward_weights_ms[u] + duration, name=name("backward_weights", u))
        ahead = problem.gradient_slots - 1
        if u + ahead <= last and cost.num_trainable:
            sent = v.gradients_sent_ms[u + ahead]
            model.addConstr(v.backward_ms[u] >= sent, name=name("backward_slot", u))


def add_gradients(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Gradients of CPU-updated units cross D2H in reverse order (Eq. 11).

    sent(u) >= backward(u) + send[u] on_cpu(u);  sent(u) >= sent(u+1) + send[u] on_cpu(u)
    The head's go first, the embedding's last. Rows: `send(u)`, `send_order(u)`.
    """
    before: Expression = 0
    for s in _stem_indices(problem, first=False):
        before = _add_send(model, problem.stem[s].name, v.stem_sent_ms[s], 0, before, _stem_send(problem, v, s))
    for u in reversed(range(len(problem.units))):
        duration = _ms(problem.units[u].gradient_d2h_s) * _on_cpu(v, u)
        before = _add_send(model, u, v.gradients_sent_ms[u], v.backward_ms[u], before, duration)
    for s in _stem_indices(problem, first=True):
        computed = v.backward_ms[0]
        before = _add_send(model, problem.stem[s].name, v.stem_sent_ms[s], computed, before, _stem_send(problem, v, s))


def add_accumulation(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """With several micro-batches the worker adds gradients up as they arrive (Eq. 12).

    accumulated(u) >= sent(u) + add[u] on_cpu(u);  accumulated(u) >= accumulated(u+1) + add[u] on_cpu(u)
    Rows: `add(u)`, `add_order(u)`.
    """
    if not problem.has_accumulation:
        return
    before: Expression = 0
    order = [*((s, False) for s in _stem_indices(problem, first=False))]
    order += [*((u, True) for u in reversed(range(len(problem.units))))]
    order += [*((s, False) for s in _stem_indices(problem, first=True))]
    for index, is_unit in order:
        cost = (problem.units if is_unit else problem.stem)[index]
        done = (v.accumulated_ms if is_unit else v.stem_accumulated_ms)[index]
        sent = (v.gradients_sent_ms if is_unit else v.stem_sent_ms)[index]
        on_cpu = _on_cpu(v, index) if is_unit else 1 - v.stem_on_gpu[index]
        duration = _ms(cost.accumulate_s) * on_cpu
        label = index if is_unit else cost.name
        model.addConstr(done >= sent + duration, name=name("add", label))
        model.addConstr(done >= before + duration, name=name("add_order", label))
        before = done


def add_repeated_forward(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Forwards of later micro-batches: no updates, and the first K units are still in slots (Eq. 13).

    Eq. 7 and 8 without `updated`; times count from the end of the backward before. Rows: `repeat...(u)`.
    """
    if not problem.has_accumulation:
        return
    for u, cost in enumerate(problem.units):
        if u >= problem.weight_slots:
            duration = _ms(cost.weight_h2d_s) * v.stream[u]
            arrives = v.repeat_weights_ms[u]
            model.addConstr(arrives >= v.repeat_weights_ms[u - 1] + duration, name=name("repeat_weights_order", u))
            slot_free = v.repeat_ms[u - problem.weight_slots]
            model.addConstr(arrives >= slot_free + duration, name=name("repeat_weights_slot", u))
        compute = _ms(cost.forward_s)
        before = v.repeat_ms[u - 1] if u else 0
        model.addConstr(v.repeat_ms[u] >= before + compute, name=name("repeat_order", u))
        model.addConstr(v.repeat_ms[u] >= v.repeat_weights_ms[u] + compute, name=name("repeat_weights", u))


def add_keep_order(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Among equal neighbours the later one keeps its activations first (Eq. 15): keep(u) <= keep(u+1).

    Both save the same recompute, and backward frees the later one's earlier (Eq. 5). It breaks the symmetry that costs
    the search most; docs/formulation.md has what it costs in step time. Rows: `keep_order(u)`.
    """
    for u, (cost, after) in enumerate(zip(problem.units, problem.units[1:])):
        if (cost.kept_bytes, cost.workspace_bytes, cost.forward_s) == (
            after.kept_bytes,
            after.workspace_bytes,
            after.forward_s,
        ):
            model.addConstr(v.keep[u] <= v.keep[u + 1], name=name("keep_order", u))


def add_step_time(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """The step's time, and what each resource alone needs for it (Eq. 14). Rows: `step_time`, `load(...)`.

    step = loss + (A - 1) (repeat(N-1) + loss time) + A backward(0)
    step >= all updates and additions of the worker; step >= all copies of a direction. The loads are implied for whole
    steps; they tighten the relaxation and keep a backlog from growing from step to step.
    """
    micro_batches = problem.accumulation_steps
    step: Expression = v.loss_ms + micro_batches * v.backward_ms[0]
    if problem.has_accumulation:
        loss = _ms(sum(cost.forward_s + cost.backward_s for cost in problem.stem if cost.forward_s))
        step = step + (micro_batches - 1) * (v.repeat_ms[-1] + loss)
    model.addConstr(v.step_ms == step, name="step_time")
    if not problem.has_gpu:
        return
    worker = sum(
        _ms(cost.cpu_update_s + micro_batches * cost.accumulate_s) * _on_cpu(v, u)
        for u, cost in enumerate(problem.units)
    ) + sum(
        _ms(cost.cpu_update_s + micro_batches * cost.accumulate_s) * (1 - v.stem_on_gpu[s])
        for s, cost in enumerate(problem.stem)
    )
    down = sum(micro_batches * _ms(c.gradient_d2h_s) * _on_cpu(v, u) for u, c in enumerate(problem.units)) + sum(
        micro_batches * _ms(c.gradient_d2h_s) * (1 - v.stem_on_gpu[s]) for s, c in enumerate(problem.stem)
    )
    model.addConstr(v.step_ms >= worker, name=name("load", "worker"))
    model.addConstr(v.step_ms >= down, name=name("load", "d2h"))


def _add_device_row(
    model: highspy.Highs, problem: PlacementProblem, v: Variables, activations: Expression, row: str
) -> None:
    rest = (
        sum(_resident_mib(cost) * v.resident[u] for u, cost in enumerate(problem.units))
        + sum(_mib(cost.weight_bytes) * v.mirror[u] for u, cost in enumerate(problem.units))
        + problem.weight_slots * v.weight_slot_mib
        + problem.gradient_slots * v.gradient_slot_mib
    )
    if problem.has_gpu:
        for s, cost in enumerate(problem.stem):
            # On the GPU: weights and states. On the CPU: weights, and the gradient that autograd makes.
            on_cpu = _mib(cost.weight_bytes + cost.gradient_bytes)
            rest = rest + on_cpu + (_resident_mib(cost) - on_cpu) * v.stem_on_gpu[s]
        budget = problem.gpu_budget_bytes - problem.gpu_reserve_bytes
    else:
        rest = rest + _host_rest(problem, v)
        budget = problem.cpu_budget_bytes - problem.cpu_reserve_bytes
    model.addConstr(rest + (1 + FRAGMENTATION_FRAC) * activations <= _mib(budget), name=row)


def _host_rest(problem: PlacementProblem, v: Variables) -> Expression:
    units = sum(_mib(cost.weight_bytes + cost.state_bytes) * _on_cpu(v, u) for u, cost in enumerate(problem.units))
    stem = sum(
        _mib(cost.weight_bytes + cost.state_bytes) * (1 - v.stem_on_gpu[s])
        for s, cost in enumerate(problem.stem)
        # Frozen stem weights rest on the GPU alone.
        if cost.num_trainable or not problem.has_gpu
    )
    return units + stem


def _add_stem_copy(model, problem: PlacementProblem, v: Variables, s: int, before):
    cost = problem.stem[s]
    duration = _ms(cost.weight_h2d_s if cost.num_trainable else 0.0) * (1 - v.stem_on_gpu[s])
    arrives = v.stem_weights_ms[s]
    if before is not None:
        model.addConstr(arrives >= before + duration, name=name("weights_order", cost.name))
    model.addConstr(arrives >= v.stem_updated_ms[s] + duration, name=name("weights_updated", cost.name))
    return arrives


def _add_send(model, label: str | int, sent, computed: Expression, before: Expression, duration: Expression):
    model.addConstr(sent >= computed + duration, name=name("send", label))
    model.addConstr(sent >= before + duration, name=name("send_order", label))
    return sent


def _stem_send(problem: PlacementProblem, v: Variables, s: int) -> Expression:
    return _ms(problem.stem[s].gradient_d2h_s) * (1 - v.stem_on_gpu[s])


def _tail_ms(problem: PlacementProblem) -> float:
    """Most that D2H and the additions can have left to do when backward ends: what the slots and the stem hold."""
    costs = (*problem.units, *problem.stem)
    sends = problem.gradient_slots * max((cost.gradient_d2h_s for cost in problem.units), default=0.0)
    stem = sum(cost.gradient_d2h_s for cost in problem.stem)
    return _ms(sends + stem + sum(cost.accumulate_s for cost in costs))


def _stem_indices(problem: PlacementProblem, *, first: bool) -> list[int]:
    """Stem units that forward needs before its first unit, or after its last."""
    return [s for s, cost in enumerate(problem.stem) if (cost.role in NEEDED_FIRST) == first]


def _on_cpu(v: Variables, u: int) -> Expression:
    """1 when the CPU updates unit u."""
    return v.stream[u] + v.mirror[u]


def _resident_mib(cost: UnitCost) -> float:
    return _mib(cost.weight_bytes + cost.state_bytes)


def _mib(num_bytes: float) -> float:
    return num_bytes * MIB_PER_BYTE


def _ms(seconds: float) -> float:
    return seconds * MS_PER_S
