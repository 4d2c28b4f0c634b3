"""The reducer as a communication hook of torch's DistributedDataParallel.

No `from __future__ import annotations` here: DDP compares the hook's annotations with its own types.
"""

import torch
import torch.distributed as dist

from lazytrain_plugin.comm.reducer import QuantizedReducer

_default: list = []
"""The process group of all ranks and its reducer, once there is one."""


def ddp_comm_hook(state: QuantizedReducer | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages one of DDP's buckets with 8-bit codes between nodes, beside the rest of backward.

        model.register_comm_hook(None, lazytrain_plugin.ddp_comm_hook)

    Args:
        state: a `QuantizedReducer` over the group of the DDP model; None: one over all ranks, made at the first bucket
            and shared by all models of the process.
        bucket: given by DDP, the gradients of several parameters, of any dtype.

    Returns:
        A future of the averaged bucket. A rank that is gone raises CommunicationError's text out of backward.
    """
    reducer = state if state is not None else _default_reducer()
    flat = bucket.buffer()
    devices = [flat.device] if flat.device.type == "cuda" else []
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    reducer.reduce_async(flat, then=lambda: future.set_result(flat), on_error=future.set_exception)
    return future


def _default_reducer() -> QuantizedReducer:
    world = dist.group.WORLD
    if not _default or _default[0] is not world:  # a new one after destroy_process_group and init_process_group
        _default[:] = [world, QuantizedReducer()]
    return _default[1]
