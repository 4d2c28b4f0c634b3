"""Run by test_two_nodes.py, by each of four ranks: steps with DeepSpeed's gradient reduction and with LazyTrain's.

    python -m torch.distributed.run --nnodes 2 --nproc-per-node 2 ... run_two_nodes.py RESULT.json INTERFACE

Rank 0 writes what it measured. Both arms alternate within one run, so that they see the same machine.
"""

import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import lazytrain_plugin.install  # noqa: F401
from lazytrain_plugin.integration.several_ranks import describe_exchange

WIDTH, STEPS, WARM_UP = 1792, 7, 1
ARMS = {
    "stage 0, bf16 on the wire": {"zero_optimization": {"stage": 0}, "communication_data_type": "bf16"},
    "stage 1, bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "stage 2, bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
}


STAGE_3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
"""LazyTrain's own engine; what it sends in fp32 is the mean's exact sum."""


def plain_model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class Layers(nn.Module):
    """Two layers that are streamed, and nothing around them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def make_engine(config, block):
    torch.manual_seed(0)
    model = Layers() if config["zero_optimization"]["stage"] == 3 else plain_model()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, **config, "lazytrain": block}
    if config["zero_optimization"]["stage"] == 3:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine, x):
    dist.barrier()
    begin = time.perf_counter()
    engine.backward(engine(x).float().square().mean())
    engine.step()
    dist.barrier()
    return time.perf_counter() - begin


def sent_bytes(interface):
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def compare(config, interface):
    engines = {"deepspeed": make_engine(config, {"enabled": False})}
    engines["lazytrain"] = make_engine(config, {"gradient_comm": {"bits": 8}})
    (reducer,) = engines["lazytrain"].lazytrain_gradient_comm._reducers.values()
    return {**measure(engines, interface), "reducer": reducer.describe(), "threshold": reducer.smallest_bucket_elements}


def compare_stage_3(interface):
    """LazyTrain's engine with gradients in fp32 and in codes."""
    blocks = {"fp32": {"gradient_comm": {"bits": 16}}, "lazytrain": {"gradient_comm": {"bits": 8}}}
    engines = {name: make_engine(STAGE_3, {"plan": {"cache": False}, **block}) for name, block in blocks.items()}
    engines["deepspeed"] = make_engine(STAGE_3, {"enabled": False})
    measured = measure(engines, interface)
    norms = {name: float(engine.get_global_grad_norm()) for name, engine in engines.items()}
    exchange = engines["lazytrain"].lazytrain.executor.exchange
    planned = {}
    if dist.get_rank() == 0:  # which has the planner
        times = {name: engines[name]._planner.predicted(engines[name].lazytrain.executor.plan) for name in blocks}
        planned = {name: predicted.busy_s["exchange"] for name, predicted in times.items()}
    for engine in engines.values():
        engine.destroy()
    threshold = exchange.between.smallest_bucket_elements
    said = {"reducer": describe_exchange(exchange), "planned_exchange_seconds": planned}
    return {**measured, "norms": norms, "threshold": threshold, **said}


def measure(engines, interface):
    """Steps of both engines in turn, on the same batch."""
    dtype = torch.bfloat16 if engines["lazytrain"].bfloat16_enabled() else torch.float32
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
    times = {name: [] for name in engines}
    wire = dict.fromkeys(engines, 0)
    comm = engines["lazytrain"].lazytrain_gradient_comm
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            before = comm.stats().wire_bytes
            wire = dict.fromkeys(engines, 0)
        for name, engine in engines.items():
            sent = sent_bytes(interface)
            seconds = step(engine, x)
            wire[name] += sent_bytes(interface) - sent
            times[name] += [seconds] if number >= WARM_UP else []
    counted = torch.tensor([comm.stats().wire_bytes - before])
    dist.all_reduce(counted)
    return {
        # The fastest: what else runs on the machine only ever slows a step, and the arm that computes more by more.
        "seconds": {name: min(values) for name, values in times.items()},
        "median_seconds": {name: statistics.median(values) for name, values in times.items()},
        "slowest_seconds": {name: max(values) for name, values in times.items()},
        "interface_bytes": {name: value / STEPS for name, value in wire.items()},
        "counted_bytes_of_a_node": int(counted) / 2 / STEPS,
        "elements": sum(p.numel() for p in engines["lazytrain"].module.parameters()),
    }


def main(result_path, interface):
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    # A minute of compilation, for inference; one that was killed leaves a lock behind. By name: the attribute
    # `deepspeed.comm.torch` is torch itself.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    results = {name: compare(config, interface) for name, config in ARMS.items()}
    results["stage 3"] = compare_stage_3(interface)
    if dist.get_rank() == 0:
        Path(result_path).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
