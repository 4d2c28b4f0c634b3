"""The fastest pattern that fits, by descent and jumps, and the same counts in a better order, by simulated annealing.

Each pattern is judged by the numbers of the accounting and the simulator alone (plan/replay.py).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

from lazytrain_plugin.plan.choices import HOMES, allows_home, home_of, input_tiers
from lazytrain_plugin.plan.deadline import NEVER, Deadline
from lazytrain_plugin.plan.patterns import PHASES, Family, Pattern
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.replay import Judge
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.vocab import Activations, Tier

REPLAYED_UNITS = 50_000
"""Units in all patterns looked at: a second or two, whatever the model's depth."""
TRIES_PER_UNIT = 100
"""Small models have few patterns."""
POLISHED_UNITS = 25_000
"""As `REPLAYED_UNITS`, for orders of one pattern."""
HOME_FIELDS = ("weights", "states", "updater", "gradients")
SAVING_FIELDS = ("activations", "saved", "saved_bits", "boundary_bits")
HEAT_FRAC = 0.001
"""How much slower an order may be than the last and still be taken, at the start."""


def search_patterns(
    problem: PlacementProblem,
    start: PlacementPlan,
    *,
    seed: int = 0,
    tries_frac: float = 1.0,
    deadline: Deadline = NEVER,
) -> PlacementPlan | None:
    """The fastest pattern found that fits; None: none was found. Deterministic.

    Descends to a pattern that none of its neighbours beats, jumps to one near by, and descends again.

    Args:
        start: a placement to begin with, which need not fit; the search gets into the budgets first.
        tries_frac: how long it looks, as a share of the usual.
        deadline: when it ends at the latest, and with it the same answer for the same question.
    """
    family = Family(problem, start)
    climb = _Climb(problem, family, random.Random(seed), deadline)
    climb.tries_left = int(climb.tries_left * tries_frac)
    best = climb.down(climb.filled(family.pattern_of(start)))
    while climb.tries_left > 0:
        climb.tries_left -= 1  # a small family is known by heart some time
        pattern = best
        for _ in range(climb.draw.choice((2, 3, 4))):
            pattern = climb.draw.choice(climb.neighbours(pattern))
        pattern = climb.down(climb.filled(pattern))
        if climb.cost(pattern) <= climb.cost(best):
            best = pattern
    return family.place(best) if climb.cost(best)[0] == 0 else None


class _Climb:
    """The patterns of one problem: costs, each found once, and neighbours."""

    def __init__(self, problem: PlacementProblem, family: Family, draw: random.Random, deadline: Deadline) -> None:
        self._problem, self._family, self._judge, self._num_units = problem, family, Judge(problem), len(problem.units)
        self._excess: dict[Pattern, float] = {}
        self._costs: dict[Pattern, tuple[float, float]] = {}
        self.draw, self._deadline = draw, deadline
        self._input_tiers = input_tiers(problem)
        self._on_nvme = [index for index, home in enumerate(family.homes) if HOMES[home]["states"] == Tier.NVME]
        self.tries_left = min(REPLAYED_UNITS // self._num_units, TRIES_PER_UNIT * self._num_units)
        cost = max(problem.units, key=lambda cost: cost.kept_bytes)
        spared_s = {
            way: (cost.recompute_s(Activations.RECOMPUTE) - cost.recompute_s(activations))
            / max(1, cost.saved_bytes(activations))
            for way, (activations, tier) in enumerate(family.saving)
            if tier == Tier.GPU and cost.can(activations)
        }
        self._by_worth = sorted((way for way in spared_s if spared_s[way] > 0), key=lambda way: -spared_s[way])
        """Ways to save on the GPU, that with the most spared time per byte first."""

    def excess_frac(self, pattern: Pattern) -> float:
        """Bytes beyond the budgets as a share of them; 0: it fits."""
        known = self._excess.get(pattern)
        if known is None:
            known = self._excess[pattern] = self._judge.excess_frac(self._family.candidate(pattern))
        return known

    def cost(self, pattern: Pattern) -> tuple[float, float]:
        """(excess, step time; 0 where it does not fit)."""
        if pattern not in self._costs:
            excess = self.excess_frac(pattern)
            self.tries_left = 0 if self._deadline.has_passed else self.tries_left - 1
            step_s = 0.0 if excess else self._judge.step_s(self._family.candidate(pattern), steps=2)
            self._costs[pattern] = (excess, step_s)
        return self._costs[pattern]

    def down(self, pattern: Pattern) -> Pattern:
        """A pattern that no neighbour beats, from this one on; the first that is better is taken."""
        while self.tries_left > 0:
            before = pattern
            for changed in self.neighbours(pattern):
                changed = self.filled(changed) if changed.saved == pattern.saved else changed
                if self.cost(changed) < self.cost(pattern):
                    pattern = changed
                    break
                if self.tries_left <= 0:
                    break
            if pattern is before:
                break
        return pattern

    def neighbours(self, pattern: Pattern) -> list[Pattern]:
        """What is one decision away, in random order."""
        near: list[Pattern] = []
        for source, target in itertools.permutations(range(len(pattern.homes)), 2):
            for step in (1, 2):
                if pattern.homes[source] >= step:
                    homes = list(pattern.homes)
                    homes[source] -= step
                    homes[target] += step
                    near.append(replace(pattern, homes=tuple(homes)))
        near += self._emptied(pattern)
        for home, count in enumerate(pattern.homes):
            if count:
                phases = (_changed(pattern.phases, home, phase) for phase in PHASES if phase != pattern.phases[home])
                near += [replace(pattern, phases=changed) for changed in phases]
        for s, home in enumerate(pattern.stem):
            if self._problem.has_gpu and self._problem.stem[s].num_trainable:
                stems = (_changed(pattern.stem, s, other) for other in self._family.stem_homes if other != home)
                near += [replace(pattern, stem=changed) for changed in stems]
        for tier, field in ((Tier.CPU, "boundaries"), (Tier.NVME, "parked")):
            count = getattr(pattern, field)
            for step in (-4, -1, 1, 4) if tier in self._input_tiers else ():
                changed = min(self._num_units, max(0, count + step))
                if changed != count:
                    near.append(replace(pattern, **{field: changed}))
        for source, target in itertools.permutations(range(len(pattern.saved)), 2):
            for step in (1, 4):
                if pattern.saved[source] >= step:
                    fewer = _changed(pattern.saved, source, pattern.saved[source] - step)
                    near.append(replace(pattern, saved=_changed(fewer, target, fewer[target] + 1)))
        for way, count in enumerate(pattern.saved):
            near += [
                replace(pattern, saved=_changed(pattern.saved, way, other))
                for other in (count - 1, count + 1)
                if other >= 0
            ]
        self.draw.shuffle(near)
        return near

    def _emptied(self, pattern: Pattern) -> Iterator[Pattern]:
        """One of the homes on NVMe is given up for another, with a unit more or fewer there: the buffers of what only
        the one has on the disk go with its last unit, so that no step on the way there need be better."""
        homes = pattern.homes
        for source, target in itertools.permutations(self._on_nvme, 2):
            if homes[source] < 2:
                continue
            moved = _changed(_changed(homes, target, homes[target] + homes[source]), source, 0)
            yield replace(pattern, homes=moved)
            for other, count in enumerate(moved):
                for step in (-1, 1) if count and other != target else ():
                    if moved[target] + step >= 0:
                        counts = _changed(_changed(moved, target, moved[target] + step), other, count - step)
                        yield replace(pattern, homes=counts)

    def filled(self, pattern: Pattern) -> Pattern:
        """The same homes with as many units saving as fit: fewer where homes grew, more where there is room."""
        if self.excess_frac(pattern) > 0:
            for way in reversed(self._by_worth):
                if pattern.saved[way]:
                    pattern = self._fewer(pattern, way)
                    if self.excess_frac(pattern) == 0:
                        break
        else:
            for way in self._by_worth:
                pattern = self._more(pattern, way)
        return pattern

    def _more(self, pattern: Pattern, way: int) -> Pattern:
        """With as many units saving that way as fit. Steps double and halve: most often none or few more do."""
        step, most = 1, self._num_units - sum(pattern.saved) + pattern.saved[way]
        grows = True
        while step:
            count = min(most, pattern.saved[way] + step)
            more = replace(pattern, saved=_changed(pattern.saved, way, count))
            if count > pattern.saved[way] and self.excess_frac(more) == 0:
                pattern = more
            else:
                grows = False
            step = step * 2 if grows else step // 2
        return pattern

    def _fewer(self, pattern: Pattern, way: int) -> Pattern:
        """With as many units saving that way as fit; none where not even that fits."""
        step = 1
        while pattern.saved[way] and self.excess_frac(pattern) > 0:
            pattern = replace(pattern, saved=_changed(pattern.saved, way, max(0, pattern.saved[way] - step)))
            step *= 2
        return self._more(pattern, way) if step > 2 and self.excess_frac(pattern) == 0 else pattern


def _changed(values: tuple, place: int, value) -> tuple:
    return (*values[:place], value, *values[place + 1 :])


def polished(
    problem: PlacementProblem, plan: PlacementPlan, *, seed: int = 0, deadline: Deadline = NEVER
) -> PlacementPlan:
    """The same counts in a better order: neighbours swap homes or what they save, inputs stay or leave.

    Deterministic.
    """
    draw, num_units, judge = random.Random(seed), len(plan.units), Judge(problem)
    tiers = input_tiers(problem)
    best = current = plan
    best_s = current_s = judge.step_s(plan, steps=2)
    tries = min(POLISHED_UNITS // num_units, TRIES_PER_UNIT * num_units) if num_units > 1 else 0
    for attempt in range(tries):
        if deadline.has_passed:
            break
        units = list(current.units)
        for _ in range(draw.choice((1, 1, 2))):
            u = draw.randrange(num_units)
            other = max(0, min(num_units - 1, u + draw.choice((-3, -2, -1, 1, 2, 3))))
            fields = draw.choice((HOME_FIELDS, HOME_FIELDS, HOME_FIELDS, SAVING_FIELDS))
            units[u], units[other] = _swapped(units[u], units[other], fields)
            if len(tiers) > 1 and draw.random() < 0.2:
                others = [tier for tier in tiers if tier != units[u].boundary]
                units[u] = replace(units[u], boundary=others[0] if len(others) == 1 else draw.choice(others))
        changed = replace(current, units=tuple(units))
        allowed = all(
            allows_home(problem, cost, home_of(unit)) and cost.can(unit.activations)
            for cost, unit in zip(problem.units, units)
            if unit not in current.units
        )
        if not allowed or not judge.fits(changed):
            continue
        step_s = judge.step_s(changed, steps=2)
        heat_s = HEAT_FRAC * best_s * (1 - attempt / tries) * -math.log(1 - draw.random())
        if step_s <= current_s + heat_s:
            current, current_s = changed, step_s
            if step_s < best_s:
                best, best_s = changed, step_s
    return best


def _swapped(first: UnitPlan, second: UnitPlan, fields: tuple[str, ...]) -> tuple[UnitPlan, UnitPlan]:
    def with_fields(unit: UnitPlan, other: UnitPlan) -> UnitPlan:
        return replace(unit, **{field: getattr(other, field) for field in fields})

    return with_fields(first, second), with_fields(second, first)
