"""Why one unit rests where it does, in figures: what it holds and costs, and what every other choice would change."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Group
from rich.table import Table

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.bits import bits_of, is_lossy
from lazytrain_plugin.plan.choices import HOMES, STEM_HOMES, allows_home, home_of, input_tiers, saving_choices
from lazytrain_plugin.plan.formats import tensor_error
from lazytrain_plugin.plan.greedy import fits
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import ACTIVATION_BITS, PlacementPlan, UnitPlan
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.model import UnitProfile
from lazytrain_plugin.units import format_bytes
from lazytrain_plugin.vocab import Activations, Tier

HOME_NAMES = {
    "stream": "weights and states on the host",
    "resident": "weights and states on the GPU",
    "mirror": "weights on the GPU, states on the host",
    "stream_update": "on the host, states pass the GPU for their update",
    "mirror_update": "weights on the GPU, states pass it for their update",
    "nvme_states": "weights on the host, states on NVMe",
    "nvme_gradients": "weights on the host, states and gradients on NVMe",
    "nvme": "weights and states on NVMe",
    "nvme_all": "weights, states and gradients on NVMe",
}

LEAST_CHANGE_FRAC = 0.005
"""Of a step: less is below what predicted steps can be told apart by, and no reason for another choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another choice for one unit, all else as planned."""

    text: str
    step_s: float
    """Of the whole plan with that choice."""
    change_bytes: dict[str, int]
    """What a budget must hold per tier, less that of the plan."""
    fits: bool


def alternatives(problem: PlacementProblem, plan: PlacementPlan, name: str) -> list[Alternative]:
    """Every other home, saving strategy and place of the input of one unit; the fastest first."""
    part, index = _position(plan, name)
    unit, cost = getattr(plan, part)[index], getattr(problem, part)[index]
    before = account(problem, plan).need_bytes()
    found = []
    for text, other in _others(problem, cost, unit, stem=part == "stem"):
        units = list(getattr(plan, part))
        units[index] = other
        try:
            changed = replace(plan, **{part: tuple(units)})
        except PlanMismatchError:
            continue  # the unit after it drops its input, and needs this one's
        after = account(problem, changed).need_bytes()
        found.append(
            Alternative(
                text=text,
                step_s=simulate(problem, changed).step_s,
                change_bytes={tier: after.get(tier, 0) - before.get(tier, 0) for tier in {*before, *after}},
                fits=fits(problem, changed),
            )
        )
    return sorted(found, key=lambda alternative: alternative.step_s)


def explain_choice(problem: PlacementProblem, plan: PlacementPlan, profile: UnitProfile) -> Group:
    """Tables: what the unit's tensors are, what it costs, and what other choices would change."""
    part, index = _position(plan, profile.name)
    cost = getattr(problem, part)[index]
    return Group(_costs(cost, profile), _alternatives_table(problem, plan, profile.name))


def _position(plan: PlacementPlan, name: str) -> tuple[str, int]:
    for part in ("units", "stem"):
        for index, unit in enumerate(getattr(plan, part)):
            if unit.name == name:
                return part, index
    raise KeyError(name)


def _others(problem: PlacementProblem, cost: UnitCost, unit: UnitPlan, *, stem: bool):
    """(description, unit plan) of each choice but the planned one."""
    names = {"cpu": "mirror", "gpu": "resident", "stream_update": "mirror_update"}
    homes = {names[home]: fields for home, fields in STEM_HOMES.items()} if stem else HOMES
    if problem.has_gpu:
        for home, fields in homes.items():
            if allows_home(problem, cost, home):
                other = replace(unit, **fields)
                if home_of(other) != home_of(unit):
                    yield HOME_NAMES[home], other
    if stem:
        return
    tiers = {Tier.GPU: "", Tier.CPU: " in host memory", Tier.NVME: " on NVMe"}
    for activations, tier in [(Activations.RECOMPUTE, Tier.GPU), *saving_choices(problem, cost)]:
        saves_same = activations == unit.activations
        if saves_same and (activations == Activations.RECOMPUTE or tier == unit.saved):
            continue
        text = "recompute everything" if activations == Activations.RECOMPUTE else f"save {activations.value}"
        bits = cost.planned_bits(activations)
        text += f" in {bits} bits" if bits < 16 else ""
        keeps = {"boundary": Tier.GPU} if activations == Activations.KEEP and unit.boundary is None else {}
        yield (
            text + tiers[tier],
            replace(unit, activations=activations, saved=tier, **cost.planned_formats(activations), **keeps),
        )
    yield from _other_bits(problem, cost, unit)
    if unit.boundary is None:
        yield "input waits on the GPU", replace(unit, boundary=Tier.GPU)
        return
    for tier in input_tiers(problem) if problem.has_gpu else ():
        if tier != unit.boundary:
            yield f"input waits{tiers[tier] or ' on the GPU'}", replace(unit, boundary=tier)


def _other_bits(problem: PlacementProblem, cost: UnitCost, unit: UnitPlan):
    """As `_others`, for the bits of what waits in codes, or may."""
    if cost.planned_bits(unit.activations) == 16 and not is_lossy(unit):
        return
    for tensor, name in (("saved", "products"), ("boundary", "input")):
        for bits in ACTIVATION_BITS:
            if bits != bits_of(unit, tensor) and (tensor == "saved" or unit.boundary is not None):
                error = tensor_error(tensor, bits, problem.gradient_errors)
                text = f"{name} in {bits} bits" + (f", gradients off by up to {error:.1%}" if error else "")
                yield text, replace(unit, **{f"{tensor}_bits": bits})


def _costs(cost: UnitCost, profile: UnitProfile) -> Table:
    table = Table(title="what it holds and costs", title_justify="left", show_header=False)
    table.add_row("parameters", f"{profile.num_parameters:,} in {len(profile.tensors)} tensors")
    table.add_row("weights", f"{format_bytes(cost.weight_bytes)}, {1e3 * cost.weight_h2d_s:.2f} ms to the GPU")
    if cost.num_trainable:
        table.add_row("states and gradients", format_bytes(cost.state_bytes))
        updates = f"{1e3 * cost.cpu_update_s:.2f} ms on the CPU"
        table.add_row(
            "update", updates + (f", {1e3 * cost.own_update_s:.2f} ms on the GPU" if cost.gpu_update_s else "")
        )
    if cost.forward_s:
        table.add_row("forward, backward", f"{1e3 * cost.forward_s:.2f} ms, {1e3 * cost.backward_s:.2f} ms")
    if cost.boundary_bytes:
        table.add_row("input", format_bytes(cost.boundary_bytes))
    for activations in Activations:
        if activations == Activations.RECOMPUTE or cost.can(activations):
            saved, again_ms = cost.saved_bytes(activations), 1e3 * cost.recompute_s(activations)
            table.add_row(f"saving {activations.value}", f"{format_bytes(saved)}, {again_ms:.2f} ms run again")
    total = sum(profile.kept_bytes_per_token_by_class.values())
    if total:
        by_size = sorted(profile.kept_bytes_per_token_by_class.items(), key=lambda item: -item[1])
        table.add_row("of what keep saves", ", ".join(f"{name} {size / total:.0%}" for name, size in by_size))
    return table


def _alternatives_table(problem: PlacementProblem, plan: PlacementPlan, name: str) -> Table:
    step_s = simulate(problem, plan).step_s
    table = Table(title=f"instead (a step takes {1e3 * step_s:.1f} ms as planned)", title_justify="left")
    for column, justify in (("choice", "left"), ("step", "right"), ("GPU", "right"), ("host", "right"), ("", "left")):
        table.add_column(column, justify=justify)
    for other in alternatives(problem, plan, name):
        table.add_row(
            other.text,
            _change(other.step_s, step_s),
            *(_signed(other.change_bytes.get(tier, 0)) for tier in ("gpu", "cpu")),
            "" if other.fits else "doesn't fit",
        )
    return table


def _change(other_s: float, step_s: float) -> str:
    if abs(other_s - step_s) < LEAST_CHANGE_FRAC * step_s:
        return "as fast"
    return f"{1e3 * (other_s - step_s):+.1f} ms"


def _signed(num_bytes: int) -> str:
    return ("+" if num_bytes > 0 else "-" if num_bytes < 0 else "") + format_bytes(abs(num_bytes))
