"""Sums of squares of gradients with the same bits on every device, for clipping by the global norm.

One order of summation, in fp64: element i is row i // 1024, lane i % 1024; row r belongs to part r % 256. A part adds
its rows one after the other, lane by lane; then the parts are added one after the other; `combine_lanes` halves the
lanes.
The square of an fp32 value is exact in fp64, so contraction to FMA makes no difference here.
"""

from __future__ import annotations

import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels.batch import Batch
from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.reference import LANES, PARTS
from lazytrain_plugin.kernels.state8 import check_flat

__all__ = ["LANES", "PARTS", "combine_lanes", "read_squares", "sum_squares_lanes"]


def sum_squares_lanes(
    gradient: torch.Tensor | CodedGradient, lanes_fp64_out: torch.Tensor, *, batch: Batch | None = None
) -> None:
    """Writes the sums of squares of `gradient` [n] per lane to `lanes_fp64_out` [LANES], same device.

    `gradient`: bf16, fp32 or in codes. NaN and infinities propagate. Raises KernelError when shapes, dtypes or devices
    don't fit. With a `batch`, a GPU sums when that is run: few launches for many gradients.
    """
    device = gradient.device
    if isinstance(gradient, CodedGradient):
        gradient.check("gradient", gradient.numel(), device)
    else:
        dtype = torch.float32 if gradient.dtype == torch.float32 else torch.bfloat16
        check_flat("gradient", gradient, dtype, gradient.numel(), device)
    check_flat("lanes", lanes_fp64_out, torch.float64, LANES, device)
    if device.type == "cpu":
        from lazytrain_plugin.kernels import native

        native.sum_squares(gradient, lanes_fp64_out)
    else:
        _on_gpu(device).sum_squares(gradient, lanes_fp64_out, batch)


def combine_lanes(lanes_fp64: torch.Tensor) -> torch.Tensor:
    """Sums of squares fp64 [num_tensors] from lanes [num_tensors, LANES], on any device."""
    while lanes_fp64.shape[1] > 1:
        half = lanes_fp64.shape[1] // 2
        lanes_fp64 = lanes_fp64[:, :half] + lanes_fp64[:, half:]
    return lanes_fp64[:, 0]


def read_squares(lanes_fp64: torch.Tensor, host_fp64: torch.Tensor) -> list[float]:
    """As `combine_lanes`, read by the host: waits for what the current stream does up to here.

    `host_fp64` [num_tensors]: scratch in host memory, page-locked for a GPU, whose kernel writes to it. A copy would
    wait for the copy engine too, until the last gradients are home.
    """
    check_flat("host", host_fp64, torch.float64, lanes_fp64.shape[0], torch.device("cpu"))
    device = lanes_fp64.device
    if device.type == "cpu":
        return combine_lanes(lanes_fp64).tolist()
    _on_gpu(device).combine_lanes(lanes_fp64, host_fp64)
    torch.cuda.current_stream(device).synchronize()
    return host_fp64.tolist()


def _on_gpu(device: torch.device):
    if device.type != "cuda":
        raise KernelError(f"There is no norm kernel for {device.type} tensors. Use the CPU or a CUDA GPU.")
    from lazytrain_plugin.kernels.triton import require_triton

    require_triton()
    from lazytrain_plugin.kernels.triton import norm as triton_norm

    return triton_norm
