"""How close the NVMe tier comes to its disk: one JSON line per (what, direction), read and write in GB/s (10**9).

    python benchmarks/bench_nvme.py --folder /mnt/nvme                    # 8 GiB
    python benchmarks/bench_nvme.py --folder /mnt/a /mnt/b --gib 16
    python benchmarks/bench_nvme.py --folder /mnt/nvme --deepspeed        # DeepSpeed's asynchronous handle beside it
    python benchmarks/bench_nvme.py --folder /mnt/nvme --gib 0 --training 1.5b   # training with states on the disk

- `plain`: the ceiling. As many threads as the tier has, each in a loop of pread or pwrite of whole blocks, past the
  page cache, over preallocated files; nothing else.
- `tier`: regions through the engine, checksums included, one unit's worth per region, several in flight.
- `deepspeed`: `aio_handle` of DeepSpeed from its own pinned memory, same block size and queue depth. It is compiled on
  first use; where that fails its line says why (benchmarks/deepspeed_aio.py).

- `together`: through the tier, half of the regions read while the others are written, for four seconds; the rate of
  each direction, as the planner takes it.

They take turns, `--repeats` times, so that a disk that others use treats them alike. Every pass is over all files and
printed; the last line has the best of each and the tier's share of the ceiling.

`--training SHAPE` times steps of that model with all optimizer states on the disk, by benchmarks/step.py and by
DeepSpeed's ZeRO-Infinity (benchmarks/zero_infinity.py), one after the other, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from deepspeed_aio import aio_handle

from lazytrain_plugin.integration.measure_nvme import together_bytes_per_s
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.nvme.io import THREADS_PER_FOLDER
from lazytrain_plugin.runtime.nvme.region import BLOCK_BYTES
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.units import GIB, MIB


def passes(folders: list[Path], total_bytes: int, region_bytes: int, in_flight: int, deepspeed: bool) -> dict:
    """name -> (write everything, read everything)."""
    tier = NvmeTier(folders)
    regions = [tier.region(region_bytes, what=f"region {i}") for i in range(total_bytes // region_bytes)]
    buffers = [HostBuffer(region_bytes, pin=False) for _ in range(in_flight)]
    addresses = [buffer.tensor(torch.uint8, 0, 1).data_ptr() for buffer in buffers]
    for seed, buffer in enumerate(buffers):
        buffer.tensor(torch.int64, 0, region_bytes // 8).random_(generator=torch.Generator().manual_seed(seed))

    def tier_pass(direction: str) -> None:
        jobs = [None] * in_flight
        for i, region in enumerate(regions):
            if jobs[i % in_flight] is not None:
                jobs[i % in_flight].wait()
            jobs[i % in_flight] = getattr(region, direction)(addresses[i % in_flight], buffers[i % in_flight])
        for job in jobs:
            if job is not None:
                job.wait()

    num_threads = THREADS_PER_FOLDER * len(folders)
    plain_files = []
    for folder in tier.folders:
        fd, path = folder.create(total_bytes // len(folders), direct=True, what="plain")
        plain_files.append((fd, path))

    memories = [mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(num_threads)]
    for memory in memories:
        memory.madvise(mmap.MADV_HUGEPAGE)  # 4 KiB pages halve the rate: requests have a limit of pieces
        memory.write(os.urandom(MIB) * (BLOCK_BYTES // MIB))

    def plain_pass(direction: str) -> None:
        blocks = [
            (fd, offset)
            for offset in range(0, total_bytes // len(folders) // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)
            for fd, _ in plain_files
        ]
        place, lock = iter(blocks), threading.Lock()

        def work(memory: mmap.mmap) -> None:
            while True:
                with lock:
                    block = next(place, None)
                if block is None:
                    return
                moved = (
                    os.preadv(block[0], [memory], block[1])
                    if direction == "read"
                    else os.pwrite(block[0], memory, block[1])
                )
                assert moved == BLOCK_BYTES

        threads = [threading.Thread(target=work, args=(memory,)) for memory in memories]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def together() -> tuple[float, float]:
        return together_bytes_per_s(tier, regions, buffers, timed_s=4.0)

    found = {"plain": plain_pass, "tier": tier_pass, "together": together}
    if deepspeed:
        try:
            handle, libaio = aio_handle(BLOCK_BYTES, THREADS_PER_FOLDER, THREADS_PER_FOLDER)
        except RuntimeError as error:
            print(json.dumps({"what": "deepspeed", "error": str(error)}), flush=True)
        else:
            print(json.dumps({"what": "deepspeed", "libaio": libaio}), flush=True)
            pinned = handle.new_cpu_locked_tensor(region_bytes, torch.empty(0, dtype=torch.uint8))
            pinned.copy_(buffers[0].tensor(torch.uint8, 0, region_bytes))

            folder = tempfile.TemporaryDirectory(dir=folders[0])

            def deepspeed_pass(direction: str) -> None:
                for i in range(total_bytes // region_bytes):
                    getattr(handle, f"sync_p{direction}")(pinned, f"{folder.name}/{i}", 0)

            found["deepspeed"] = deepspeed_pass

    def close() -> None:
        tier.close()
        if "deepspeed" in found:
            folder.cleanup()

    found["close"] = close
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", nargs="+", type=Path, default=[Path(tempfile.gettempdir())])
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--region-mib", type=int, default=256)
    parser.add_argument("--in-flight", type=int, default=3, help="regions read or written at once, as nvme_slots")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeed's asynchronous handle too")
    parser.add_argument("--training", metavar="SHAPE", help="time training steps with states on the disk")
    parser.add_argument("--layers", type=int, help="of that model, if not its own")
    parser.add_argument("--bs", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--limit-s", type=float, default=280, help="time limit of each of the two runs")
    options = parser.parse_args()
    if options.gib > 0:
        compare_rates(options)
    if options.training:
        compare_training(options)


def compare_rates(options: argparse.Namespace) -> None:
    total_bytes = int(options.gib * GIB) // (options.region_mib * MIB) * options.region_mib * MIB
    found = passes(options.folder, total_bytes, options.region_mib * MIB, options.in_flight, options.deepspeed)
    close, together = found.pop("close"), found.pop("together")
    best: dict[tuple[str, str], float] = {}
    try:
        for _ in range(options.repeats):
            for direction in ("write", "read"):
                for name, one_pass in found.items():
                    start_s = time.perf_counter()
                    one_pass(direction)
                    rate = total_bytes / (time.perf_counter() - start_s) / 1e9
                    best[name, direction] = max(best.get((name, direction), 0.0), rate)
                    print(json.dumps({"what": name, "direction": direction, "gb_per_s": round(rate, 3)}), flush=True)
            for direction, bytes_per_s in zip(("read", "write"), together()):
                rate = bytes_per_s / 1e9
                best["together", direction] = max(best.get(("together", direction), 0.0), rate)
                print(json.dumps({"what": "together", "direction": direction, "gb_per_s": round(rate, 3)}), flush=True)
    finally:
        close()
    best_of = {" ".join(k): round(v, 3) for k, v in best.items()}
    share = {d: round(best["tier", d] / best["plain", d], 3) for d in ("write", "read")}
    print(json.dumps({"best_gb_per_s": best_of, "tier_share": share}), flush=True)


def compare_training(options: argparse.Namespace) -> None:
    """Prints the JSON line of each run, then the ratio of their step times (sustained, the last update included)."""
    here = Path(__file__).parent
    size = ["--shape", options.training, "--bs", str(options.bs), "--seq", str(options.seq)]
    size += ["--steps", str(options.steps), "--warmup", "1"]
    size += ["--layers", str(options.layers)] if options.layers else []
    folders = [str(folder) for folder in options.folder]
    ours = ["step.py", *size, "--nvme", *folders, "--nvme-states-units", "1000", "--stem-states", "nvme"]
    with tempfile.TemporaryDirectory(dir=folders[0]) as folder:
        theirs = ["zero_infinity.py", *size, "--nvme", folder]
        results = [run_one(here, command, options.limit_s) for command in (ours, theirs)]
    for result in results:
        print(json.dumps(result), flush=True)
    if not any("error" in result for result in results):
        ratio = results[1]["s_per_step"] / results[0]["s_per_step_sustained"]
        print(json.dumps({"speed_over_zero_infinity": round(ratio, 3)}), flush=True)


def run_one(here: Path, command: list[str], limit_s: float) -> dict:
    """The last JSON line that a benchmark printed, or why there is none under "error"."""
    process = subprocess.Popen(
        [sys.executable, str(here / command[0]), *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"system": command[0], "error": f"not done within {limit_s:.0f} s (--limit-s)"}
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        return {"system": command[0], "error": (said.strip().splitlines() or ["no output"])[-1][:400]}
    return json.loads(lines[-1])


if __name__ == "__main__":
    main()
