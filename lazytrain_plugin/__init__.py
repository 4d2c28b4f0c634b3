"""LazyTrain: a DeepSpeed offload engine that plans every tensor's place.

Importing this package imports nothing else (the `torch.backends` entry point imports it in every process that imports
torch), so public names are resolved on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazytrain_plugin.comm.ddp import ddp_comm_hook
    from lazytrain_plugin.comm.reducer import QuantizedReducer
    from lazytrain_plugin.config.schema import (
        ActivationsConfig,
        GradientCommConfig,
        GradientsConfig,
        LazyTrainConfig,
        OptimizerConfig,
        PlanConfig,
        TraceConfig,
    )
    from lazytrain_plugin.errors import LazyTrainError
    from lazytrain_plugin.integration.accelerate_plugin import LazyTrainPlugin
    from lazytrain_plugin.integration.ddp_kwargs import LazyTrainDDPKwargs
    from lazytrain_plugin.plan.result import PlacementPlan

__version__ = "0.1.0"

_HOME_OF = {
    "ActivationsConfig": "lazytrain_plugin.config.schema",
    "GradientCommConfig": "lazytrain_plugin.config.schema",
    "GradientsConfig": "lazytrain_plugin.config.schema",
    "LazyTrainConfig": "lazytrain_plugin.config.schema",
    "OptimizerConfig": "lazytrain_plugin.config.schema",
    "PlanConfig": "lazytrain_plugin.config.schema",
    "QuantizedReducer": "lazytrain_plugin.comm.reducer",
    "ddp_comm_hook": "lazytrain_plugin.comm.ddp",
    "LazyTrainDDPKwargs": "lazytrain_plugin.integration.ddp_kwargs",
    "LazyTrainError": "lazytrain_plugin.errors",
    "LazyTrainPlugin": "lazytrain_plugin.integration.accelerate_plugin",
    "PlacementPlan": "lazytrain_plugin.plan.result",
    "TraceConfig": "lazytrain_plugin.config.schema",
}

__all__ = [
    "ActivationsConfig",
    "GradientCommConfig",
    "GradientsConfig",
    "LazyTrainConfig",
    "LazyTrainDDPKwargs",
    "LazyTrainError",
    "LazyTrainPlugin",
    "OptimizerConfig",
    "PlacementPlan",
    "PlanConfig",
    "QuantizedReducer",
    "TraceConfig",
    "ddp_comm_hook",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
