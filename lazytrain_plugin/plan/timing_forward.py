"""Time up to the loss: constraints of the program, one function per equation of docs/formulation.md. Times are in ms.

An operation's finish time is at least that of what it waits for plus its duration; because each resource works in
program order, no big-M is needed for the order itself.
"""

from __future__ import annotations

import highspy

from lazytrain_plugin.plan.capacity import nvme_updated_mib, offloaded_mib
from lazytrain_plugin.plan.gradient_traffic import stem_gradients
from lazytrain_plugin.plan.names import name
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost, mib, ms
from lazytrain_plugin.plan.simulate import NEEDED_FIRST
from lazytrain_plugin.plan.variables import Expression, Variables
from lazytrain_plugin.units import MIB


def add_updates(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """The worker updates in forward order, each unit once its gradients rest on the host (Eq. 10).

    updated(u) >= updated(u-1) + update(u) on_worker(u) + delay(u)
    updated(u) >= arrived(u) - end - unhidden + update(u) on_worker(u) + delay(u) - tail (1 - sends(u))
    `delay` is what the activations of unit u that leave the GPU in forward cost the worker.
    `arrived` is the gradients' time in the backward before (the step repeats); `tail` bounds what the links and the
    worker still have to do when backward ends. For streamed states `updated` is when their gradients are there. Rows:
    `update_order(u)`, `update_gradients(u)`.
    """
    backward_end = v.end_ms + v.unhidden_ms
    arrived = v.accumulated_ms if problem.has_accumulation else v.gradients_sent_ms
    stem_arrived = v.stem_accumulated_ms if problem.has_accumulation else v.stem_sent_ms
    tail = tail_ms(problem)

    def add(label, updated, before, gradients, cost: UnitCost, duration: Expression, sends: Expression) -> None:
        if before is not None:
            model.addConstr(updated >= before + duration, name=name("update_order", label))
        if cost.num_trainable:
            model.addConstr(
                updated >= gradients - backward_end + duration - tail * (1 - sends),
                name=name("update_gradients", label),
            )

    def add_stem(s: int, before):
        worker, sends = v.stem_on_worker(s), 1 - v.stem_on_gpu[s]
        cost = problem.stem[s]
        add(cost.name, v.stem_updated_ms[s], before, stem_arrived[s], cost, ms(cost.cpu_update_s) * worker, sends)
        return v.stem_updated_ms[s]

    before = None
    for s in stem_indices(problem, first=True):
        before = add_stem(s, before)
    for u, cost in enumerate(problem.units):
        add(u, v.updated_ms[u], before, arrived[u], cost, worker_ms(problem, v, u), v.sends(u))
        before = v.updated_ms[u]
    for s in stem_indices(problem, first=False):
        before = add_stem(s, before)


def worker_ms(problem: PlacementProblem, v: Variables, u: int) -> Expression:
    """The worker's time for unit u: its update, and what its leaving activations cost the updates beside them."""
    cost = problem.units[u]
    delay = ms(problem.update_delay_s(MIB)) * offloaded_mib(cost, v, u)
    return ms(cost.cpu_update_s) * v.on_worker(u) + delay


def add_spread(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Updated weights come to the other nodes in forward order, after the gathers of what GPUs have updated (Eq. 10a).

    spread(u) >= spread(u-1) + spread time(u) sends(u);  spread(u) >= updated(u) + the same
    spread(u) >= states_back(u) - ahead (1 - streams_states(u)) + the same
    spread(0) >= all gathers + the same. Rows: `spread...(u)`.
    """
    if not problem.spreads:
        return
    before = sum(_gather_ms(cost, v.homes["resident"][u]) for u, cost in enumerate(problem.units))
    before = before + sum(_gather_ms(cost, v.stem_on_gpu[s]) for s, cost in enumerate(problem.stem))

    def add(label, spread, updated, duration: Expression) -> None:
        nonlocal before
        model.addConstr(spread >= before + duration, name=name("spread_order", label))
        model.addConstr(spread >= updated + duration, name=name("spread", label))
        before = spread

    def add_stem(s: int) -> None:
        cost = problem.stem[s]
        duration = spread_ms(cost, 1 - v.stem_on_gpu[s])
        add(cost.name, v.stem_spread_ms[s], v.stem_updated_ms[s], duration)

    for s in stem_indices(problem, first=True):
        add_stem(s)
    for u, cost in enumerate(problem.units):
        duration = spread_ms(cost, v.sends(u))
        add(u, v.spread_ms[u], v.updated_ms[u], duration)
        if has_streams(v, u):
            back = v.states_back_ms[u] - _ahead_ms(problem, u) * (1 - v.streams_states(u))
            model.addConstr(v.spread_ms[u] >= back + duration, name=name("spread_states", u))
    for s in stem_indices(problem, first=False):
        add_stem(s)


def spread_ms(cost: UnitCost, sends: Expression) -> Expression:
    """What a unit's updated weights in host memory take to come to the other nodes."""
    return ms(cost.spread_s) * sends


def add_disk(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """NVMe reads and writes of updates, each in forward order, through D staging buffers (Eq. 11).

    disk_read(u) >= disk_read(u-1) + read_lost(u-1) + read(u);  disk_read(u) >= disk_written(u-D) + read(u)
    disk_read(u) >= gradients_written(u) - end + read(u), for u >= D: those that came last are still in memory
    updated(u) >= disk_read(u) + update(u) on_worker(u)
    disk_written(u) >= disk_written(u-1) + write_lost(u) + write(u);  disk_written(u) >= updated(u) + write(u)
    step >= disk_written(N-1). `read_lost(u)`: what the writes of unit u take from reading; `write_lost(u)`: what its
    reads take from writing. Rows: `disk_read...(u)`, `disk_write...(u)`.
    """
    if not v.disk_read_ms:
        return
    depth = problem.nvme_slots
    before_read: Expression = 0
    before_write: Expression = 0
    for u, cost in enumerate(problem.units):
        moved = nvme_updated_mib(cost, v, u)
        written = moved if cost.num_trainable else 0
        if v.gradients_written_ms and u >= depth:
            moved = moved + mib(cost.accumulator_bytes or cost.gradient_rest_bytes) * v.gradients_on_nvme(u)
        read, write = ms(problem.nvme_read_s(MIB)) * moved, ms(problem.nvme_write_s(MIB)) * written
        if v.gradients_written_ms and u >= depth:
            there = v.gradients_written_ms[u] - v.end_ms - behind_ms(problem) * (1 - v.gradients_on_nvme(u))
            model.addConstr(v.disk_read_ms[u] >= there + read, name=name("disk_read_gradients", u))
        model.addConstr(v.disk_read_ms[u] >= before_read + read, name=name("disk_read_order", u))
        if u >= depth:
            free = v.disk_written_ms[u - depth]
            model.addConstr(v.disk_read_ms[u] >= free + read, name=name("disk_read_slot", u))
        update = worker_ms(problem, v, u)
        model.addConstr(v.updated_ms[u] >= v.disk_read_ms[u] + update, name=name("update_disk", u))
        before_write = before_write + ms(problem.nvme_write_delay_s(MIB)) * moved
        model.addConstr(v.disk_written_ms[u] >= before_write + write, name=name("disk_write_order", u))
        model.addConstr(v.disk_written_ms[u] >= v.updated_ms[u] + write, name=name("disk_write", u))
        before_read = v.disk_read_ms[u] + ms(problem.nvme_read_delay_s(MIB)) * written
        before_write = v.disk_written_ms[u]
    model.addConstr(v.step_ms >= v.disk_written_ms[-1], name="disk_write_end")


def add_forward_weights(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Weights and streamed states cross H2D in forward order, after updates and into free slots (Eq. 12).

    forward_weights(u) >= forward_weights(u-1) + copy(u) (streamed(u) + mirror(u)) + states_in(u) streams_states(u)
    forward_weights(u) >= updated(u)           + the same
    forward_weights(u) >= spread(u)            + copy(u) (streamed(u) + mirror(u)), where nodes divide states
    forward_weights(u) >= forward(u-P)         + copy(u) streamed(u)
    forward_weights(u) >= states_back(u-S)     + states_in(u) streams_states(u) where a slot holds a unit's states; else
    forward_weights(u) >= states_back(u-1) - (S-1) chunks out of u-1 + states_in(u) - ahead (1 - streams_states(u))
    forward_weights(u) >= states_back(u-P)     + copy(u) streamed(u): updated weights leave from their slot
    forward_weights(N-1) >= all updates of the worker + copy uses(worker): the last updated unit's copy comes after all
    of them, whichever unit it is. Implied for whole units, but not for fractions.
    The stem's: the embedding's before the first unit, the head's after the last.
    Rows: `weights_order(u)`, `weights_updated(u)`, `weights_slot(u)`, `states_slot(u)`.
    """
    before = None
    for s in stem_indices(problem, first=True):
        before = _add_stem_copy(model, problem, v, s, before)
    for u, cost in enumerate(problem.units):
        arrives, copy = v.forward_weights_ms[u], ms(cost.weight_h2d_s)
        states, copied = _states_in_ms(problem, v, u), v.streamed(u) + v.homes["mirror"][u]
        if problem.divides_updates:
            copied = copied + v.homes["mirror_update"][u]
            # New weights come from where all ranks' parts have met, while the states of later units pass.
            met = v.states_back_ms[u] - _ahead_ms(problem, u) * (1 - v.streams_states(u)) if has_streams(v, u) else 0
            model.addConstr(arrives >= met + copy * copied, name=name("weights_met", u))
            states = _states_ahead_ms(problem, v, u)
        duration = copy * copied + states
        if before is not None:
            model.addConstr(arrives >= before + duration, name=name("weights_order", u))
        model.addConstr(arrives >= v.updated_ms[u] + duration, name=name("weights_updated", u))
        if v.spread_ms:
            model.addConstr(arrives >= v.spread_ms[u] + copy * copied, name=name("weights_spread", u))
        if u >= problem.weight_slots:
            slot_free = v.forward_ms[u - problem.weight_slots]
            model.addConstr(arrives >= slot_free + copy * v.streamed(u), name=name("weights_slot", u))
            if has_streams(v, u - problem.weight_slots):
                left = v.states_back_ms[u - problem.weight_slots]
                model.addConstr(arrives >= left + copy * v.streamed(u), name=name("weights_left", u))
        if has_streams(v, u) and not problem.divides_updates:
            _add_states_slot(model, problem, v, u, arrives, states)
        before = arrives
    if "worker" in v.used:
        copies = [ms(cost.weight_h2d_s) for u, cost in enumerate(problem.units) if cost.num_trainable]
        updates = sum(ms(cost.cpu_update_s) * v.on_worker(u) for u, cost in enumerate(problem.units))
        model.addConstr(before >= updates + min(copies) * v.used["worker"], name=name("weights_last"))
    for s in stem_indices(problem, first=False):
        before = _add_stem_copy(model, problem, v, s, before)


def _states_in_ms(problem: PlacementProblem, v: Variables, u: int) -> Expression:
    """What streamed states of unit u take to come to the GPU."""
    return ms(problem.h2d_s(problem.units[u].streamed_in_bytes)) * v.streams_states(u)


def _states_ahead_ms(problem: PlacementProblem, v: Variables, u: int) -> Expression:
    """Divided updates: states that come between the weights of the unit before and those of unit u."""
    last = len(problem.units) - 1
    ahead = range(u + problem.state_slots, u + problem.state_slots + 1) if u else range(problem.state_slots + 1)
    return sum(_states_in_ms(problem, v, later) for later in ahead if later <= last)


def _add_states_slot(model, problem: PlacementProblem, v: Variables, u: int, arrives, states: Expression) -> None:
    slots, cost = problem.state_slots, problem.units[u]
    if cost.state_chunks <= 1:
        if u >= slots:
            model.addConstr(arrives >= v.states_back_ms[u - slots] + states, name=name("states_slot", u))
    elif u:
        # A unit's chunks follow those of the unit before, S of them at a time.
        last_chunks = (min(slots, cost.state_chunks) - 1) / cost.state_chunks * _states_out_ms(problem, v, u - 1)
        ahead = _ahead_ms(problem, u)
        free = v.states_back_ms[u - 1] - last_chunks - ahead * (1 - v.streams_states(u))
        model.addConstr(arrives >= free + states, name=name("states_slot", u))


def _states_out_ms(problem: PlacementProblem, v: Variables, u: int) -> Expression:
    """What an update of streamed states sends back, weights included where they rest on the host."""
    cost = problem.units[u]
    states = ms(problem.d2h_s(cost.streamed_out_bytes)) * v.streams_states(u)
    return states + ms(problem.d2h_s(cost.returned_weight_bytes)) * returns_weights(problem, v, u)


def returns_weights(problem: PlacementProblem, v: Variables, u: int) -> Expression:
    """1 when a streamed update sends new weights to the host: they rest there, or all ranks' parts meet there."""
    return v.streams_states(u) if problem.divides_updates else v.homes["stream_update"][u]


def _ahead_ms(problem: PlacementProblem, u: int) -> float:
    """Most that states may be behind weights that don't wait for them: what two units send back and compute."""
    costs = problem.units[max(0, u - 2) : u]
    out = sum(problem.d2h_s(c.streamed_out_bytes + c.weight_bytes + c.boundary_bytes + c.kept_bytes) for c in costs)
    return ms(out + sum(c.forward_s for c in costs))


def add_forward(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Compute in forward order, each unit when its weights are there (Eq. 13).

    forward(u) >= forward(u-1) + forward time + gpu_update(u) streams_states(u);  >= forward_weights(u) + the same
    forward(u) >= left(u-L) + forward time: at most L units' activations are on their way off the GPU
    forward(0) >= the embedding's weights, and the GPU's own updates, which run first on the compute stream.
    loss >= forward(N-1) + loss time;  loss >= the head's weights + loss time.
    forward(u), loss >= the gathers of what ranks have updated on their GPUs, up to u. Rows: `forward_order(u)`, ...
    """
    gpu_updates = sum(ms(cost.own_update_s) * v.homes["resident"][u] for u, cost in enumerate(problem.units)) + sum(
        ms(cost.own_update_s) * v.stem_on_gpu[s] for s, cost in enumerate(problem.stem)
    )
    gathered: Expression = sum(_gather_ms(problem.stem[s], v.stem_on_gpu[s]) for s in stem_indices(problem, first=True))
    first = ms(problem.units[0].forward_s)
    model.addConstr(v.forward_ms[0] >= gpu_updates + first, name="forward_after_gpu_updates")
    for s in stem_indices(problem, first=True):
        update = ms(problem.stem[s].own_update_s) * v.stem_streams[s]
        model.addConstr(
            v.forward_ms[0] >= v.stem_weights_ms[s] + update + first, name=name("forward_stem", problem.stem[s].name)
        )
    for u, cost in enumerate(problem.units):
        duration = ms(cost.forward_s) + ms(cost.own_update_s) * v.streams_states(u)
        if u:
            model.addConstr(v.forward_ms[u] >= v.forward_ms[u - 1] + duration, name=name("forward_order", u))
        model.addConstr(v.forward_ms[u] >= v.forward_weights_ms[u] + duration, name=name("forward_weights", u))
        if cost.gather_s:
            gathered = gathered + _gather_ms(cost, v.homes["resident"][u])
            model.addConstr(v.forward_ms[u] >= gathered + ms(cost.forward_s), name=name("forward_gathered", u))
        if v.returned_ms and u >= problem.activation_slots:
            slot_free = v.left_ms[u - problem.activation_slots]
            model.addConstr(v.forward_ms[u] >= slot_free + ms(cost.forward_s), name=name("forward_slot", u))
    loss = loss_ms(problem)
    model.addConstr(v.loss_ms >= v.forward_ms[-1] + loss, name="loss_order")
    for s in stem_indices(problem, first=False):
        update = ms(problem.stem[s].own_update_s) * v.stem_streams[s]
        row = name("loss_weights", problem.stem[s].name)
        model.addConstr(v.loss_ms >= v.stem_weights_ms[s] + update + loss, name=row)
        if problem.stem[s].gather_s:
            gathered = gathered + _gather_ms(problem.stem[s], v.stem_on_gpu[s])
            model.addConstr(v.loss_ms >= gathered + loss, name=name("loss_gathered", problem.stem[s].name))


def _gather_ms(cost: UnitCost, on_gpu: Expression) -> Expression:
    """What a unit's updated weights take to come to all ranks of the node."""
    return ms(cost.gather_s) * on_gpu


def add_forward_returns(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """What crosses D2H in forward: updated states as early as they are here, activations as they are computed (Eq. 14).

    states_back(u) >= states_back(u-1) + activations(u-2) + states_out(u) streams_states(u);
    u = 0: the last gradient's arrival - end - unhidden + ...
    states_back(u) >= forward_weights(u) + (gpu_update(u) + last chunk of states_out(u)) streams_states(u)
    states_back(u) >= forward_weights(u) + (states_out(u) - (states_in(u) - its first chunk)) streams_states(u)
    left(u) >= each of left(u-1), forward(u), + activations(u), the last also >= states_back(N-1) + activations(N-1)
    `states_out` holds the weights too where they rest on the host. Rows: `states_back...(u)`, `left...(u)`.
    """
    if not v.left_ms:
        return
    for u, cost in enumerate(problem.units):
        states, here = _states_out_ms(problem, v, u), v.forward_weights_ms[u]
        before = v.states_back_ms[u - 1] if u else last_sent_ms(problem, v) - v.end_ms - v.unhidden_ms
        if u > 1:
            before = before + ms(problem.d2h_s(MIB)) * offloaded_mib(problem.units[u - 2], v, u - 2)
        model.addConstr(v.states_back_ms[u] >= before + states, name=name("states_back_order", u))
        if has_streams(v, u) and problem.divides_updates:
            _add_divided_return(model, problem, v, u)
        elif has_streams(v, u):
            update = ms(cost.gpu_update_s) * v.streams_states(u)
            last_chunk = states * (1 / cost.state_chunks)
            model.addConstr(v.states_back_ms[u] >= here + update + last_chunk, name=name("states_back", u))
            later = ms(problem.h2d_s(cost.streamed_in_bytes)) * (1 - 1 / cost.state_chunks) * v.streams_states(u)
            if cost.state_chunks > 1:
                model.addConstr(v.states_back_ms[u] >= here - later + states, name=name("states_back_first", u))
        leaving = ms(problem.d2h_s(MIB)) * offloaded_mib(cost, v, u)
        if u:
            model.addConstr(v.left_ms[u] >= v.left_ms[u - 1] + leaving, name=name("left_order", u))
        if u + 1 == len(problem.units):
            model.addConstr(v.left_ms[u] >= v.states_back_ms[u] + leaving, name=name("left_states", u))
        model.addConstr(v.left_ms[u] >= v.forward_ms[u] + leaving, name=name("left", u))


def _add_divided_return(model, problem: PlacementProblem, v: Variables, u: int) -> None:
    """Divided updates don't wait for weights: their states come after those of units before."""
    cost, streams = problem.units[u], v.streams_states(u)
    last_chunk = _states_out_ms(problem, v, u) * (1 / cost.state_chunks)
    update = ms(cost.own_update_s) * streams + last_chunk
    before = u - problem.state_slots - 1
    if before >= 0:
        here = v.forward_weights_ms[before] + _states_in_ms(problem, v, u)
    else:
        here = sum(_states_in_ms(problem, v, earlier) for earlier in range(u + 1))
    model.addConstr(v.states_back_ms[u] >= here + update, name=name("states_back", u))
    if cost.num_trainable:
        # Nothing is put off where the unit does not stream: its update must be done by its forward as well.
        come = v.updated_ms[u] - _ahead_ms(problem, u) * (1 - streams)
        model.addConstr(v.states_back_ms[u] >= come + _states_in_ms(problem, v, u) + update, name=name("states_due", u))


def _add_stem_copy(model, problem: PlacementProblem, v: Variables, s: int, before):
    cost = problem.stem[s]
    copied = v.stem_on_worker(s) + (v.stem_streams[s] if problem.divides_updates else 0)
    copy = ms(cost.weight_h2d_s if cost.num_trainable else 0.0) * copied
    duration = copy + ms(problem.h2d_s(cost.streamed_in_bytes)) * v.stem_streams[s]
    arrives = v.stem_weights_ms[s]
    if before is not None:
        model.addConstr(arrives >= before + duration, name=name("weights_order", cost.name))
    model.addConstr(arrives >= v.stem_updated_ms[s] + duration, name=name("weights_updated", cost.name))
    if v.stem_spread_ms:
        model.addConstr(arrives >= v.stem_spread_ms[s] + copy, name=name("weights_spread", cost.name))
    return arrives


def tail_ms(problem: PlacementProblem) -> float:
    """Most that links and additions can have left to do when backward ends: what the slots and the stem hold."""
    costs = (*problem.units, *problem.stem)
    sends = problem.gradient_slots * max((cost.gradient_d2h_s for cost in problem.units), default=0.0)
    stem = sum(cost.gradient_d2h_s for cost in problem.stem)
    meeting = problem.gradient_slots * max((cost.exchange_s for cost in problem.units), default=0.0)
    meeting += sum(cost.exchange_s for cost in problem.stem)
    return ms(sends + stem + meeting + sum(cost.accumulate_s for cost in costs))


def behind_ms(problem: PlacementProblem) -> float:
    """Most that D2H can be behind backward, gradients and what forward left it to do, with a disk behind it."""
    leaving = max((cost.boundary_bytes + cost.kept_bytes for cost in problem.units), default=0)
    states = sum(cost.streamed_out_bytes + cost.weight_bytes for cost in problem.units[-2:])
    behind = tail_ms(problem) + ms(problem.d2h_s(problem.activation_slots * leaving + states))
    if problem.has_nvme:
        largest = max((cost.state_bytes + leaving for cost in problem.units), default=0)
        moves_s = problem.nvme_write_s(largest) + problem.nvme_read_s(largest)
        lost_s = problem.nvme_write_delay_s(largest) + problem.nvme_read_delay_s(largest)
        behind += ms(problem.nvme_slots * (moves_s + lost_s))
    return behind


def stem_indices(problem: PlacementProblem, *, first: bool) -> list[int]:
    """Stem units that forward needs before its first unit, or after its last."""
    return [s for s, cost in enumerate(problem.stem) if (cost.role in NEEDED_FIRST) == first]


def last_sent_ms(problem: PlacementProblem, v: Variables) -> Expression:
    """When the last gradients of a backward have left the GPU."""
    _, late = stem_gradients(problem.stem)
    return v.stem_sent_ms[late[-1]] if late else v.gradients_sent_ms[0]


def loss_ms(problem: PlacementProblem) -> float:
    """Computing the head and the loss, forward and backward."""
    return ms(sum(cost.forward_s + cost.backward_s for cost in problem.stem if cost.forward_s))


def has_streams(v: Variables, u: int) -> bool:
    """Whether unit u may stream its states."""
    return bool(v.states_back_ms) and not isinstance(v.streams_states(u), int)
