"""Finds what is streamed: units (repeated layers) and the stem (the rest)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

MIN_STEM_TENSOR_NUMEL = 2**20
"""A stem tensor at least this big is a stem unit of its own: placed and updated by itself."""

STEM_REST = "stem.rest"


@dataclass(frozen=True, slots=True)
class FoundUnit:
    """A module whose parameters travel as one, or a part of the stem (`module` is None)."""

    name: str
    module: nn.Module | None
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """(name, parameter) in model order, each parameter once, none of them used by another unit."""


@dataclass(frozen=True, slots=True)
class Discovery:
    units: tuple[FoundUnit, ...]
    stem: tuple[FoundUnit, ...]
    """Parts of the stem in forward order."""

    def statement(self, *, has_gpu: bool) -> str:
        """One line: what is streamed and what is not."""
        streamed = sum(p.numel() for unit in self.units for _, p in unit.parameters)
        stem = sum(p.numel() for unit in self.stem for _, p in unit.parameters)
        if not self.units:
            rest = "stay on the GPU (only optimizer states can leave it)" if has_gpu else "stay in place"
            return (
                f"found no list of repeated layers in this model: nothing is streamed, all {stem / 1e6:.1f} M "
                f"parameters {rest}"
            )
        lists = sorted({unit.name.rpartition(".")[0] for unit in self.units})
        return (
            f"streams {len(self.units)} units of {', '.join(lists)} ({streamed / 1e6:.1f} M parameters); "
            f"the stem ({stem / 1e6:.1f} M) stays {'on the GPU' if has_gpu else 'in place'}"
        )


def discover(model: nn.Module) -> Discovery:
    """Units are the children of the outermost ModuleLists; a parameter that two units share belongs to the stem.

    Outermost, because the experts of a mixture are a list inside a layer. A list counts when all of its children
    hold parameters.
    """
    names = dict(model.named_parameters())  # each parameter once, under its first name
    modules = [
        (f"{list_name}.{index}", child)
        for list_name, module_list in _outermost_lists(model)
        for index, child in enumerate(module_list)
    ]
    owner: dict[nn.Parameter, set[int]] = {}
    for _, child in modules:
        for parameter in child.parameters():
            owner.setdefault(parameter, set()).add(id(child))
    # A parameter that is also reachable outside its unit (tied to the stem) must stay where both can read it.
    inside = {module for _, child in modules for module in child.modules()}
    for module in model.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                owner.pop(parameter, None)

    units, seen = [], set()
    for name, child in modules:
        if id(child) in seen:
            continue
        seen.add(id(child))
        owned = tuple((n, p) for n, p in names.items() if owner.get(p) == {id(child)})
        if owned:
            units.append(FoundUnit(name, child, owned))
    streamed = {p for unit in units for _, p in unit.parameters}
    return Discovery(tuple(units), _stem_units([(n, p) for n, p in names.items() if p not in streamed]))


def _outermost_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    found: list[tuple[str, nn.ModuleList]] = []

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            stack = isinstance(child, nn.ModuleList) and len(child) > 0
            if stack and all(next(layer.parameters(), None) is not None for layer in child):
                found.append((path, child))
            else:
                visit(path, child)

    visit("", model)
    return found


def _stem_units(named: list[tuple[str, nn.Parameter]]) -> tuple[FoundUnit, ...]:
    small = tuple((n, p) for n, p in named if p.numel() < MIN_STEM_TENSOR_NUMEL)
    units = [FoundUnit(STEM_REST, None, small)] if small else []
    units += [FoundUnit(f"stem.{n}", None, ((n, p),)) for n, p in named if p.numel() >= MIN_STEM_TENSOR_NUMEL]
    return tuple(units)
