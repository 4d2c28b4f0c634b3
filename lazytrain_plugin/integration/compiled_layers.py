"""What torch.compile may trace: the streamed layers' own forward, never the way of their weights."""

from __future__ import annotations

from torch import nn

from lazytrain_plugin.errors import ConfigError

COMPILE_REFUSAL = (
    "torch.compile of {} is not supported under LazyTrain: the weights of its layers move while they run. Don't call "
    "compile on it; set torch_compile in the training arguments, or call engine.compile(), which compile layer by layer"
)
OTHER_COMPILERS_REFUSAL = (
    "engine.compile compiles layer by layer under LazyTrain, without compiled autograd and without schedules of "
    "DeepCompile; leave compiled_autograd_enabled and schedule out"
)


def modules_around(model: nn.Module, unit_names: list[str]) -> list[tuple[str, nn.Module]]:
    """The units and the modules that hold them, with their names."""
    names = {""}
    for unit_name in unit_names:
        parts = unit_name.split(".")
        names.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return [(name, module) for name, module in model.named_modules() if name in names]


def refuse_compiled(named: list[tuple[str, nn.Module]]) -> None:
    """Raises ConfigError if torch.compile would trace a streamed layer: it fails there with an error of its own."""
    for name, module in named:
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            raise ConfigError(COMPILE_REFUSAL.format(name or "the model"))
