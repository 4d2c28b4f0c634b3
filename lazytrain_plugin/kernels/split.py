"""fp32 master weights stored as a bf16 weight and an int16 remainder: the model's own weight is half of its master.

With `bits` the fp32 bit pattern:

    weight    = (bits + 0x8000) >> 16          round to nearest, half away from zero
    remainder = int16(bits & 0xFFFF)
    bits      = (weight - (remainder < 0)) << 16 | (remainder & 0xFFFF)

This is exact for every value but NaN: NaN is first set to 0x7FC00000 (0x7FFFFFFF, CUDA's NaN, would become -0.0). In
decoding, a negative remainder at weight = +-0 counts as 0: no encoding gives it, it is what a weight that was zeroed
from outside has left. A weight replaced from outside therefore decodes to within half a bf16 ulp of itself.
"""

from __future__ import annotations

import torch

from lazytrain_plugin.kernels.state8 import check_flat


def split_master(master_fp32: torch.Tensor, weight_bf16_out: torch.Tensor, remainder_int16_out: torch.Tensor) -> None:
    """Splits `master_fp32` [n] into `weight_bf16_out` [n] and `remainder_int16_out` [n].

    Raises KernelError when sizes, dtypes or devices don't fit.
    """
    _check(master_fp32, weight_bf16_out, remainder_int16_out)
    _implementation(master_fp32).split(master_fp32, weight_bf16_out, remainder_int16_out)


def join_master(weight_bf16: torch.Tensor, remainder_int16: torch.Tensor, master_fp32_out: torch.Tensor) -> None:
    """The inverse of `split_master`, into `master_fp32_out` [n]."""
    _check(master_fp32_out, weight_bf16, remainder_int16)
    _implementation(master_fp32_out).join(weight_bf16, remainder_int16, master_fp32_out)


def _check(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    numel, device = master.numel(), master.device
    check_flat("master", master, torch.float32, numel, device)
    check_flat("weight", weight, torch.bfloat16, numel, device)
    check_flat("remainder", remainder, torch.int16, numel, device)


def _implementation(tensor: torch.Tensor):
    if tensor.device.type == "cpu":
        from lazytrain_plugin.kernels import native

        return native
    from lazytrain_plugin.kernels import reference  # integer operations: the same bits on every device

    return reference
