"""`LazyTrainConfig`: every key of the `"lazytrain"` block, its default, its unit and what it means.

This is the only list of the keys: the parser, the JSON Schema and `LazyTrainPlugin` are derived from these fields.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.vocab import LEAST_ACTIVATION_BITS, Fidelity, Shard

_KINDS = {
    "bool": "true or false",
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "strings": "a string or a list of strings",
}

BLOCK = "lazytrain"
"""Name of the block at the top level of a DeepSpeed config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a JSON value of one key may be."""

    kind: Literal["bool", "integer", "number", "string", "strings"]
    """"strings": one string, or a list of at least one."""
    nullable: bool = False
    above: float | None = None
    """Exclusive lower bound."""
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[Any, ...] = ()

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, as the end of a sentence that starts with the key; None if nothing."""
        if value is None:
            return None if self.nullable else f"is null; expected {self.describe()}"
        fits = (
            self._has_kind(value)
            and (not self.choices or value in self.choices)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )
        return None if fits else f"is {show_json(value)}; expected {self.describe()}"

    def describe(self) -> str:
        if self.choices:
            text = " or ".join(show_json(choice) for choice in self.choices)
        else:
            text = _KINDS[self.kind]
        if self.above is not None:
            text += f" above {self.above:g}"
        if self.at_least is not None:
            text += f" of at least {self.at_least:g}"
        if self.at_most is not None:
            text += f" and at most {self.at_most:g}"
        return text + (", or null" if self.nullable else "")

    def json_schema(self) -> dict[str, Any]:
        """JSON Schema of one value."""
        kinds = {"bool": ["boolean"], "strings": ["string", "array"]}.get(self.kind, [self.kind])
        kinds += ["null"] if self.nullable else []
        schema: dict[str, Any] = {"type": kinds if len(kinds) > 1 else kinds[0]}
        if self.kind == "strings":
            schema |= {"items": {"type": "string"}, "minItems": 1}
        if self.choices:
            schema["enum"] = [*self.choices, *([None] if self.nullable else [])]
        if self.above is not None:
            schema["exclusiveMinimum"] = self.above
        if self.at_least is not None:
            schema["minimum"] = self.at_least
        if self.at_most is not None:
            schema["maximum"] = self.at_most
        return schema

    def _has_kind(self, value: Any) -> bool:
        # bool is an int in Python, but `"max_tokens": true` is a mistake.
        match self.kind:
            case "bool":
                return isinstance(value, bool)
            case "integer":
                return isinstance(value, int) and not isinstance(value, bool)
            case "number":
                return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            case "string":
                return isinstance(value, str)
            case "strings":
                values = [value] if isinstance(value, str) else value
                return (
                    isinstance(values, list | tuple) and all(isinstance(v, str) and v for v in values) and bool(values)
                )


def option(help_text: str, default: Any, rule: Rule) -> Any:
    """A dataclass field with its meaning and its rule in the metadata."""
    return field(default=default, metadata={"help": help_text, "rule": rule})


def section(help_text: str, section_type: type) -> Any:
    """A dataclass field that holds a nested object."""
    return field(default_factory=section_type, metadata={"help": help_text, "section": section_type})


def check_fields(config: Any) -> None:
    """Raises ConfigError for the first field of a config dataclass whose value its rule refuses."""
    for item in fields(config):
        value = getattr(config, item.name)
        if section_type := item.metadata.get("section"):
            problem = None if isinstance(value, section_type) else f"is {show_json(value)}; expected an object"
        else:
            problem = item.metadata["rule"].problem(value)
        if problem is not None:
            raise ConfigError(f'"{config.PATH}.{item.name}" {problem}.')


def show_json(value: Any) -> str:
    """A value as it stands in the JSON file that the user has to correct."""
    return json.dumps(value, default=repr)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Where the placement comes from."""

    PATH: ClassVar[str] = f"{BLOCK}.plan"

    path: str | None = option(
        "a plan file to follow (`lazytrain plan` writes one); null: planned at the first batch",
        None,
        Rule(kind="string", nullable=True),
    )
    evaluation_tokens: int | None = option(
        "tokens of an evaluation batch whose whole logits the GPU must hold; null: no evaluation is planned for",
        None,
        Rule(kind="integer", nullable=True, at_least=1),
    )
    adapt: bool = option(
        "plan again, in the background, when steps show other rates than planned; weights move, results do not change",
        True,
        Rule(kind="bool"),
    )
    cache: bool = option(
        "keep plans and measured rates in $XDG_CACHE_HOME/lazytrain (~/.cache/lazytrain) for the next run",
        True,
        Rule(kind="bool"),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How weights are updated."""

    PATH: ClassVar[str] = f"{BLOCK}.optimizer"

    state_bits: int | None = option(
        "bits of one optimizer moment element; null: what fidelity says, 32 for exact and 8 otherwise",
        None,
        Rule(kind="integer", nullable=True, choices=(32, 8)),
    )
    embedding_state_bits: int = option(
        "the same of the embedding (and of the head if they are tied) where state_bits is 8: 32, as bitsandbytes under "
        "Trainer, or 8; an error where states have 32 bits",
        32,
        Rule(kind="integer", choices=(32, 8)),
    )
    implementation: str = option(
        "native: the fused kernels; torch: the optimizer's own step, unit by unit on fp32 masters, slower",
        "native",
        Rule(kind="string", choices=("native", "torch")),
    )
    threads: int | None = option(
        "CPU threads of the update; null: the affinity mask and cgroup quota, divided by the ranks of this machine",
        None,
        Rule(kind="integer", nullable=True, at_least=1, at_most=1024),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsConfig:
    """How gradients rest between backward and update."""

    PATH: ClassVar[str] = f"{BLOCK}.gradients"

    bits: int | None = option(
        "8: in 8-bit codes, half the bytes on their way and in host memory; 16: in their own precision; null: "
        "what fidelity says, 8 for compact",
        None,
        Rule(kind="integer", nullable=True, choices=(8, 16)),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsConfig:
    """How saved activations wait for backward."""

    PATH: ClassVar[str] = f"{BLOCK}.activations"

    bits: int | None = option(
        "the fewest bits of a saved activation outside of attention, more where memory is left; 16: as it is; null: "
        "4 for fidelity compact, else 16",
        None,
        Rule(kind="integer", nullable=True, choices=(16, 8, 6, 5, 4)),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCommConfig:
    """How gradients are averaged over ranks."""

    PATH: ClassVar[str] = f"{BLOCK}.gradient_comm"

    bits: int | None = option(
        "8: in 8-bit codes between nodes; 16: in full precision; null: what fidelity says, 16 for exact, else 8",
        None,
        Rule(kind="integer", nullable=True, choices=(8, 16)),
    )
    ranks_per_node: int | None = option(
        "this many neighbouring ranks make a node; null: found from the launcher and the hosts' names",
        None,
        Rule(kind="integer", nullable=True, at_least=1),
    )
    smallest_bucket_elements: int | None = option(
        "buckets and units of fewer elements keep full precision; null: measured at the start, where codes are faster",
        None,
        Rule(kind="integer", nullable=True, at_least=0),
    )
    network_gbit: float | None = option(
        "a node's link to the others in Gbit/s each way, for the plan; null: measured at the start",
        None,
        Rule(kind="number", nullable=True, above=0),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Which steps are measured operation by operation."""

    PATH: ClassVar[str] = f"{BLOCK}.trace"

    path: str | None = option(
        "write here when each operation of some steps ran, for `lazytrain explain --measured`; null: nothing is",
        None,
        Rule(kind="string", nullable=True),
    )
    first_step: int = option("optimizer steps before the first one in the trace", 5, Rule(kind="integer", at_least=1))
    num_steps: int = option("optimizer steps in the trace", 3, Rule(kind="integer", at_least=1, at_most=100))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTrainConfig:
    """The whole block. Raises ConfigError for a value that its rule refuses."""

    PATH: ClassVar[str] = BLOCK

    enabled: bool = option("false gives plain DeepSpeed with the same file", True, Rule(kind="bool"))
    fidelity: str = option(
        "exact: 32-bit optimizer states, results equal bit for bit whatever the plan; balanced: 8-bit states "
        "and 8-bit gradients between nodes; compact: 8-bit gradients at rest and 4-bit activations too",
        Fidelity.EXACT.value,
        Rule(kind="string", choices=tuple(map(str, Fidelity))),
    )
    gpu_memory_gib: float | None = option(
        "GPU memory that training may use, in GiB (2**30 bytes); null: what the device has free",
        None,
        Rule(kind="number", nullable=True, above=0),
    )
    cpu_memory_gib: float | None = option(
        "host memory that training may use, in GiB (2**30 bytes); null: what the machine or its cgroup has free",
        None,
        Rule(kind="number", nullable=True, above=0),
    )
    nvme_path: str | list[str] | None = option(
        "folder on an NVMe disk for what fits neither memory, or a list of folders, one per disk; null: none is used",
        None,
        Rule(kind="strings", nullable=True),
    )
    nvme_gib: float | None = option(
        "disk space that training may use, over all folders, in GiB (2**30 bytes); null: what is free there",
        None,
        Rule(kind="number", nullable=True, above=0),
    )
    nvme_write_gib_per_day: float | None = option(
        "what training may write to the disk in 24 hours, in GiB (2**30 bytes), to limit its wear; null: no limit",
        None,
        Rule(kind="number", nullable=True, above=0),
    )
    max_tokens: int | None = option(
        "tokens of the largest micro-batch (batch x sequence); null: taken from the first batch",
        None,
        Rule(kind="integer", nullable=True, at_least=1),
    )
    shard: str = option(
        "ranks that divide optimizer states: those of each node, or all of the job, where nodes also send weights",
        Shard.NODE.value,
        Rule(kind="string", choices=tuple(map(str, Shard))),
    )
    plan: PlanConfig = section("where the placement comes from", PlanConfig)
    optimizer: OptimizerConfig = section("how weights are updated", OptimizerConfig)
    gradients: GradientsConfig = section("how gradients rest between backward and update", GradientsConfig)
    activations: ActivationsConfig = section("how saved activations wait for backward", ActivationsConfig)
    gradient_comm: GradientCommConfig = section(
        "how gradients are averaged over ranks; also beside DeepSpeed's own ZeRO stages 0, 1 and 2", GradientCommConfig
    )
    trace: TraceConfig = section("which steps are measured operation by operation", TraceConfig)
    fused_kernels: bool = option("fused RMSNorm, SwiGLU, RoPE and the chunked loss, on a GPU", True, Rule(kind="bool"))
    watchdog_s: float = option(
        "a phase without progress for this many seconds is reported with its name and rank; 0 turns that off",
        600.0,
        Rule(kind="number", at_least=0),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for key in ("nvme_gib", "nvme_write_gib_per_day"):
            if getattr(self, key) is not None and self.nvme_path is None:
                raise ConfigError(
                    f'"{self.PATH}.{key}" is set but "{self.PATH}.nvme_path" is not; name a folder on an NVMe disk.'
                )
        if self.optimizer.implementation == "torch" and self.state_bits == 8:
            raise ConfigError(
                f'"{self.PATH}.optimizer.implementation" is "torch", whose states have the optimizer\'s own precision, '
                'but 8-bit states are asked for; use "native", or "exact" fidelity with state_bits null.'
            )

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """The folders of `nvme_path`, none if it is null."""
        if self.nvme_path is None:
            return ()
        return (self.nvme_path,) if isinstance(self.nvme_path, str) else tuple(self.nvme_path)

    @property
    def state_bits(self) -> int:
        """Bits of one optimizer moment element after fidelity and override: 32 or 8."""
        if self.optimizer.state_bits is not None:
            return self.optimizer.state_bits
        return 32 if self.fidelity == Fidelity.EXACT else 8

    @property
    def resting_gradient_bits(self) -> int:
        """Bits of a gradient element between backward and update, after fidelity and override: 16 or 8."""
        if self.gradients.bits is not None:
            return self.gradients.bits
        return 8 if self.fidelity == Fidelity.COMPACT else 16

    @property
    def activation_bits(self) -> int:
        """The fewest bits of a saved activation, after fidelity and override."""
        if self.activations.bits is not None:
            return self.activations.bits
        return LEAST_ACTIVATION_BITS[Fidelity(self.fidelity)]

    @property
    def wire_gradient_bits(self) -> int:
        """Bits of a gradient element between nodes after fidelity and override: 16 (its own precision) or 8."""
        if self.gradient_comm.bits is not None:
            return self.gradient_comm.bits
        return 16 if self.fidelity == Fidelity.EXACT else 8


def json_schema(config_type: type = LazyTrainConfig) -> dict[str, Any]:
    """JSON Schema of the block, for editors: object types, keys, defaults and meanings."""
    properties: dict[str, Any] = {}
    for item in fields(config_type):
        help_text = item.metadata["help"]
        if section_type := item.metadata.get("section"):
            properties[item.name] = {**json_schema(section_type), "description": help_text}
        else:
            properties[item.name] = {
                **item.metadata["rule"].json_schema(),
                "default": item.default,
                "description": help_text,
            }
    return {"type": "object", "properties": properties, "additionalProperties": False}
