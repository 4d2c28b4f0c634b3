"""The scalars of one AdamW update, made once for every device: computed in double, rounded to fp32 once each."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels.state8 import round_fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWStep:
    """Hyper-parameters of one update of one tensor, as torch.optim.AdamW names them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """1 for the first update; the bias corrections come from it."""
    decoupled: bool = True
    """AdamW; False: Adam with the decay added to the gradient."""
    gradient_scale: float = 1.0
    """Clip factor; multiplies the gradient."""
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class AdamWScalars:
    """What the kernels compute with; every float is exact in fp32. With g the fp32 gradient:

    g = g * gradient_scale;  g = g + l2 * p if use_l2;  p = p * decay
    m = base + lerp_weight * (g - m), base is m, or g if lerp_from_gradient (beta1 <= 1/2: torch.lerp's second form)
    v = v * beta2 + (one_minus_beta2 * g) * g
    p = p + (minus_step_size * m) / (sqrt(v) * inv_sqrt_bias2 + eps)

    This is the order of torch.optim.AdamW's for-loop form, but for one multiplication by 1 / sqrt(bias correction 2)
    where torch divides by its square root (one division per element instead of two).
    """

    gradient_scale: float
    l2: float
    decay: float
    lerp_weight: float
    beta2: float
    one_minus_beta2: float
    inv_sqrt_bias2: float
    eps: float
    minus_step_size: float
    use_l2: bool
    lerp_from_gradient: bool


@functools.lru_cache(maxsize=64)
def scalars_of(step: AdamWStep) -> AdamWScalars:
    """Raises KernelError for a step below 1 or a beta outside [0, 1). Cached, as a group's tensors share a step."""
    if step.step < 1 or not (0 <= step.beta1 < 1 and 0 <= step.beta2 < 1):
        raise KernelError(
            f"AdamW needs step >= 1 and betas in [0, 1), but got step {step.step}, betas {step.beta1}, {step.beta2}. "
            "Count a tensor's first update as step 1 and check the optimizer's betas."
        )
    weight = 1 - step.beta1
    from_gradient = weight >= 0.5
    return AdamWScalars(
        gradient_scale=round_fp32(-step.gradient_scale if step.maximize else step.gradient_scale),
        l2=0.0 if step.decoupled else round_fp32(step.weight_decay),
        decay=round_fp32(1 - step.lr * step.weight_decay) if step.decoupled else 1.0,
        lerp_weight=round_fp32(-(1 - weight) if from_gradient else weight),
        beta2=round_fp32(step.beta2),
        one_minus_beta2=round_fp32(1 - step.beta2),
        inv_sqrt_bias2=round_fp32(1 / math.sqrt(1 - step.beta2**step.step)),
        eps=round_fp32(step.eps),
        minus_step_size=round_fp32(-step.lr / (1 - step.beta1**step.step)),
        use_l2=not step.decoupled and step.weight_decay != 0,
        lerp_from_gradient=from_gradient,
    )
