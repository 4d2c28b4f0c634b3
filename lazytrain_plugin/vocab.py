"""The words that every part shares."""

from enum import StrEnum


class Tier(StrEnum):
    """Where a tensor rests."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"


class Updater(StrEnum):
    """Who computes the optimizer update of a unit."""

    CPU = "cpu"
    GPU = "gpu"


class Activations(StrEnum):
    """What a unit keeps between forward and backward."""

    RECOMPUTE = "recompute"
    """Only its input; the forward runs again in backward."""
    ATTENTION = "attention"
    """Input and attention outputs; the rest runs again."""
    MLP = "mlp"
    """Outputs of the matrix products that come after attention; attention and what it reads run again."""
    MATMULS = "matmuls"
    """Outputs of matrix products and of attention; only element-wise work runs again."""
    KEEP = "keep"
    """Every saved tensor except weights."""


MAY_BE_CODED = frozenset((Activations.MLP, Activations.MATMULS))
"""What plans save in fewer bits."""


class Fidelity(StrEnum):
    """How lossy the plan may be."""

    EXACT = "exact"
    BALANCED = "balanced"
    COMPACT = "compact"


class Shard(StrEnum):
    """Over which ranks optimizer states are divided."""

    NODE = "node"
    """Over those of a node; each node has all of them."""
    JOB = "job"
    """Over all ranks; nodes send each other updated weights."""


LEAST_ACTIVATION_BITS = {Fidelity.EXACT: 16, Fidelity.BALANCED: 16, Fidelity.COMPACT: 4}
"""The fewest bits of a saved activation that each allows; 16: as it is."""
