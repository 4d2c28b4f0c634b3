"""Trains the same model on the same batches with 32-bit and with 8-bit optimizer states, and compares the losses.

    python benchmarks/convergence_8bit.py --steps 1000 --out benchmarks/results/convergence_8bit
    python benchmarks/convergence_8bit.py --device cpu --steps 100 --hidden 64 --layers 2 --lr 3e-3

Arms, each from the same initial weights, with the same batches in the same order, fp32 masters and gradient clipping:

    lazytrain_32bit  the LazyTrain engine, 32-bit states
    lazytrain_8bit   the LazyTrain engine, block-wise 8-bit states
    bitsandbytes     a plain torch loop with bitsandbytes' AdamW8bit
    torch            the same loop with torch's AdamW: how far apart two correct runs end

The text is that of examples/train_lm.py, byte-level, or any file (`--text`). What is compared: the training loss, mean
over the last 5 % of the steps, and the loss on text that was held out. Fused kernels are off, so that the arms differ
in the optimizer only. Prints a table and, as its last line, JSON; `--out PREFIX` writes PREFIX.json and, where
matplotlib is installed, the figure PREFIX.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lazytrain_plugin.install  # noqa: F401
from examples.train_lm import ByteWindows, ModelArguments, build_model, load_text

BASELINE = "lazytrain_32bit"
ARMS = (BASELINE, "lazytrain_8bit", "bitsandbytes", "torch")
BETAS = (0.9, 0.999)
WARMUP_FRAC = 0.05
FINAL_FRAC = 0.05
SO_FAR = "_so_far.json"
"""Ends the name of a file with an unfinished run."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all arms of one seed share."""

    device: str
    dtype: str
    steps: int
    batch: int
    sequence: int
    hidden: int
    layers: int
    lr: float
    weight_decay: float = 0.1
    max_norm: float = 1.0
    text: str | None = None
    """A file to train on; None: the example's text."""

    def learning_rate(self, step: int) -> float:
        """Linear warm-up over the first 5 % of the steps, then half a cosine down to zero."""
        warmup = max(1, int(WARMUP_FRAC * self.steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))

    def build_model(self) -> nn.Module:
        """On the CPU, with fresh random weights."""
        return build_model(
            ModelArguments(
                hidden_size=self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=max(1, self.hidden // 64),
                sequence_length=self.sequence,
            )
        )


def machine_name() -> str:
    """Of what trains here."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


@dataclass
class ArmRun:
    """One arm with one seed."""

    arm: str
    seed: int
    losses: list[float] = field(repr=False)
    held_out_loss: float
    wall_s: float
    final_frac: float = FINAL_FRAC
    machine: str = field(default_factory=machine_name)
    torch: str = torch.__version__

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last `final_frac` of the steps, nat per byte."""
        return statistics.fmean(self.losses[-max(1, int(self.final_frac * len(self.losses))) :])


def run_arm(arm: str, setup: Setup, seed: int) -> ArmRun:
    """Trains one arm from scratch; leaves nothing behind on the device."""
    torch.manual_seed(seed)
    model = setup.build_model()
    training_text, held_out_text = _texts(setup)
    train = _train_with_lazytrain if arm.startswith("lazytrain") else _train_with_torch
    start_s = time.perf_counter()
    losses = train(
        arm, model, setup, batches(training_text, setup, seed), lambda: held_out(model, held_out_text, setup)
    )
    *steps, held_out_loss = torch.stack(losses).tolist()
    return ArmRun(arm=arm, seed=seed, losses=steps, held_out_loss=held_out_loss, wall_s=time.perf_counter() - start_s)


def run_all(
    work: list[tuple[str, Setup, int]],
    num_jobs: int,
    run_arm: Callable[[str, Setup, int], ArmRun] = run_arm,
    *,
    always_apart: bool = False,
    kept: KeptRuns | None = None,
) -> list[ArmRun]:
    """Every (arm, setup, seed), in this order; several jobs (one too, if `always_apart`) run in their own processes.

    Args:
        kept: what it has is not run again, and what is run is written to it.
    """
    runs = {part: run for part in work if kept is not None and (run := kept.load(*part)) is not None}
    missing = [part for part in work if part not in runs]
    with contextlib.ExitStack() as stack:
        if num_jobs > 1 or always_apart:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=1))
            started = {pool.submit(_run_and_keep, run_arm, kept, *part): part for part in missing}
            results = ((started[future], future.result()) for future in as_completed(started))
        else:
            results = ((part, _run_and_keep(run_arm, kept, *part)) for part in missing)
        for part, run in results:
            runs[part] = run
            figures = f"{run.final_loss:.4f} in {run.wall_s:.1f} s"
            print(f"seed {run.seed}, {run.arm}: {figures}", file=sys.stderr, flush=True)
    return [runs[part] for part in work]


def _run_and_keep(run_arm: Callable, kept: KeptRuns | None, arm: str, setup: Setup, seed: int) -> ArmRun:
    run = run_arm(arm, setup, seed)
    if kept is not None:
        kept.store(setup, run)
    return run


@dataclass(frozen=True)
class KeptRuns:
    """A folder with a file for each run: a benchmark that was cut short goes on from there, with whole runs."""

    folder: Path

    def load(self, arm: str, setup: Setup, seed: int, *, so_far: bool = False) -> ArmRun | None:
        """A run of this setup that has ended (or, `so_far`, what it had written); None if there is none.

        Exits if the setup is another.
        """
        path = self._path(arm, seed)
        if so_far and not path.exists():
            path = self._path(arm, seed, SO_FAR)
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        if found["setup"] != asdict(setup):
            sys.exit(f"{path} is of another setup, {found['setup']}; name another --out, or delete it")
        return ArmRun(**found["run"])

    def store(self, setup: Setup, run: ArmRun) -> None:
        """Writes a run, or, if it has fewer steps than it shall have, what it is so far."""
        self.folder.mkdir(parents=True, exist_ok=True)
        so_far = self._path(run.arm, run.seed, SO_FAR)
        so_far.write_text(json.dumps({"setup": asdict(setup), "run": asdict(run)}))
        if len(run.losses) == setup.steps:
            so_far.replace(self._path(run.arm, run.seed))

    def _path(self, arm: str, seed: int, ending: str = ".json") -> Path:
        return self.folder / f"{arm}_{seed}{ending}"


def runs_so_far(work: list[tuple[str, Setup, int]], kept: KeptRuns) -> list[ArmRun]:
    """What `kept` has of them, unfinished runs too, all cut to the shortest."""
    runs = [run for part in work if (run := kept.load(*part, so_far=True)) is not None]
    if not runs:
        sys.exit(f"{kept.folder} holds no run; train some first")
    length = min(len(run.losses) for run in runs)
    return [replace(run, losses=run.losses[:length]) for run in runs]


def _texts(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    if setup.text is None:
        return load_text()
    text = np.fromfile(setup.text, dtype=np.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def batches(text: np.ndarray, setup: Setup, seed: int) -> Iterator[Tensor]:
    """int64 [batch, sequence], drawn without replacement, epoch after epoch."""
    windows = ByteWindows(text, setup.sequence).windows
    generator = torch.Generator().manual_seed(seed)
    left = setup.steps
    while left > 0:
        order = torch.randperm(len(windows), generator=generator)
        for start in range(0, min(len(order) - setup.batch + 1, left * setup.batch), setup.batch):
            yield windows[order[start : start + setup.batch]].to(setup.device)
            left -= 1


@torch.no_grad()
def held_out(model: nn.Module, text: np.ndarray, setup: Setup) -> Tensor:
    model.eval()
    windows = ByteWindows(text, setup.sequence).windows
    losses = [model(input_ids=part, labels=part).loss.float() for part in windows.to(setup.device).split(64)]
    sizes = torch.tensor([len(part) for part in windows.split(64)], dtype=torch.float32, device=setup.device)
    return (torch.stack(losses) * sizes).sum() / sizes.sum()


def _train_with_lazytrain(
    arm: str, model: nn.Module, setup: Setup, batches: Iterator[Tensor], held_out: Callable[[], Tensor]
) -> list[Tensor]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": setup.batch,
        "gradient_clipping": setup.max_norm,
        "bf16": {"enabled": setup.dtype == "bf16"},
        "zero_optimization": {"stage": 3},
        "lazytrain": {
            "max_tokens": setup.batch * setup.sequence,
            "fused_kernels": False,
            "optimizer": {"state_bits": 8 if arm == "lazytrain_8bit" else 32},
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.lr, betas=BETAS, weight_decay=setup.weight_decay)
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
    engine.flush()
    losses.append(held_out())
    engine.destroy()
    return losses


def _train_with_torch(
    arm: str, model: nn.Module, setup: Setup, batches: Iterator[Tensor], held_out: Callable[[], Tensor]
) -> list[Tensor]:
    """fp32 masters beside the weights (the weights themselves in fp32), as in the other arms."""
    model.to(setup.device).train()
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().clone()) for weight in weights]
    if setup.dtype == "bf16":
        for weight in weights:
            weight.data = weight.data.bfloat16()
    optimizer = _optimizer_class(arm)(masters, lr=setup.lr, betas=BETAS, weight_decay=setup.weight_decay)
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = setup.learning_rate(step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        for weight, master in zip(weights, masters):
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, setup.max_norm)
        optimizer.step()
        for weight, master in zip(weights, masters):
            weight.data.copy_(master.data)
        losses.append(loss.detach().float())
    losses.append(held_out())
    return losses


def _optimizer_class(arm: str) -> type[torch.optim.Optimizer]:
    if arm == "torch":
        return torch.optim.AdamW
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit


def percent_above(run: ArmRun, baseline: ArmRun, what: str = "final_loss") -> float:
    """How much higher a loss is than the baseline's, in percent of it."""
    return 100 * (getattr(run, what) / getattr(baseline, what) - 1)


def summarize(runs: list[ArmRun], baseline: str = BASELINE) -> list[dict]:
    """Per arm: mean losses over seeds, and the paired differences from the baseline arm (mean and worst seed)."""
    rows = []
    baselines = {run.seed: run for run in runs if run.arm == baseline}
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == arm]
        row = {
            "arm": arm,
            "seeds": len(own),
            "final_loss": statistics.fmean(run.final_loss for run in own),
            "held_out_loss": statistics.fmean(run.held_out_loss for run in own),
            "s_per_step": statistics.fmean(run.wall_s / len(run.losses) for run in own),
        }
        for what in ("final_loss", "held_out_loss") if baselines else ():
            above = [percent_above(run, baselines[run.seed], what) for run in own]
            row[f"{what}_percent_above"] = statistics.fmean(above)
            row[f"{what}_percent_above_worst"] = max(above, key=abs)
        rows.append(row)
    return rows


def print_table(rows: list[dict], baseline: str = "32 bit") -> None:
    titles = ("arm", "seeds", "training loss", f"(vs {baseline})", "held out", f"(vs {baseline})", "s/step")
    print("{:16} {:>5} {:>14} {:>12} {:>9} {:>12} {:>8}".format(*titles))
    for row in rows:
        above = [row.get(f"{what}_percent_above", math.nan) for what in ("final_loss", "held_out_loss")]
        print(
            f"{row['arm']:16} {row['seeds']:5d} {row['final_loss']:14.4f} {above[0]:+11.2f}% "
            f"{row['held_out_loss']:9.4f} {above[1]:+11.2f}% {row['s_per_step']:8.4f}"
        )


def draw(runs: list[ArmRun], setup: Setup, path: Path, baseline_arm: str = BASELINE) -> bool:
    """Loss curves of the first seed, and every arm's distance from the baseline arm. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, distance) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    window = max(1, setup.steps // 50)
    smooth = lambda losses: np.convolve(losses, np.ones(window) / window, mode="valid")  # noqa: E731
    first = [run for run in runs if run.seed == runs[0].seed]
    baseline = next((run for run in first if run.arm == baseline_arm), first[0])
    x = np.arange(window, len(baseline.losses) + 1)
    for run in first:
        curves.plot(x, smooth(run.losses), label=f"{run.arm}: {run.final_loss:.4f}", linewidth=1)
        if run is not baseline:
            distance.plot(x, 100 * (smooth(run.losses) / smooth(baseline.losses) - 1), label=run.arm, linewidth=1)
    title = f"mean of {window} steps; legend: mean of the last {100 * baseline.final_frac:.0f} %"
    curves.set(ylabel="training loss (nat per byte)", title=title)
    curves.legend()
    distance.axhspan(-0.5, 0.5, color="0.9", label="within 0.5 %")
    distance.set(xlabel="step", ylabel=f"% above {baseline.arm}")
    distance.legend(ncols=4, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16 on a GPU, fp32 on the CPU")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="each seed: initial weights and order of batches"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--hidden", type=int, default=384, help="width of the model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--text", help="train on the bytes of this file; its last tenth is held out")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; s/step means little with several")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="write PREFIX.json and PREFIX.png")
    return parser.parse_args()


def setup_of(arguments: argparse.Namespace) -> Setup:
    """Also tells DeepSpeed about the CPU, which must happen before it is imported."""
    if arguments.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    shared = ("device", "steps", "hidden", "layers", "batch", "sequence", "lr", "text")
    return Setup(
        dtype=arguments.dtype or ("bf16" if arguments.device == "cuda" else "fp32"),
        **{name: getattr(arguments, name) for name in shared},
    )


def publish(
    name: str, setup: Setup, runs: list[ArmRun], rows: list[dict], out: Path | None, *, baseline: str, **more: object
) -> None:
    """Prints the result as one line of JSON; with `out`, writes it with all losses to OUT.json, and draws OUT.png."""
    result = {
        "benchmark": name,
        "setup": asdict(setup),
        "machine": runs[0].machine,
        "torch": runs[0].torch,
        **more,
        "arms": rows,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with_curves = {**result, "runs": [{**asdict(run), "final_loss": run.final_loss} for run in runs]}
        out.with_suffix(".json").write_text(json.dumps(with_curves, indent=1) + "\n")
        if not draw(runs, setup, out.with_suffix(".png"), baseline):
            print("no figure: matplotlib is not installed", file=sys.stderr)
    print(json.dumps(result))


def main() -> None:
    arguments = parse_arguments()
    setup = setup_of(arguments)
    runs = run_all([(arm, setup, seed) for seed in arguments.seeds for arm in arguments.arms], arguments.jobs)
    rows = summarize(runs)
    print_table(rows)
    publish("convergence_8bit", setup, runs, rows, arguments.out, baseline=BASELINE)


if __name__ == "__main__":
    main()
