"""In how many bits saved activations wait: bytes, time and error of a format.

What may be coded, and how, is the runtime's business (runtime/quantized_saves.py, kernels/blockwise.py); the core of
attention is exact in any case. Which bits a unit gets is chosen in plan/bits.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lazytrain_plugin.plan.result import ACTIVATION_BITS

BLOCK = 128
"""Values that share a scale of two bytes, as in kernels/blockwise.py."""
GRADIENT_ERROR = {
    "norm": {4: 0.051, 5: 0.023, 6: 0.011, 8: 0.0028},
    "gemm": {4: 0.114, 5: 0.063, 6: 0.032, 8: 0.0079},
    "swiglu": {4: 0.109, 5: 0.057, 6: 0.027, 8: 0.0068},
}
"""|g' - g| / |g| of the gradients of one operator whose saved input was in so many bits, by class of operator; measured
by benchmarks/gradient_error.py (table: docs/quantized-activations.md). AGoQ's 4-bit figures: 0.003, 0.026, 0.051."""


def bits_per_value(bits: int) -> float:
    """With the scale of a value's block."""
    return bits + 16 / BLOCK if bits < 16 else 16.0


def coded_bytes(num_bytes: int, element_bytes: int, bits: int) -> int:
    """Bytes of values that take `num_bytes` as they are, in so many bits; 16: as they are."""
    return num_bytes if bits == 16 else int(num_bytes / element_bytes * bits_per_value(bits) / 8)


@dataclass(frozen=True, slots=True)
class CodingRates:
    """How fast codes are made and read, in bytes read and written together in a second."""

    quantize_bytes_per_s: float = math.inf
    dequantize_bytes_per_s: float = math.inf

    def pass_s(self, num_bytes: int, element_bytes: int, bits: int) -> float:
        """A pass of its own in forward that makes codes of values, and one in backward that makes values of codes."""
        if bits == 16:
            return 0.0
        moved_bytes = num_bytes + coded_bytes(num_bytes, element_bytes, bits)
        return moved_bytes / self.quantize_bytes_per_s + moved_bytes / self.dequantize_bytes_per_s

    def fused_s(self, num_bytes: int, element_bytes: int, bits: int) -> float:
        """What an operator adds to itself that reads the values anyway and writes their codes too. In backward it reads
        codes instead of values, which is less."""
        return 0.0 if bits == 16 else coded_bytes(num_bytes, element_bytes, bits) / self.quantize_bytes_per_s

    def fused_input_s(self, num_bytes: int, element_bytes: int, bits: int) -> float:
        """As `fused_s`, with a pass in backward: others read the values too."""
        if bits == 16:
            return 0.0
        coded = coded_bytes(num_bytes, element_bytes, bits)
        return coded / self.quantize_bytes_per_s + (num_bytes + coded) / self.dequantize_bytes_per_s


GradientErrors = Mapping[str, Mapping[int, float]]
"""Like `GRADIENT_ERROR`."""


TENSOR_CLASSES = {"saved": ("swiglu", "gemm"), "boundary": ("norm", "gemm")}
"""The classes of operators whose gradients are computed from each tensor that a unit may have in codes: what its
products return (`saved_bits`), and its input (`boundary_bits`)."""


def tensor_error(tensor: str, bits: int, measured: GradientErrors | None = None) -> float:
    """The error price of a tensor (a key of `TENSOR_CLASSES`) in so many bits: the largest of its classes' errors.

    Args:
        measured: on the model itself, in place of the classes that it has.
    """
    if bits == 16:
        return 0.0
    errors = {**GRADIENT_ERROR, **(measured or {})}
    return max(errors[name][bits] for name in TENSOR_CLASSES[tensor])


def describe_errors(bits: int, measured: GradientErrors | None) -> str:
    """Class by class, and where the figures come from."""
    errors = {**GRADIENT_ERROR, **(measured or {})}
    classes = ", ".join(f"{name} {by_bits[bits]:.1%}" for name, by_bits in errors.items())
    return f"{classes}; {'measured on this model' if measured else 'of a small model, not yet measured on this one'}"


def stage_bits(num_stages: int, *, least: int = 4) -> tuple[int, ...]:
    """Bits per pipeline stage at equal activation memory: AGoQ's rule for interleaved 1F1B, as a special case of slack.

    Stage i (from 1) of n holds 3n - 2i + 1 micro-batches, so it may spend `least` * N_1 / N_i bits on each; rounded to
    the nearest format. (The paper's equation 21 prints n + 2i - 1, in the wrong direction; its 4, 5, 6, 8 bits for four
    stages come from this one.)
    """
    live = [3 * num_stages - 2 * stage + 1 for stage in range(1, num_stages + 1)]
    wanted = [least * live[0] / count for count in live]
    return tuple(min(ACTIVATION_BITS, key=lambda bits: (abs(bits - want), bits)) for want in wanted)
