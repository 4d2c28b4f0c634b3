"""`Candidate`: what of a plan decides its bytes and its time, for searches that judge thousands."""

from __future__ import annotations

from dataclasses import dataclass

from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """What of a plan decides its bytes and its time, without the checks and sizes of a whole one."""

    units: tuple[UnitPlan, ...]
    stem: tuple[UnitPlan, ...]
    weight_slots: int
    gradient_slots: int
    state_slots: int
    activation_slots: int
    nvme_slots: int


def candidate_of(plan: PlacementPlan, units: tuple[UnitPlan, ...]) -> Candidate:
    """The plan with other units."""
    return Candidate(
        units=units,
        stem=plan.stem,
        weight_slots=plan.weight_slots,
        gradient_slots=plan.gradient_slots,
        state_slots=plan.state_slots,
        activation_slots=plan.activation_slots,
        nvme_slots=plan.nvme_slots,
    )


Judged = PlacementPlan | Candidate
