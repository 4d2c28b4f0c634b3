"""Times training steps under DeepSpeed's own NVMe offload of optimizer states (ZeRO-Infinity), without LazyTrain.

    python benchmarks/zero_infinity.py --shape 1.5b --bs 8 --nvme /mnt/nvme
    python benchmarks/zero_infinity.py --shape small --bs 2 --seq 64 --nvme /tmp --device cpu     # try it out

Prints one JSON line: the median of the wall time of whole steps after warm-up, each with the device idle at its end,
and the bytes that were found on the disk (small models are not offloaded at all, without a word). Where it can't run,
the line says why under "error".
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

import psutil
import torch
from deepspeed_aio import load, prepare_libaio

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b", help="a name in benchmarks/shapes.py")
    parser.add_argument("--layers", type=int, help="another depth than the shape's")
    parser.add_argument("--bs", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--nvme", type=Path, required=True, help="a folder on an NVMe disk")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    result = {"system": "deepspeed-zero3-nvme-states", "shape": arguments.shape, "bs": arguments.bs}
    result["seq"] = arguments.seq
    try:
        result |= {"libaio": prepare_libaio()} | run(arguments)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(json.dumps(result | {"error": f"{type(error).__name__}: {lines[-1][:400]}"}), flush=True)
        sys.exit(1)
    print(json.dumps(result), flush=True)


def run(arguments: argparse.Namespace) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    is_cuda = arguments.device == "cuda"
    if not is_cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from shapes import build_model

    begin_s = time.perf_counter()
    for operator in ("async_io", "cpu_adam"):
        load(operator)
    operators_s = time.perf_counter() - begin_s
    deepspeed.init_distributed("nccl" if is_cuda else "gloo")
    torch.manual_seed(0)
    model = build_model(arguments.shape, arguments.device, layers=arguments.layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(arguments))
    start_s = time.perf_counter() - begin_s - operators_s
    vocab_size = model.config.vocab_size
    ids = torch.randint(0, vocab_size, (arguments.bs, arguments.seq), device=arguments.device)
    seconds, losses = [], []
    for _ in range(arguments.warmup + arguments.steps):
        step_began_s = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - step_began_s)
    on_disk = sum(path.stat().st_size for path in arguments.nvme.rglob("*") if path.is_file())
    if on_disk == 0:
        raise RuntimeError("DeepSpeed put nothing on the disk: the model is too small for it")
    s_per_step = statistics.median(seconds[arguments.warmup :])
    num_tokens = arguments.bs * arguments.seq
    return {
        "parameters": num_parameters,
        "s_per_step": round(s_per_step, 4),
        "tflops": round(6 * num_parameters * num_tokens / s_per_step / 1e12, 1),
        "on_disk_gib": round(on_disk / GIB, 2),
        "gpu_peak_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if is_cuda else None,
        "rss_gib": round(psutil.Process().memory_info().rss / GIB, 2),
        "deepspeed": deepspeed.__version__,
        "operators_s": round(operators_s, 1),
        "start_s": round(start_s, 1),
        "s_of_each_step": [round(s, 4) for s in seconds],
        "losses": [round(loss, 4) for loss in losses],
    }


def config(arguments: argparse.Namespace) -> dict:
    """Asynchronous I/O as its documentation tunes it; the defaults are far slower."""
    return {
        "train_micro_batch_size_per_gpu": arguments.bs,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(arguments.nvme),
                "pin_memory": arguments.device == "cuda",
                "pipeline_read": True,
                "pipeline_write": True,
                "buffer_count": 12,  # gradient and three states of the unit before, this one and the next
            },
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 10**8,
            "reduce_bucket_size": 5 * 10**8,
            "stage3_prefetch_bucket_size": 5 * 10**8,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 8,
            "single_submit": False,
            "overlap_events": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "steps_per_print": 10**9,
    }


if __name__ == "__main__":
    main()
