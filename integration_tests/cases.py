"""The cases of the parity matrix, as data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields

from integration_tests.models import MODELS


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is computed; the plan must not change a bit of it."""

    model: str
    trained: str = "full"
    accumulation: int = 1
    dtype: str = "fp32"
    max_norm: float = 0.0
    """Limit of the global gradient norm; 0: no clipping."""
    implementation: str = "torch"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and how a plan lets it be computed."""

    homes: str
    activations: str = "recompute"
    resting: str = "gpu"
    """Where unit inputs and what is saved rest between forward and backward; "dropped": inputs but the first nowhere,
    what is saved on the GPU."""


@dataclass(frozen=True, kw_only=True)
class Case:
    work: Work
    placement: Placement

    @property
    def id(self) -> str:
        values = {**vars(self.work), **vars(self.placement)}
        values["accumulation"] = f"acc{self.work.accumulation}"
        values["resting"] = f"on_{self.placement.resting}"
        values["max_norm"] = "clip" if self.work.max_norm else "noclip"
        return "-".join(str(value).replace(" ", "_") for value in values.values())


FACTORS: dict[str, tuple] = {
    "model": tuple(MODELS),
    "homes": ("cpu", "gpu", "mixed", "streamed states"),
    "trained": ("full", "half frozen", "lora"),
    "activations": ("recompute", "attention", "matmuls", "keep"),
    "resting": ("gpu", "cpu", "dropped"),
    "accumulation": (1, 4),
    "dtype": ("fp32", "bf16"),
    "max_norm": (0.0, 0.05),
    "implementation": ("torch", "native"),
}


IMPOSSIBLE = [
    {"homes": "streamed states", "implementation": "torch"},
    {"resting": "dropped", "activations": "keep"},
]
"""What is refused, and tested elsewhere."""


def all_cases() -> list[Case]:
    """The full product."""
    return [_case(row) for row in itertools.product(*FACTORS.values()) if _possible(dict(enumerate(row)))]


def _possible(chosen: dict[int, object]) -> bool:
    """Whether values, by the index of their factor, may go together."""
    values = {name: chosen[index] for index, name in enumerate(FACTORS) if index in chosen}
    return not any(refused.items() <= values.items() for refused in IMPOSSIBLE)


def pairwise_cases() -> list[Case]:
    """Rows in which every pair of values of two factors occurs: most defects need no more than two to show."""
    factors = list(FACTORS.values())
    open_pairs = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(factors)), 2)
        for a in factors[i]
        for b in factors[j]
        if _possible({i: a, j: b})
    }
    rows = []
    while open_pairs:
        # Ties go to another value in each row, or what is left to chance would be the first value always.
        turned = [values[len(rows) % len(values) :] + values[: len(rows) % len(values)] for values in factors]
        row = _row_through(min(open_pairs, key=str), turned, open_pairs)
        open_pairs -= set(_pairs(row))
        rows.append(row)
    return [_case(row) for row in rows]


def _row_through(seed: tuple, factors: list[tuple], open_pairs: set) -> tuple:
    """A row that holds the pair `seed`; the other factors take, one by one, the value that closes most open pairs."""
    chosen: dict[int, object] = dict(seed)
    for index, values in enumerate(factors):
        if index not in chosen:
            possible = [value for value in values if _possible({**chosen, index: value})]
            chosen[index] = max(possible, key=lambda value: _gain(index, value, chosen, open_pairs))
    return tuple(chosen[index] for index in range(len(factors)))


def _gain(index: int, value: object, chosen: dict[int, object], open_pairs: set) -> int:
    pairs = (tuple(sorted(((index, value), (other, chosen[other])), key=lambda item: item[0])) for other in chosen)
    return sum(pair in open_pairs for pair in pairs)


def _pairs(row: Iterable) -> Iterable[tuple]:
    return itertools.combinations(enumerate(row), 2)


def _case(row: tuple) -> Case:
    values = dict(zip(FACTORS, row, strict=True))
    split = {part: {field.name: values[field.name] for field in fields(part)} for part in (Work, Placement)}
    return Case(work=Work(**split[Work]), placement=Placement(**split[Placement]))
