"""The same short training three ways: plain torch, `deepspeed.initialize`, and HF Trainer on a model of one's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from torch import Tensor, nn

from integration_tests import harness
from integration_tests.cases import Placement
from integration_tests.harness import InOrderTrainer, deepspeed_config, make_plan

Batch = dict[str, Tensor]
Steps = Sequence[Sequence[Batch]]
"""Micro-batches per optimizer step."""
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""From parameters (or groups) to an optimizer."""

STREAMED = Placement(homes="cpu", activations="recompute")
KEPT = Placement(homes="cpu", activations="keep")
RESIDENT = Placement(homes="gpu", activations="keep")
MIXED = Placement(homes="mixed", activations="recompute")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch)
    return output["loss"]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's parameters, on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def train_torch(
    model: nn.Module,
    steps: Steps,
    make_optimizer: MakeOptimizer = adamw,
    *,
    max_norm: float = 0.0,
    loss: Callable[[nn.Module, Batch], Tensor] = model_loss,
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains a copy of `model`; returns its weights and the norms before clipping."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    norms = []
    for micro_batches in steps:
        for batch in micro_batches:
            (loss(model, batch) / len(micro_batches)).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(float(nn.utils.get_total_norm(gradients)))
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), norms


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: Path,
    /,
    *,
    placement: Placement | None = STREAMED,
    accumulation: int = 1,
    max_norm: float = 0.0,
    implementation: str = "torch",
    micro_batch: int = 2,
    state_bits: int = 32,
    gradient_bits: int = 16,
    **ds_config: Any,
) -> Any:
    """An engine of `deepspeed.initialize` under our block; `placement` None: planned at the first batch.

    On the CPU only, where plain torch gives the same bits; `tests/runtime` has the executor's tests for both devices.
    """
    if torch.cuda.is_available():
        pytest.skip("compares bits with plain torch on the CPU")
    block: dict[str, Any] = {"optimizer": {"implementation": implementation}}
    if placement is not None:
        folder.mkdir(parents=True, exist_ok=True)
        make_plan(model, placement, state_bits, gradient_bits).save(folder / "plan.json")
        block["plan"] = {"path": str(folder / "plan.json")}
        block["optimizer"]["state_bits"] = state_bits
        block["gradients"] = {"bits": gradient_bits}
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_norm,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "lazytrain": block,
        **ds_config,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def run_engine(
    engine: Any, steps: Steps, *, loss: Callable[[nn.Module, Batch], Tensor] = model_loss
) -> tuple[dict[str, Tensor], list[float]]:
    """`engine.backward` and `engine.step` per micro-batch; returns weights and norms."""
    norms = []
    for micro_batches in steps:
        for batch in micro_batches:
            engine.backward(loss(engine, batch))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    engine.flush()
    return weights_of(engine.module), norms


def make_trainer(
    model: nn.Module,
    samples: Sequence[Batch],
    folder: Path,
    device: str,
    *,
    placement: Placement | None = None,
    block: dict[str, Any] | None = None,
    ds_config: dict[str, Any] | None = None,
    trainer_class: type[transformers.Trainer] = InOrderTrainer,
    trainer_options: dict[str, Any] | None = None,
    **arguments: Any,
) -> transformers.Trainer:
    """A Trainer on `model`: plain where neither placement nor block is given.

    Call inside `harness.fresh_accelerate_state()`; `arguments` are those of TrainingArguments.
    """
    if placement is not None:
        folder.mkdir(parents=True, exist_ok=True)
        make_plan(model, placement).save(folder / "plan.json")
        block = {"plan": {"path": str(folder / "plan.json")}, "optimizer": {"implementation": "torch"}, **(block or {})}
    if block is not None:
        arguments["deepspeed"] = {**deepspeed_config(block), **(ds_config or {})}
    training_arguments = harness.arguments(folder, device, **arguments)
    return trainer_class(model, training_arguments, train_dataset=list(samples), **(trainer_options or {}))


def random_batches(count: int, *, rows: int = 2, length: int = 12, vocab: int = 97, seed: int = 3) -> list[Batch]:
    """Token batches whose labels are the tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, vocab, (rows, length), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]
