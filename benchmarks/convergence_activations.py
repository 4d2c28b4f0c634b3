"""Trains one model with exact and with quantized activations, pair by pair, and compares the losses.

    python benchmarks/convergence_activations.py --seeds 0 1 --jobs 8 --out benchmarks/results/convergence_activations
    python benchmarks/convergence_activations.py --device cpu --steps 60 --hidden 64 --layers 2 --batch 8 --lr 3e-3

Arms, each from the same initial weights and with the same batches in the same order:

    exact     32-bit states, activations as they are
    balanced  8-bit states
    compact   8-bit states, gradients in 8-bit codes, activations in 4 bits outside of attention
    uniform   the same with attention in 4 bits too, which the engine never does: what the layer-aware rule is for

In every arm all layers save the outputs of matrix products (the strategy matmuls), so that the arms differ in bits
only. The text is the source of Python's standard library, byte-level (some 15 MB: 1,000 steps of 8,192 bytes see less
than all of it once), or any file (`--text`). What is compared: the training loss, mean over the last 10 % of the
steps, per seed against the exact arm of that seed, and the loss on pages that were held out. `spread` is how far the
exact arms of the seeds are apart: differences below it are noise of the seed, but the pairs share it. Prints a table
and, as its last line, JSON; `--out PREFIX` writes PREFIX.json and, where matplotlib is installed, PREFIX.png.

With `--out` each run is kept in PREFIX_runs/ when it ends, and the same command goes on with those that are missing
(`--seeds` and `--arms` choose some). Every 100 steps a run writes its losses there too: `--so-far` compares what there
is without training, unfinished runs included.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import platform
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import convergence_8bit as common
import numpy as np
import torch
from torch import Tensor, nn

import lazytrain_plugin.install  # noqa: F401
from examples.train_lm import HELD_OUT_EVERY, PAGE_BYTES

FINAL_FRAC = 0.1


@dataclass(frozen=True)
class Bits:
    """What an arm stores its states and activations in."""

    states: int
    gradients: int
    activations: int
    attention_too: bool = False


BASELINE = "exact"
ARMS = {
    BASELINE: Bits(32, 16, 16),
    "balanced": Bits(8, 16, 16),
    "compact": Bits(8, 8, 4),
    "uniform": Bits(8, 8, 4, attention_too=True),
}
REPORT_STEPS = 100


def run_arm(
    arm: str, setup: common.Setup, seed: int, *, num_jobs: int = 1, kept: common.KeptRuns | None = None
) -> common.ArmRun:
    """Trains one arm from scratch, in a process of its own."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_jobs))
    torch.manual_seed(seed)
    model = setup.build_model()
    training_text, held_out_text = load_text(setup.text)
    start_s = time.perf_counter()
    if ARMS[arm].attention_too:
        quantize_attention_too()

    def run_of(losses: list[Tensor], held_out_loss: float = math.nan) -> common.ArmRun:
        values = torch.stack(losses).tolist()
        wall_s = time.perf_counter() - start_s
        return common.ArmRun(
            arm=arm, seed=seed, losses=values, held_out_loss=held_out_loss, wall_s=wall_s, final_frac=FINAL_FRAC
        )

    def report(losses: list[Tensor]) -> None:
        run = run_of(losses)
        mean = statistics.fmean(run.losses[-REPORT_STEPS:])
        rate = f"loss {mean:.4f}, {run.wall_s:.0f} s so far"
        print(f"seed {seed}, {arm}: {len(losses)} of {setup.steps} steps, {rate}", file=sys.stderr, flush=True)
        if kept is not None:
            kept.store(setup, run)

    batches = common.batches(training_text, setup, seed)
    losses, held_out_loss = train(ARMS[arm], model, setup, batches, held_out_text, report)
    return run_of(losses, held_out_loss.item())


def load_text(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """uint8 arrays, split by pages: (training, held out)."""
    if path is not None:
        text = np.fromfile(path, dtype=np.uint8)
    else:
        library = Path(sysconfig.get_path("stdlib"))
        skipped = ("site-packages", "test", "tests", "idlelib")
        files = [file for file in sorted(library.rglob("*.py")) if not set(skipped) & set(file.parts[:-1])]
        text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8)
    pages = text[: len(text) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
    held_out = np.arange(len(pages)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return pages[~held_out].reshape(-1), pages[held_out].reshape(-1)[: 1 << 19]


def quantize_attention_too() -> None:
    """In this process (one run of one arm) nothing is taken for attention any more."""
    from lazytrain_plugin.profile.attention_core import AttentionCore

    AttentionCore.holds_output = AttentionCore.holds_saved = lambda self, _: False


def plan_of(model: nn.Module, setup: common.Setup, bits: Bits):
    """Everything on the GPU, every layer with the outputs of its matrix products."""
    from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
    from lazytrain_plugin.runtime.discovery import discover
    from lazytrain_plugin.vocab import Activations, Fidelity, Tier, Updater

    on_gpu = setup.device == "cuda"
    tier, updater = (Tier.GPU, Updater.GPU) if on_gpu else (Tier.CPU, Updater.CPU)
    found = discover(model)

    def unit(name: str, **activations) -> UnitPlan:
        return UnitPlan(
            name=name,
            weights=tier,
            states=tier,
            updater=updater,
            state_bits=bits.states,
            gradient_bits=bits.gradients,
            reason="by hand",
            **activations,
        )

    saving = {"activations": Activations.MATMULS, "saved_bits": bits.activations, "boundary_bits": bits.activations}
    return PlacementPlan(
        units=tuple(unit(layer.name, **saving) for layer in found.units),
        stem=tuple(unit(part.name) for part in found.stem),
        fidelity=Fidelity.EXACT if bits == ARMS[BASELINE] else Fidelity.COMPACT,
    )


def train(
    bits: Bits,
    model: nn.Module,
    setup: common.Setup,
    batches: Iterator[Tensor],
    held_out_text: np.ndarray,
    report: Callable[[list[Tensor]], None],
) -> tuple[list[Tensor], Tensor]:
    """The training losses and the held-out loss; `report` gets the losses every 100 steps."""
    import deepspeed

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan_of(model, setup, bits).save(path)
        config = {
            "train_micro_batch_size_per_gpu": setup.batch,
            "gradient_clipping": setup.max_norm,
            "bf16": {"enabled": setup.dtype == "bf16"},
            "zero_optimization": {"stage": 3},
            "lazytrain": {
                "plan": {"path": str(path)},
                "optimizer": {"state_bits": bits.states},
                "gradients": {"bits": bits.gradients},
                "activations": {"bits": bits.activations},
            },
        }
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=setup.lr, betas=common.BETAS, weight_decay=setup.weight_decay
        )
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.train()
        losses = []
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = setup.learning_rate(step)
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
            if len(losses) % REPORT_STEPS == 0 and len(losses) < setup.steps:
                report(losses)
        engine.flush()
        held_out_loss = common.held_out(model, held_out_text, setup)
        engine.destroy()
    return losses, held_out_loss


def spread_percent(runs: list[common.ArmRun]) -> float:
    """How far the exact arms of all seeds are apart, in percent of their mean."""
    losses = [run.final_loss for run in runs if run.arm == BASELINE]
    return 100 * (max(losses) - min(losses)) / (sum(losses) / len(losses)) if losses else float("nan")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16 on a GPU, fp32 on the CPU")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--hidden", type=int, default=768, help="width of the model")
    parser.add_argument("--layers", type=int, default=7, help="with --hidden 768: 66 million parameters")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--lr", type=float, default=6e-4, help="peak learning rate")
    parser.add_argument("--text", help="train on the bytes of this file")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; s/step means little with several")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="write PREFIX.json, PREFIX.png and PREFIX_runs/")
    parser.add_argument("--so-far", action="store_true", help="train nothing: compare what PREFIX_runs/ holds")
    arguments = parser.parse_args()
    if arguments.so_far and arguments.out is None:
        parser.error("--so-far needs --out: where the runs are")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    setup = common.setup_of(arguments)
    work = [(arm, setup, seed) for seed in arguments.seeds for arm in arguments.arms]
    kept = None if arguments.out is None else common.KeptRuns(arguments.out.with_name(f"{arguments.out.name}_runs"))
    if arguments.so_far:
        runs = common.runs_so_far(work, kept)
    else:
        num_jobs = max(1, min(arguments.jobs, len(work)))
        run = functools.partial(run_arm, num_jobs=num_jobs, kept=kept)
        # A process for each run, with one job too: an arm may change the engine for itself.
        runs = common.run_all(work, num_jobs, run, always_apart=True, kept=kept)
    rows = common.summarize(runs, BASELINE)
    common.print_table(rows, BASELINE)
    spread = spread_percent(runs)
    print(f"spread of the exact arm over {len(arguments.seeds)} seeds: {spread:.2f} %")
    more = {"python": platform.python_version(), "spread_percent": spread}
    common.publish("convergence_activations", setup, runs, rows, arguments.out, baseline=BASELINE, **more)


if __name__ == "__main__":
    main()
