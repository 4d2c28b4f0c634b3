"""What tests of this folder share: models of awkward and of large tensors, plans with parts on NVMe, comparisons."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import nn

from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.runtime.executor import Executor
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.train_state import ExecutorState
from lazytrain_plugin.units import MIB
from lazytrain_plugin.vocab import Activations, Tier
from tests.runtime.rig import Model, batches, make_executor, plan_for, train

STEPS = 6


def in_three(nbytes: int, ranks: int) -> int:
    """Pieces in which a rank's states of a unit pass to memory, with tensors that end in the middle of one."""
    return 3


class Awkward(nn.Module):
    """A layer of tensor sizes that nothing divides: 1 element, primes, a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.wide = nn.Linear(24, 1009)
        self.back = nn.Parameter(torch.randn(24, 1009).mul_(0.05).t())
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x):
        return x + torch.tanh(self.wide(x)) @ self.back * self.scale + self.frozen.sum() * 0


class Big(nn.Linear):
    """Large enough that memory shows: 2 MiB of moments."""

    def __init__(self) -> None:
        super().__init__(24, 24)
        self.big = nn.Parameter(torch.zeros(MIB // 4))

    def forward(self, x):
        return super().forward(x) + self.big[: x.shape[-1]]


def make_model(num_layers: int = 5) -> Model:
    torch.manual_seed(0)
    return Model(layers=[Awkward() for _ in range(num_layers)])


def big_model(num_layers: int) -> Model:
    torch.manual_seed(0)
    return Model(layers=[Big() for _ in range(num_layers)])


def on_nvme(
    plan: PlacementPlan, *, slots: int = 2, every: int = 1, stem: bool | None = None, **homes: Tier
) -> PlacementPlan:
    """`homes` for every `every`-th unit (default: its states on NVMe), and for every `every`-th of the stem.

    The stem's weights stay where they are. `stem` says whether it moves; None: if states do.
    """
    homes = homes or {"states": Tier.NVME}
    of_stem = {key: value for key, value in homes.items() if key != "weights"}
    moves_stem = "weights" not in homes if stem is None else stem

    def moved(parts, changes):
        return tuple(replace(part, **changes) if i % every == 0 else part for i, part in enumerate(parts))

    stem_parts = moved(plan.stem, of_stem) if moves_stem else plan.stem
    return replace(plan, units=moved(plan.units, homes), stem=stem_parts, nvme_slots=slots)


EVERYTHING = {
    "weights": Tier.NVME,
    "states": Tier.NVME,
    "gradients": Tier.NVME,
    "boundary": Tier.NVME,
    "saved": Tier.NVME,
    "activations": Activations.MATMULS,
}
"""Weights, states, gradients and activations of a unit."""


def all_on_nvme(plan: PlacementPlan, *, slots: int = 2, **changes) -> PlacementPlan:
    """Everything of the units; the stem's states and gradients."""
    changes = EVERYTHING | changes
    stem = tuple(replace(part, states=changes["states"], gradients=changes["gradients"]) for part in plan.stem)
    return replace(plan.with_units(**changes), stem=stem, nvme_slots=slots)


def windows(device: str, accumulation: int = 1) -> list[list[torch.Tensor]]:
    data = batches(STEPS * accumulation, device)
    return [data[i : i + accumulation] for i in range(0, len(data), accumulation)]


def executor_for(model, plan, *, device="cpu", dtype=None, tier=None, delay_s=0.0) -> Executor:
    return make_executor(model, plan, device=device, native=True, dtype=dtype, nvme=tier, transfer_delay_s=delay_s)


def full_state(executor: Executor) -> dict[str, torch.Tensor]:
    """Every master and moment; what moves last is read first."""
    state, out = ExecutorState(executor), {}
    for record in reversed(state.records):
        out[record.name] = state.read_master(record).clone()
        for key, value in state.read_state(record).items():
            out[f"{record.name}.{key}"] = torch.as_tensor(value).clone()
    return out


def everything(executor: Executor, norms: list[float]) -> dict[str, torch.Tensor]:
    """Norms, masters, moments and weights."""
    state = {"norms": torch.tensor(norms, dtype=torch.float64), **full_state(executor)}
    weights = {f"weight {name}": p.detach().cpu().clone() for name, p in executor.model.named_parameters()}
    return state | weights


def assert_same(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


@functools.cache
def trained_in_memory(device: str, dtype: torch.dtype, accumulation: int, state_bits: int = 32) -> dict:
    """`everything` after four steps with nothing on disk, which `assert_trains_the_same_on` compares with."""
    model = make_model().to(device)
    executor = executor_for(model, plan_for(model, state_bits=state_bits, device=device), device=device, dtype=dtype)
    norms = train(executor, windows(device, accumulation)[:4], max_norm=0.5)
    found = everything(executor, norms)
    executor.close()
    return found


def assert_trains_the_same_on(
    disk,
    place,
    *,
    device: str,
    dtype: torch.dtype,
    accumulation: int,
    state_bits: int = 32,
    keep: str = "none",
    look=lambda executor, tier: None,
) -> None:
    """Four steps of the plan that `place` makes of an ordinary one, every disk request and every transfer late.

    `look(executor, tier)` is called before the end.
    """
    model = make_model().to(device)
    tier = NvmeTier([disk], block_bytes=8192, pieces=in_three, delay_s=0.001)
    plan = place(plan_for(model, keep=keep, state_bits=state_bits, device=device))
    executor = executor_for(model, plan, device=device, dtype=dtype, tier=tier, delay_s=0.001)
    norms = train(executor, windows(device, accumulation)[:4], max_norm=0.5)
    found = everything(executor, norms)
    if look is not None:
        look(executor, tier)
    executor.close()
    assert_same(found, trained_in_memory(device, dtype, accumulation, state_bits))
    closed = {f"weight {name}": p.detach().cpu() for name, p in model.named_parameters()}
    assert_same(closed, {key: value for key, value in found.items() if key in closed})  # readable without its folder
    assert not list(disk.iterdir())
