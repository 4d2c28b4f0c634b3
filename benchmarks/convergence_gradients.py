"""Trains the same model with gradients averaged over ranks in full precision and in 8-bit codes; compares the losses.

    torchrun --nproc-per-node 2 benchmarks/convergence_gradients.py --steps 1000 --out results.json
    torchrun --nproc-per-node 2 benchmarks/convergence_gradients.py --hidden 64 --layers 2 --lr 3e-3 --steps 300

Arms, each from the same initial weights, with the same batches in the same order, AdamW in fp32 and clipping; every
rank is a node, and every bucket or unit travels in codes where there are any:

    full         torch's DistributedDataParallel and its own all-reduce
    8bit         the same with lazytrain_plugin.ddp_comm_hook
    full_again   as `full`, with each rank's share of a batch in another order: how far apart two correct runs end
    engine       LazyTrain's engine, gradients in full precision
    engine_8bit  the same in codes

Rank 0 prints a line per arm and seed, and as its last line JSON: the mean training loss of the last 5 % of the steps,
the loss on text that was held out, and how far an arm is above the full one, in percent.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lazytrain_plugin
from benchmarks import convergence_8bit as common
from examples.train_lm import load_text
from lazytrain_plugin.comm.topology import Topology

BASELINE = "full"
ARMS = (BASELINE, "8bit", "full_again", "engine", "engine_8bit")


def run_arm(arm: str, setup: common.Setup, seed: int, *, rank: int, device: torch.device) -> common.ArmRun:
    """Trains one arm on all ranks, each with its share of every batch; the losses are the means over ranks."""
    world = dist.get_world_size()
    torch.manual_seed(seed)
    model = setup.build_model().to(device)
    make = functools.partial(torch.optim.AdamW, lr=setup.lr, betas=common.BETAS, weight_decay=setup.weight_decay)
    trainer = (EngineTrainer if arm.startswith("engine") else DDPTrainer)(arm, model, setup, make, device)
    text, held_out = load_text()
    losses = []
    begin = time.perf_counter()
    for step, batch in enumerate(common.batches(text, setup, seed)):
        share = batch[rank::world] if arm != "full_again" else batch.flip(0)[rank::world]
        for group in trainer.optimizer.param_groups:
            group["lr"] = setup.learning_rate(step)
        losses.append(trainer.step(share).detach().float())
    wall_s = time.perf_counter() - begin
    mean = torch.stack([*losses, common.held_out(model, held_out, setup)])
    dist.all_reduce(mean)
    *steps, held_out_loss = (mean / world).tolist()
    trainer.close()
    return common.ArmRun(arm=arm, seed=seed, losses=steps, held_out_loss=held_out_loss, wall_s=wall_s)


class DDPTrainer:
    """torch's DistributedDataParallel, with or without the hook."""

    def __init__(self, arm: str, model: nn.Module, setup: common.Setup, make_optimizer, device: torch.device) -> None:
        self._max_norm = setup.max_norm
        self._ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        self._reducer = None
        if arm == "8bit":
            nodes = Topology.consecutive(dist.get_world_size(), 1)
            self._reducer = lazytrain_plugin.QuantizedReducer(topology=nodes, smallest_bucket_elements=1)
            self._ddp.register_comm_hook(self._reducer, lazytrain_plugin.ddp_comm_hook)
        self.optimizer = make_optimizer(self._ddp.parameters(), foreach=True)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self._ddp(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._ddp.parameters(), self._max_norm)
        self.optimizer.step()
        return loss

    def close(self) -> None:
        if self._reducer is not None:
            assert not self._reducer.stats().fallbacks, self._reducer.stats()
            self._reducer.close()


class EngineTrainer:
    """LazyTrain's engine, made as a script would make it."""

    def __init__(self, arm: str, model: nn.Module, setup: common.Setup, make_optimizer, device: torch.device) -> None:
        import deepspeed

        if device.type == "cpu":  # a minute of compilation, for inference
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        self.optimizer = make_optimizer(model.parameters())
        bits = 8 if arm == "engine_8bit" else 16
        config = {
            "train_micro_batch_size_per_gpu": setup.batch // dist.get_world_size(),
            "gradient_clipping": setup.max_norm,
            "zero_optimization": {"stage": 3},
            "lazytrain": {
                "max_tokens": setup.batch * setup.sequence,
                "fused_kernels": False,
                "gradient_comm": {"bits": bits, "ranks_per_node": 1, "smallest_bucket_elements": 1},
            },
        }
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=config)
        self._bits = bits

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self._engine(input_ids=batch, labels=batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return loss

    def close(self) -> None:
        stats = self._engine.lazytrain_gradient_comm.stats()
        assert (stats.full_precision_buckets, stats.quantized_buckets)[self._bits == 16] == 0, stats
        self._engine.destroy()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, all ranks together")
    parser.add_argument("--sequence", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--out", type=Path, help="write JSON here, with the losses of all steps")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    shared = ("steps", "hidden", "layers", "batch", "sequence", "lr")
    setup = common.Setup(device=str(device), dtype="fp32", **{name: getattr(arguments, name) for name in shared})
    runs = []
    for seed in arguments.seeds:
        for arm in arguments.arms:
            runs.append(run_arm(arm, setup, seed, rank=rank, device=device))
            if rank == 0:
                last = runs[-1]
                figures = f"{last.final_loss:.4f} training, {last.held_out_loss:.4f} held out, {last.wall_s:.1f} s"
                print(f"seed {seed}, {arm}: {figures}", flush=True)
    if rank == 0:
        result = {
            "benchmark": "convergence_gradients",
            "ranks": dist.get_world_size(),
            "setup": asdict(setup),
            "machine": torch.cuda.get_device_name() if on_gpu else "CPU",
            "torch": torch.__version__,
            "arms": summarize(runs),
        }
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps({**result, "runs": [asdict(run) for run in runs]}) + "\n")
        print(json.dumps(result))
    dist.destroy_process_group()


def summarize(runs: list[common.ArmRun]) -> list[dict]:
    """Per arm: mean losses over seeds, and how far above the full-precision run of the same seed, mean and worst."""
    baselines = {run.seed: run for run in runs if run.arm == BASELINE}
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == arm]
        row: dict = {
            "arm": arm,
            "seeds": len(own),
            "s_per_step": statistics.fmean(r.wall_s / len(r.losses) for r in own),
        }
        for what in ("final_loss", "held_out_loss"):
            row[what] = statistics.fmean(getattr(run, what) for run in own)
            if baselines and arm != BASELINE:
                above = [common.percent_above(run, baselines[run.seed], what) for run in own]
                row[f"{what}_percent_above"] = statistics.fmean(above)
                row[f"{what}_percent_above_worst"] = max(above, key=abs)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
