"""AdamW updates in place, with fp32 or 8-bit states: the C++ library on the CPU, Triton on CUDA, the same bits on both.

One update against torch.optim.AdamW (for-loop form, fp32) from the same state: exp_avg within 2 ulp of the larger of
exp_avg and gradient, exp_avg_sq within 2 ulp, the weight within 6 ulp of the larger of weight and step, the step being
taken with the larger of exp_avg and gradient (tests/kernels/test_adamw.py; torch's own fused form is as far from its
for-loop form). Infinities, NaN and denormals go through as IEEE has them.
"""

from __future__ import annotations

import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels.batch import Batch
from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.scalars import AdamWStep, scalars_of
from lazytrain_plugin.kernels.state8 import BLOCK, Moment8, check_flat, noise_seeds, num_blocks

__all__ = ["AdamWStep", "Batch", "Moment8", "accumulate", "adamw_8bit", "adamw_fp32"]


def adamw_fp32(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: AdamWStep,
    *,
    batch: Batch | None = None,
) -> None:
    """One update with fp32 moments; `weight`, `remainder` and both moments change in place.

    All [n], flat and contiguous on one device: `weight` bf16 with `remainder` int16 (split.py), or fp32 with None;
    `gradient` bf16, fp32 or in codes; moments fp32. Raises KernelError otherwise, or where the device has no kernel.
    With a `batch`, the tensors are updated when that is run.
    """
    numel, device = weight.numel(), weight.device
    _check_weight(weight, remainder, gradient)
    check_flat("exp_avg", exp_avg, torch.float32, numel, device)
    check_flat("exp_avg_sq", exp_avg_sq, torch.float32, numel, device)
    scalars = scalars_of(step)
    _implementation(device).adamw_fp32(weight, remainder, gradient, exp_avg, exp_avg_sq, scalars, batch)


def adamw_8bit(
    weight: torch.Tensor,
    remainder: torch.Tensor | None,
    gradient: torch.Tensor | CodedGradient,
    exp_avg: Moment8,
    exp_avg_sq: Moment8,
    step: AdamWStep,
    *,
    noise_key: int,
    first_index: int = 0,
    batch: Batch | None = None,
) -> None:
    """One update with 8-bit moments (state8.py), rounded stochastically; arguments as in `adamw_fp32`.

    The rounding noise of an element depends on `noise_key` (the parameter), its index and `step.step` only.
    `first_index` is the index of element 0 in its parameter, a multiple of 256, when `weight` is a slice of one.
    """
    check_moment_of(weight, exp_avg, "exp_avg")
    check_moment_of(weight, exp_avg_sq, "exp_avg_sq")
    _check_weight(weight, remainder, gradient)
    if first_index % BLOCK or first_index < 0:
        raise KernelError(
            f"first_index is {first_index}, but a slice of 8-bit states starts at a multiple of {BLOCK}, the size of a "
            f"quantization block. Cut the parameter at multiples of {BLOCK} elements."
        )
    seeds = noise_seeds(noise_key, step.step)
    scalars = scalars_of(step)
    _implementation(weight.device).adamw_8bit(
        weight, remainder, gradient, exp_avg, exp_avg_sq, scalars, seeds, first_index, batch
    )


def accumulate(accumulator_fp32: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
    """accumulator = gradient if `first`, else accumulator + gradient, in fp32. Both [n]; `gradient` bf16 or fp32."""
    numel, device = accumulator_fp32.numel(), accumulator_fp32.device
    check_flat("accumulator", accumulator_fp32, torch.float32, numel, device)
    _check_gradient(gradient, numel, device)
    if device.type == "cpu":
        from lazytrain_plugin.kernels import native

        native.accumulate(accumulator_fp32, gradient, first)
    else:
        from lazytrain_plugin.kernels import reference  # one torch operation: nothing to gain from a kernel of ours

        reference.accumulate(accumulator_fp32, gradient, first)


def check_moment_of(weight: torch.Tensor, moment: Moment8, name: str) -> None:
    check_flat(f"{name}.codes", moment.codes, torch.uint8, weight.numel(), weight.device)
    check_flat(f"{name}.scales", moment.scales, torch.float32, num_blocks(weight.numel()), weight.device)


def _check_weight(weight: torch.Tensor, remainder: torch.Tensor | None, gradient: torch.Tensor | CodedGradient) -> None:
    numel, device = weight.numel(), weight.device
    check_flat("weight", weight, torch.float32 if remainder is None else torch.bfloat16, numel, device)
    if remainder is not None:
        check_flat("remainder", remainder, torch.int16, numel, device)
    _check_gradient(gradient, numel, device)


def _check_gradient(gradient: torch.Tensor | CodedGradient, numel: int, device: torch.device) -> None:
    if isinstance(gradient, CodedGradient):
        return gradient.check("gradient", numel, device)
    dtype = torch.float32 if gradient.dtype == torch.float32 else torch.bfloat16
    check_flat("gradient", gradient, dtype, numel, device)


def _implementation(device: torch.device):
    if device.type == "cpu":
        from lazytrain_plugin.kernels import native

        return native
    if device.type == "cuda":
        from lazytrain_plugin.kernels.triton import require_triton

        require_triton()
        from lazytrain_plugin.kernels.triton import adamw as triton_adamw

        return triton_adamw
    raise KernelError(
        f"There is no AdamW kernel for {device.type} tensors. Keep optimizer states on the CPU or a CUDA GPU."
    )
