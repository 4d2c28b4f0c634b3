"""Placements that repeat: how many units have each home, spread over the model.

The layers of a decoder are alike, so a good placement is a mixture: so many units resident, so many updated by the
GPU, so many by the CPU, in turn. A pattern is these counts and, per home, where its units stand (`phase`: 0 as early as
their share allows, 1 as late); what is saved on the GPU counts from the last unit, whose memory backward frees first,
and what leaves it is spread over the model; inputs leave from the first unit on, which would hold them longest, and
those of the very first ones to a disk, if any do. A dozen
integers instead of a dozen choices per unit: plan/search.py finds in a second what a search over single units does not
find in minutes, and the result is readable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lazytrain_plugin.plan.candidate import Candidate, candidate_of
from lazytrain_plugin.plan.choices import (
    HOMES,
    STEM_HOMES,
    allows_home,
    home_of,
    saving_choices,
    stem_home_of,
)
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.vocab import Activations, Tier

PHASES = (0.01, 0.25, 0.5, 0.75, 0.99)
RECOMPUTE = -1
"""Index of the way to save nothing."""
RECOMPUTED = (Activations.RECOMPUTE, Tier.GPU)
LEAST_WORTH_FRAC = 0.4
"""Of the most that saving a byte spares: ways below it are no part of a pattern."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One member of the family. Counts may exceed the number of units; what is beyond it is ignored."""

    homes: tuple[int, ...]
    """Units of each home of the family."""
    phases: tuple[float, ...]
    saved: tuple[int, ...]
    """Units of each way to save."""
    boundaries: int
    """Units whose inputs leave the GPU for host memory, from the first on."""
    stem: tuple[str, ...]
    """Members of `STEM_HOMES`."""
    parked: int = 0
    """Units before those whose inputs leave the GPU for NVMe."""


class Family:
    """The patterns that a problem allows."""

    def __init__(self, problem: PlacementProblem, plan: PlacementPlan) -> None:
        """`plan`: any placement of the problem; its slots and sizes are taken over."""
        self.problem, self._plan = problem, plan
        costs = problem.units
        self.homes = [home for home in HOMES if any(allows_home(problem, cost, home) for cost in costs)]
        self.saving = list(dict.fromkeys(choice for cost in costs for choice in _worthwhile(problem, cost)))
        streams = problem.has_gpu and problem.capabilities.streamed_states
        self.stem_homes = [home for home in STEM_HOMES if streams or home != "stream_update"]
        self._leaving = [index for index, (_, tier) in enumerate(self.saving) if tier != Tier.GPU]
        self._staying = [index for index, (_, tier) in enumerate(self.saving) if tier == Tier.GPU]
        self._stream = self.homes.index("stream")
        self._units: dict[tuple[int, int, int, Tier], UnitPlan] = {}
        self._stem: dict[tuple[int, str], UnitPlan] = {}
        self._allowed = [{home for home in self.homes if allows_home(problem, cost, home)} for cost in costs]

    def pattern_of(self, plan: PlacementPlan) -> Pattern:
        """Counts of a plan, evenly spread."""
        homes = [home_of(unit) for unit in plan.units]
        saved = [(unit.activations, unit.saved) for unit in plan.units]
        return Pattern(
            homes=tuple(homes.count(home) for home in self.homes),
            phases=(0.5,) * len(self.homes),
            saved=tuple(saved.count(choice) for choice in self.saving),
            boundaries=sum(unit.boundary == Tier.CPU for unit in plan.units),
            parked=sum(unit.boundary == Tier.NVME for unit in plan.units),
            stem=tuple(stem_home_of(unit) for unit in plan.stem),
        )

    def place(self, pattern: Pattern) -> PlacementPlan:
        """The plan that a pattern means."""
        candidate = self.candidate(pattern)
        return replace(self._plan, units=candidate.units, stem=candidate.stem)

    def candidate(self, pattern: Pattern) -> Candidate:
        """The same to be judged. What a unit can't have is what leaves most room: streamed, recomputed."""
        homes = _in_turn(pattern.homes, range(len(pattern.homes)), pattern.phases)
        num_units = len(self._plan.units)
        homes = homes[:num_units] + [self._stream] * (num_units - len(homes))
        saving = self._saving(pattern.saved)
        known, parked, off_gpu, units = self._units, pattern.parked, pattern.parked + pattern.boundaries, []
        for u, (home, index) in enumerate(zip(homes, saving)):
            key = (u, home, index, Tier.NVME if u < parked else Tier.CPU if u < off_gpu else Tier.GPU)
            unit = known.get(key)
            units.append(self._unit(*key) if unit is None else unit)
        stem = []
        for s, home in enumerate(pattern.stem):
            unit = self._stem.get((s, home))
            stem.append(self._stem_unit(s, home) if unit is None else unit)
        return replace(candidate_of(self._plan, tuple(units)), stem=tuple(stem))

    def _saving(self, counts: tuple[int, ...]) -> list[int]:
        """Which way each unit saves. What leaves the GPU is spread over the model, for the links; what stays counts
        from the last unit on."""
        num_units = len(self._plan.units)
        saving = [RECOMPUTE] * num_units
        leaving = _in_turn(counts, self._leaving)[:num_units]
        for place, index in enumerate(leaving):
            saving[int((place + 0.5) * num_units / len(leaving))] = index
        staying = (index for index in self._staying for _ in range(counts[index]))
        for u in reversed(range(num_units)):
            if saving[u] == RECOMPUTE:
                saving[u] = next(staying, RECOMPUTE)
        return saving

    def _unit(self, u: int, home_index: int, saving_index: int, boundary: Tier) -> UnitPlan:
        cost, home = self.problem.units[u], self.homes[home_index]
        activations, saved = RECOMPUTED if saving_index == RECOMPUTE else self.saving[saving_index]
        if home not in self._allowed[u]:
            home = "stream"
        if not cost.can(activations):
            activations, saved = RECOMPUTED
        choices = {"activations": activations, "saved": saved, **cost.planned_formats(activations)}
        unit = replace(self._plan.units[u], **HOMES[home], **choices, boundary=boundary)
        self._units[u, home_index, saving_index, boundary] = unit
        return unit

    def _stem_unit(self, s: int, home: str) -> UnitPlan:
        fields = STEM_HOMES[home] if self.problem.has_gpu else HOMES["stream"]
        unit = self._stem[s, home] = replace(self._plan.stem[s], **fields)
        return unit


def _in_turn(counts: Sequence[int], indices: Iterable[int], phases: Sequence[float] | None = None) -> list[int]:
    """Each index as often as its count says, spread evenly."""
    places = (
        ((place + (phases[index] if phases else 0.5)) / counts[index], index)
        for index in indices
        for place in range(counts[index])
    )
    return [index for _, index in sorted(places)]


def _worthwhile(problem: PlacementProblem, cost: UnitCost) -> list[tuple[Activations, Tier]]:
    """What a unit may save, without ways that spare far less per byte than another, and not the most either: patterns
    that nobody wants cost a search as much time as those that help."""
    choices = saving_choices(problem, cost)
    again_s = cost.recompute_s(Activations.RECOMPUTE)
    spared_s = {activations: again_s - cost.recompute_s(activations) for activations, _ in choices}
    worth = {activations: spared_s[activations] / max(1, cost.saved_bytes(activations)) for activations in spared_s}
    most_s, most_worth = max(spared_s.values(), default=0.0), max(worth.values(), default=0.0)
    wanted = {a for a in spared_s if spared_s[a] == most_s or worth[a] >= LEAST_WORTH_FRAC * most_worth}
    return [choice for choice in choices if choice[0] in wanted]
