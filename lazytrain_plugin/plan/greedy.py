"""A planner without a solver: a small family of placements, the fastest of those that fit.

The family, in the order in which GPU memory is worth most (each claim is checked by the simulator, not believed):
1. stem states on the GPU, the embedding's first: nothing of a forward can run before the embedding is updated;
2. R units rest on the GPU with their states, so that the CPU updates and the links carry less;
3. what is left keeps activations of the last units, which saves their recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lazytrain_plugin.plan.accounting import (
    account,
    excess_frac,
    nvme_bytes_allowed_per_step,
    nvme_written_bytes,
)
from lazytrain_plugin.plan.bits import choose_bits
from lazytrain_plugin.plan.candidate import Candidate, candidate_of
from lazytrain_plugin.plan.choices import HOMES, STEM_HOMES, allows_home
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost, build_problem
from lazytrain_plugin.plan.reasons import explained_unit
from lazytrain_plugin.plan.replay import Judge
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile, UnitRole
from lazytrain_plugin.vocab import Activations, Shard, Tier

COARSE_COUNTS = 16
PROMISING = 3
"""Layouts that are searched for their best number of resident units."""
WORTHWHILE_FRAC = 0.002
"""A placement that takes more GPU memory must be faster by this much."""


def greedy_plan(model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> PlacementPlan:
    """The fastest placement of the family above, by the simulator. Deterministic.

    Raises:
        InfeasiblePlanError: nothing fits; the message has need and have per tier and the nearest remedies.
    """
    # Which look for what would fit, with this module.
    from lazytrain_plugin.plan.last_resort import dropping_plan
    from lazytrain_plugin.plan.refusal import Rebuilder, infeasible

    problem = build_problem(model, hardware, request)
    best = plan_greedily(problem)
    if best is None and (dropping := dropping_plan(problem)) is not None:
        best = explained(problem, dropping, simulate(problem, dropping).step_s)
    if best is None:
        raise infeasible(problem, Rebuilder(model, hardware, request))
    return best


def plan_greedily(problem: PlacementProblem) -> PlacementPlan | None:
    """As `greedy_plan`, from a problem; None: nothing of the family fits."""
    best = _search(problem)
    return None if best is None else explained(problem, *best)


def closest_plans(problem: PlacementProblem) -> Iterator[PlacementPlan]:
    """Members of the family that need the least of some tier, the leanest first.

    More resident units need more of the GPU and less of the host, each in proportion, so that the number that comes
    closest to both budgets is found by halving.
    """
    yield leanest_plan(problem)
    if not problem.has_gpu:
        return
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
    # States that pass the GPU rest on the host all the same, and take staging buffers.
    for variant in (variant for variant in _variants(problem) if variant.home == "stream"):
        for stem in range(len(problem.stem) + 1):

            def placed(count: int, variant: _Layout = variant, stem: int = stem) -> PlacementPlan:
                return _plan(problem, replace(variant, stem_on_gpu=stem, resident=_first(count)))

            def excess(count: int, placed: Callable[[int], PlacementPlan] = placed) -> float:
                return excess_frac(account(problem, placed(count)).need_bytes(), have)

            low, high = 0, len(problem.units) - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if excess(middle) > excess(middle + 1) else (low, middle)
            # With all of them resident there are no slots.
            yield from (placed(low), placed(len(problem.units)))


def fits(problem: PlacementProblem, plan: PlacementPlan) -> bool:
    """Whether every budget holds the plan, in a step and between steps."""
    have = {"gpu": problem.gpu_budget_bytes, "cpu": problem.cpu_budget_bytes, "nvme": problem.nvme_budget_bytes}
    if nvme_written_bytes(problem, plan) > nvme_bytes_allowed_per_step(problem):
        return False
    return all(num_bytes <= have[tier] for tier, num_bytes in account(problem, plan).need_bytes().items())


def leanest_plan(problem: PlacementProblem) -> PlacementPlan:
    """All units and stem states on the CPU, updated there, everything recomputed: the least GPU memory without
    offloaded activations."""
    return _plan(problem, _Layout())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """One member of the family."""

    stem_on_gpu: int = 0
    """How many stem units have their states on the GPU: small tensors first, then the embedding."""
    resident: frozenset[int] = frozenset()
    home: str = "stream"
    """Of the units that are not resident: a member of `HOMES`."""
    on_nvme: frozenset[int] = frozenset()
    nvme_home: str = "nvme_states"
    boundaries_on_cpu: bool = False


def _search(problem: PlacementProblem) -> tuple[PlacementPlan, float] | None:
    """The fastest of the family that fits and its step time; None: nothing fits.

    The number of resident units is searched coarsely first, then by one around the best: step time has no narrow dips.
    """
    placer = _Placer(problem)
    if not problem.has_gpu:
        # One tier: only activations are left to decide.
        plan = placer.save_what_fits(leanest_plan(problem))
        return (plan, placer.judge.step_s(plan)) if placer.judge.fits(plan) else None
    best: tuple[PlacementPlan, float] | None = None
    num_units = len(problem.units)
    for layout in _promising(placer, _variants(problem)):
        best_count, stride = None, max(1, num_units // COARSE_COUNTS)
        counts = sorted({*range(0, num_units + 1, stride), num_units})
        while counts:
            best_count_s = float("inf")
            for count in counts:
                for resident in dict.fromkeys((_first(count), _spread(count, num_units))):
                    plan = placer.place(replace(layout, resident=resident))
                    if not placer.judge.fits(plan):
                        continue
                    plan = placer.save_what_fits(plan)
                    step_s = placer.judge.step_s(plan)
                    if step_s < best_count_s:
                        best_count, best_count_s = count, step_s
                    if best is None or step_s < best[1] * (1 - WORTHWHILE_FRAC):
                        best = (plan, step_s)
            if best_count is None or stride == 1:
                break
            tried, stride = stride, max(1, stride // 3)
            counts = sorted(set(range(max(0, best_count - tried), min(num_units, best_count + tried) + 1, stride)))
    return best


def _promising(placer: _Placer, variants: list[_Layout]) -> list[_Layout]:
    """Those that look fastest at a few numbers of resident units, each with so many stem units on the GPU."""
    problem = placer.problem
    num_units, layouts = len(problem.units), []
    for variant in variants:
        layouts += [replace(variant, stem_on_gpu=count) for count in range(len(problem.stem) + 1)]
    if len(layouts) <= PROMISING:
        return layouts
    ranked: list[tuple[float, int]] = []
    for index, layout in enumerate(layouts):
        times_s = [float("inf")]
        for count in sorted({num_units * quarter // 4 for quarter in range(5)}):
            plan = placer.place(replace(layout, resident=_first(count)))
            if placer.judge.fits(plan):
                times_s.append(placer.judge.step_s(placer.save_what_fits(plan), steps=2))
        ranked.append((min(times_s), index))
    if all(step_s == float("inf") for step_s, _ in ranked):
        return layouts
    return [layouts[index] for _, index in sorted(ranked)[:PROMISING]]


def _variants(problem: PlacementProblem) -> list[_Layout]:
    """What the family makes of units that are not resident: only what the runtime carries out."""
    homes = ["stream", "stream_update"] if problem.capabilities.streamed_states else ["stream"]
    boundaries = [False, True] if problem.capabilities.offloaded_boundaries else [False]
    variants = [_Layout(home=home, boundaries_on_cpu=off) for home in homes for off in boundaries]
    if problem.has_nvme:
        # As many of the last units on NVMe as make the rest fit the host: forward needs them last.
        for nvme_home in ("nvme_states", "nvme"):
            count = _fewest_on_nvme(problem, nvme_home)
            if count:
                last = frozenset(range(len(problem.units) - count, len(problem.units)))
                variants += [
                    replace(variant, on_nvme=last, nvme_home=nvme_home)
                    for variant in (_Layout(boundaries_on_cpu=off) for off in boundaries)
                ]
    return variants


def _fewest_on_nvme(problem: PlacementProblem, nvme_home: str) -> int:
    """How many units must rest on NVMe for the others to fit the host; 0: none, or it does not help."""
    num_units = len(problem.units)
    for count in range(num_units + 1):
        last = frozenset(range(num_units - count, num_units))
        need = account(problem, _plan(problem, _Layout(on_nvme=last, nvme_home=nvme_home))).need_bytes()
        if need["cpu"] <= problem.cpu_budget_bytes and need.get("nvme", 0) <= problem.nvme_budget_bytes:
            return count
    return 0


def _first(count: int) -> frozenset[int]:
    """Resident units at the start of the forward order give the worker the longest start.

    Unit i's update may take until the forwards before it are done, so moving a resident unit forward never makes
    another unit's update late.
    """
    return frozenset(range(count))


def _spread(count: int, num_units: int) -> frozenset[int]:
    """Spread evenly they serve the link: with few slots it can't run ahead while resident units compute."""
    return frozenset(index * num_units // count for index in range(count)) if count else frozenset()


def _plan(problem: PlacementProblem, layout: _Layout) -> PlacementPlan:
    priority = {UnitRole.REST: 0, UnitRole.EMBEDDING: 1, UnitRole.HEAD: 2, UnitRole.LAYER: 3}
    order = sorted(range(len(problem.stem)), key=lambda index: (priority[problem.stem[index].role], index))
    on_gpu = frozenset(order[: layout.stem_on_gpu])

    def unit(index: int, cost: UnitCost) -> UnitPlan:
        home = "resident" if index in layout.resident else layout.home
        if index in layout.on_nvme and home != "resident":
            home = layout.nvme_home
        if not allows_home(problem, cost, home):
            home = "stream"  # frozen units have no states to place
        boundary = Tier.CPU if layout.boundaries_on_cpu else Tier.GPU
        return UnitPlan(name=cost.name, **HOMES[home], state_bits=cost.state_bits, boundary=boundary)

    def stem_unit(index: int, cost: UnitCost) -> UnitPlan:
        streams = layout.home == "stream_update" and cost.num_trainable > 0
        home = "gpu" if index in on_gpu else "stream_update" if streams else "cpu"
        fields = STEM_HOMES[home] if problem.has_gpu else HOMES["stream"]
        return UnitPlan(name=cost.name, **fields, state_bits=cost.state_bits)

    return empty_plan(
        problem,
        [unit(index, cost) for index, cost in enumerate(problem.units)],
        [stem_unit(index, cost) for index, cost in enumerate(problem.stem)],
    )


def empty_plan(problem: PlacementProblem, units: Sequence[UnitPlan], stem: Sequence[UnitPlan]) -> PlacementPlan:
    """A plan of these units with the problem's slots and sizes, without predictions."""
    return PlacementPlan(
        units=tuple(units),
        stem=tuple(stem),
        weight_slots=problem.weight_slots,
        gradient_slots=problem.gradient_slots,
        state_slots=problem.state_slots,
        activation_slots=problem.activation_slots,
        nvme_slots=problem.nvme_slots,
        fidelity=problem.fidelity,
        max_tokens=problem.max_tokens,
        nodes=problem.nodes,
        local_ranks=problem.local_ranks,
        shard=Shard.JOB if problem.shards_job else Shard.NODE,
        digests=problem.digests,
    )


class _Placer:
    """Layouts as plans, with as much saved as fits. Equal units are one object, so that judging them is quick."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem, self.judge = problem, Judge(problem)
        self._same: dict[tuple[int, UnitPlan], UnitPlan] = {}
        self._strategies = [a for a in reversed(Activations) if a in problem.capabilities.strategies][:-1]

    def place(self, layout: _Layout) -> PlacementPlan:
        plan = _plan(self.problem, layout)
        return replace(plan, units=tuple(self._once(u, unit) for u, unit in enumerate(plan.units)))

    def _once(self, u: int, unit: UnitPlan) -> UnitPlan:
        return self._same.setdefault((u, unit), unit)

    def save_what_fits(self, plan: PlacementPlan) -> PlacementPlan:
        """Saves activations on the GPU, of as many units as fit, from the last on: backward frees those first, so that
        the widest recompute of the others finds its memory again. Each strategy may come first; those that save less
        follow."""
        best, best_saved_s = plan, -1.0
        for first in range(len(self._strategies)):
            filled = plan
            for activations in self._strategies[first:]:
                filled = self.saving(filled, activations)
            saved_s = sum(
                cost.forward_s - cost.recompute_s(unit.activations)
                for cost, unit in zip(self.problem.units, filled.units)
            )
            if saved_s > best_saved_s:
                best, best_saved_s = filled, saved_s
        return best

    def saving(self, plan: PlacementPlan, activations: Activations) -> PlacementPlan:
        """The most of the last units without a strategy yet get this one."""
        free = [
            index
            for index, (cost, unit) in enumerate(zip(self.problem.units, plan.units))
            if unit.activations == Activations.RECOMPUTE
            and cost.can(activations)
            # With little work per byte, codes may take longer than the recompute that they spare.
            and cost.recompute_s(activations) < cost.recompute_s(Activations.RECOMPUTE)
        ]
        saving = {}
        for u in free:
            saves = {"activations": activations, **self.problem.units[u].planned_formats(activations)}
            saving[u] = self._once(u, replace(plan.units[u], **saves))

        def with_last(count: int) -> Candidate:
            units = list(plan.units)
            for u in free[len(free) - count :]:
                units[u] = saving[u]
            return candidate_of(plan, tuple(units))

        low, high = 0, len(free)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.judge.fits(with_last(middle)) else (low, middle - 1)
        return replace(plan, units=with_last(low).units) if low else plan


def explained(
    problem: PlacementProblem, plan: PlacementPlan, step_s: float, *, never_above_s: float = float("inf")
) -> PlacementPlan:
    """`plan` with its predictions, a reason per unit, and the bits of saved activations that cost the least error.

    Args:
        never_above_s: what those bits must not make a step slower than.
    """
    plan, step_s = choose_bits(problem, plan, step_s, never_above_s=never_above_s)
    ledger = account(problem, plan)
    return replace(
        plan,
        units=tuple(explained_unit(problem, cost, unit) for cost, unit in zip(problem.units, plan.units)),
        stem=tuple(explained_unit(problem, cost, unit) for cost, unit in zip(problem.stem, plan.stem)),
        predicted_bytes=ledger.total_bytes(),
        outside_step_bytes=ledger.outside_step,
        predicted_step_s=round(step_s, 6),
    )
