"""Rate of the optimizer update and its helpers: one JSON line per (operation, instruction set, threads).

    python benchmarks/bench_kernels.py        # every instruction set of this machine, 1, 2, 4 ... all threads
    python benchmarks/bench_kernels.py --isa best --threads 16 --params 268435456
    python benchmarks/bench_kernels.py --device cuda

`gparams_per_s` is the best of `--repeats` runs by wall clock, `gib_per_s` the bytes that such a run must move.
`--cpu-time` counts the calling thread's processor time instead: right on a busy machine, with one thread only.
"""

import argparse
import itertools
import json
import os
import platform
import time

import torch

from lazytrain_plugin.kernels import native
from lazytrain_plugin.kernels.adamw import AdamWStep, Batch, Moment8, accumulate, adamw_8bit, adamw_fp32
from lazytrain_plugin.kernels.coded_gradient import CodedGradient, add_codes, encode_gradient
from lazytrain_plugin.kernels.norm import LANES, sum_squares_lanes
from lazytrain_plugin.kernels.split import join_master, split_master
from lazytrain_plugin.units import GIB

STEP = AdamWStep(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=10)


def operations(numel: int, device: torch.device) -> dict:
    """name -> (bytes moved per element, function)."""
    weight = torch.empty(numel, dtype=torch.bfloat16, device=device)
    remainder = torch.empty(numel, dtype=torch.int16, device=device)
    gradient = torch.randn(numel, device=device).to(torch.bfloat16)
    master, m, v = (torch.zeros(numel, device=device) for _ in range(3))
    m8, v8 = (Moment8.zeros(numel, signed=signed, device=device) for signed in (True, False))
    lanes = torch.empty(LANES, dtype=torch.float64, device=device)
    split_master(torch.randn(numel, device=device), weight, remainder)
    codes, total = CodedGradient.empty(numel, 8, device), CodedGradient.empty(numel, 16, device)
    encode_gradient(gradient, codes)
    add_codes(total, codes, first=True)
    code, sum_code = 1 + 2 / 64, 2 + 2 / 64
    layer = cut_as_a_layer(gradient)
    layer_lanes = torch.empty(len(layer), LANES, dtype=torch.float64, device=device)

    def sum_squares_together() -> None:
        batch = Batch()
        for tensor, row in zip(layer, layer_lanes, strict=True):
            sum_squares_lanes(tensor, row, batch=batch)
        batch.run()

    def sum_squares_apart() -> None:
        for tensor, row in zip(layer, layer_lanes, strict=True):
            sum_squares_lanes(tensor, row)

    adamw8 = lambda g: adamw_8bit(weight, remainder, g, m8, v8, STEP, noise_key=0)  # noqa: E731
    return {
        "adamw_fp32": (26, lambda: adamw_fp32(weight, remainder, gradient, m, v, STEP)),
        "adamw_8bit": (14 + 16 / 256, lambda: adamw8(gradient)),
        "adamw_fp32_codes": (24 + code, lambda: adamw_fp32(weight, remainder, codes, m, v, STEP)),
        "adamw_8bit_codes": (12 + 16 / 256 + code, lambda: adamw8(codes)),
        "adamw_8bit_code_sums": (12 + 16 / 256 + sum_code, lambda: adamw8(total)),
        "encode_gradient": (2 + code, lambda: encode_gradient(gradient, codes)),
        "add_codes": (code + 2 * sum_code, lambda: add_codes(total, codes, first=False)),
        "sum_squares_codes": (sum_code, lambda: sum_squares_lanes(total, lanes)),
        "sum_squares": (2, lambda: sum_squares_lanes(gradient, lanes)),
        "sum_squares_layer": (2, sum_squares_together),
        "sum_squares_layer_apart": (2, sum_squares_apart),
        "accumulate": (10, lambda: accumulate(master, gradient, first=False)),
        "split": (8, lambda: split_master(master, weight, remainder)),
        "join": (8, lambda: join_master(weight, remainder, master)),
    }


def cut_as_a_layer(flat: torch.Tensor) -> list[torch.Tensor]:
    """Twelve tensors in the proportions of a Qwen2-7B layer's: seven matrices, three biases, two norms."""
    hidden, intermediate, keys = 3584, 18944, 512
    shares = [hidden**2, hidden * keys, hidden * keys, hidden**2, *[hidden * intermediate] * 3, hidden, keys, keys]
    shares += [hidden, hidden]
    total, ends = sum(shares), list(itertools.accumulate(shares))
    ends = [end * flat.numel() // total // 256 * 256 for end in ends[:-1]] + [flat.numel()]
    return [flat[start:end] for start, end in zip([0, *ends], ends)]


def seconds(function, device: torch.device, repeats: int, clock) -> float:
    def run() -> float:
        start = clock()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    run()
    return min(run() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--isa", action="append", help="'best', or names; default: all that this processor has")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--params", type=int, default=64 * 2**20)
    parser.add_argument("--operation", action="append", help="default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()

    device = torch.device(options.device)
    available = native.available_isas()
    isas = [available[0] if isa == "best" else isa for isa in options.isa or available]
    cores = native.default_num_threads(1)
    powers = [2**exponent for exponent in range(cores.bit_length()) if 2**exponent < cores]
    threads = options.threads or ([1] if options.cpu_time else [*powers, cores])
    if device.type == "cuda":
        isas, threads = ["triton"], [0]
    clock = time.thread_time if options.cpu_time else time.perf_counter

    for isa in isas:
        numel = options.params if isa != native.PLAIN_TORCH else min(options.params, 4 * 2**20)  # it is slow
        made = operations(numel, device)
        for count in threads:
            if device.type == "cpu":
                native.force_isa(isa)
                native.set_num_threads(count)
                torch.set_num_threads(count)
            for name, (num_bytes, function) in made.items():
                if options.operation and name not in options.operation:
                    continue
                duration = seconds(function, device, options.repeats if isa != native.PLAIN_TORCH else 1, clock)
                line = {
                    "operation": name,
                    "isa": isa,
                    "threads": count,
                    "params": numel,
                    "seconds": round(duration, 6),
                    "gparams_per_s": round(numel / duration / 1e9, 3),
                    "gib_per_s": round(numel * num_bytes / duration / GIB, 1),
                    "clock": "thread" if options.cpu_time else "wall",
                    "load": round(os.getloadavg()[0], 1),
                    "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
                }
                print(json.dumps(line), flush=True)
    native.force_isa(None)


if __name__ == "__main__":
    main()
