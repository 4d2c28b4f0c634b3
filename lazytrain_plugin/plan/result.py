"""`PlacementPlan`: what the planner decides and the executor carries out, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.plan.edges import check_edges
from lazytrain_plugin.profile._json import check_keys
from lazytrain_plugin.vocab import Activations, Fidelity, Shard, Tier, Updater

SCHEMA_VERSION = 2
ACTIVATION_BITS = (16, 8, 6, 5, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Decisions for one unit (a streamed layer, or a part of the stem)."""

    name: str
    """Name of the unit, as unit discovery gives it (`model.layers.3`, `stem.lm_head`)."""
    weights: Tier
    """Home of the weights. Stem weights are always on the GPU (where there is one)."""
    states: Tier
    """Home of master remainder, moments and accumulated gradients."""
    updater: Updater
    """GPU with states on the CPU: the states are streamed through the GPU while the next forward runs."""
    gradients: Tier | None = None
    """Home of the gradients between backward and update; None: GPU for states on the GPU, else CPU."""
    state_bits: int = 32
    """Bits of one optimizer moment element: 32 or 8 (block-wise, block 256)."""
    gradient_bits: int = 16
    """Bits of one gradient element at rest: 16, the weight's own precision (with fp32 sums), or 8 (block-wise codes,
    block 64, with 16-bit sums). The norm, and with it clipping, is taken before."""
    activations: Activations = Activations.RECOMPUTE
    """What is saved between forward and backward beside the input. Ignored for stem units."""
    boundary: Tier | None = Tier.GPU
    """Where the unit's input rests between forward and backward; None: nowhere, the unit before it runs once more
    (plan/edges.py). Ignored for stem units."""
    saved: Tier = Tier.GPU
    """Where what `activations` saves rests. Ignored for stem units and where nothing is saved."""
    saved_bits: int = 16
    """Bits of a value that `activations` saves outside of attention: 16 (as it is), 8, 6, 5 or 4 (in blocks of 128)."""
    boundary_bits: int = 16
    """The same for the unit's input; below 16 for the strategies that save matrix products only (matmuls, keep)."""
    reason: str = ""
    """One sentence: why this placement."""

    def __post_init__(self) -> None:
        if self.state_bits not in (8, 32):
            raise PlanMismatchError(f"{self.name}: state_bits is {self.state_bits}; the formats are 32 and 8")
        if self.gradient_bits not in (8, 16):
            raise PlanMismatchError(
                f"{self.name}: gradient_bits is {self.gradient_bits}; the formats are 16 (the weight's own) and 8"
            )
        if not {self.saved_bits, self.boundary_bits} <= set(ACTIVATION_BITS):
            raise PlanMismatchError(
                f"{self.name}: activations in {self.saved_bits} and {self.boundary_bits} bits; "
                f"the formats have {', '.join(map(str, ACTIVATION_BITS))}"
            )
        if self.boundary_bits < 16 and self.activations not in (Activations.MATMULS, Activations.KEEP):
            raise PlanMismatchError(
                f"{self.name}: an input in {self.boundary_bits} bits with activations {self.activations}: attention "
                "would be computed again from it, and is never below 16 bits; plan with matmuls or keep"
            )
        if self.boundary is None and (self.activations == Activations.KEEP or self.boundary_bits < 16):
            raise PlanMismatchError(
                f"{self.name}: its input is dropped, which activations {self.activations} in {self.boundary_bits} bits "
                "need; keep it, or plan with recompute"
            )
        if self.states == Tier.GPU and (self.updater != Updater.GPU or self.weights != Tier.GPU):
            raise PlanMismatchError(
                f"{self.name}: states rest on the GPU with weights on {self.weights} and the {self.updater} updating; "
                "put the weights on the GPU too and let it update"
            )
        if self.updater == Updater.GPU and Tier.NVME in (self.states, self.weights):
            raise PlanMismatchError(
                f"{self.name}: weights on {self.weights} and states on {self.states} can't be updated by the GPU; "
                "what rests on NVMe is updated by the CPU"
            )
        if self.gradients not in (None, Tier.CPU) and self.gradients != self.states:
            raise PlanMismatchError(
                f"{self.name}: gradients on {self.gradients} with states on {self.states}; "
                "put them where the states are, or on the CPU"
            )

    @property
    def gradient_tier(self) -> Tier:
        """Where the gradients rest between backward and update."""
        return self.gradients or (Tier.GPU if self.states == Tier.GPU else Tier.CPU)

    @property
    def streams_states(self) -> bool:
        """The GPU updates states that rest in host memory."""
        return self.updater == Updater.GPU and self.states == Tier.CPU


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
    state_slots: int = 2
    """Staging buffers on the GPU for states that the GPU updates but the CPU holds."""
    activation_slots: int = 2
    """Units whose activations may be on their way off the GPU, or back, at once."""
    nvme_slots: int = 3
    """Staging buffers in host memory for what rests on NVMe."""
    fidelity: Fidelity = Fidelity.EXACT
    max_tokens: int | None = None
    """Tokens of one micro-batch that the memory figures hold for; None when unknown."""
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    """Peak bytes per tier in a step, `{"gpu": ..., "cpu": ..., "nvme": ...}`."""
    outside_step_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same for moments between steps, a checkpoint or an evaluation; a budget must hold those too."""
    predicted_step_s: float | None = None
    """Step time by the simulator, optimizer step and accumulation included; None when unknown."""
    solver: dict[str, str | float | None] = field(default_factory=dict)
    """How it was found: name, status, proven gap, time limit; empty when no solver was used."""
    nodes: int | None = None
    local_ranks: int | None = None
    """Machines, and ranks of each, that it was planned for; None: unknown."""
    shard: Shard | None = None
    """Over which ranks optimizer states are divided; None: unknown."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the inputs: config, hardware profile, model profile."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        names = [unit.name for unit in (*self.units, *self.stem)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanMismatchError(f"the plan has {twice} twice; which one counts?")
        if self.weight_slots < 2 or min(self.gradient_slots, self.state_slots, self.activation_slots) < 1:
            raise PlanMismatchError("a plan needs at least 2 weight slots, and 1 slot of each other kind")
        check_edges(self.units)
        lossy = next((unit for unit in self.units if min(unit.saved_bits, unit.boundary_bits) < 16), None)
        if self.fidelity == Fidelity.EXACT and lossy is not None:
            raise PlanMismatchError(
                f"{lossy.name}: {min(lossy.saved_bits, lossy.boundary_bits)}-bit activations in a plan of fidelity "
                '"exact"; plan with "fidelity": "compact" to allow them (8 bits: "balanced")'
            )
        lossy = next((unit for unit in (*self.units, *self.stem) if unit.gradient_bits < 16), None)
        if self.fidelity == Fidelity.EXACT and lossy is not None:
            raise PlanMismatchError(
                f'{lossy.name}: 8-bit gradients in a plan of fidelity "exact"; plan with "fidelity": "compact" to '
                "allow them"
            )

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
            if "schema_version" not in raw:
                raise KeyError("schema_version")
            if raw["schema_version"] != SCHEMA_VERSION:
                raise PlanMismatchError(
                    f"plan schema {raw['schema_version']} is not {SCHEMA_VERSION}; plan again with this version"
                )
            check_keys(raw, cls)
            for part in ("units", "stem"):
                raw[part] = tuple(_unit_from_dict(unit) for unit in raw[part])
            raw["fidelity"] = Fidelity(raw["fidelity"])
            raw["shard"] = Shard(raw["shard"]) if raw.get("shard") else None
            return cls(**raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else error
            raise PlanMismatchError(f"not a LazyTrain plan: {what}; write one with `lazytrain plan --out`") from error

    @classmethod
    def load(cls, path: str | Path) -> PlacementPlan:
        """Reads a plan file; raises PlanMismatchError, with the file's name, as `from_json` does."""
        try:
            return cls.from_json(Path(path).read_text())
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{path}: {error}") from error


def uses_nvme(plan: PlacementPlan) -> bool:
    """Whether any part of it rests on NVMe."""
    return any(
        Tier.NVME in (unit.weights, unit.states, unit.gradient_tier, unit.boundary, unit.saved)
        for unit in (*plan.units, *plan.stem)
    )


def _unit_from_dict(raw: dict) -> UnitPlan:
    check_keys(raw, UnitPlan)
    return UnitPlan(
        **{
            **raw,
            "weights": Tier(raw["weights"]),
            "states": Tier(raw["states"]),
            "updater": Updater(raw["updater"]),
            "gradients": Tier(raw["gradients"]) if raw.get("gradients") else None,
            "activations": Activations(raw["activations"]),
            "boundary": None if raw["boundary"] is None else Tier(raw["boundary"]),
            "saved": Tier(raw["saved"]),
        }
    )
