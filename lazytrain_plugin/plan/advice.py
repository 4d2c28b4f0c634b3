"""What a lower fidelity would gain: said beside a plan, never done unasked."""

from __future__ import annotations

from dataclasses import fields, replace

from lazytrain_plugin.plan.greedy import explained, fits, save_what_fits
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Activations, Fidelity, Tier

WORTH_FRAC = 0.05
"""A gain below this is not worth a word."""


def fidelity_advice(
    plan: PlacementPlan, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest
) -> list[str]:
    """One line per lower fidelity that makes the step more than 5 % faster, with its gain in time and memory.

    A lower bound, found in milliseconds: weights and states stay where `plan` has them, in fewer bits; activations are
    saved anew in the room that this leaves. A whole plan of that fidelity may gain more.
    """
    order = list(Fidelity)
    lines = []
    for fidelity in order[order.index(plan.fidelity) + 1 :]:
        other = _with_fidelity(plan, fidelity, model, hardware, request)
        if other is None:
            continue
        gain = plan.predicted_step_s / other.predicted_step_s
        if gain < 1 + WORTH_FRAC:
            continue
        spared = [
            f"{format_bytes(spared_bytes)} less {name} memory"
            for tier, name in (("gpu", "GPU"), ("cpu", "host"))
            if (spared_bytes := plan.predicted_bytes.get(tier, 0) - other.predicted_bytes.get(tier, 0))
            > WORTH_FRAC * plan.predicted_bytes.get(tier, 0)
        ]
        lines.append(f'"fidelity": "{fidelity.value}" would be {gain:.2f}x as fast' + "".join(f", {s}" for s in spared))
    return lines


def _with_fidelity(
    plan: PlacementPlan, fidelity: Fidelity, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest
) -> PlacementPlan | None:
    """None where it does not fit, which only a plan of other sizes can be."""
    as_fidelity_says = {name: None for name in _BITS if name in {field.name for field in fields(request)}}
    request = replace(request, max_tokens=request.max_tokens or plan.max_tokens, fidelity=fidelity, **as_fidelity_says)
    problem = build_problem(model, hardware, request)
    bare = {
        "activations": Activations.RECOMPUTE, "saved": Tier.GPU, "saved_bits": 16, "boundary_bits": 16,
        "state_bits": problem.state_bits,
    }  # fmt: skip
    stem = tuple(replace(unit, state_bits=problem.state_bits) for unit in plan.stem)
    other = replace(plan.with_units(**bare), stem=stem, fidelity=fidelity)
    if not fits(problem, other):
        return None
    other = save_what_fits(problem, other)
    return explained(problem, other, simulate(problem, other).step_s)


_BITS = ("state_bits", "gradient_bits", "activation_bits")
"""Fields of a request that follow its fidelity when they are None."""
