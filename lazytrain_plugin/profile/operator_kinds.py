"""Which operators the strategies between RECOMPUTE and KEEP save; the profile counts and the runtime saves by it.

Attention means a fused operator that returns its output and what its backward needs of the softmax (its logsumexp).
Attention that a layer writes out as products and a softmax is matrix products to us: ATTENTION saves nothing of it.
"""

from __future__ import annotations

import functools
import re
from enum import Enum

from lazytrain_plugin.vocab import Activations


class OperatorKind(Enum):
    """What an operator is to a strategy."""

    ATTENTION = "attention"
    MATMUL = "matmul"
    OTHER = "other"


_MATMULS = frozenset(
    f"aten::{name}"
    for name in (
        "mm addmm bmm baddbmm mv addmv linear matmul _addmm_activation convolution _convolution "
        "_grouped_mm _scaled_mm _scaled_grouped_mm"
    ).split()
)
_ATTENTION = re.compile(r"attention|attn|fmha")
_GROUPED_MATMUL = re.compile(r"grouped_mm|grouped_gemm|\bgmm\b")
_NOT_FORWARD = re.compile(r"backward|bwd|_math|seed|mask")


@functools.cache
def operator_kind(operator: object) -> OperatorKind:
    """The kind of a dispatched operator (an `OpOverload` or a higher-order operator).

    Kernels of extensions (flash-attn, xformers, kernels from the Hub) are known by name. One that writes into an
    argument can't be replaced by its saved output, so it runs again.
    """
    schema = getattr(operator, "_schema", None)
    if schema is not None and schema.is_mutable:
        return OperatorKind.OTHER
    name = schema.name if schema is not None else str(operator)
    if name in _MATMULS or (_GROUPED_MATMUL.search(name) and not _NOT_FORWARD.search(name)):
        return OperatorKind.MATMUL
    returns = None if schema is None else len(schema.returns)
    named_as_kernel = name.startswith("aten::_") or not name.startswith("aten::")
    if named_as_kernel and returns != 0 and _ATTENTION.search(name) and not _NOT_FORWARD.search(name):
        return OperatorKind.ATTENTION
    # flash-attn's libraries call it fwd and varlen_fwd.
    if re.match(r"_?(vllm_)?flash_?attn\w*::\w*fwd", name):
        return OperatorKind.ATTENTION
    return OperatorKind.OTHER


def saves(activations: Activations, kind: OperatorKind) -> bool:
    """Whether a strategy saves the outputs of such operators; MLP of those after attention (`forgets_earlier`)."""
    if activations == Activations.MATMULS:
        return kind in (OperatorKind.ATTENTION, OperatorKind.MATMUL)
    if activations == Activations.MLP:
        return kind == OperatorKind.MATMUL
    return activations == Activations.ATTENTION and kind == OperatorKind.ATTENTION


def forgets_earlier(activations: Activations, kind: OperatorKind) -> bool:
    """Whether a strategy saves nothing of what ran before such an operator: attention, for which it runs again."""
    return activations == Activations.MLP and kind == OperatorKind.ATTENTION
