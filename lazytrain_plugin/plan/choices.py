"""The homes that a unit may have: what each means in a plan, and which of them a problem allows."""

from __future__ import annotations

from typing import Any

from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import UnitPlan
from lazytrain_plugin.vocab import Activations, Tier, Updater

HOMES: dict[str, dict[str, Any]] = {
    "stream": {"weights": Tier.CPU, "states": Tier.CPU, "updater": Updater.CPU},
    "resident": {"weights": Tier.GPU, "states": Tier.GPU, "updater": Updater.GPU},
    "mirror": {"weights": Tier.GPU, "states": Tier.CPU, "updater": Updater.CPU},
    "stream_update": {"weights": Tier.CPU, "states": Tier.CPU, "updater": Updater.GPU},
    "mirror_update": {"weights": Tier.GPU, "states": Tier.CPU, "updater": Updater.GPU},
    "nvme_states": {"weights": Tier.CPU, "states": Tier.NVME, "updater": Updater.CPU},
    "nvme": {"weights": Tier.NVME, "states": Tier.NVME, "updater": Updater.CPU},
}
"""Weights and states both on the CPU or on the GPU; weights on the GPU with a mirror beside the states on the CPU; the
same two with states that pass the GPU for their update; states, or both, on NVMe."""

STEM_HOMES: dict[str, dict[str, Any]] = {
    "cpu": HOMES["mirror"],
    "gpu": HOMES["resident"],
    "stream_update": HOMES["mirror_update"],
}
"""Stem weights rest on the GPU in any case."""


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
        "nvme": problem.has_gpu and problem.has_nvme,
    }[home]


def home_of(unit: UnitPlan) -> str:
    """The member of `HOMES` that a plan means; `mirror` where none is it (states on NVMe, weights on the GPU)."""
    wanted = {"weights": unit.weights, "states": unit.states, "updater": unit.updater}
    return next((home for home, fields in HOMES.items() if fields == wanted), "mirror")


def stem_home_of(unit: UnitPlan) -> str:
    """The member of `STEM_HOMES` that a stem unit's plan means."""
    return "gpu" if unit.states == Tier.GPU else "stream_update" if unit.streams_states else "cpu"


def saving_choices(problem: PlacementProblem, cost: UnitCost) -> list[tuple[Activations, Tier]]:
    """What a unit may save beside its input, and where."""
    tiers = [Tier.GPU]
    if problem.has_gpu and problem.capabilities.offloaded_saved:
        tiers.append(Tier.CPU)
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


def offloads_boundaries(problem: PlacementProblem) -> bool:
    """Whether inputs of units may leave the GPU."""
    return problem.has_gpu and problem.capabilities.offloaded_boundaries
