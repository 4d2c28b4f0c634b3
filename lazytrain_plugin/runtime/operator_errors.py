"""How wrong gradients get when what one class of operators saves waits for backward in fewer bits, on a real layer.

Every operator's own backward is computed twice from the same gradient of its output, in fp32: from what it saves, and
from the same after a round trip through a format. The error of a class is |g' - g| / |g| (L2) over all gradients of its
operators:

    norm      gradient of a norm's input, its statistics computed again from the coded input
    gemm      gradient of a linear layer's weight, from its coded input
    swiglu    gradients of gate and up of a gated MLP, from both coded
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lazytrain_plugin.kernels import blockwise

MOST_ELEMENTS = 2**26
"""Of a linear layer's weight gradient: fp32 copies of larger ones would be felt."""


class OperatorErrors:
    """Sums of squares of gradients and of their errors, per class and format.

    Args:
        most_rows: of what an operator reads (tokens, or heads of them) so many are looked at; None: all.
    """

    def __init__(self, formats: Sequence[str], *, most_rows: int | None = None) -> None:
        self.formats, self._most_rows = tuple(formats), most_rows
        self._exact: dict[str, Tensor | float] = defaultdict(float)
        self._off: dict[tuple[str, str], Tensor | float] = defaultdict(float)

    def rows(self, tensor: Tensor) -> Tensor:
        """The first rows [rows, columns] of an operand, or of its gradient."""
        return tensor.flatten(0, -2)[: self._most_rows]

    def measure(
        self, name: str, gradients: Callable[..., Iterable[Tensor]], saved: tuple[Tensor, ...], coded: tuple[int, ...]
    ) -> None:
        """`gradients`: of fp32 copies of what is `saved`; the positions `coded` go through the formats."""
        exact = tuple(gradients(*(tensor.float() for tensor in saved)))
        self._exact[name] += sum(g.square().sum() for g in exact)
        for form in self.formats:
            rounded = [round_trip(t, form) if i in coded else t for i, t in enumerate(saved)]
            found = gradients(*(tensor.float() for tensor in rounded))
            self._off[name, form] += sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))

    def table(self) -> dict[str, dict[str, float]]:
        """Class -> format -> error, for what was measured and had a gradient. Waits for the device."""
        return {
            name: {form: float(self._off[name, form] / exact) ** 0.5 for form in self.formats}
            for name, exact in self._exact.items()
            if 0 < float(exact) < float("inf")
        }


def round_trip(tensor: Tensor, form: str) -> Tensor:
    return blockwise.dequantize(blockwise.quantize(tensor.contiguous(), form))


def gradients_of(function: Callable[..., Tensor], output_gradient: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """A function from saved tensors to their gradients."""

    def gradients(*saved: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in saved]
            return torch.autograd.grad(function(*leaves), leaves, output_gradient.float())

    return gradients


def watch_operators(
    module: nn.Module, errors: OperatorErrors, *, skipped: Tensor | None = None
) -> list[torch.utils.hooks.RemovableHandle]:
    """From now on every backward through `module` measures, until the handles are removed.

    Norms, products and gated MLPs are found by what they are. `skipped`: a weight whose products don't count.
    """
    handles = []
    for part in module.modules():
        if type(part).__name__.endswith(("RMSNorm", "LayerNorm")):
            handles.append(part.register_forward_hook(_watch_norm(errors)))
        elif isinstance(part, nn.Linear) and part.weight is not skipped and part.weight.numel() <= MOST_ELEMENTS:
            handles.append(part.register_forward_hook(_watch_linear(errors)))
        elif all(hasattr(part, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            handles += _watch_gated(part, errors)
    return handles


def _when_differentiated(output: Tensor, measure: Callable[[Tensor], None]) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: measure(gradient.detach()))


def _watch_norm(errors: OperatorErrors):
    def hook(norm: nn.Module, inputs, output) -> None:
        x = errors.rows(inputs[0].detach())
        weights = {name: weight.detach().float() for name, weight in norm.named_parameters()}
        function = lambda x: torch.func.functional_call(_Plain(norm), _renamed(weights), (x,))  # noqa: E731
        measure = lambda g: errors.measure("norm", gradients_of(function, errors.rows(g)), (x,), (0,))  # noqa: E731
        _when_differentiated(output, measure)

    return hook


class _Plain(nn.Module):
    """A module's own computation, without the hooks on it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"inner.{name}": weight for name, weight in weights.items()}


def _watch_linear(errors: OperatorErrors):
    def hook(linear: nn.Module, inputs, output) -> None:
        x = errors.rows(inputs[0].detach())

        def measure(gradient: Tensor) -> None:
            flat = errors.rows(gradient).float()
            errors.measure("gemm", lambda x: (flat.T @ x,), (x,), (0,))

        _when_differentiated(output, measure)

    return hook


def _watch_gated(mlp: nn.Module, errors: OperatorErrors) -> list[torch.utils.hooks.RemovableHandle]:
    kept: dict[str, Tensor] = {}

    def before_down(down: nn.Module, inputs) -> None:
        gate, up = errors.rows(kept.pop("gate")), errors.rows(kept.pop("up"))
        function = lambda gate, up: mlp.act_fn(gate) * up  # noqa: E731

        def measure(gradient: Tensor) -> None:
            errors.measure("swiglu", gradients_of(function, errors.rows(gradient)), (gate, up), (0, 1))

        _when_differentiated(inputs[0], measure)

    return [
        mlp.gate_proj.register_forward_hook(lambda m, i, output: kept.update(gate=output.detach())),
        mlp.up_proj.register_forward_hook(lambda m, i, output: kept.update(up=output.detach())),
        mlp.down_proj.register_forward_pre_hook(before_down),
    ]
