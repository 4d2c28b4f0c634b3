"""`PlacementPlan`: what the planner decides and the executor carries out, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.vocab import Activations, Fidelity, Tier, Updater

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Decisions for one unit (a streamed layer, or a part of the stem)."""

    name: str
    """Name of the unit, as unit discovery gives it (`model.layers.3`, `stem.lm_head`)."""
    weights: Tier
    """Home of the weights. Stem weights are always on the GPU."""
    states: Tier
    """Home of master remainder, moments and gradients; equal to the tier of `updater`."""
    updater: Updater
    state_bits: int = 32
    """Bits of one optimizer moment element: 32 or 8 (block-wise, block 256)."""
    activations: Activations = Activations.RECOMPUTE
    """Ignored for stem units."""
    reason: str = ""
    """One sentence: why this placement."""

    def __post_init__(self) -> None:
        if self.state_bits not in (8, 32):
            raise PlanMismatchError(f"{self.name}: state_bits is {self.state_bits}; the formats are 32 and 8")
        if self.states.value != self.updater.value:
            raise PlanMismatchError(
                f"{self.name}: states rest on {self.states} but the {self.updater} updates them; "
                "place both on the same side"
            )
        if self.weights == Tier.CPU and self.updater == Updater.GPU:
            raise PlanMismatchError(
                f"{self.name}: weights on the CPU with a GPU updater is not supported; "
                "put weights and states on the GPU, or both on the CPU"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """One step's placement, valid for batches up to `max_tokens` tokens.

    Deterministic and diffable: no time stamps, keys in a fixed order.
    """

    units: tuple[UnitPlan, ...]
    """Streamed units in forward order."""
    stem: tuple[UnitPlan, ...]
    """Parts of the stem in forward order."""
    weight_slots: int = 3
    """Staging buffers on the GPU for streamed weights (at least 2)."""
    gradient_slots: int = 2
    """Units whose gradients may be on the GPU at once: the one in backward and those on their way to the CPU."""
    fidelity: Fidelity = Fidelity.EXACT
    max_tokens: int | None = None
    """Tokens of one micro-batch that the memory figures hold for; None when unknown."""
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    """Peak bytes per tier, `{"gpu": ..., "cpu": ...}`."""
    predicted_step_s: float | None = None
    """Step time by the simulator, optimizer step and accumulation included; None when unknown."""
    solver: dict[str, str | float | None] = field(default_factory=dict)
    """How it was found: name, status, proven gap, time limit; empty when no solver was used."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the inputs: config, hardware profile, model profile."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.weight_slots < 2 or self.gradient_slots < 1:
            raise PlanMismatchError("a plan needs at least 2 weight slots and 1 gradient slot")

    def unit(self, name: str) -> UnitPlan:
        for candidate in (*self.units, *self.stem):
            if candidate.name == name:
                return candidate
        known = ", ".join(unit.name for unit in (*self.units, *self.stem)[:4])
        raise PlanMismatchError(f"the plan has no unit {name!r} (it starts with {known}); plan for this model again")

    def with_units(self, **changes: object) -> PlacementPlan:
        """The same plan with fields of every streamed unit replaced."""
        return replace(self, units=tuple(replace(unit, **changes) for unit in self.units))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def from_json(cls, text: str) -> PlacementPlan:
        """Parses a plan; raises PlanMismatchError for another schema or an unknown key."""
        try:
            raw = json.loads(text)
            if raw.get("schema_version") != SCHEMA_VERSION:
                raise PlanMismatchError(
                    f"plan schema {raw.get('schema_version')} is not {SCHEMA_VERSION}; plan again with this version"
                )
            for part in ("units", "stem"):
                raw[part] = tuple(_unit_from_dict(unit) for unit in raw[part])
            raw["fidelity"] = Fidelity(raw["fidelity"])
            return cls(**raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanMismatchError(f"not a LazyTrain plan: {error}; write one with `lazytrain plan --out`") from error

    @classmethod
    def load(cls, path: str | Path) -> PlacementPlan:
        return cls.from_json(Path(path).read_text())


def _unit_from_dict(raw: dict) -> UnitPlan:
    return UnitPlan(
        **{
            **raw,
            "weights": Tier(raw["weights"]),
            "states": Tier(raw["states"]),
            "updater": Updater(raw["updater"]),
            "activations": Activations(raw["activations"]),
        }
    )
