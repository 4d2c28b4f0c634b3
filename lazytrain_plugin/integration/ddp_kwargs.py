"""The quantized reducer for people who train with Accelerate's DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accelerate import DistributedDataParallelKwargs

from lazytrain_plugin.comm.ddp import ddp_comm_hook
from lazytrain_plugin.comm.reducer import QuantizedReducer
from lazytrain_plugin.integration.logs import setup_logging


@dataclass
class LazyTrainDDPKwargs(DistributedDataParallelKwargs):
    """Accelerate's DDP settings, with LazyTrain's gradient reduction as the communication hook.

        accelerator = Accelerator(kwargs_handlers=[LazyTrainDDPKwargs(find_unused_parameters=True)])

    `reducer_options` are arguments of `QuantizedReducer`; `comm_hook` and `comm_wrapper` are not used. After `prepare`,
    `reducer` is the reducer of the last model, with its `stats()`; None where training is not distributed.
    """

    reducer_options: dict[str, Any] = field(default_factory=dict)
    reducer: QuantizedReducer | None = field(default=None, init=False, repr=False)

    @property
    def __class__(self) -> type:
        """Accelerate looks a handler up by its exact class (accelerator.py), so that no subclass would be found."""
        return DistributedDataParallelKwargs

    def to_dict(self, ignore_keys: tuple[str, ...] = ()) -> dict[str, Any]:
        """What Accelerate hands to DistributedDataParallel."""
        ours = ("reducer_options", "reducer", "comm_hook", "comm_wrapper", "comm_state_option")
        return super().to_dict(ignore_keys=(*ours, *ignore_keys))

    def register_comm_hook(self, model: Any) -> None:
        """Called by Accelerate with the DDP model, on every rank."""
        setup_logging()
        self.reducer = QuantizedReducer(model.process_group, **self.reducer_options)
        model.register_comm_hook(self.reducer, ddp_comm_hook)
