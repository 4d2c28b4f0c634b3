"""`ModelProfile`: bytes and work of a model's units, per token where they grow with the batch. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from lazytrain_plugin.errors import ConfigError, UnsupportedModelError
from lazytrain_plugin.profile._json import check_keys, digest_of
from lazytrain_plugin.units import align_up
from lazytrain_plugin.vocab import Activations

STATE_ALIGNMENT_ELEMENTS = 256
"""Each tensor's states start at a multiple of this: the block of the 8-bit states never straddles two tensors."""
LEAST_CODED_NUMEL = 4096
"""Tensors with fewer elements keep 32-bit states under 8-bit plans: norms and biases, as in bitsandbytes."""
FLAT_ALIGNMENT_BYTES = 1024
"""Each tensor's weights and gradients start at a multiple of this inside a flat (256 fp32 elements)."""
LOSS_CHUNK_TOKENS = 2048
"""Tokens whose logits exist at once in the chunked loss. Fixed, so that plans stay bit-equal."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

TRAINED_DTYPES = ("bfloat16", "float32")
"""What weights at home may be."""


class UnitRole(StrEnum):
    """What a unit is in the step."""

    LAYER = "layer"
    EMBEDDING = "embedding"
    """Needed before the first layer; when tied it is the head too."""
    HEAD = "head"
    """Needed after the last layer."""
    REST = "rest"
    """Small stem tensors: the final norm and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorProfile:
    name: str
    """Full parameter name, as in `model.named_parameters()`."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the `torch.` prefix."""
    trainable: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        try:
            return DTYPE_BYTES[self.dtype]
        except KeyError:
            raise UnsupportedModelError(
                f"{self.name}: dtype {self.dtype} has no known size; cast it to bfloat16 or float32"
            ) from None

    @property
    def flat_bytes(self) -> int:
        """Bytes in a flat of weights or gradients, padding included."""
        return align_up(self.numel * self.element_bytes, FLAT_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyProfile:
    """What one way of saving activations holds, and what it computes again."""

    activations: Activations
    saved_bytes_per_token: int
    """Saved between forward and backward beside the unit's input, each storage once, without weights."""
    recompute_frac: float
    """Share of the unit's forward time that runs again in backward, in [0, 1]."""
    attention_bytes_per_token: int = 0
    """Of `saved_bytes_per_token`: in the core of attention, which is never saved in fewer bits."""
    fused_bytes_per_token: int = 0
    """Of `saved_bytes_per_token`: read by a fused operator alone, which makes and reads their codes on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProfile:
    """A streamed layer, or a part of the stem. Every parameter appears in one unit only (tied ones too)."""

    name: str
    tensors: tuple[TensorProfile, ...]
    role: UnitRole = UnitRole.LAYER
    boundary_bytes_per_token: int = 0
    """The unit's input, which is kept in any case."""
    fused_input: bool = False
    """A fused norm reads the unit's input, and makes its codes on its way."""
    kept_bytes_per_token: int = 0
    """What KEEP adds: saved tensors other than weights and the input, each storage once."""
    workspace_bytes_per_token: int = 0
    """What a recompute and its backward hold at their fullest moment, beyond the input."""
    flop_per_token: float = 0.0
    """Floating point operations of the forward, attention included."""
    forward_s_per_token: float | None = None
    """Measured time of the forward; None: derived from `flop_per_token`."""
    backward_s_per_token: float | None = None
    """Measured time of the backward, without recompute; None: derived from the forward's."""
    num_operators: int = 0
    """Operators of the forward that the host launches; 0: not known."""
    forward_launch_s: float | None = None
    """Measured time in which the host launches the forward, whatever the tokens; None: derived from `num_operators`."""
    backward_launch_s: float | None = None
    """The same of the backward, without what runs again."""
    strategies: tuple[StrategyProfile, ...] = ()
    """Ways of saving other than KEEP (`kept_bytes_per_token`, nothing again); RECOMPUTE without an entry: all again."""
    kept_bytes_per_token_by_class: dict[str, int] = field(default_factory=dict)
    """`kept_bytes_per_token` by what the tensors are: norm, qkv, attention, mlp, other."""

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def num_trainable(self) -> int:
        return sum(tensor.numel for tensor in self.tensors if tensor.trainable)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the flat that holds all weights."""
        return sum(tensor.flat_bytes for tensor in self.tensors)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the flat of gradients, in the weights' dtype."""
        return sum(tensor.flat_bytes for tensor in self.tensors if tensor.trainable)

    @property
    def state_numel(self) -> int:
        """Elements of a flat of states: trainable tensors, padded."""
        return sum(align_up(tensor.numel, STATE_ALIGNMENT_ELEMENTS) for tensor in self.tensors if tensor.trainable)

    @property
    def remainder_bytes(self) -> int:
        """The int16 remainders; a unit whose trainable weights are all fp32 has none (they are their own master)."""
        split = any(tensor.trainable and tensor.element_bytes == 2 for tensor in self.tensors)
        return 2 * self.state_numel if split else 0

    def moment_bytes(self, state_bits: int) -> int:
        """Both Adam moments: fp32, or 8-bit codes with an fp32 scale for each block of 256, and fp32 for small ones.

        (Small tensors have unused codes too: places are the same in all flats.)
        """
        numel = self.state_numel
        if state_bits == 32:
            return 8 * numel
        return 2 * (numel + 4 * (numel // STATE_ALIGNMENT_ELEMENTS)) + 8 * self.exact_numel

    @property
    def exact_numel(self) -> int:
        """Elements, padded, of trainable tensors that are too small for 8-bit states."""
        return sum(
            align_up(tensor.numel, STATE_ALIGNMENT_ELEMENTS)
            for tensor in self.tensors
            if tensor.trainable and tensor.numel < LEAST_CODED_NUMEL
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    name: str
    units: tuple[UnitProfile, ...]
    """Streamed units in forward order."""
    stem: tuple[UnitProfile, ...]
    """Stem units in forward order."""
    hidden_size: int
    vocab_size: int
    sequence_length: int
    """Sequence length that `flop_per_token` was counted at (attention grows with it)."""
    activation_bytes: int
    """Bytes of one activation element."""
    tied: bool = False
    """The head is the embedding."""
    chunked_loss: bool = True
    """Logits exist for `LOSS_CHUNK_TOKENS` tokens at once; False: for the whole micro-batch."""
    estimate: str = ""
    """How activation bytes were found, when not by running the units on meta tensors."""

    @property
    def num_parameters(self) -> int:
        return sum(unit.num_parameters for unit in (*self.units, *self.stem))

    @property
    def num_trainable(self) -> int:
        return sum(unit.num_trainable for unit in (*self.units, *self.stem))

    def loss_bytes(self, tokens: int) -> int:
        """What the loss holds at its fullest: logits, gradients, and the hidden state around the final norm.

        The chunked loss sums the head's gradient in fp32 over chunks, beside one chunk of logits whose gradient is
        written in their place; then, without logits, it rounds that sum to the model's dtype.
        """
        if not self.vocab_size:
            return 0
        element = self.activation_bytes
        # The last layer's output, the norm's output, and the gradient of it.
        hidden = 3 * tokens * self.hidden_size * element
        if not self.chunked_loss:
            # One copy in the model's dtype, one in fp32, and the fp32 softmax that backward needs.
            return hidden + tokens * self.vocab_size * (element + 8)
        logits = min(tokens, LOSS_CHUNK_TOKENS) * self.vocab_size * element
        head_trainable = any(
            unit.num_trainable
            for unit in self.stem
            if unit.role == UnitRole.HEAD or (self.tied and unit.role == UnitRole.EMBEDDING)
        )
        head_numel = self.vocab_size * self.hidden_size if head_trainable else 0
        return hidden + max(logits + 4 * head_numel, (4 + element) * head_numel)

    def evaluation_bytes(self, tokens: int) -> int:
        """An evaluation batch: whole logits in the model's dtype and in fp32, and a layer's input and output."""
        return tokens * (self.vocab_size * (self.activation_bytes + 4) + 2 * self.hidden_size * self.activation_bytes)

    @property
    def digest(self) -> str:
        return digest_of(asdict(self))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """Parses a profile; raises ConfigError when it is not one."""
        try:
            raw = json.loads(text)
            check_keys(raw, cls)
            for part in ("units", "stem"):
                raw[part] = tuple(_unit_from_dict(unit) for unit in raw[part])
            return cls(**raw)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a model profile: {error}; write one with `lazytrain profile MODEL`") from error


def _unit_from_dict(raw: dict) -> UnitProfile:
    for records, record in (
        ([raw], UnitProfile),
        (raw["tensors"], TensorProfile),
        (raw.get("strategies", ()), StrategyProfile),
    ):
        for each in records:
            check_keys(each, record)
    tensors = tuple(TensorProfile(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in raw["tensors"])
    strategies = tuple(
        StrategyProfile(**{**strategy, "activations": Activations(strategy["activations"])})
        for strategy in raw.get("strategies", ())
    )
    return UnitProfile(**{**raw, "tensors": tensors, "role": UnitRole(raw["role"]), "strategies": strategies})
