"""What DeepSpeed and Accelerate see as the optimizer; the work is the executor's."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import nn

from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.train_state import ExecutorState


class LazyTrainOptimizer(ZeROOptimizer):
    """Fronts the client's optimizer: its `param_groups` stay the single source of hyper-parameters.

    Args:
        client: the torch optimizer that the user (or DeepSpeed, from its JSON) made; None in evaluation only.
        max_norm: limit of the global gradient norm; 0: no clipping.
    """

    dynamic_loss_scale = False
    custom_loss_scaler = False
    external_loss_scale = None
    torch_autocast_gradscaler = None
    loss_scale = cur_scale = 1.0

    def __init__(
        self, client: torch.optim.Optimizer | None, state: ExecutorState, process_group: Any, max_norm: float
    ) -> None:
        super().__init__()
        self.optimizer = client
        self._lazytrain = state
        self._max_norm = max_norm
        self.dp_process_group = process_group
        self.overflow = False
        self._global_grad_norm: float | None = None

    @property
    def _executor(self) -> Executor:
        return self._lazytrain.executor

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults if self.optimizer is not None else {}

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Optimizer states by parameter, decoded into new tensors: for looking, not for changing."""
        self._lazytrain.flush()
        records = [record for record in self._lazytrain.records if record.group is not None]
        states = {record.parameter: self._lazytrain.read_state(record) for record in records}
        for record in records:
            self._lazytrain.leave_together(record, "reading of optimizer states")
        return states

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        return [list(group["params"]) for group in self.param_groups]

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        super().set_gradient_accumulation_boundary(is_boundary)
        self._executor.set_last_micro_batch(bool(is_boundary))

    def step(self, closure: Any = None) -> None:
        """Fixes the step; the updates run while the next forward does. `overflow` tells if it was skipped."""
        if closure is not None:
            raise ValueError("step(closure) is not supported: gradients are gone from the GPU when step() is called")
        norm, applied = self._executor.step(self._max_norm)
        self._global_grad_norm = norm.total
        self.overflow = not applied
        # LR schedulers warn when the optimizer that they watch has never stepped.
        self.optimizer._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets this window's gradients. They have left their parameters, but for those that nobody trains."""
        self._lazytrain.discard_gradients()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """In torch's format, states decoded to fp32. Engine checkpoints don't use it: it holds all states at once."""
        index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        return {
            "state": {index[p]: state for p, state in self.state.items() if state},
            "param_groups": [{**group, "params": [index[p] for p in group["params"]]} for group in self.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("optimizer states are loaded with engine.load_checkpoint (or accelerator.load_state)")

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Gradients are reduced while backward runs, and what is left in `backward_epilogue`."""

    def backward_prologue(self) -> None:
        pass

    def backward_epilogue(self, **kwargs: Any) -> None:
        self._executor.end_backward()

    def refresh_fp32_params(self) -> None:
        """Masters take the value of weights that were loaded into the module, of any rank; all of them call it."""
        self._lazytrain.flush()
        self._executor.share_changes()
        for record in self._lazytrain.records:
            if record.group is not None:
                self._lazytrain.write_master(record, record.parameter.detach().float().cpu().reshape(-1))
        self._lazytrain.meet("taking over of loaded weights")

    def _restore_from_bit16_weights(self) -> None:
        self.refresh_fp32_params()

    def empty_partition_cache(self) -> None:
        pass

    def destroy(self) -> None:
        self._executor.close()
