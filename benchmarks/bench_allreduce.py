"""Quantized against bf16 gradient reduction between ranks that count as nodes: by size, and in DeepSpeed's step.

    torchrun --nproc-per-node 2 benchmarks/bench_allreduce.py                        # what connects the GPUs: NVLink
    torchrun --nproc-per-node 2 benchmarks/bench_allreduce.py --transport sockets    # NCCL over TCP: a slow network
    torchrun --nproc-per-node 2 benchmarks/bench_allreduce.py --only zero++          # in a run of its own
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 benchmarks/bench_allreduce.py --quick       # gloo, to try it out

Every `--ranks-per-node` ranks (default 1) count as a node, whatever really connects them. What is measured, each line a
JSON object printed by rank 0:

- `allreduce`: one bucket of so many bytes of bf16, in 8-bit codes and by torch's own all-reduce of bf16, alternating;
  medians of the slowest rank, in seconds.
- `threshold`: from which size on the reducer itself, measuring at its start, would use codes here.
- `deepspeed`: a step (forward, backward, step) of DeepSpeed's engine at ZeRO stages 0, 1 and 2, with its own reduction
  and with LazyTrain's; `wire_bytes`: what a rank sent to other nodes, as LazyTrain counts it.
- `zero++`: a step at stage 3 with and without `zero_quantized_gradients`, or the reason why it does not run. Each rank
  then sees one GPU, because DeepSpeed takes the GPUs that a rank sees for its node and quantizes between nodes only;
  DeepSpeed compiles its kernel first.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

import lazytrain_plugin.install  # noqa: F401
from lazytrain_plugin.comm.reducer import QuantizedReducer
from lazytrain_plugin.comm.threshold import NEVER
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.units import MIB

SOCKETS_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_NVLS_ENABLE": "0"}
SECTIONS = ("allreduce", "threshold", "deepspeed", "zero++")
SIZES = tuple(32 * 1024 * 4**power for power in range(8))
"""32 KiB to 512 MiB of bf16."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("default", "sockets"), default="default", help="sockets: NCCL over TCP")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="ranks that count as one node")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS[:-1])
    parser.add_argument("--repeats", type=int, default=10, help="timed all-reduces of each size, and each way")
    parser.add_argument("--largest-mib", type=float, default=512, help="largest bucket")
    parser.add_argument("--layers", type=int, default=16, help="of the trained model, each width x width twice")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192, help="rows of a batch, per rank")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each engine")
    parser.add_argument("--quick", action="store_true", help="small sizes, for the CPU")
    arguments = parser.parse_args()
    if arguments.quick:
        small = {"repeats": 3, "largest_mib": 2, "layers": 2, "width": 256, "tokens": 16, "steps": 2}
        vars(arguments).update(small)
    return arguments


class Ranks:
    """This rank, its device and its clock."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.on_gpu else torch.device("cpu")
        self.topology = Topology.consecutive(self.world, arguments.ranks_per_node)
        self.about = {"transport": arguments.transport, "nodes": len(self.topology.nodes), "ranks": self.world}

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def time_s(self, work: Callable[[], None]) -> float:
        """Of the slowest rank, from a common start."""
        self.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        work()
        self.synchronize()
        taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=self.device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    def medians_s(self, arms: dict[str, Callable[[], None]], repeats: int, warmup: int = 2) -> dict[str, float]:
        """Of each arm; they alternate, so that they see the same machine."""
        times: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(warmup + repeats):
            for name, work in arms.items():
                seconds = self.time_s(work)
                if number >= warmup:
                    times[name].append(seconds)
        return {name: statistics.median(values) for name, values in times.items()}

    def print(self, what: str, **found: object) -> None:
        if self.rank == 0:
            rounded = {key: round(value, 7) if isinstance(value, float) else value for key, value in found.items()}
            print(json.dumps({"what": what, **self.about, **rounded}), flush=True)


def bench_allreduce(ranks: Ranks, arguments: argparse.Namespace) -> None:
    reducer = QuantizedReducer(topology=ranks.topology, smallest_bucket_elements=1)
    for size in SIZES:
        if size > arguments.largest_mib * MIB:
            break
        summed = torch.randn(size // 2, device=ranks.device).mul_(1e-9).to(torch.bfloat16)  # grows with each repeat
        averaged = summed.clone()
        arms = {
            "bf16_s": lambda bucket=summed: dist.all_reduce(bucket),
            "quantized_s": lambda bucket=averaged: reducer.reduce(bucket),
        }
        before = reducer.stats()
        seconds = ranks.medians_s(arms, arguments.repeats)
        calls = reducer.stats().quantized_buckets - before.quantized_buckets
        wire_bytes = (reducer.stats().wire_bytes - before.wire_bytes) // max(1, calls)
        speedup = round(seconds["bf16_s"] / seconds["quantized_s"], 3)
        ranks.print("allreduce", bytes=size, **seconds, speedup=speedup, wire_bytes=wire_bytes)
        # What a link of this speed would carry: a ring's bytes over the time of the bf16 all-reduce.
        ring_bytes = 2 * (ranks.world - 1) / ranks.world * size
        ranks.print("link", bytes=size, gbyte_per_s=ring_bytes / seconds["bf16_s"] / 1e9)
    reducer.close()


def bench_threshold(ranks: Ranks) -> None:
    reducer = QuantizedReducer(topology=ranks.topology)
    smallest = reducer.smallest_bucket_elements
    chosen = "full precision at every size" if smallest >= NEVER else f"codes from {2 * smallest} bytes of bf16 on"
    ranks.print("threshold", elements=smallest, chosen=chosen, measured=reducer.measured)
    reducer.close()


def make_engine(ranks: Ranks, arguments: argparse.Namespace, zero: dict, block: dict):
    import deepspeed

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(arguments.layers):
        layers += [nn.Linear(arguments.width, arguments.width), nn.GELU(), nn.Linear(arguments.width, arguments.width)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 2**26, **zero},
        "zero_allow_untested_optimizer": True,
        "lazytrain": block,
    }
    if zero["stage"] == 0:
        # bf16 on the wire, like the other stages: at stage 0 DeepSpeed sends fp32 otherwise
        config["communication_data_type"] = "bf16"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def time_engines(ranks: Ranks, arguments: argparse.Namespace, engines: dict) -> dict[str, float]:
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    shape = (arguments.tokens, arguments.width)
    x = torch.randn(shape, generator=generator, device=ranks.device).to(torch.bfloat16)

    def step(engine) -> None:
        engine.backward(engine(x).float().square().mean())
        engine.step()

    return ranks.medians_s({f"{name}_s": lambda e=e: step(e) for name, e in engines.items()}, arguments.steps)


def bench_deepspeed(ranks: Ranks, arguments: argparse.Namespace) -> None:
    for stage in arguments.stages:
        hook = {"gradient_comm": {"bits": 8, "ranks_per_node": arguments.ranks_per_node, "smallest_bucket_elements": 1}}
        engines = {
            "deepspeed": make_engine(ranks, arguments, {"stage": stage}, {"enabled": False}),
            "lazytrain": make_engine(ranks, arguments, {"stage": stage}, hook),
        }
        seconds = time_engines(ranks, arguments, engines)
        stats = engines["lazytrain"].lazytrain_gradient_comm.stats()
        wire_bytes = stats.wire_bytes // (arguments.steps + 2)
        ranks.print(
            "deepspeed",
            stage=stage,
            elements=sum(p.numel() for p in engines["lazytrain"].module.parameters()),
            **seconds,
            speedup=round(seconds["deepspeed_s"] / seconds["lazytrain_s"], 3),
            wire_bytes=wire_bytes,
            fallbacks=dict(stats.fallbacks),
        )
        for engine in engines.values():
            engine.destroy()
        del engine, engines
        free_memory(ranks)


def bench_zero_plus_plus(ranks: Ranks, arguments: argparse.Namespace) -> None:
    reason = why_no_zero_plus_plus(ranks)
    if reason is None:
        try:
            engines = {
                "stage3": make_engine(ranks, arguments, {"stage": 3}, {"enabled": False}),
                "stage3_quantized_gradients": make_engine(
                    ranks, arguments, {"stage": 3, "zero_quantized_gradients": True}, {"enabled": False}
                ),
            }
            seconds = time_engines(ranks, arguments, engines)
        except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            speedup = seconds["stage3_s"] / seconds["stage3_quantized_gradients_s"]
            ranks.print("zero++", **seconds, speedup=round(speedup, 3))
            return
    ranks.print("zero++", does_not_run=reason)


def why_no_zero_plus_plus(ranks: Ranks) -> str | None:
    """What keeps `zero_quantized_gradients` from running here; None if nothing is known to."""
    if not ranks.on_gpu:
        return "its kernels are CUDA only"
    try:
        from deepspeed.ops.op_builder import QuantizerBuilder

        QuantizerBuilder().load()
    except Exception as error:  # whatever a compiler's absence raises
        return f"its kernel can't be built: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


def show_one_gpu() -> None:
    """Hides the other ranks' GPUs from this one; before CUDA starts."""
    local_rank = int(os.environ["LOCAL_RANK"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank] if visible else str(local_rank)
    os.environ["LOCAL_RANK"] = "0"


def free_memory(ranks: Ranks) -> None:
    gc.collect()
    if ranks.on_gpu:
        torch.cuda.empty_cache()


def main() -> None:
    arguments = parse_arguments()
    if arguments.transport == "sockets":
        os.environ.update(SOCKETS_ONLY)  # NCCL reads them when the first communicator is made
    if "zero++" in arguments.only:
        show_one_gpu()
    ranks = Ranks(arguments)
    if ranks.on_gpu:
        torch.cuda.set_device(ranks.device)
        ranks.about["gpu"] = torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
    logging.disable(logging.INFO)
    dist.init_process_group("nccl" if ranks.on_gpu else "gloo")
    wants_deepspeed = {"deepspeed", "zero++"} & set(arguments.only)
    if wants_deepspeed:
        import deepspeed

        if not ranks.on_gpu:
            # A minute of compilation, for inference. By name: the attribute `deepspeed.comm.torch` is torch itself.
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        deepspeed.init_distributed("nccl" if ranks.on_gpu else "gloo")
    for section in sections(ranks, arguments):
        section()
        free_memory(ranks)
    dist.barrier()
    dist.destroy_process_group()


def sections(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[Callable[[], None]]:
    every = {
        "allreduce": lambda: bench_allreduce(ranks, arguments),
        "threshold": lambda: bench_threshold(ranks),
        "deepspeed": lambda: bench_deepspeed(ranks, arguments),
        "zero++": lambda: bench_zero_plus_plus(ranks, arguments),
    }
    return (work for name, work in every.items() if name in arguments.only)


if __name__ == "__main__":
    main()
