"""`UnitTable`: which units a model has, which tensors they own, and the order of their updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lazytrain_plugin.errors import UnsupportedModelError
from lazytrain_plugin.profile.model import LEAST_CODED_NUMEL
from lazytrain_plugin.runtime.discovery import Discovery
from lazytrain_plugin.runtime.layout import UnitTensor, lay_out
from lazytrain_plugin.runtime.unit import Unit


class UnitTable:
    """Units, stem and tensors of one model.

    Args:
        groups: the optimizer's `param_groups`; empty: nothing is trained.
        least_coded_numel: tensors with fewer elements have 32-bit states under 8-bit plans too.
    """

    def __init__(
        self,
        model: nn.Module,
        discovery: Discovery,
        dtypes: dict[nn.Parameter, torch.dtype],
        groups: list[dict[str, Any]],
        *,
        least_coded_numel: int = LEAST_CODED_NUMEL,
    ) -> None:
        # A frozen parameter in a group (optimizers are often given all of them) has no gradient, so no states either.
        place_in_group = {
            p: (g, i) for g, group in enumerate(groups) for i, p in enumerate(group["params"]) if p.requires_grad
        }

        def make(found) -> Unit:
            named, trained = list(found.parameters), place_in_group.__contains__
            return Unit(found.name, found.module, lay_out(named, dtypes, trained, least_coded_numel=least_coded_numel))

        self.units = [make(found) for found in discovery.units]
        self.stem = [make(found) for found in discovery.stem]
        self.owner: dict[nn.Parameter, tuple[Unit, UnitTensor]] = {
            tensor.parameter: (unit, tensor) for unit in (*self.units, *self.stem) for tensor in unit.layout.tensors
        }
        self.trained_tensors: list[UnitTensor] = []
        """In the order of `model.parameters()`."""
        positions = {parameter: i for i, parameter in enumerate(model.parameters())}
        for parameter in positions:
            tensor = self.owner[parameter][1]
            if tensor.trained:
                tensor.index = len(self.trained_tensors)
                tensor.group, tensor.position_in_group = place_in_group[parameter]
                self.trained_tensors.append(tensor)
        self._group_sizes = [len(group["params"]) for group in groups]
        self._frozen_in_groups = [
            (self.owner[p][1].name, p)
            for group in groups
            for p in group["params"]
            if p in self.owner and p not in place_in_group
        ]
        first = lambda unit: positions[unit.layout.tensors[0].parameter]  # noqa: E731
        first_streamed = min(map(first, self.units), default=0)
        early = [unit for unit in self.stem if first(unit) < first_streamed or len(unit.layout.tensors) > 1]
        self.update_order = early + self.units + [unit for unit in self.stem if unit not in early]
        """Forward order: what the next forward needs first is updated first."""
        self.head = [unit for unit in self.stem if unit not in early]
        """Stem units that run after all others; their gradients come first."""
        for unit in self.units:
            shared = {self.owner[p] for p in unit.module.parameters() if self.owner[p][0] is not unit}
            unit.foreign = tuple(t for _, t in sorted(shared, key=lambda item: item[1].name) if t.trained)

    def check_groups(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuses what the optimizer is to train now, but was not when the engine was made.

        Raises:
            UnsupportedModelError: a weight was unfrozen, or the optimizer got or lost weights.
        """
        if not self._group_sizes:
            return  # evaluation only
        for name, parameter in self._frozen_in_groups:
            if parameter.requires_grad:
                raise UnsupportedModelError(
                    f"{name} was frozen when the engine was made and is to be trained now: it has no optimizer states. "
                    "Unfreeze it first, then make the Trainer (or the engine)"
                )
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != self._group_sizes:
            raise UnsupportedModelError(
                f"the optimizer's groups hold {sizes} parameters, and held {self._group_sizes} when the engine was "
                "made: added ones would have no optimizer states. Give the optimizer all that is to be trained first "
                "(add_param_group), then make the Trainer (or the engine)"
            )
