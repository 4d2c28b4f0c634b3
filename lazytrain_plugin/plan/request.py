"""`PlanRequest`: what is asked of the planner beside a model and a machine; one object for all who plan and check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.plan.cluster import Cluster
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import LEAST_ACTIVATION_BITS, Activations, Fidelity, Shard

WEIGHT_SLOTS = 3
GRADIENT_SLOTS = 2
STATE_SLOTS = 4
"""One comes, one leaves, and two wait for the kernel that runs (`unit_cost.KERNEL_WAIT_FRAC`): with two, the link stood
still as long as their updates did."""
ACTIVATION_SLOTS = 2
NVME_SLOTS = 3


WHOLE_STRATEGIES = frozenset({Activations.RECOMPUTE, Activations.KEEP})
"""What works without seeing single operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Families of decisions that the runtime carries out; the planner uses no other."""

    streamed_states: bool = False
    """The GPU updates units whose states rest in host memory."""
    offloaded_boundaries: bool = False
    """A unit's input may rest in host memory between forward and backward."""
    strategies: frozenset[Activations] = WHOLE_STRATEGIES
    """What units may save."""
    offloaded_saved: bool = False
    """What `strategies` save may rest in host memory."""
    nvme: bool = False
    """Weights and states may rest on NVMe; without it nothing may."""
    dropped_boundaries: bool = False
    """A unit's input may be dropped and computed again in backward, where nothing fits otherwise."""
    nvme_boundaries: bool = False
    """A unit's input may rest on NVMe between forward and backward."""
    nvme_saved: bool = False
    """What `strategies` save may rest on NVMe."""
    nvme_gradients: bool = False
    """Gradients, and their sums over micro-batches, may rest on NVMe where the states do."""

    @classmethod
    def everything(cls) -> Capabilities:
        """All families that a plan has words for."""
        return cls(
            streamed_states=True,
            offloaded_boundaries=True,
            strategies=frozenset(Activations),
            offloaded_saved=True,
            nvme=True,
            dropped_boundaries=True,
            nvme_boundaries=True,
            nvme_saved=True,
            nvme_gradients=True,
        )


RUNTIME_CAPABILITIES = replace(Capabilities.everything(), nvme=False)
"""What the executor of this version carries out wherever it runs; NVMe needs a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Sizes, budgets and freedoms of one plan.

    Raises:
        ConfigError: a budget that is not positive, or a size below 1.
    """

    max_tokens: int | None = None
    """Tokens of the largest micro-batch. None is for `check_plan` alone: the plan's own."""
    gpu_budget_bytes: int | None = None
    cpu_budget_bytes: int | None = None
    nvme_budget_bytes: int | None = None
    """Budgets; None: what the machine has free for this process."""
    nvme_write_bytes_per_day: float | None = None
    """Wear that the disk is allowed; None: no limit."""
    fidelity: Fidelity = Fidelity.EXACT
    state_bits: int | None = None
    """32 or 8; None: what `fidelity` says (8 unless exact)."""
    embedding_state_bits: int | None = None
    """Of the embedding (the head too where they are tied), whose rows are updated in bursts; None: 32."""
    gradient_bits: int | None = None
    """Of gradients at rest: 16 (their own precision) or 8; None: what `fidelity` says (8 for compact)."""
    activation_bits: int | None = None
    """The fewest of a saved activation: 16 (as it is), 8, 6, 5 or 4; None: what `fidelity` says."""
    gradient_errors: Mapping[str, Mapping[int, float]] | None = None
    """Errors of gradients by class of operator and bits of what it saves, as measured on this model; None: those of
    plan/formats.py."""
    accumulation_steps: int = 1
    """Micro-batches per optimizer step."""
    local_ranks: int = 1
    """Ranks of this machine, with a GPU each, that have one copy of the model in its host memory. Budgets of host
    memory and NVMe are the machine's, for all of them; what is asked for otherwise is one rank's."""
    nodes: int = 1
    """Machines like this one, each with a copy of the model."""
    shard: Shard = Shard.NODE
    """Over which ranks optimizer states are divided: those of a machine, or all."""
    cluster: Cluster | None = None
    """The links on which those ranks exchange gradients; None: that is taken to cost nothing."""
    evaluation_tokens: int | None = None
    """Tokens of an evaluation batch whose logits exist all at once; None: no evaluation is planned for."""
    capabilities: Capabilities = RUNTIME_CAPABILITIES
    weight_slots: int = WEIGHT_SLOTS
    gradient_slots: int = GRADIENT_SLOTS
    state_slots: int = STATE_SLOTS
    activation_slots: int = ACTIVATION_SLOTS
    nvme_slots: int = NVME_SLOTS

    def state_bits_of(self, role: UnitRole) -> int:
        """Of a unit's optimizer states."""
        return self.embedding_state_bits if role == UnitRole.EMBEDDING else self.state_bits

    def __post_init__(self) -> None:
        object.__setattr__(self, "fidelity", Fidelity(self.fidelity))
        object.__setattr__(self, "shard", Shard(self.shard))
        if self.state_bits is None:
            object.__setattr__(self, "state_bits", 32 if self.fidelity == Fidelity.EXACT else 8)
        if self.embedding_state_bits is None:
            object.__setattr__(self, "embedding_state_bits", 32)
        if self.gradient_bits is None:
            object.__setattr__(self, "gradient_bits", 8 if self.fidelity == Fidelity.COMPACT else 16)
        if self.activation_bits is None:
            object.__setattr__(self, "activation_bits", LEAST_ACTIVATION_BITS[self.fidelity])
        for what, bits in (("gradients", self.gradient_bits), ("activations", self.activation_bits)):
            if bits < 16 and self.fidelity == Fidelity.EXACT:
                raise ConfigError(
                    f'{what} are asked for in {bits} bits, which fidelity "exact" excludes; plan with "balanced" or '
                    '"compact"'
                )
        tokens = 1 if self.max_tokens is None else self.max_tokens
        if min(tokens, self.accumulation_steps, self.evaluation_tokens or 1, self.local_ranks, self.nodes) < 1:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, accumulation_steps {self.accumulation_steps}, evaluation_tokens "
                f"{self.evaluation_tokens}, local_ranks {self.local_ranks} and nodes {self.nodes}; each is at least 1"
            )
        if self.cluster is not None and self.cluster.ranks != self.local_ranks * self.nodes:
            raise ConfigError(
                f"the links are those of {self.cluster.nodes} nodes of {self.cluster.ranks_per_node} ranks, and the "
                f"plan is for {self.nodes} of {self.local_ranks}; give the same numbers"
            )
        if self.cluster is not None and self.cluster.shards_job != self.shards_job:
            raise ConfigError(
                f'the links are those of a job that divides states otherwise than "shard": "{self.shard}" does; give '
                "the same to both"
            )
        for tier in ("gpu", "cpu", "nvme"):
            budget_bytes = getattr(self, f"{tier}_budget_bytes")
            # 0 is a way to say "no NVMe".
            if budget_bytes is not None and (budget_bytes < 0 or (budget_bytes == 0 and tier != "nvme")):
                raise ConfigError(
                    f"{tier}_memory_gib is {budget_bytes / GIB:g}; give a size above 0, or null for all there is"
                )
        if self.nvme_write_bytes_per_day is not None and self.nvme_write_bytes_per_day <= 0:
            raise ConfigError(f"nvme_write_bytes_per_day is {self.nvme_write_bytes_per_day}; give a size above 0")

    @property
    def shards_job(self) -> bool:
        """States are divided over several machines."""
        return self.shard == Shard.JOB and self.nodes > 1
