"""Plans drawn at random among those that fit: what a planner's choice must not lose against."""

import random
from dataclasses import replace

from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.choices import HOMES, STEM_HOMES, allows_home, offloads_boundaries, saving_choices
from lazytrain_plugin.plan.greedy import closest_plans, fits
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.vocab import Activations, Tier

FIELDS = ("weights", "states", "updater", "activations", "saved", "boundary")
TRIES = 400


def random_plan(problem: PlacementProblem, generator: random.Random) -> PlacementPlan | None:
    """A plan that fits every budget; None where none was found.

    Starts from a plan that fits and gives each unit choices of its own, in random order, as long as the plan still
    fits. How eager it is differs from plan to plan: a share of the units, drawn anew for each kind of choice, stays
    as it was.
    """
    plan = next((candidate for candidate in closest_plans(problem) if fits(problem, candidate)), None)
    if plan is None:
        return None
    homes_share, saving_share, boundary_share, stem_share = (generator.random() for _ in range(4))
    changes = []
    for index, cost in enumerate(problem.units):
        if generator.random() < homes_share:
            home = generator.choice([home for home in HOMES if allows_home(problem, cost, home)])
            changes.append(("units", index, HOMES[home]))
        saving = [choice for choice in saving_choices(problem, cost) if choice[0] != Activations.RECOMPUTE]
        if saving and generator.random() < saving_share:
            activations, saved = generator.choice(saving)
            changes.append(("units", index, {"activations": activations, "saved": saved}))
        if offloads_boundaries(problem) and generator.random() < boundary_share:
            changes.append(("units", index, {"boundary": Tier.CPU}))
    for index, cost in enumerate(problem.stem):
        homes = [home for home, field in STEM_HOMES.items() if _stem_may(problem, cost, home)]
        if homes and generator.random() < stem_share:
            changes.append(("stem", index, STEM_HOMES[generator.choice(homes)]))
    generator.shuffle(changes)
    for part, index, fields in changes:
        units = list(getattr(plan, part))
        units[index] = replace(units[index], **fields, reason="at random")
        changed = replace(plan, **{part: tuple(units)})
        if fits(problem, changed):
            plan = changed
    return replace(
        plan,
        fidelity=problem.fidelity,
        max_tokens=problem.max_tokens,
        predicted_bytes=account(problem, plan).total_bytes(),
        predicted_step_s=simulate(problem, plan).step_s,
    )


def random_plans(problem: PlacementProblem, count: int, seed: int) -> list[PlacementPlan]:
    """Up to `count` different plans; the same for the same seed."""
    generator, found = random.Random(seed), {}
    for _ in range(TRIES):
        if len(found) == count:
            break
        plan = random_plan(problem, generator)
        if plan is not None:
            key = tuple(getattr(unit, field) for unit in (*plan.units, *plan.stem) for field in FIELDS)
            found.setdefault(key, plan)
    return list(found.values())


def _stem_may(problem: PlacementProblem, cost, home: str) -> bool:
    if not problem.has_gpu or not cost.num_trainable:
        return False
    return home != "stream_update" or problem.capabilities.streamed_states
