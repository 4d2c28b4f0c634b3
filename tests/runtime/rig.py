"""A small model, plans for it, and an executor around it; the reference is the same model in plain torch."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.update import ClientOptimizer, NativeAdamW
from lazytrain_plugin.vocab import Activations, Tier, Updater

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
HIDDEN, VOCAB = 24, 50
HOMES = {
    "cpu": (Tier.CPU, Tier.CPU, Updater.CPU),
    "gpu": (Tier.GPU, Tier.GPU, Updater.GPU),
    "mirror": (Tier.GPU, Tier.CPU, Updater.CPU),
    "streamed": (Tier.CPU, Tier.CPU, Updater.GPU),
    "streamed from gpu": (Tier.GPU, Tier.CPU, Updater.GPU),
}
"""Weights, states, updater."""


class Block(nn.Module):
    """A layer with a norm, two matrices, a bias of awkward size and dropout."""

    def __init__(self, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 37)
        self.down = nn.Linear(37, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=None):
        y = self.down(self.dropout(torch.nn.functional.silu(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    """Embedding, layers, head: what discovery expects of a language model."""

    def __init__(self, layers: list[nn.Module] | None = None, *, num_layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(layers or [Block(dropout=dropout) for _ in range(num_layers)])
        self.head = nn.Linear(HIDDEN, VOCAB)

    def run_layers(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids):
        return self.head(self.run_layers(self.embedding(ids)))

    def loss(self, ids):
        return torch.nn.functional.cross_entropy(self(ids).flatten(0, 1).float(), ids.flatten())


def batches(count: int, device: str, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (2, 7), generator=generator).to(device) for _ in range(count)]


def plan_for(
    model: nn.Module, *, home: str = "cpu", keep: str = "none", state_bits: int = 32, device="cpu"
) -> PlacementPlan:
    """`home`: a key of HOMES for all units, or "mixed" or "every kind" for units of several; `keep`: none, all or mixed
    (which units keep activations)."""
    found = discover(model)
    cycle = {"mixed": ("cpu", "gpu"), "every kind": ("streamed", "cpu", "streamed from gpu", "gpu", "mirror")}
    kinds = cycle.get(home, (home,))

    def unit(name: str, index: int, stem: bool = False) -> UnitPlan:
        weights, states, updater = HOMES[kinds[index % len(kinds)]]
        kept = keep == "all" or (keep == "mixed" and index % 2 == 0)
        return UnitPlan(
            name=name,
            weights=Tier.GPU if stem and device == "cuda" else weights,
            states=states,
            updater=updater,
            state_bits=state_bits,
            activations=Activations.KEEP if kept else Activations.RECOMPUTE,
        )

    return PlacementPlan(
        units=tuple(unit(u.name, i) for i, u in enumerate(found.units)),
        stem=tuple(unit(u.name, i, stem=True) for i, u in enumerate(found.stem)),
        weight_slots=2,
        gradient_slots=1,
    )


def make_executor(
    model: nn.Module,
    plan: PlacementPlan,
    *,
    device: str = "cpu",
    native: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: torch.dtype | None = None,
    least_coded_numel: int = 0,
    **kwargs,
) -> Executor:
    """`least_coded_numel`: all tensors of this model are too small for 8-bit states in earnest."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    adamw = NativeAdamW(decoupled=True, least_coded_numel=least_coded_numel)
    executor = Executor(
        model,
        discover(model),
        torch.device(device),
        dtypes={p: dtype or p.dtype for p in model.parameters()},
        optimizer=optimizer,
        updater=adamw if native else ClientOptimizer(optimizer),
        **kwargs,
    )
    executor.place(plan)
    return executor


def train_plain(model: nn.Module, steps: list[list[torch.Tensor]], *, max_norm: float = 0.0, loss=Model.loss):
    """Plain torch training of a copy of `model`; `steps` is a list of micro-batches per step."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for micro_batches in steps:
        for ids in micro_batches:
            loss(model, ids).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def train(executor: Executor, steps: list[list[torch.Tensor]], *, max_norm: float = 0.0, loss=Model.loss):
    """The same under the executor; returns the norms. Flushes at the end only."""
    norms = []
    for micro_batches in steps:
        for i, ids in enumerate(micro_batches):
            executor.begin_forward()
            executor.set_last_micro_batch(i == len(micro_batches) - 1)
            loss(executor.model, ids).backward()
        norms.append(executor.step(max_norm)[0].total)
    executor.flush()
    return norms


def assert_same_weights(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.detach().cpu(), q.detach().cpu()), f"{name} differs by {(p.cpu() - q.cpu()).abs().max()}"


def with_activations(plan: PlacementPlan, activations: Activations) -> PlacementPlan:
    return replace(plan, units=tuple(replace(unit, activations=activations) for unit in plan.units))
