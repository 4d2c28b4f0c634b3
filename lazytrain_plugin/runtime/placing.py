"""A unit's move into a home: its first, or another one under another plan."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.runtime.gradients import GradientSink
from lazytrain_plugin.runtime.homes import UnitHome
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.unit import Unit


def move_all(
    units: list[Unit], plan: PlacementPlan, make_home: Callable[..., UnitHome], now, ranks: RankGroup | None
) -> None:
    """Moves the units whose homes differ from `plan`'s, one after the other. Arguments as of `move`.

    Args:
        make_home: (layout, unit plan) -> an empty home.
        ranks: all of them call it; each may read what the others have moved.
    """
    for unit in units:
        unit_plan, before = plan.unit(unit.name), unit.home
        if before is not None and before.fits(unit_plan):
            before.plan = unit_plan
        else:
            move(unit, make_home(unit.layout, unit_plan), now)
    if ranks is not None:
        ranks.barrier("placing of weights and states")


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def move(unit: Unit, home: UnitHome, now) -> None:
    """Puts everything the unit has into `home`, bit for bit, also what has arrived in this window.

    Args:
        now: makes an event at the end of the compute stream.
    """
    before = unit.home
    if before is None:
        _take_weights(unit, home)
    else:
        home.copy_from(before)
        home.take_sums(before, unit.arrived)
        unit.gradient_event = now()
        if before.is_divided:
            before.ranks.barrier(f"move of {unit.name}")  # others may read this rank's part
        before.release()
    unit.home = home
    unit.point_home()
    home.let_go(updated=False)


def _take_weights(unit: Unit, home: UnitHome) -> None:
    ranks = home.ranks
    # Ranks of a node have one copy in host memory, the first rank's; the others find it there.
    writes = ranks is None or ranks.is_first_of_node or home.host_weights is None
    for tensor in unit.layout.tensors:
        data = tensor.parameter.data
        values = data.as_strided((tensor.numel,), (1,)) if data.stride() == tensor.stride else data.reshape(-1)
        # Each rank writes the remainders of its own part.
        has_part = home.is_divided and tensor.is_split and values.dtype != torch.bfloat16
        if ranks is not None and (ranks.num_nodes > 1 or has_part):
            values = values.to(home.device if home.states_on_gpu else "cpu", copy=True)
            ranks.copy_of_first(values, f"first copy of {tensor.name}")
        if writes or has_part:
            home.write_master(tensor, values)
        tensor.parameter.data = home.views[tensor]


def sum_up(units: list[Unit], plan: PlacementPlan, sink: GradientSink, ranks: RankGroup | None) -> None:
    """Makes what arrived in this window fit to move, where units are going to."""
    moving = [unit for unit in units if unit.arrived and not unit.home.fits(plan.unit(unit.name))]
    for unit in moving:
        sink.sum_up(unit)
    if moving and ranks is not None:
        ranks.barrier("placing of gradients")


def begin_alike(units: list[Unit], ranks: RankGroup) -> None:
    """After the first placement by all: whatever ranks don't have in common becomes what the first rank has."""
    for unit in units:
        home = unit.home
        for tensor in unit.layout.tensors:
            if home.host_weights is None:
                ranks.copy_of_first(home.gpu_weights[tensor], f"first copy of {tensor.name}")
            else:
                home.publish(tensor)
