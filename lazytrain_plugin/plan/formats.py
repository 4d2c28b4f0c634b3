"""In how many bits saved activations wait: bytes, time and error of a format, and how bits follow free memory.

What may be coded, and how, is the runtime's business (runtime/quantized_saves.py, kernels/blockwise.py); the core of
attention is exact in any case. Here a unit's bits are chosen: the planner plans with the fewest that the fidelity
allows, and what GPU memory is left buys bits back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lazytrain_plugin.plan.result import ACTIVATION_BITS, PlacementPlan, UnitPlan
from lazytrain_plugin.vocab import Activations, Tier

if TYPE_CHECKING:
    from lazytrain_plugin.plan.problem import PlacementProblem

BLOCK = 128
"""Values that share a scale of two bytes, as in kernels/blockwise.py."""
FLOP_PER_CODED_BYTE = 150.0
"""Encoding and decoding take as long as this many FLOP of matrix products for each byte read or written: the rate of
element-wise work in profile/probe.py."""
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


def coding_flop(num_bytes: int, element_bytes: int, bits: int) -> float:
    """Work of encoding in forward and decoding in backward, in FLOP of matrix products that take as long."""
    if bits == 16:
        return 0.0
    return FLOP_PER_CODED_BYTE * 2 * (num_bytes + coded_bytes(num_bytes, element_bytes, bits))


GradientErrors = Mapping[str, Mapping[int, float]]
"""Like `GRADIENT_ERROR`."""


def gradient_error(bits: int, measured: GradientErrors | None = None) -> float:
    """The largest of the classes' errors: what a unit's gradients may be off by. 0 for 16 bits.

    Args:
        measured: on the model itself, in place of the classes that it has.
    """
    errors = {**GRADIENT_ERROR, **(measured or {})}
    return max((by_bits[bits] for by_bits in errors.values()), default=0.0) if bits < 16 else 0.0


def describe_errors(bits: int, measured: GradientErrors | None) -> str:
    """Class by class, and where the figures come from."""
    errors = {**GRADIENT_ERROR, **(measured or {})}
    classes = ", ".join(f"{name} {by_bits[bits]:.1%}" for name, by_bits in errors.items())
    return f"{classes}; {'measured on this model' if measured else 'of a small model, not yet measured on this one'}"


def spend_slack(
    problem: PlacementProblem, plan: PlacementPlan, fits: Callable[[PlacementProblem, PlacementPlan], bool]
) -> PlacementPlan:
    """The plan with more bits where the GPU has room for them, which costs no time.

    A bit is worth the more the fewer there are (an error falls by half with each), so all units get the next wider
    format before any gets the one after it; the last units first, whose memory backward frees first.
    """
    ladder = sorted(ACTIVATION_BITS)
    for narrow, wide in zip(ladder, ladder[1:]):
        waiting = [
            index
            for index, unit in enumerate(plan.units)
            if unit.saved_bits == narrow and unit.saved == Tier.GPU and unit.activations == Activations.MATMULS
        ]
        low, high = 0, len(waiting)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(problem, _raised(plan, waiting, middle, wide)) else (low, middle - 1)
        plan = _raised(plan, waiting, low, wide)
        if low < len(waiting):
            break
    return plan


def _raised(plan: PlacementPlan, waiting: list[int], count: int, bits: int) -> PlacementPlan:
    chosen = frozenset(waiting[len(waiting) - count :])
    units = (_in_bits(unit, bits) if index in chosen else unit for index, unit in enumerate(plan.units))
    return replace(plan, units=tuple(units))


def _in_bits(unit: UnitPlan, bits: int) -> UnitPlan:
    """What it saves, and its input if that waits in codes on the GPU."""
    coded_here = unit.boundary_bits < 16 and unit.boundary == Tier.GPU
    return replace(unit, saved_bits=bits, boundary_bits=bits if coded_here else unit.boundary_bits)


def stage_bits(num_stages: int, *, least: int = 4) -> tuple[int, ...]:
    """Bits per pipeline stage at equal activation memory: AGoQ's rule for interleaved 1F1B, as a special case of slack.

    Stage i (from 1) of n holds 3n - 2i + 1 micro-batches, so it may spend `least` * N_1 / N_i bits on each; rounded to
    the nearest format. (The paper's equation 21 prints n + 2i - 1, in the wrong direction; its 4, 5, 6, 8 bits for four
    stages come from this one.)
    """
    live = [3 * num_stages - 2 * stage + 1 for stage in range(1, num_stages + 1)]
    wanted = [least * live[0] / count for count in live]
    return tuple(min(ACTIVATION_BITS, key=lambda bits: (abs(bits - want), bits)) for want in wanted)
