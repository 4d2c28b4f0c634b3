"""Runs of HF Trainer on tiny models: plain, in bf16 with fp32 masters, and under a LazyTrain plan."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from transformers.integrations import deepspeed as hf_deepspeed

import lazytrain_plugin.install  # noqa: F401  (installs the hook even where entry points are off)
from integration_tests.cases import Placement, Work
from integration_tests.models import build_model, make_samples
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.runtime import activation_store
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.vocab import Activations, Fidelity, Tier, Updater

STEPS = 5
MICRO_BATCH = 2
LEARNING_RATE = 1e-2

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Run:
    """What a training run leaves behind."""

    weights: dict[str, Tensor]
    """Copies of the parameters, on the CPU, in their own dtypes."""
    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    trainer: transformers.Trainer = field(repr=False)

    @property
    def engine(self) -> Any:
        return self.trainer.model_wrapped


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A group of this process alone, on a free port."""
    import deepspeed.comm

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    values = dict(zip(LAUNCH_VARIABLES, ("0", "0", "1", "127.0.0.1", port), strict=True))
    with environment(values):
        deepspeed.comm.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
        yield
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def environment(values: dict[str, str | None]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    for key, value in values.items():
        os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)


@contextlib.contextmanager
def fresh_accelerate_state() -> Iterator[None]:
    """Accelerate and transformers keep the DeepSpeed config of the last run in globals and in the environment."""

    def reset() -> None:
        for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FP8_"))]:
            del os.environ[key]
        hf_deepspeed.unset_hf_deepspeed_config()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    reset()
    try:
        yield
    finally:
        reset()


class InOrderTrainer(transformers.Trainer):
    """Takes samples in order, so that runs of different kinds see the same batches."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class MasterTrainer(InOrderTrainer):
    """bf16 model, fp32 masters: what LazyTrain's bf16 training means, in plain torch."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        self.optimizer = MasterOptimizer(super().create_optimizer(*args, **kwargs), self.masters, self.max_norm)
        return self.optimizer


class MasterOptimizer(torch.optim.Optimizer):
    """torch's AdamW on fp32 masters: fp32 sums of gradients, clipped by global norm; weights rounded half away."""

    def __init__(self, client: torch.optim.Optimizer, masters: dict[nn.Parameter, Tensor], max_norm: float) -> None:
        super().__init__(client.param_groups, client.defaults)
        self.max_norm = max_norm
        self.summed: dict[nn.Parameter, Tensor] = {}
        self.masters = {p: nn.Parameter(masters[p]) for group in self.param_groups for p in group["params"]}
        self.inner = type(client)(
            [{**group, "params": [self.masters[p] for p in group["params"]]} for group in client.param_groups]
        )
        for parameter in self.masters:
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad.float(), None
        self.summed[parameter] = self.summed[parameter] + gradient if parameter in self.summed else gradient

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        order = [parameter for parameter in self.model_order if parameter in self.summed]
        for parameter, master in self.masters.items():
            master.data = master.data.to(parameter.device)  # Trainer has moved the model since
            master.grad = self.summed.get(parameter)
        if self.max_norm:
            nn.utils.clip_grad_norm_([self.masters[parameter] for parameter in order], self.max_norm)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
        self.inner.step()
        for parameter in order:
            master = self.masters[parameter].data
            parameter.copy_(round_half_away(master) if parameter.dtype == torch.bfloat16 else master)
        self.summed.clear()


def round_half_away(master: Tensor) -> Tensor:
    """fp32 -> bf16, ties away from zero: the rounding of the split master (DESIGN of the format: kernels/split.py)."""
    bits = master.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    high = (bits + 0x8000) >> 16
    return high.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def run_plain(work: Work, folder: Path, device: str, *, noise_seed: int | None = None, **options: Any) -> Run:
    """HF Trainer without DeepSpeed; in bf16, the reference with fp32 masters.

    With `noise_seed`, one of 50 elements that a norm returns is an ulp of bf16 larger: another order of a sum.
    """
    model = build_model(work.model, work.trained)
    if noise_seed is not None:
        _round_differently(model, noise_seed)
    with environment(dict.fromkeys(LAUNCH_VARIABLES)), fresh_accelerate_state():
        training_arguments = _arguments(work, folder, device, **options)
        if work.dtype == "fp32":
            trainer = InOrderTrainer(model, training_arguments, train_dataset=_samples(work))
        else:
            masters = {parameter: parameter.detach().clone() for parameter in model.parameters()}
            for parameter in model.parameters():
                parameter.data = round_half_away(parameter.data)
            training_arguments.max_grad_norm = 0.0  # MasterOptimizer clips, on the fp32 sums
            trainer = MasterTrainer(model, training_arguments, train_dataset=_samples(work))
            trainer.masters, trainer.max_norm = masters, work.max_norm
            MasterOptimizer.model_order = list(model.parameters())
        return finish(trainer, None)


def _round_differently(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def hook(module, args, output):
        chosen = torch.rand(output.shape, generator=generator).to(output.device) < 0.02
        return output * torch.where(chosen, 1 + torch.finfo(torch.bfloat16).eps, 1.0).to(output.dtype)

    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    assert norms
    for module in norms:
        module.register_forward_hook(hook)


def run_lazytrain(
    work: Work,
    placement: Placement,
    folder: Path,
    device: str,
    *,
    block: dict[str, Any] | None = None,
    state_bits: int = 32,
    gradient_bits: int = 16,
    activation_bits: int = 16,
    resume: str | None = None,
    trainer_class: type[transformers.Trainer] = InOrderTrainer,
    **options: Any,
) -> Run:
    """HF Trainer with a DeepSpeed config that holds our block and a plan file."""
    model = build_model(work.model, work.trained)
    folder.mkdir(parents=True, exist_ok=True)
    plan_path = folder / "plan.json"
    make_plan(model, placement, state_bits, gradient_bits, activation_bits).save(plan_path)
    ds_config = deepspeed_config(
        {
            "plan": {"path": str(plan_path)},
            "optimizer": {"implementation": work.implementation, "state_bits": state_bits},
            "gradients": {"bits": gradient_bits},
            "activations": {"bits": activation_bits},
            **(block or {}),
        }
    )
    with fresh_accelerate_state(), small_activations_leave():
        training_arguments = _arguments(work, folder, device, deepspeed=ds_config, bf16=work.dtype == "bf16", **options)
        return finish(trainer_class(model, training_arguments, train_dataset=_samples(work)), resume)


@contextlib.contextmanager
def small_activations_leave() -> Iterator[None]:
    """Test models are too small for a plan that rests activations on the host to have an effect otherwise."""
    smallest, activation_store.SMALLEST_BYTES = activation_store.SMALLEST_BYTES, 1
    try:
        yield
    finally:
        activation_store.SMALLEST_BYTES = smallest


def deepspeed_config(block: dict[str, Any]) -> dict[str, Any]:
    automatic = (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"
    )  # fmt: skip
    return {
        **dict.fromkeys(automatic, "auto"),
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "lazytrain": block,
    }


def make_plan(
    model: nn.Module,
    placement: Placement,
    state_bits: int = 32,
    gradient_bits: int = 16,
    activation_bits: int = 16,
) -> PlacementPlan:
    """A plan by hand. Homes: "cpu" streams everything, "gpu" nothing, "mixed" has units of each kind; with "streamed
    states" the GPU updates units whose states rest in host memory, two of three, and the stem."""
    kinds = {
        "cpu": (Tier.CPU, Tier.CPU),
        "weights": (Tier.GPU, Tier.CPU),
        "gpu": (Tier.GPU, Tier.GPU),
        "streamed": (Tier.CPU, Tier.CPU),
        "streamed from gpu": (Tier.GPU, Tier.CPU),
    }
    cycles = {"mixed": ("gpu", "cpu", "weights"), "streamed states": ("streamed", "cpu", "streamed from gpu")}
    cycle = cycles.get(placement.homes, (placement.homes,))
    stem = {"gpu": "gpu", "streamed states": "streamed from gpu"}.get(placement.homes, "weights")
    found = discover(model)

    rests = Tier.GPU if placement.resting == "dropped" else Tier(placement.resting)

    def unit(name: str, kind: str, drops: bool = False) -> UnitPlan:
        weights, states = kinds[kind]
        return UnitPlan(
            name=name,
            weights=weights,
            states=states,
            updater=Updater.GPU if kind.startswith("streamed") else Updater(states.value),
            state_bits=state_bits,
            gradient_bits=gradient_bits,
            saved_bits=activation_bits,
            boundary_bits=activation_bits,
            activations=Activations(placement.activations),
            boundary=None if drops else rests,
            saved=rests,
        )

    return PlacementPlan(
        units=tuple(
            unit(part.name, cycle[i % len(cycle)], drops=i > 0 and placement.resting == "dropped")
            for i, part in enumerate(found.units)
        ),
        stem=tuple(unit(part.name, stem) for part in found.stem),
        weight_slots=2,
        fidelity=Fidelity.EXACT if min(gradient_bits, activation_bits) == 16 else Fidelity.COMPACT,
    )


def _samples(work: Work) -> list[dict[str, Tensor]]:
    return make_samples(work.model, 4 * STEPS * MICRO_BATCH * work.accumulation)


def _arguments(work: Work, folder: Path, device: str, **options: Any) -> transformers.TrainingArguments:
    of_the_work = {"gradient_accumulation_steps": work.accumulation, "max_grad_norm": work.max_norm}
    return arguments(folder, device, **(of_the_work | options))


def arguments(
    folder: Path,
    device: str,
    arguments_class: type[transformers.TrainingArguments] = transformers.TrainingArguments,
    **options: Any,
) -> transformers.TrainingArguments:
    """Short, silent training that logs every step and saves nothing, changed by `options`."""
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": MICRO_BATCH,
        "max_grad_norm": 0.0,
        "learning_rate": LEARNING_RATE,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    return arguments_class(str(folder), **(defaults | options))


def finish(trainer: transformers.Trainer, resume: str | None = None) -> Run:
    """Trains, and collects what the run leaves behind."""
    trainer.train(resume_from_checkpoint=resume)
    if hasattr(trainer.model_wrapped, "flush"):
        trainer.model_wrapped.flush()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(
        weights={name: parameter.detach().cpu().clone() for name, parameter in trainer.model.named_parameters()},
        losses=[entry["loss"] for entry in logs],
        grad_norms=[entry["grad_norm"] for entry in logs if "grad_norm" in entry],
        learning_rates=[entry["learning_rate"] for entry in logs],
        trainer=trainer,
    )


def close(run: Run) -> None:
    """Ends the engine's threads and frees its buffers; the weights of `run` stay."""
    run.engine.destroy()


def assert_bit_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names each tensor that differs, with the size of the difference."""
    assert got.keys() == expected.keys()
    different = {
        name: f"{(got[name].float() - value.float()).abs().max().item():.2e} of {value.float().abs().max().item():.2e}"
        for name, value in expected.items()
        if got[name].dtype != value.dtype or not torch.equal(got[name], value)
    }
    assert not different, f"{len(different)} of {len(expected)} differ: {dict(list(different.items())[:6])}"


def assert_close_on_gpu(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Kernels that round differently: all weights together are within 1e-4 of their length.

    Not element by element: where the true gradient is nearly zero, Adam makes a step of its rounding.
    """
    assert got.keys() == expected.keys()
    square = lambda values: sum(value.double().square().sum().item() for value in values)  # noqa: E731
    assert square(got[name].double() - value.double() for name, value in expected.items()) <= 1e-8 * square(
        expected.values()
    )
