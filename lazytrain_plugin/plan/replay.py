"""The simulator and the accounting in a hurry: thousands of plans of one problem, a step time and bytes for each.

Searching spends nearly all of its time in judging plans that differ in a unit or two. Here what a unit's decisions mean
is looked up once (plan/facts.py), and the replay is one loop over numbers, without names, events or noise. It gives
the very numbers of `simulate` and `account`, bit for bit (tests/plan/test_replay.py); where a plan has what it does not
know (activations and gradients on NVMe, dropped inputs, updates that ranks divide, no GPU), it asks them.
"""

from __future__ import annotations

from collections import deque

from lazytrain_plugin.plan.accounting import (
    Staging,
    account,
    excess_frac,
    nvme_bytes_allowed_per_step,
    nvme_written_bytes,
    reserved_bytes,
    staged_bytes,
)
from lazytrain_plugin.plan.candidate import Judged
from lazytrain_plugin.plan.facts import FROZEN, ON_GPU, ON_WORKER, PASSING, Facts, facts_of
from lazytrain_plugin.plan.gradient_traffic import MEANS, stem_gradients
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.simulate import NEEDED_FIRST, simulate
from lazytrain_plugin.profile.model import UnitRole


class Judge:
    """Step times and bytes of plans of one problem."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self._costs = (*problem.units, *problem.stem)
        self._facts: dict[tuple[int, int], Facts] = {}
        roles = [cost.role for cost in problem.stem]
        self._first = [s for s, role in enumerate(roles) if role in NEEDED_FIRST]
        self._last = [s for s, role in enumerate(roles) if role not in NEEDED_FIRST]
        self._early, self._late = stem_gradients(problem.stem)
        self._have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes}
        self._have["nvme"] = problem.nvme_budget_bytes

    def fits(self, plan: Judged) -> bool:
        """As `greedy.fits`."""
        return self.excess_frac(plan) == 0

    def excess_frac(self, plan: Judged) -> float:
        """Bytes beyond the budgets, each tier's as a share of its budget; 0: it fits."""
        excess = excess_frac(self.need_bytes(plan), self._have)
        allowed = nvme_bytes_allowed_per_step(self.problem)
        if allowed != float("inf") and (written := nvme_written_bytes(self.problem, plan)) > allowed:
            excess += written / max(allowed, 1.0)
        return excess

    def need_bytes(self, plan: Judged) -> dict[str, int]:
        """As `account(problem, plan).need_bytes()`."""
        facts = self._facts_of(plan)
        if facts is None:
            return account(self.problem, plan).need_bytes()
        problem, num_units = self.problem, len(plan.units)
        units, stem = facts[:num_units], facts[num_units:]
        num_streamed = slot = ring = gradient_slot = input_bytes = saved_bytes = offloaded = 0
        rest_gpu = rest_cpu = rest_nvme = state_slot = 0
        staging: list[Staging] = []
        for fact in units:
            if fact.streamed:
                num_streamed += 1
                if fact.weight_bytes > slot:
                    slot = fact.weight_bytes
            if fact.offloaded:
                offloaded += fact.offloaded
                ring = max(ring, fact.offloaded)
            if fact.takes_slot and fact.gradient_bytes > gradient_slot:
                gradient_slot = fact.gradient_bytes
            input_bytes += fact.input_bytes
            saved_bytes += fact.saved_bytes
        for fact in facts:
            rest_gpu += fact.rest_gpu
            rest_cpu += fact.rest_cpu
            if fact.state_slot_bytes > state_slot:
                state_slot = fact.state_slot_bytes
            if fact.staging:
                rest_nvme += fact.rest_nvme
                staging += fact.staging
        rest_gpu += min(plan.weight_slots, num_streamed + 1) * slot
        # The windows of `accounting.windows`, from the loss backwards.
        head = sum(self._head_bytes(stem, always=True))
        leaving_head = sum(self._head_bytes(stem, always=False))
        lasting, passing, rings = input_bytes + saved_bytes, head, plan.gradient_slots - 1
        fullest, stays = reserved_bytes(lasting=lasting, passing=problem.loss_bytes), not problem.has_accumulation
        for later, fact in enumerate(reversed(units)):
            lasting -= fact.saved_bytes
            window = passing + fact.workspace_bytes + (1 + (later if later < rings else rings)) * gradient_slot
            if not fact.sends:
                if stays:
                    passing += fact.resting_gradient_bytes
                window += fact.resting_gradient_bytes
            if later < rings:
                window += leaving_head
            window = reserved_bytes(lasting=lasting, passing=window)
            if window > fullest:
                fullest = window
            lasting -= fact.input_bytes
        embedding = sum(cost.gradient_bytes for cost in problem.stem if cost.role != UnitRole.HEAD)
        fullest = max(fullest, reserved_bytes(passing=passing + rings * gradient_slot + embedding))
        ring = reserved_bytes(lasting=ring * plan.activation_slots)
        gpu = rest_gpu + plan.state_slots * state_slot + problem.exchange_bytes + ring + fullest
        gpu += problem.gpu_reserve_bytes
        cpu = rest_cpu + problem.cpu_reserve_bytes
        cpu += problem.local_ranks * staged_bytes(staging, plan.nvme_slots)
        if problem.evaluation_bytes:
            evaluation = reserved_bytes(passing=problem.evaluation_bytes)
            gpu = max(gpu, rest_gpu + problem.gpu_reserve_bytes + evaluation)
        need = {"gpu": gpu, "cpu": cpu + max(problem.local_ranks * offloaded, problem.save_bytes)}
        return need | {"nvme": rest_nvme} if rest_nvme else need

    def _head_bytes(self, stem: list[Facts], *, always: bool):
        """As `accounting._head_gradient_bytes`."""
        for cost, fact in zip(self.problem.stem, stem):
            if self.problem.tied and cost.role == UnitRole.EMBEDDING:
                yield cost.gradient_bytes if always else 0
            elif cost.role == UnitRole.HEAD and always:
                yield 0 if self.problem.has_accumulation else fact.resting_gradient_bytes
            elif cost.role == UnitRole.HEAD:
                yield cost.gradient_bytes if fact.takes_slot else 0

    def _facts_of(self, plan: Judged) -> list[Facts] | None:
        """Of all units and the stem; None where `simulate` and `account` must be asked."""
        if not self.problem.has_gpu:
            return None
        found, known = [], self._facts
        for place, unit in enumerate((*plan.units, *plan.stem)):
            key = (place, id(unit))
            fact = known.get(key)
            if fact is None:
                fact = known[key] = facts_of(self.problem, self._costs[place], unit)
            if not fact.is_known:
                return None
            found.append(fact)
        return found

    def step_s(self, plan: Judged, *, steps: int = 3) -> float:
        """As `simulate(problem, plan, steps=steps).step_s`."""
        facts = self._facts_of(plan)
        if facts is None:
            return simulate(self.problem, plan, steps=steps).step_s
        num_units = len(plan.units)
        replay = _Replay(facts[:num_units], facts[num_units:], plan)
        begin_s = end_s = 0.0
        stem = facts[num_units:]
        loss = [
            (num_units + s, cost.forward_s + cost.backward_s, cost.forward_launch_s)
            for s, cost in enumerate(self.problem.stem)
            if cost.forward_s
        ]
        first = [(num_units + s, stem[s]) for s in self._first]
        last = [(num_units + s, stem[s]) for s in self._last]
        early = [(num_units + s, stem[s]) for s in self._early]
        late = [(num_units + s, stem[s]) for s in self._late]
        order = [*first, *enumerate(facts[:num_units]), *last]
        for _ in range(steps):
            begin_s = end_s
            replay.updates(order, begin_s)
            for micro in range(self.problem.accumulation_steps):
                replay.forward(first, last, loss, fresh=micro == 0)
                end_s = replay.backward(early, late)
            end_s = replay.compute_s = max(replay.compute_s, replay.exchange_s)
        return end_s - begin_s


class _Replay:
    """The state of `simulate._Step` as numbers, by place in the model: units first, then the stem."""

    def __init__(self, units: list[Facts], stem: list[Facts], plan: Judged) -> None:
        self.units = units
        count = len(units) + len(stem)
        self.host_s = self.compute_s = self.h2d_s = self.d2h_s = self.worker_s = self.exchange_s = 0.0
        self.gradient_s = [0.0] * count
        self.weight_s = [0.0] * count
        self.back_s = [0.0] * count
        self.offloaded_s = [0.0] * len(units)
        self.slots: dict[int, float] = {}
        self.free_slots = [0.0] * plan.weight_slots
        self.sent: deque[float] = deque([0.0] * plan.gradient_slots, maxlen=plan.gradient_slots)
        self.means: deque[float] = deque([0.0] * MEANS, maxlen=MEANS)
        self.states: deque[float] = deque([0.0] * plan.state_slots, maxlen=plan.state_slots)
        self.states_back_s = 0.0
        self.crossing: deque[tuple[float, float]] = deque()
        self.activation_slots = plan.activation_slots
        self.read_s = self.write_s = 0.0
        self.written_s = [0.0] * count
        self.disk: deque[float] = deque([0.0] * plan.nvme_slots, maxlen=plan.nvme_slots)

    def updates(self, order: list[tuple[int, Facts]], step_s: float) -> None:
        slots, weight_s, on_worker = self.slots, self.weight_s, False
        self.host_s = max(self.host_s, step_s)
        for place, fact in order:
            updates = fact.updates
            if updates == FROZEN:
                weight_s[place] = 0.0
                continue
            if updates != ON_GPU and place in slots:
                self.free_slots.append(slots.pop(place))
            if updates == PASSING:
                weight_s[place] = step_s
            elif updates == ON_GPU:
                weight_s[place] = self._compute(fact.gpu_update_s, fact.update_launch_s, step_s)
                if fact.gather_s:
                    self.exchange_s = weight_s[place] = max(self.exchange_s, weight_s[place]) + fact.gather_s
            else:
                on_worker = True
        if not on_worker:
            return
        worker_s = self.worker_s
        for place, fact in order:
            if fact.updates == ON_WORKER:
                ready_s = step_s
                if fact.stage_s:
                    ready_s = self._read(place, step_s, fact.stage_s, fact.stage_lost_s)
                worker_s = weight_s[place] = max(worker_s, ready_s, self.gradient_s[place]) + fact.update_s
                if fact.stage_s:
                    self.write_s = self.written_s[place] = max(self.write_s, worker_s) + fact.write_s
                    self.read_s += fact.write_lost_s
                    self.disk.append(self.write_s)
            elif fact.delay_s:
                worker_s = max(worker_s, step_s) + fact.delay_s
        self.worker_s = worker_s

    def _compute(self, duration_s: float, launch_s: float, ready_s: float) -> float:
        """As `Clock.compute`."""
        begin_s = self.host_s
        self.host_s = launched_s = begin_s + launch_s
        start_s = self.compute_s if self.compute_s > ready_s else ready_s
        if begin_s > start_s:
            start_s = begin_s
        if launched_s - duration_s > start_s:
            start_s = launched_s - duration_s
        self.compute_s = end_s = start_s + duration_s
        return end_s

    def _read(self, place: int, after_s: float, duration_s: float, lost_s: float) -> float:
        """From NVMe."""
        end_s = self.read_s = max(self.read_s, after_s, self.disk[0], self.written_s[place]) + duration_s
        self.write_s += lost_s
        return end_s

    def forward(self, first, last, loss, *, fresh: bool) -> None:
        weight_s = self.weight_s
        leaving = deque([0.0] * self.activation_slots, maxlen=self.activation_slots)
        if fresh:
            self.crossing.clear()
            self.states_back_s = self.d2h_s
            self._renew(first)
        end_s = max((weight_s[place] for place, _ in first), default=0.0)
        for place, fact in enumerate(self.units):
            if fresh and fact.updates == ON_WORKER and weight_s[place] > self.host_s:
                self.host_s = weight_s[place]
            if fresh and fact.spread_s:
                self.exchange_s = weight_s[place] = max(self.exchange_s, weight_s[place]) + fact.spread_s
            if fact.streamed:
                ready_s = self._weights_arrive(place, fact, fresh=fresh)
            else:
                if fresh and fact.updates == ON_WORKER:
                    self.h2d_s = weight_s[place] = max(self.h2d_s, weight_s[place]) + fact.weights_s
                ready_s = weight_s[place]
            if fresh and fact.updates == PASSING:
                ready_s = self._pass(place, fact, ready_s, end_s)
            if ready_s < end_s:
                ready_s = end_s
            if fact.leaves:
                ready_s = max(ready_s, leaving[0])
            end_s = self._compute(fact.forward_s, fact.forward_launch_s, ready_s)
            if fact.streamed:
                self._used_slot(place, end_s)
            if fact.leaves:
                leaving.append(self._leave(place, fact.leave_s, end_s))
        if fresh:
            self._renew(last)
            self.d2h_s = max(self.d2h_s, self.states_back_s)
        for place, duration_s, launch_s in loss:
            end_s = self._compute(duration_s, launch_s, max(end_s, weight_s[place]))

    def backward(self, early, late) -> float:
        end_s = self.compute_s
        returning = deque([0.0] * self.activation_slots, maxlen=self.activation_slots)
        for place, fact in early:
            end_s = self._deliver(place, fact, end_s)
        for place in range(len(self.units) - 1, -1, -1):
            fact = self.units[place]
            arrived_s = self._weights_arrive(place, fact, fresh=False) if fact.streamed else self.weight_s[place]
            ready_s = end_s if end_s > arrived_s else arrived_s
            if fact.leaves:
                start_s = max(self.h2d_s, self.offloaded_s[place], returning[0])
                self.h2d_s = start_s + fact.return_s
                ready_s = max(ready_s, self.h2d_s)
            end_s = self._compute(fact.backward_s, fact.backward_launch_s, ready_s)
            if fact.sends or fact.meets_s:
                end_s = self._deliver(place, fact, end_s)
            else:
                self.gradient_s[place] = end_s
            if fact.streamed:
                self._used_slot(place, end_s)
            if fact.leaves:
                returning.append(end_s)
        for place, fact in late:
            end_s = self._deliver(place, fact, end_s)
        return end_s

    def _weights_arrive(self, place: int, fact: Facts, *, fresh: bool) -> float:
        slots = self.slots
        if place in slots:
            return 0.0
        slot_s = self.free_slots.pop(0) if self.free_slots else slots.pop(next(iter(slots)))
        ready_s = self.weight_s[place]
        fetches = fact.fetch_s and not (fresh and fact.updates != FROZEN)
        if fetches:
            ready_s = self._read(place, ready_s, fact.fetch_s, fact.fetch_lost_s)
        self.h2d_s = max(self.h2d_s, slot_s, ready_s) + fact.weights_s
        if fetches:
            self.disk.append(self.h2d_s)
        return self.h2d_s

    def _used_slot(self, place: int, end_s: float) -> None:
        self.slots.pop(place, None)
        back_s = self.back_s[place]
        self.slots[place] = end_s if end_s > back_s else back_s
        self.back_s[place] = 0.0

    def _leave(self, place: int, duration_s: float, computed_s: float) -> float:
        start_s = self.d2h_s if self.d2h_s > computed_s else computed_s
        left_s = self.d2h_s = self.offloaded_s[place] = start_s + duration_s
        if self.states_back_s > left_s - duration_s:
            self.states_back_s += duration_s
        else:
            self.crossing.append((left_s - duration_s, duration_s))
        return left_s

    def _deliver(self, place: int, fact: Facts, computed_s: float) -> float:
        """As `GradientTraffic.deliver`."""
        meets_s, sends = fact.meets_s, fact.sends
        if meets_s:
            start_s = computed_s if computed_s > self.exchange_s else self.exchange_s
            if sends and self.means[0] > start_s:
                start_s = self.means[0]
            computed_s = self.exchange_s = start_s + meets_s
            self.sent.append(computed_s)
        if sends:
            computed_s = self.d2h_s = (self.d2h_s if self.d2h_s > computed_s else computed_s) + fact.send_s
            if meets_s or fact.has_place:
                (self.means if meets_s else self.sent).append(computed_s)
            if fact.add_s:
                computed_s = self.worker_s = max(self.worker_s, computed_s) + fact.add_s
        self.gradient_s[place] = computed_s
        if (sends or meets_s) and self.sent[0] > self.compute_s:
            self.compute_s = self.sent[0]
        return self.compute_s

    def _renew(self, stem: list[tuple[int, Facts]]) -> None:
        for place, fact in stem:
            if fact.spread_s:
                self.exchange_s = self.weight_s[place] = max(self.exchange_s, self.weight_s[place]) + fact.spread_s
            if fact.updates == PASSING:
                self._pass(place, fact, self.weight_s[place], 0.0)
            elif fact.updates == ON_WORKER and not fact.streamed:
                self.h2d_s = self.weight_s[place] = max(self.h2d_s, self.weight_s[place]) + fact.weights_s

    def _pass(self, place: int, fact: Facts, weights_s: float, computed_s: float) -> float:
        """As `_streamed_update`."""
        states, crossing = self.states, self.crossing
        in_s, out_s, update_s, wait_s = fact.in_s, fact.out_s, fact.chunk_update_s, fact.kernel_wait_s
        here_s = max(self.h2d_s, states[0], self.gradient_s[place], self.weight_s[place])
        back_s = self.states_back_s
        for _ in range(fact.chunks):
            free_s = states[0]
            here_s = (here_s if here_s > free_s else free_s) + in_s
            begun_s = here_s if here_s > weights_s else weights_s
            if begun_s < computed_s:
                begun_s += wait_s
                if begun_s > computed_s:
                    begun_s = computed_s
            updated_s = begun_s + update_s
            back_s = (back_s if back_s > updated_s else updated_s) + out_s
            while crossing and crossing[0][0] < back_s:
                back_s += crossing.popleft()[1]
            states.append(back_s)
        self.states_back_s = back_s
        if here_s > self.h2d_s:
            self.h2d_s = here_s
        self.back_s[place] = back_s
        self.weight_s[place] = back_s if fact.streamed else updated_s
        computing_s = max(computed_s, updated_s - fact.passing_update_s)
        return self._compute(fact.passing_update_s, fact.update_launch_s, computing_s)
