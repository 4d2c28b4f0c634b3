"""RMSNorm and SwiGLU around block-wise codes: the forward that computes also encodes, and backward reads the codes.

AGoQ keeps the quantized inputs of an element-wise group and computes what is between again from them. Encoding in a
pass of its own reads a layer's largest tensors once more, and decoding writes them and reads them back; in the kernel
that works on them anyway it costs the codes' own bytes. Bytes per element of gate and up, bf16 and 4 bits:

    forward   swiglu reads 4, writes 2; encoding reads 4, writes 1           11    together   7
    backward  decoding reads 1, writes 4; swiglu again reads 4, writes 2     11    together   3
              its backward reads 2 + 4, writes 4                             10    with codes 7

CUDA tensors go to Triton, others to plain torch, which is the oracle; the codes and values are those of blockwise.py
and elementwise.py, to the bit.
"""

from __future__ import annotations

import torch

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.blockwise import BLOCK, QuantizedTensor


def can_quantize_rows(x: torch.Tensor) -> bool:
    """Whether `rms_norm_quantized` takes a tensor [..., columns]: its rows are whole blocks."""
    return x.shape[-1] % BLOCK == 0 and x.shape[-1] > 0


def swiglu_quantized(
    gate: torch.Tensor, up: torch.Tensor, gate_out: QuantizedTensor, up_out: QuantizedTensor
) -> torch.Tensor:
    """round(silu(gate)) * up of contiguous tensors; their codes go to `gate_out` and `up_out`, in one format."""
    if gate.is_cuda:
        from lazytrain_plugin.kernels.triton import coded_elementwise as kernels

        return kernels.swiglu_quantized(gate, up, gate_out, up_out)
    for values, out in ((gate, gate_out), (up, up_out)):
        blockwise.quantize_reference(values.reshape(-1), out)
    return torch.nn.functional.silu(gate) * up


def swiglu_decoded(gate: QuantizedTensor, up: QuantizedTensor, shape: torch.Size) -> torch.Tensor:
    """The same from the codes of gate and up, in the dtype that was encoded."""
    device = gate.codes.device
    if device.type == "cuda":
        from lazytrain_plugin.kernels.triton import coded_elementwise as kernels

        y = torch.empty(shape, dtype=gate.dtype, device=device)
        kernels.swiglu_decoded(gate, up, y)
        return y
    return (torch.nn.functional.silu(blockwise.dequantize(gate)) * blockwise.dequantize(up)).view(shape)


def swiglu_backward_decoded(
    dy: torch.Tensor, gate: QuantizedTensor, up: QuantizedTensor, dgate: torch.Tensor, dup: torch.Tensor
) -> None:
    """Writes the gradients of gate and up; `dy`, `dgate`, `dup` contiguous, of the dtype that was encoded."""
    if dy.is_cuda:
        from lazytrain_plugin.kernels.triton import coded_elementwise as kernels

        kernels.swiglu_backward_decoded(dy, gate, up, dgate, dup)
        return
    values = (blockwise.dequantize(part).view(dy.shape) for part in (gate, up))
    for out, gradient in zip((dgate, dup), swiglu_gradients(dy, *values), strict=True):
        out.copy_(gradient)


def swiglu_gradients(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and up, plain torch, rounded as the eager formula rounds."""
    gate32 = gate.float()
    sigmoid = torch.sigmoid(gate32)
    dgate = dy.float() * up.float() * sigmoid * (1.0 + gate32 * (1.0 - sigmoid))
    return dgate.to(gate.dtype), (dy.float() * (gate32 * sigmoid).to(gate.dtype).float()).to(up.dtype)
