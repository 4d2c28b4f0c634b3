"""Time from the loss on, and the step's: constraints of the program, one function per equation of docs/formulation.md.

Times are in ms.
"""

from __future__ import annotations

import highspy

from lazytrain_plugin.plan.capacity import nvme_updated_mib, offloaded_mib
from lazytrain_plugin.plan.gradient_traffic import MEANS, stem_gradients
from lazytrain_plugin.plan.names import name
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost, mib, ms
from lazytrain_plugin.plan.program_inputs import again_ms, parked_mib
from lazytrain_plugin.plan.timing_forward import (
    behind_ms,
    has_streams,
    last_sent_ms,
    loss_ms,
    returns_weights,
    spread_ms,
    tail_ms,
    worker_ms,
)
from lazytrain_plugin.plan.variables import Expression, Variables
from lazytrain_plugin.units import MIB
from lazytrain_plugin.vocab import Activations


def add_backward_weights(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Weights, and activations that left, cross H2D in reverse order (Eq. 15).

    The last P units are still in their slots.
    backward_weights(u) >= returned(u+1) + copy(u) streamed(u);  >= backward(u+P) + copy(u) streamed(u),  u < N - P
    backward_weights(u) >= states_back(u) - loss + copy(u) streamed(u)
    returned(u) >= backward_weights(u) + activations(u);  >= backward(u+L) + activations(u)
    returned(u) >= left(u) - loss + activations(u)
    With weights on NVMe: disk_backward(u) >= disk_backward(u+1) + read(u);  >= backward_weights(u+D) + read(u);
    >= disk_written(u) - loss + read(u), and backward_weights(u) >= disk_backward(u) + copy(u) streamed(u).
    Rows: `reload_order(u)`, `reload_slot(u)`, ...
    """
    slots, num_units = problem.weight_slots, len(problem.units)
    arrived = v.returned_ms or v.backward_weights_ms
    for u in reversed(range(num_units)):
        cost = problem.units[u]
        arrives = v.backward_weights_ms[u]
        duration = ms(cost.weight_h2d_s) * v.streamed(u) if u < num_units - slots else 0
        if u < num_units - slots or (v.returned_ms and u + 1 < num_units):
            model.addConstr(arrives >= arrived[u + 1] + duration, name=name("reload_order", u))
        if u < num_units - slots:
            model.addConstr(arrives >= v.backward_ms[u + slots] + duration, name=name("reload_slot", u))
            if has_streams(v, u):
                written = v.states_back_ms[u] - v.loss_ms
                model.addConstr(arrives >= written + duration, name=name("reload_updated", u))
            if v.disk_backward_ms:
                _add_backward_read(model, problem, v, u)
                model.addConstr(arrives >= v.disk_backward_ms[u] + duration, name=name("reload_disk", u))
        if not v.returned_ms:
            continue
        back = ms(problem.h2d_s(MIB)) * offloaded_mib(cost, v, u)
        returned = v.returned_ms[u]
        model.addConstr(returned >= arrives + back, name=name("return", u))
        if u + problem.activation_slots < num_units:
            slot_free = v.backward_ms[u + problem.activation_slots]
            model.addConstr(returned >= slot_free + back, name=name("return_slot", u))
        model.addConstr(returned >= v.left_ms[u] - v.loss_ms + back, name=name("return_left", u))


def _add_backward_read(model: highspy.Highs, problem: PlacementProblem, v: Variables, u: int) -> None:
    cost = problem.units[u]
    read = ms(problem.nvme_read_s(cost.weight_bytes, each=True)) * v.weights_on_nvme(u)
    done, num_units = v.disk_backward_ms[u], len(problem.units)
    if u + 1 < num_units:
        model.addConstr(done >= v.disk_backward_ms[u + 1] + read, name=name("reload_read_order", u))
    if u + problem.nvme_slots < num_units:
        free = v.backward_weights_ms[u + problem.nvme_slots]
        model.addConstr(done >= free + read, name=name("reload_read_slot", u))
    written = v.disk_written_ms[u] - v.loss_ms
    model.addConstr(done >= written + read, name=name("reload_read", u))


def add_backward(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Compute in reverse order, with the recompute of what was not saved (Eq. 16).

    backward(u) >= backward(u+1)       + backward time + recompute(u)
    backward(u) >= backward_weights(u) + backward time + recompute(u), `returned(u)` where activations may leave
    backward(u) >= sent(u+R-1), `exchanged` with several ranks: gradients of R units at most are on the GPU.
    Rows: `backward_order(u)`, ...
    recompute(u) = forward time - sum over a of what strategy a saves of it, + forward time(u-1) drop(u).
    """
    last, (early, _) = len(problem.units) - 1, stem_gradients(problem.stem)
    arrived = v.returned_ms or v.backward_weights_ms
    for u in reversed(range(last + 1)):
        cost = problem.units[u]
        duration = ms(cost.backward_s) + recompute_ms(cost, v, u) + again_ms(problem, v, u)
        after = v.backward_ms[u + 1] if u < last else 0
        model.addConstr(v.backward_ms[u] >= after + duration, name=name("backward_order", u))
        model.addConstr(v.backward_ms[u] >= arrived[u] + duration, name=name("backward_weights", u))
        ahead = problem.gradient_slots - 1
        if u + ahead <= last and cost.num_trainable:
            sent = (v.exchanged_ms or v.gradients_sent_ms)[u + ahead]
            model.addConstr(v.backward_ms[u] >= sent, name=name("backward_slot", u))
        elif v.exchanged_ms and last < u + ahead <= last + len(early) and cost.num_trainable:
            # The stem's exchanges take slots too.
            sent = v.stem_exchanged_ms[early[last - u - ahead]]
            model.addConstr(v.backward_ms[u] >= sent, name=name("backward_slot", u))


def recompute_ms(cost: UnitCost, v: Variables, u: int) -> Expression:
    """What unit u computes again in backward."""
    everything_s = cost.recompute_s(Activations.RECOMPUTE)
    return ms(everything_s) - sum(
        ms(everything_s - cost.recompute_s(activations)) * column for (activations, _), column in v.saved[u].items()
    )


def add_exchange(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Gradients meet those of other ranks in reverse order, before they leave the GPU (Eq. 17a).

    exchanged(u) >= backward(u) + exchange(u);  exchanged(u) >= exchanged(u+1) + exchange(u)
    exchanged(u) >= sent(u+2) + exchange(u) - tail (1 - sends(u)): two means at a time, one on its way home
    unhidden >= exchanged(embedding) - end. The head's meet first, the embedding's last. Rows: `exchange(u)`,
    `exchange_order(u)`.
    """
    if not problem.exchanges:
        return
    before: Expression = 0
    tail, (early, late) = tail_ms(problem), stem_gradients(problem.stem)
    for s in early:
        cost = problem.stem[s]
        duration = ms(cost.exchange_s)
        before = _add_send(model, cost.name, v.stem_exchanged_ms[s], 0, before, duration, kind="exchange")
    for u in reversed(range(len(problem.units))):
        duration = ms(problem.units[u].exchange_s)
        before = _add_send(model, u, v.exchanged_ms[u], v.backward_ms[u], before, duration, kind="exchange")
        if u + MEANS < len(problem.units):
            sent = v.gradients_sent_ms[u + MEANS] - tail * (1 - v.sends(u))
            model.addConstr(before >= sent + duration, name=name("exchange_mean", u))
    for s in late:
        cost, computed = problem.stem[s], v.backward_ms[0]
        duration = ms(cost.exchange_s)
        before = _add_send(model, cost.name, v.stem_exchanged_ms[s], computed, before, duration, kind="exchange")
    model.addConstr(v.unhidden_ms >= before - v.end_ms, name="unhidden")


def add_gradients(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Gradients cross D2H in reverse order, after what forward sent (Eq. 17).

    sent(u) >= backward(u) + send(u) sends(u);  sent(u) >= sent(u+1) + send(u) sends(u)
    The head's go first (after left(N-1) - loss), then the small tensors', the embedding's last. With several ranks
    `exchanged` takes the place of `backward`. Rows: `send(u)`, `send_order(u)`.
    """
    before: Expression = v.left_ms[-1] - v.loss_ms if v.left_ms else 0
    early, late = stem_gradients(problem.stem)
    if v.repeat_left_ms and problem.units:
        # Every micro-batch's forward leaves as much to do; its backward is counted alike.
        sent = v.stem_sent_ms[early[0]] if early else v.gradients_sent_ms[-1]
        done = v.repeat_left_ms[-1] - v.repeat_ms[-1] - loss_ms(problem)
        duration = (
            _stem_send(problem, v, early[0])
            if early
            else ms(problem.units[-1].gradient_d2h_s) * v.sends(len(problem.units) - 1)
        )
        model.addConstr(sent >= done + duration, name="send_after_repeat")
    for s in early:
        computed = v.stem_exchanged_ms[s] if v.stem_exchanged_ms else 0
        before = _add_send(model, problem.stem[s].name, v.stem_sent_ms[s], computed, before, _stem_send(problem, v, s))
    for u in reversed(range(len(problem.units))):
        duration = ms(problem.units[u].gradient_d2h_s) * v.sends(u)
        computed = (v.exchanged_ms or v.backward_ms)[u]
        before = _add_send(model, u, v.gradients_sent_ms[u], computed, before, duration)
    for s in late:
        computed = v.stem_exchanged_ms[s] if v.stem_exchanged_ms else v.backward_ms[0]
        before = _add_send(model, problem.stem[s].name, v.stem_sent_ms[s], computed, before, _stem_send(problem, v, s))
    _add_places(model, problem, v, early, late)


def _add_places(model, problem: PlacementProblem, v: Variables, early: list[int], late: list[int]) -> None:
    """The stem's gradients take places too: with all R taken, backward goes on when the oldest have arrived.

    Of what goes home k-th, the head's first: backward >= sent(k-R+1) - behind (1 - sends(k)), `backward` being the next
    unit's without its computing, the unit's own, or for the embedding's the end. Between units it is Eq. 16's row.
    Small ones take none. Rows: `place(k)`.
    """
    early = [s for s in early if problem.stem[s].has_gradient_place]
    behind, last = behind_ms(problem), len(problem.units) - 1
    begin: Expression = 0
    if problem.units:
        cost = problem.units[-1]
        begin = v.backward_ms[last] - ms(cost.backward_s) - recompute_ms(cost, v, last) - again_ms(problem, v, last)
    order = [(problem.stem[s].name, v.stem_sent_ms[s], 1 - v.stem_on_gpu[s], begin) for s in early]
    order += [(u, v.gradients_sent_ms[u], v.sends(u), v.backward_ms[u]) for u in reversed(range(last + 1))]
    model.addConstr(v.end_ms >= v.backward_ms[0], name="backward_end")
    order += [(problem.stem[s].name, v.stem_sent_ms[s], 1 - v.stem_on_gpu[s], v.end_ms) for s in late]
    ahead = problem.gradient_slots - 1
    for k, (label, _, sends, goes_on) in enumerate(order):
        oldest = k - ahead
        between_units = isinstance(label, int) and oldest >= len(early)
        if ahead < 1 or oldest < 0 or between_units or not problem.has_gpu or problem.exchanges:
            continue  # exchanges have rows of their own
        model.addConstr(goes_on >= order[oldest][1] - behind * (1 - sends), name=name("place", label))


def add_gradients_to_disk(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Gradients cross one of D buffers on their way to NVMe, in reverse order (Eq. 17).

    gradients_written(u) >= gradients_written(u+1) + write(G);  >= arrived(u) + write(G) - behind (1 - on_nvme(u))
    backward(u) >= gradients_written(u+D) - behind (1 - on_nvme(u)): the host waits for a buffer, and launches nothing.
    With several micro-batches these are the sums, which come to memory for every addition after the first.
    Rows: `gradients_write_order(u)`, `gradients_write(u)`, `gradients_buffer(u)`.
    """
    if not v.gradients_written_ms:
        return
    behind, num_units = behind_ms(problem), len(problem.units)
    arrived = v.accumulated_ms if problem.has_accumulation else v.gradients_sent_ms
    for u in reversed(range(num_units)):
        on_nvme, written = v.gradients_on_nvme(u), v.gradients_written_ms[u]
        write = ms(problem.nvme_write_s(_summed_bytes(problem.units[u]))) * on_nvme
        if u + 1 < num_units:
            after = v.gradients_written_ms[u + 1]
            model.addConstr(written >= after + write, name=name("gradients_write_order", u))
        model.addConstr(written >= arrived[u] + write - behind * (1 - on_nvme), name=name("gradients_write", u))
        if u + problem.nvme_slots < num_units:
            free = v.gradients_written_ms[u + problem.nvme_slots] - behind * (1 - on_nvme)
            model.addConstr(v.backward_ms[u] >= free, name=name("gradients_buffer", u))


def _summed_bytes(cost: UnitCost) -> int:
    """Of a unit's gradients, what goes to NVMe in each backward."""
    return cost.accumulator_bytes or cost.gradient_rest_bytes


def add_accumulation(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """With several micro-batches the worker adds gradients up as they arrive (Eq. 18).

    accumulated(u) >= sent(u) + add(u) sends(u);  accumulated(u) >= accumulated(u+1) + add(u) sends(u)
    Rows: `add(u)`, `add_order(u)`.
    """
    if not problem.has_accumulation:
        return
    before: Expression = 0
    early, late = stem_gradients(problem.stem)
    order = [*((s, False) for s in early)]
    order += [*((u, True) for u in reversed(range(len(problem.units))))]
    order += [*((s, False) for s in late)]
    for index, is_unit in order:
        cost = (problem.units if is_unit else problem.stem)[index]
        done = (v.accumulated_ms if is_unit else v.stem_accumulated_ms)[index]
        sent = (v.gradients_sent_ms if is_unit else v.stem_sent_ms)[index]
        sends = v.sends(index) if is_unit else 1 - v.stem_on_gpu[index]
        duration = ms(cost.accumulate_s) * sends
        if is_unit and v.gradients_written_ms:
            duration = duration + ms(problem.nvme_read_s(cost.accumulator_bytes)) * v.gradients_on_nvme(index)
        label = index if is_unit else cost.name
        model.addConstr(done >= sent + duration, name=name("add", label))
        model.addConstr(done >= before + duration, name=name("add_order", label))
        before = done


def add_repeated_forward(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Forwards of later micro-batches: no updates, and the first P units are still in slots (Eq. 19).

    Eq. 12 to 14 without `updated` and states; times count from the end of the backward before. Rows: `repeat...(u)`.
    """
    if not problem.has_accumulation:
        return
    for u, cost in enumerate(problem.units):
        if u >= problem.weight_slots:
            duration = ms(cost.weight_h2d_s) * v.streamed(u)
            arrives = v.repeat_weights_ms[u]
            model.addConstr(arrives >= v.repeat_weights_ms[u - 1] + duration, name=name("repeat_weights_order", u))
            slot_free = v.repeat_ms[u - problem.weight_slots]
            model.addConstr(arrives >= slot_free + duration, name=name("repeat_weights_slot", u))
            if v.disk_repeat_ms:
                read = ms(problem.nvme_read_s(cost.weight_bytes, each=True)) * v.weights_on_nvme(u)
                done = v.disk_repeat_ms[u]
                model.addConstr(done >= v.disk_repeat_ms[u - 1] + read, name=name("repeat_read_order", u))
                if u >= problem.nvme_slots:
                    free = v.repeat_weights_ms[u - problem.nvme_slots]
                    model.addConstr(done >= free + read, name=name("repeat_read_slot", u))
                model.addConstr(arrives >= done + duration, name=name("repeat_disk", u))
        compute = ms(cost.forward_s)
        before = v.repeat_ms[u - 1] if u else 0
        model.addConstr(v.repeat_ms[u] >= before + compute, name=name("repeat_order", u))
        model.addConstr(v.repeat_ms[u] >= v.repeat_weights_ms[u] + compute, name=name("repeat_weights", u))
        if not v.repeat_left_ms:
            continue
        leaving = ms(problem.d2h_s(MIB)) * offloaded_mib(cost, v, u)
        before = v.repeat_left_ms[u - 1] if u else last_sent_ms(problem, v) - v.end_ms
        model.addConstr(v.repeat_left_ms[u] >= before + leaving, name=name("repeat_left_order", u))
        model.addConstr(v.repeat_left_ms[u] >= v.repeat_ms[u] + leaving, name=name("repeat_left", u))
        if u >= problem.activation_slots:
            slot_free = v.repeat_left_ms[u - problem.activation_slots]
            model.addConstr(v.repeat_ms[u] >= slot_free + compute, name=name("repeat_slot", u))


def _add_send(
    model, label: str | int, sent, computed: Expression, before: Expression, duration: Expression, kind: str = "send"
):
    model.addConstr(sent >= computed + duration, name=name(kind, label))
    model.addConstr(sent >= before + duration, name=name(f"{kind}_order", label))
    return sent


def _add_disk_backlog(model: highspy.Highs, problem: PlacementProblem, v: Variables, period: Expression) -> None:
    """What a backward reads takes time from writing, and the next forward's first write comes after it; and what a
    forward writes from reading.

    parked(0) >= parked(N-1) + lost - period + write(x(0)), and the same for the first input that is fetched; `period`
    is that of a micro-batch. Rows: `disk_backlog(write)`, `disk_backlog(read)`.
    """
    num_units = len(problem.units)
    parked = [problem.local_ranks * parked_mib(problem, v, u) for u in range(num_units)]
    fetched = parked[: num_units - problem.nvme_slots]
    lost = ms(problem.nvme_write_delay_s(MIB)) * sum(fetched)
    write = ms(problem.nvme_write_s(MIB)) * parked[0]
    model.addConstr(v.parked_ms[0] >= v.parked_ms[-1] + lost - period + write, name=name("disk_backlog", "write"))
    if fetched:
        lost = ms(problem.nvme_read_delay_s(MIB)) * sum(parked)
        read, first = ms(problem.nvme_read_s(MIB)) * fetched[-1], v.fetched_ms[len(fetched) - 1]
        model.addConstr(first >= v.fetched_ms[0] + lost - period + read, name=name("disk_backlog", "read"))


def _stem_send(problem: PlacementProblem, v: Variables, s: int) -> Expression:
    return ms(problem.stem[s].gradient_d2h_s) * (1 - v.stem_on_gpu[s])


def add_step_time(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """The step's time, and what each resource alone needs for it (Eq. 20). Rows: `step_time`, `load(...)`.

    step = loss + (A - 1) (repeat(N-1) + loss time) + A end + unhidden
    step >= all updates and additions of the worker; step >= all copies of a direction; step >= all NVMe reads, writes,
    each with what the other direction takes from it; step >= all exchanges with other ranks. The loads are implied for
    whole steps; they tighten the relaxation and keep a backlog from growing from step to step.
    """
    micro_batches = problem.accumulation_steps
    step: Expression = v.loss_ms + micro_batches * v.end_ms + v.unhidden_ms
    if problem.has_accumulation:
        step = step + (micro_batches - 1) * (v.repeat_ms[-1] + loss_ms(problem))
    model.addConstr(v.step_ms == step, name="step_time")
    if not problem.has_gpu:
        return
    if v.parked_ms:
        period = v.end_ms + (v.repeat_ms[-1] + loss_ms(problem) if problem.has_accumulation else v.loss_ms)
        _add_disk_backlog(model, problem, v, period)
    worker: Expression = 0
    meets: Expression = 0
    down: Expression = 0
    read_mib: Expression = 0
    written_mib: Expression = 0
    for u, cost in enumerate(problem.units):
        add = ms(micro_batches * cost.accumulate_s) * v.sends(u)
        worker = worker + worker_ms(problem, v, u) + add
        states = ms(problem.d2h_s(cost.streamed_out_bytes)) * v.streams_states(u)
        states = states + ms(problem.d2h_s(cost.returned_weight_bytes)) * returns_weights(problem, v, u)
        per_micro = ms(cost.gradient_d2h_s) * v.sends(u) + ms(problem.d2h_s(MIB)) * offloaded_mib(cost, v, u)
        down = down + states + micro_batches * per_micro
        if problem.exchanges:
            meets = meets + ms(micro_batches * cost.exchange_s) + ms(cost.gather_s) * v.homes["resident"][u]
            meets = meets + spread_ms(cost, v.sends(u))
        changed, parked = nvme_updated_mib(cost, v, u), micro_batches * problem.local_ranks * parked_mib(problem, v, u)
        gradients = micro_batches * mib(_summed_bytes(cost)) * v.gradients_on_nvme(u)
        # What ran last is still in memory.
        read_mib = read_mib + changed + (gradients if u >= problem.nvme_slots else 0)
        read_mib = read_mib + (parked if u < len(problem.units) - problem.nvme_slots else 0)
        written_mib = written_mib + (changed if cost.num_trainable else 0) + parked + gradients
    for s, cost in enumerate(problem.stem):
        sends = 1 - v.stem_on_gpu[s]
        worker = worker + ms(cost.cpu_update_s) * v.stem_on_worker(s) + ms(micro_batches * cost.accumulate_s) * sends
        down = down + ms(micro_batches * cost.gradient_d2h_s) * sends
        if problem.exchanges:
            meets = meets + ms(micro_batches * cost.exchange_s) + ms(cost.gather_s) * v.stem_on_gpu[s]
            meets = meets + spread_ms(cost, sends)
        returned = cost.streamed_out_bytes + (cost.returned_weight_bytes if problem.divides_updates else 0)
        down = down + ms(problem.d2h_s(returned)) * v.stem_streams[s]
    read = ms(problem.nvme_read_s(MIB)) * read_mib + ms(problem.nvme_read_delay_s(MIB)) * written_mib
    write = ms(problem.nvme_write_s(MIB)) * written_mib + ms(problem.nvme_write_delay_s(MIB)) * read_mib
    loads = {"worker": worker, "d2h": down, "nvme_read": read, "nvme_write": write, "exchange": meets}
    for resource, load in loads.items():
        if not isinstance(load, (int, float)):
            model.addConstr(v.step_ms >= load, name=name("load", resource))
