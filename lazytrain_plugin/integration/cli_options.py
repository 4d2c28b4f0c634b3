"""Options that `lazytrain plan` and `explain` share, and the machine and request that they ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.integration.cli_nodes import cluster_of
from lazytrain_plugin.integration.plan_cache import parse_errors
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan, uses_nvme
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Fidelity, Shard

Hardware = Annotated[str, typer.Option(help="a file as in configs/hardware/, or 'this' machine")]
SequenceLength = Annotated[int, typer.Option(min=1, help="tokens of one sequence")]
Dtype = Annotated[str, typer.Option(help="dtype of the weights")]
AccumulationSteps = Annotated[int, typer.Option(min=1, help="micro-batches per optimizer step")]
GpuMemory = Annotated[float | None, typer.Option(help="GPU budget; default: all there is")]
CpuMemory = Annotated[float | None, typer.Option(help="host budget; default: all there is")]
NvmeMemory = Annotated[float | None, typer.Option(help="NVMe budget; default: none is used")]
NvmeWrites = Annotated[
    float | None, typer.Option(help="what may be written to the disk in 24 hours; default: no limit")
]
EvaluationTokens = Annotated[
    int | None, typer.Option(min=1, help="an evaluation batch whose whole logits the GPU must hold")
]
Nodes = Annotated[int, typer.Option(min=1, help="machines like this one")]
RanksPerNode = Annotated[int, typer.Option(min=1, help="GPUs of each, like the one described")]
PlannedNodes = Annotated[int | None, typer.Option(min=1, help="machines like this one; default: as the plan says")]
PlannedRanks = Annotated[int | None, typer.Option(min=1, help="GPUs of each; default: as the plan says")]
ShardOption = Annotated[
    Shard, typer.Option("--shard", help="over which ranks optimizer states are divided: those of a node, or of the job")
]
PlannedShard = Annotated[
    Shard | None, typer.Option("--shard", help="over which ranks states are divided; default: as the plan says")
]
NetworkGbit = Annotated[float | None, typer.Option(help="a node's link to the others, Gbit/s each way")]
InsideGbit = Annotated[
    float | None, typer.Option(help="a GPU's link to those of its node, Gbit/s each way; default: PCIe")
]
GradientBits = Annotated[int | None, typer.Option(help="of gradients between nodes, 8 or 16; default: 8 unless exact")]
ErrorPrices = Annotated[
    Path | None,
    typer.Option(help="what fewer bits did to a model's gradients, as a run measured (its log names the file)"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Budgets, ranks and sizes as the options give them."""

    fidelity: Fidelity
    max_tokens: int | None
    """None: the plan's own."""
    accumulation_steps: int
    gpu_memory_gib: float | None
    cpu_memory_gib: float | None
    nvme_gib: float | None
    nvme_write_gib_per_day: float | None
    evaluation_tokens: int | None
    nodes: int
    ranks_per_node: int
    network_gbit: float | None
    inside_gbit: float | None
    gradient_bits: int | None
    error_prices: Path | None
    shard: Shard = Shard.NODE

    def on(self, machine: HardwareProfile) -> tuple[HardwareProfile, PlanRequest]:
        """The machine, with so much of its disk, and the request.

        Raises:
            ConfigError: a size that isn't above 0, a disk or a network that nothing is known of, or a file of error
                prices that holds none.
        """
        request = PlanRequest(
            max_tokens=self.max_tokens,
            gpu_budget_bytes=_gib_to_bytes("gpu-memory-gib", self.gpu_memory_gib),
            cpu_budget_bytes=_gib_to_bytes("cpu-memory-gib", self.cpu_memory_gib),
            fidelity=self.fidelity,
            accumulation_steps=self.accumulation_steps,
            nvme_write_bytes_per_day=_gib_to_bytes("nvme-write-gib-per-day", self.nvme_write_gib_per_day),
            evaluation_tokens=self.evaluation_tokens,
            gradient_errors=_error_prices(self.error_prices),
            local_ranks=self.ranks_per_node,
            nodes=self.nodes,
            shard=self.shard,
        )
        if self.nvme_gib is not None:
            machine, request = _with_nvme(machine, request, self.nvme_gib)
        elif self.nvme_write_gib_per_day is not None:
            raise ConfigError("--nvme-write-gib-per-day limits what --nvme-gib allows to use; give both")
        cluster = cluster_of(
            machine,
            self.fidelity,
            self.nodes,
            self.ranks_per_node,
            self.network_gbit,
            self.inside_gbit,
            self.gradient_bits,
            self.shard,
        )
        return machine, replace(request, cluster=cluster)


def ranks_of(
    plan: PlacementPlan,
    *,
    nodes: int | None,
    ranks_per_node: int | None,
    network_gbit: float | None,
    nvme_gib: float | None,
) -> tuple[int, int]:
    """Nodes and ranks of each that a plan is for.

    Raises:
        ConfigError: options that the plan can't be judged without are missing, or say other ranks than the plan.
    """
    for option, given, planned in (
        ("nodes", nodes, plan.nodes),
        ("ranks-per-node", ranks_per_node, plan.local_ranks),
    ):
        if given is not None and planned is not None and given != planned:
            raise ConfigError(
                f"--{option} is {given}, and the plan is for {planned}; leave the option out, or plan again for {given}"
            )
    nodes, ranks_per_node = nodes or plan.nodes or 1, ranks_per_node or plan.local_ranks or 1
    missing = []
    if nodes > 1 and network_gbit is None:
        missing.append(f"--network-gbit (the plan is for {nodes} nodes)")
    if nvme_gib is None and uses_nvme(plan):
        missing.append("--nvme-gib (a part of the plan rests on NVMe)")
    if missing:
        raise ConfigError(f"times and budgets of this plan need {' and '.join(missing)}; add what it was planned with")
    return nodes, ranks_per_node


def shard_of(plan: PlacementPlan, given: Shard | None) -> Shard:
    """Over which ranks the states of a plan are divided. Raises ConfigError where the option says otherwise."""
    if given is not None and plan.shard is not None and given != plan.shard and (plan.nodes or 1) > 1:
        raise ConfigError(
            f"--shard is {given}, and the plan is for {plan.shard}; leave the option out, or plan again for {given}"
        )
    return given or plan.shard or Shard.NODE


def _error_prices(path: Path | None) -> dict[str, dict[int, float]] | None:
    """Errors that a run has measured; None: those of a small model."""
    if path is None:
        return None
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--error-prices {str(path)!r} can't be read: {error}; give a file that a run kept"
        ) from error
    errors = parse_errors(text)
    if errors is None:
        raise ConfigError(
            f"--error-prices {str(path)!r} holds no error prices (norm, gemm and swiglu in 4, 5, 6 and 8 bits); give "
            "the file that the log of a compact run names"
        )
    return errors


def _with_nvme(machine: HardwareProfile, request: PlanRequest, gib: float) -> tuple[HardwareProfile, PlanRequest]:
    """Machine and request with so much of the disk."""
    budget_bytes = _gib_to_bytes("nvme-gib", gib)
    if not machine.nvme_read_bytes_per_s or not machine.nvme_write_bytes_per_s:
        raise ConfigError(
            f"--nvme-gib is {gib:g}, but the profile of {machine.name!r} has no rates of a disk; measure one with "
            "`lazytrain profile --nvme-path FOLDER --out machine.json`"
        )
    if machine.nvme_bytes and budget_bytes > machine.nvme_bytes:
        raise ConfigError(
            f"--nvme-gib is {gib:g}, {machine.name!r} has {machine.nvme_bytes / GIB:g} GiB of disk free; give less"
        )
    capabilities = replace(request.capabilities, nvme=True)
    return replace(machine, nvme_bytes=budget_bytes), replace(
        request, nvme_budget_bytes=budget_bytes, capabilities=capabilities
    )


def _gib_to_bytes(option: str, gib: float | None) -> int | None:
    if gib is None:
        return None
    if not 0 < gib < math.inf:
        raise ConfigError(f"--{option} is {gib:g}; give a number of GiB above 0")
    return int(gib * GIB)
