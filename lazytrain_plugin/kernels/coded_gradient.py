"""Gradients stored in codes: 8 bits as they leave the device, 16 bits for their sum over micro-batches.

The 8-bit codes are those of gradient_codes.py, in blocks of 64 with a bf16 step; here codes and steps are arrays of
their own, so that the parts of a unit lie side by side. Bytes an element: 1.031 as it arrives (bf16: 2), 2.031 for the
sum (fp32: 4). A block with NaN or an infinity decodes to NaN throughout: an overflow survives.

Why the sum has 16 bits: each addition rounds the sum again, to nearest. In 8 bits the error of a sum of 64 is 5 times
that of its parts, and what is below 1/250 of a block's largest magnitude never gets into it; in 10 bits it is still
twice as large where micro-batches agree. In 16 bits nothing of that is left for thousands of micro-batches, at half the
bytes of fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels.gradient_codes import BLOCK, num_blocks
from lazytrain_plugin.kernels.state8 import check_flat

ARRIVING_BITS, SUM_BITS = 8, 16
CODE_DTYPES = {ARRIVING_BITS: torch.int8, SUM_BITS: torch.int16}


@dataclass(frozen=True, slots=True)
class CodedGradient:
    """`n` values: `codes` int8 or int16 [n], `steps` int16 (the bits of bf16) [ceil(n / 64)]."""

    codes: torch.Tensor
    steps: torch.Tensor

    @classmethod
    def empty(cls, numel: int, bits: int, device: torch.device | str = "cpu") -> CodedGradient:
        """Memory for `numel` elements in 8 or 16 bits, with undefined contents."""
        return cls(
            torch.empty(numel, dtype=CODE_DTYPES[bits], device=device),
            torch.empty(num_blocks(numel), dtype=torch.int16, device=device),
        )

    @property
    def bits(self) -> int:
        return 8 * self.codes.itemsize

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def numel(self) -> int:
        return self.codes.numel()

    def part(self, start: int, numel: int) -> CodedGradient:
        """Elements from `start`, a multiple of 64, on."""
        first = start // BLOCK
        return CodedGradient(self.codes[start : start + numel], self.steps[first : first + num_blocks(numel)])

    def copy_(self, other: CodedGradient) -> None:
        """Takes over codes of as many bits, from any device."""
        self.codes.copy_(other.codes)
        self.steps.copy_(other.steps)

    def check(self, name: str, numel: int, device: torch.device) -> None:
        """Raises KernelError unless this holds `numel` elements on `device`."""
        check_flat(f"{name}.codes", self.codes, CODE_DTYPES[8 if self.bits == 8 else 16], numel, device)
        check_flat(f"{name}.steps", self.steps, torch.int16, num_blocks(numel), device)


def encode_gradient(values: torch.Tensor, coded_out: CodedGradient) -> None:
    """Encodes `values` [n], fp32 or bf16, into `coded_out`, in the bits that it has.

    Raises KernelError when sizes, dtypes or devices don't fit, or where the device has no kernel.
    """
    _check_values("values", values, coded_out)
    if values.numel():
        _implementation(values.device).encode_gradient(values, coded_out)


def decode_gradient(coded: CodedGradient, values_out: torch.Tensor) -> None:
    """Decodes into `values_out` fp32 [n], exactly. Errors as in `encode_gradient`."""
    if values_out.dtype != torch.float32:
        raise KernelError(f"values_out is {values_out.dtype}; codes decode to fp32. Decode first, then convert.")
    _check_values("values_out", values_out, coded)
    if values_out.numel():
        _implementation(values_out.device).decode_gradient(coded, values_out)


def add_codes(total: CodedGradient, arrived: CodedGradient, *, first: bool) -> None:
    """total = arrived if `first`, else total + arrived: decoded, added in fp32, and encoded again.

    `total` has 16 bits, `arrived` 8, both [n] on one device. Raises KernelError otherwise.
    """
    if total.bits != SUM_BITS or arrived.bits != ARRIVING_BITS:
        raise KernelError(
            f"A sum in {total.bits} bits of gradients in {arrived.bits}; they are {SUM_BITS} and {ARRIVING_BITS}."
        )
    arrived.check("arrived", total.numel(), total.device)
    total.check("total", total.numel(), total.device)
    if total.numel():
        _implementation(total.device).add_codes(total, arrived, first)


def _check_values(name: str, values: torch.Tensor, coded: CodedGradient) -> None:
    dtype = torch.float32 if values.dtype == torch.float32 else torch.bfloat16
    check_flat(name, values, dtype, values.numel(), values.device)
    coded.check("coded", values.numel(), values.device)


def _implementation(device: torch.device):
    if device.type == "cpu":
        from lazytrain_plugin.kernels import native

        return native
    if device.type == "cuda":
        from lazytrain_plugin.kernels.triton import require_triton

        require_triton()
        from lazytrain_plugin.kernels.triton import coded_gradient as triton_coded_gradient

        return triton_coded_gradient
    raise KernelError(f"There is no gradient code kernel for {device.type} tensors. Use the CPU or a CUDA GPU.")
