"""The homes that a unit may have: what each means in a plan, and which of them a problem allows."""

from __future__ import annotations

from typing import Any

from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import UnitPlan
from lazytrain_plugin.vocab import Activations, Tier, Updater

HOMES: dict[str, dict[str, Any]] = {
    name: {"weights": weights, "states": states, "updater": updater, "gradients": gradients}
    for name, weights, states, updater, gradients in (
        ("stream", Tier.CPU, Tier.CPU, Updater.CPU, None),
        ("resident", Tier.GPU, Tier.GPU, Updater.GPU, None),
        ("mirror", Tier.GPU, Tier.CPU, Updater.CPU, None),
        ("stream_update", Tier.CPU, Tier.CPU, Updater.GPU, None),
        ("mirror_update", Tier.GPU, Tier.CPU, Updater.GPU, None),
        ("nvme_states", Tier.CPU, Tier.NVME, Updater.CPU, None),
        ("nvme_gradients", Tier.CPU, Tier.NVME, Updater.CPU, Tier.NVME),
        ("nvme", Tier.NVME, Tier.NVME, Updater.CPU, None),
        ("nvme_all", Tier.NVME, Tier.NVME, Updater.CPU, Tier.NVME),
    )
}
"""Weights and states both on the CPU or on the GPU; weights on the GPU with a mirror beside the states on the CPU; the
same two with states that pass the GPU for their update; states, or weights too, on NVMe, each also with the gradients.
"""

STEM_HOMES: dict[str, dict[str, Any]] = {
    "cpu": HOMES["mirror"],
    "gpu": HOMES["resident"],
    "stream_update": HOMES["mirror_update"],
}
"""Stem weights rest on the GPU in any case."""


WEIGHTS_AND_JOB = (
    'weights on NVMe, but with "shard": "job" updated weights of all nodes meet in memory; plan again, or write '
    '"shard": "node"'
)


def allows_home(problem: PlacementProblem, cost: UnitCost, home: str) -> bool:
    """Whether the machine has the tiers, the runtime the means, and the unit the states."""
    trains = cost.num_trainable > 0
    return {
        "stream": True,
        "resident": problem.has_gpu,
        "mirror": problem.has_gpu and trains,
        "stream_update": problem.has_gpu and trains and problem.capabilities.streamed_states,
        "mirror_update": problem.has_gpu and trains and problem.capabilities.streamed_states,
        "nvme_states": problem.has_gpu and trains and problem.has_nvme,
        "nvme_gradients": trains and parks_gradients(problem),
        "nvme": problem.has_gpu and problem.has_nvme and not problem.shards_job,
        "nvme_all": trains and parks_gradients(problem) and not problem.shards_job,
    }[home]


def home_of(unit: UnitPlan) -> str:
    """The member of `HOMES` that a plan means; `mirror` where none is it (states on NVMe, weights on the GPU)."""
    gradients = Tier.NVME if unit.gradients == Tier.NVME else None
    wanted = {"weights": unit.weights, "states": unit.states, "updater": unit.updater, "gradients": gradients}
    return next((home for home, fields in HOMES.items() if fields == wanted), "mirror")


def stem_home_of(unit: UnitPlan) -> str:
    """The member of `STEM_HOMES` that a stem unit's plan means."""
    return "gpu" if unit.states == Tier.GPU else "stream_update" if unit.streams_states else "cpu"


def saving_choices(problem: PlacementProblem, cost: UnitCost) -> list[tuple[Activations, Tier]]:
    """What a unit may save beside its input, and where."""
    tiers = [Tier.GPU]
    if problem.has_gpu and problem.capabilities.offloaded_saved:
        tiers.append(Tier.CPU)
    if parks_saved(problem):
        tiers.append(Tier.NVME)
    return [
        (activations, tier)
        for activations in Activations
        if activations in problem.capabilities.strategies
        and activations != Activations.RECOMPUTE
        and cost.can(activations)
        for tier in tiers
    ]


def drops_boundaries(problem: PlacementProblem) -> bool:
    """Whether inputs of units may be computed again instead of kept."""
    return problem.capabilities.dropped_boundaries


def parks_boundaries(problem: PlacementProblem) -> bool:
    """Whether inputs of units may rest on NVMe."""
    return problem.has_gpu and problem.has_nvme and problem.capabilities.nvme_boundaries


def parks_saved(problem: PlacementProblem) -> bool:
    """Whether what units save may rest on NVMe."""
    return problem.has_gpu and problem.has_nvme and problem.capabilities.nvme_saved


def parks_gradients(problem: PlacementProblem) -> bool:
    """Whether gradients may rest on NVMe."""
    return problem.has_gpu and problem.has_nvme and problem.capabilities.nvme_gradients


def input_tiers(problem: PlacementProblem) -> list[Tier]:
    """Where inputs of units may rest between forward and backward."""
    tiers = {Tier.GPU: True, Tier.CPU: offloads_boundaries(problem), Tier.NVME: parks_boundaries(problem)}
    return [tier for tier, allowed in tiers.items() if allowed]


def offloads_boundaries(problem: PlacementProblem) -> bool:
    """Whether inputs of units may leave the GPU."""
    return problem.has_gpu and problem.capabilities.offloaded_boundaries
