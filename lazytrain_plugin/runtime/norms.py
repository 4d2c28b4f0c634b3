"""The global gradient norm, from per-tensor sums that are the same bits under every plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lazytrain_plugin.kernels.batch import Batch
from lazytrain_plugin.kernels.norm import LANES, read_squares, sum_squares_lanes
from lazytrain_plugin.runtime.gradient_format import Gradient, as_values
from lazytrain_plugin.runtime.layout import UnitTensor

logger = logging.getLogger(__name__)

Squares = dict[UnitTensor, float]


@dataclass(frozen=True, slots=True)
class GradientNorm:
    total: float
    """L2 norm of all gradients, before clipping."""
    bad_tensors: tuple[str, ...]
    """Names of tensors whose gradient holds an inf or a NaN."""

    @property
    def is_finite(self) -> bool:
        return not self.bad_tensors and math.isfinite(self.total)

    def report(self) -> None:
        """Says why a step is skipped."""
        shown = ", ".join(self.bad_tensors[:3]) + (", ..." if len(self.bad_tensors) > 3 else "")
        logger.warning(
            "step skipped: non-finite gradients in %d tensors (%s); weights and optimizer states are unchanged",
            len(self.bad_tensors),
            shown or "their sum overflows",
        )

    def clip_factor(self, max_norm: float) -> float:
        """What gradients are multiplied by: min(1, max_norm / (norm + 1e-6)) in fp32, as torch's clip_grad_norm_."""
        if max_norm <= 0:
            return 1.0
        factor = max_norm / (torch.tensor(self.total, dtype=torch.float32) + 1e-6)
        return float(torch.clamp(factor, max=1.0))


class LaneNorm:
    """Sums of squares in fp64 with one fixed order of additions on every device (kernels/norm.py).

    Each gradient is summed where it is complete: on the device as it appears, or at home when micro-batches were
    added up there. The per-tensor sums are then added in parameter order.
    """

    def __init__(self, num_tensors: int, device: torch.device) -> None:
        shape = (num_tensors, LANES)
        self._lanes = {
            kind: torch.zeros(shape, dtype=torch.float64, device=where)
            for kind, where in {device.type: device, "cpu": torch.device("cpu")}.items()
        }
        self._host = {
            kind: torch.zeros(num_tensors, dtype=torch.float64, pin_memory=kind == "cuda") for kind in self._lanes
        }
        self._summed_on: dict[UnitTensor, str] = {}

    def add(self, gradients: Mapping[UnitTensor, Gradient]) -> None:
        """Sums complete gradients, 1-D in storage order, on the device that they are on."""
        batch = Batch()
        for tensor, gradient in gradients.items():
            kind = gradient.device.type
            sum_squares_lanes(gradient, self._lanes[kind][tensor.index], batch=batch)
            self._summed_on[tensor] = kind
        batch.run()

    def has(self, tensor: UnitTensor) -> bool:
        return tensor in self._summed_on

    def discard(self, tensor: UnitTensor) -> None:
        self._summed_on.pop(tensor, None)

    def finish(self, agree: Callable[[Squares], Squares] | None = None) -> GradientNorm:
        """The norm of everything added since the last call. Waits for the device.

        `agree`: brings the sums of squares of all ranks together.
        """
        sums = {kind: read_squares(self._lanes[kind], self._host[kind]) for kind in set(self._summed_on.values())}
        squares = {tensor: sums[kind][tensor.index] for tensor, kind in self._summed_on.items()}
        if agree is not None:
            squares = agree(squares)
        total, bad = 0.0, []
        for tensor in sorted(squares, key=lambda t: t.index):
            square = squares[tensor]
            total += square
            if not math.isfinite(square):
                bad.append(tensor.name)
        self._summed_on.clear()
        norm = float(torch.tensor(math.sqrt(total) if total >= 0 else math.nan, dtype=torch.float32))
        return GradientNorm(norm, tuple(bad))


class TorchNorm:
    """The norm as `torch.nn.utils.clip_grad_norm_` computes it, bit for bit: used with the client's own optimizer."""

    def __init__(self) -> None:
        self._norms: dict[UnitTensor, torch.Tensor] = {}

    def add(self, gradients: Mapping[UnitTensor, Gradient]) -> None:
        for tensor, gradient in gradients.items():
            self._norms[tensor] = torch.linalg.vector_norm(tensor.shaped(as_values(gradient)).float())

    def has(self, tensor: UnitTensor) -> bool:
        return tensor in self._norms

    def discard(self, tensor: UnitTensor) -> None:
        self._norms.pop(tensor, None)

    def finish(self) -> GradientNorm:
        ordered = sorted(self._norms.items(), key=lambda item: item[0].index)
        self._norms.clear()
        if not ordered:
            return GradientNorm(0.0, ())
        norms = torch.stack([norm.cpu() for _, norm in ordered])
        bad = tuple(tensor.name for (tensor, _), norm in zip(ordered, norms, strict=True) if not norm.isfinite())
        return GradientNorm(float(torch.linalg.vector_norm(norms)), bad)
