"""Placements that repeat: how many units have each home, spread over the model, and what the search finds among them.

The layers of a decoder are alike, so a good placement is a mixture: so many units resident, so many updated by the
GPU, so many by the CPU, in turn. A pattern is these counts and, per home, where its units stand (`phase`: 0 as early as
their share allows, 1 as late); what is saved counts from the last unit, whose memory backward frees first; inputs leave
the GPU from the first unit on, which would hold them longest. A dozen integers instead of a dozen choices per unit:
simulated annealing by the simulator finds in a second what a search over single units does not find in minutes, and the
result is readable. Each pattern is judged by the accounting and the simulator alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from lazytrain_plugin.plan.accounting import account, nvme_bytes_allowed_per_step, nvme_written_bytes
from lazytrain_plugin.plan.choices import (
    HOMES,
    STEM_HOMES,
    allows_home,
    home_of,
    offloads_boundaries,
    saving_choices,
    stem_home_of,
)
from lazytrain_plugin.plan.greedy import excess_frac, fits
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.vocab import Activations, Tier

REPLAYED_UNITS = 50_000
"""Units in all patterns looked at: a second or two, whatever the model's depth."""
TRIES_PER_UNIT = 50
"""Small models have few patterns."""
POLISHED_UNITS = 25_000
"""As `REPLAYED_UNITS`, for orders of one pattern."""
HOME_FIELDS = ("weights", "states", "updater")
SAVING_FIELDS = ("activations", "saved", "saved_bits")
PHASES = (0.01, 0.25, 0.5, 0.75, 0.99)
HEAT_FRAC = 0.004
"""How much slower a pattern may be than the last and still be taken, at the start."""
REHEATS = 2
"""The search starts again from the best so far, as warm as at first."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One member of the family. Counts may exceed the number of units; what is beyond it is ignored."""

    homes: tuple[int, ...]
    """Units of each home of the family."""
    phases: tuple[float, ...]
    saved: tuple[int, ...]
    """Units of each way to save, from the last unit on."""
    boundaries: int
    """Units whose inputs leave the GPU, from the first on."""
    stem: tuple[str, ...]
    """Members of `STEM_HOMES`."""


class Family:
    """The patterns that a problem allows."""

    def __init__(self, problem: PlacementProblem, plan: PlacementPlan) -> None:
        """`plan`: any placement of the problem; its slots and sizes are taken over."""
        self.problem, self._plan = problem, plan
        costs = problem.units
        self.homes = [home for home in HOMES if any(allows_home(problem, cost, home) for cost in costs)]
        self.saving = list(dict.fromkeys(choice for cost in costs for choice in saving_choices(problem, cost)))
        streams = problem.has_gpu and problem.capabilities.streamed_states
        self.stem_homes = [home for home in STEM_HOMES if streams or home != "stream_update"]
        self._units: dict[tuple, UnitPlan] = {}
        self._allowed = [{home for home in self.homes if allows_home(problem, cost, home)} for cost in costs]

    def pattern_of(self, plan: PlacementPlan) -> Pattern:
        """Counts of a plan, evenly spread."""
        homes = [home_of(unit) for unit in plan.units]
        saved = [(unit.activations, unit.saved) for unit in plan.units]
        return Pattern(
            homes=tuple(homes.count(home) for home in self.homes),
            phases=(0.5,) * len(self.homes),
            saved=tuple(saved.count(choice) for choice in self.saving),
            boundaries=sum(unit.boundary != Tier.GPU for unit in plan.units),
            stem=tuple(stem_home_of(unit) for unit in plan.stem),
        )

    def place(self, pattern: Pattern) -> PlacementPlan:
        """The plan that a pattern means. What a unit can't have is what leaves most room: streamed, recomputed."""
        places = sorted(
            ((place + phase) / count, index)
            for index, (count, phase) in enumerate(zip(pattern.homes, pattern.phases))
            for place in range(count)
        )
        homes = [self.homes[index] for _, index in places]
        saving = [choice for choice, count in zip(self.saving, pattern.saved) for _ in range(count)]
        units = []
        for u in range(len(self._plan.units)):
            home = homes[u] if u < len(homes) and homes[u] in self._allowed[u] else "stream"
            from_end = len(self._plan.units) - 1 - u
            activations, saved = saving[from_end] if from_end < len(saving) else (Activations.RECOMPUTE, Tier.GPU)
            if not self.problem.units[u].can(activations):
                activations, saved = Activations.RECOMPUTE, Tier.GPU
            boundary = Tier.CPU if u < pattern.boundaries else Tier.GPU
            units.append(self._unit(u, home, activations, saved, boundary))
        return replace(self._plan, units=tuple(units), stem=tuple(map(self._stem_unit, self._plan.stem, pattern.stem)))

    def _unit(self, u: int, home: str, activations: Activations, saved: Tier, boundary: Tier) -> UnitPlan:
        key = (u, home, activations, saved, boundary)
        if key not in self._units:
            bits = self.problem.units[u].planned_bits(activations)
            choices = {"activations": activations, "saved": saved, "saved_bits": bits, "boundary": boundary}
            self._units[key] = replace(self._plan.units[u], **HOMES[home], **choices)
        return self._units[key]

    def _stem_unit(self, unit: UnitPlan, home: str) -> UnitPlan:
        return replace(unit, **(STEM_HOMES[home] if self.problem.has_gpu else HOMES["stream"]))

    def changed(self, pattern: Pattern, draw: random.Random) -> Pattern:
        """A pattern near by."""
        num_units = len(self._plan.units)
        homes, phases, saved = list(pattern.homes), list(pattern.phases), list(pattern.saved)
        boundaries, stem = pattern.boundaries, list(pattern.stem)
        for _ in range(draw.choice((1, 1, 2, 3))):
            kind, step = draw.random(), draw.choice((1, 1, 1, 2, 3, 5, 8))
            if kind < 0.45 and len(homes) > 1:
                source, target = draw.sample(range(len(homes)), 2)
                step = min(step, homes[source])
                homes[source] -= step
                homes[target] += step
            elif kind < 0.57:
                phases[draw.randrange(len(phases))] = draw.choice(PHASES)
            elif kind < 0.82 and saved:
                source, target = draw.randrange(len(saved)), draw.randrange(len(saved))
                less = min(step, saved[source])
                if draw.random() < 0.5:
                    saved[source] -= less
                if draw.random() < 0.7:
                    saved[target] = min(num_units, saved[target] + step)
            elif kind < 0.92 and offloads_boundaries(self.problem):
                boundaries = min(num_units, max(0, boundaries + draw.choice((-2, 2)) * step))
            elif stem:
                stem[draw.randrange(len(stem))] = draw.choice(self.stem_homes)
        return Pattern(tuple(homes), tuple(phases), tuple(saved), boundaries, tuple(stem))


def search_patterns(problem: PlacementProblem, start: PlacementPlan, *, seed: int = 0) -> PlacementPlan | None:
    """The fastest pattern found that fits; None: none was found. Deterministic.

    Args:
        start: a placement to begin with, which need not fit; the search gets into the budgets first.
    """
    family, draw = Family(problem, start), random.Random(seed)
    judge = _judge(problem, family)
    current = family.pattern_of(start)
    current_cost = best_cost = judge(current)
    tries = min(REPLAYED_UNITS // len(problem.units), TRIES_PER_UNIT * len(problem.units))
    best, tries_a_heat = current, max(1, tries // (REHEATS + 1))
    for attempt in range(tries):
        heat = 1 - (attempt % tries_a_heat) / tries_a_heat
        if attempt % tries_a_heat == 0:
            current, current_cost = best, best_cost
        pattern = family.changed(current, draw)
        cost = judge(pattern)
        # Excess bytes come first; among patterns that fit a slightly slower one may lead to a faster.
        margin_s = HEAT_FRAC * best_cost[1] * heat * -math.log(1 - draw.random()) if best_cost[0] == 0 else 0.0
        if cost[0] < current_cost[0] or (cost[0] == current_cost[0] and cost[1] <= current_cost[1] + margin_s):
            current, current_cost = pattern, cost
            if cost < best_cost:
                best, best_cost = pattern, cost
    return family.place(best) if best_cost[0] == 0 else None


def polished(problem: PlacementProblem, plan: PlacementPlan, *, seed: int = 0) -> PlacementPlan:
    """The same counts in a better order: neighbours swap homes or what they save, inputs stay or leave.

    Deterministic.
    """
    draw, num_units = random.Random(seed), len(plan.units)
    best = current = plan
    best_s = current_s = simulate(problem, plan, steps=2).step_s
    tries = min(POLISHED_UNITS // num_units, TRIES_PER_UNIT * num_units) if num_units > 1 else 0
    for attempt in range(tries):
        units = list(current.units)
        for _ in range(draw.choice((1, 1, 2))):
            u = draw.randrange(num_units)
            other = max(0, min(num_units - 1, u + draw.choice((-3, -2, -1, 1, 2, 3))))
            fields = draw.choice((HOME_FIELDS, HOME_FIELDS, HOME_FIELDS, SAVING_FIELDS))
            units[u], units[other] = _swapped(units[u], units[other], fields)
            if offloads_boundaries(problem) and draw.random() < 0.2:
                units[u] = replace(units[u], boundary=Tier.GPU if units[u].boundary != Tier.GPU else Tier.CPU)
        changed = replace(current, units=tuple(units))
        allowed = all(
            allows_home(problem, cost, home_of(unit)) and cost.can(unit.activations)
            for cost, unit in zip(problem.units, units)
            if unit not in current.units
        )
        if not allowed or not fits(problem, changed):
            continue
        step_s = simulate(problem, changed, steps=2).step_s
        heat_s = HEAT_FRAC / 4 * best_s * (1 - attempt / tries) * -math.log(1 - draw.random())
        if step_s <= current_s + heat_s:
            current, current_s = changed, step_s
            if step_s < best_s:
                best, best_s = changed, step_s
    return best


def _swapped(first: UnitPlan, second: UnitPlan, fields: tuple[str, ...]) -> tuple[UnitPlan, UnitPlan]:
    def with_fields(unit: UnitPlan, other: UnitPlan) -> UnitPlan:
        return replace(unit, **{field: getattr(other, field) for field in fields})

    return with_fields(first, second), with_fields(second, first)


def _judge(problem: PlacementProblem, family: Family) -> Callable[[Pattern], tuple[float, float]]:
    """(bytes beyond the budgets as a share of them, step time; 0 where it does not fit) of a pattern, each once."""
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
    known: dict[Pattern, tuple[float, float]] = {}
    allowed = nvme_bytes_allowed_per_step(problem)

    def judge(pattern: Pattern) -> tuple[float, float]:
        if pattern not in known:
            plan = family.place(pattern)
            need = account(problem, plan).need_bytes()
            excess = excess_frac(need, have)
            if problem.has_nvme and nvme_written_bytes(problem, plan) > allowed:
                excess += nvme_written_bytes(problem, plan) / max(allowed, 1.0)
            known[pattern] = (excess, 0.0 if excess else simulate(problem, plan, steps=2).step_s)
        return known[pattern]

    return judge
