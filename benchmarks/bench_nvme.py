"""How close the NVMe tier comes to its disk: one JSON line per (what, direction), read and write in GB/s (10**9).

    python benchmarks/bench_nvme.py --folder /mnt/nvme                    # 8 GiB
    python benchmarks/bench_nvme.py --folder /mnt/a /mnt/b --gib 16
    python benchmarks/bench_nvme.py --folder /mnt/nvme --deepspeed        # DeepSpeed's asynchronous handle beside it

- `plain`: the ceiling. As many threads as the tier has, each in a loop of pread or pwrite of whole blocks, past the
  page cache, over preallocated files; nothing else.
- `tier`: regions through the engine, checksums included, one unit's worth per region, several in flight.
- `deepspeed`: `aio_handle` of DeepSpeed, same block size and queue depth (needs libaio and a compiler).

They take turns, `--repeats` times, so that a disk that others use treats them alike. Every pass is over all files and
printed; the last line has the best of each and the tier's share of the ceiling.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import tempfile
import threading
import time
from pathlib import Path

import torch

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

    plain_files = []
    for folder in tier.folders:
        fd, path = folder.create(total_bytes // len(folders), direct=True, what="plain")
        plain_files.append((fd, path))

    def plain_pass(direction: str) -> None:
        blocks = [
            (fd, offset)
            for offset in range(0, total_bytes // len(folders) // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)
            for fd, _ in plain_files
        ]
        place, lock = iter(blocks), threading.Lock()

        def work() -> None:
            with mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                memory.madvise(mmap.MADV_HUGEPAGE)  # 4 KiB pages halve the rate: requests have a limit of pieces
                memory.write(os.urandom(MIB) * (BLOCK_BYTES // MIB))
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

        threads = [threading.Thread(target=work) for _ in range(THREADS_PER_FOLDER * len(folders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = {"plain": plain_pass, "tier": tier_pass}
    if deepspeed:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = (
            AsyncIOBuilder()
            .load()
            .aio_handle(
                block_size=BLOCK_BYTES,
                queue_depth=THREADS_PER_FOLDER,
                single_submit=False,
                overlap_events=True,
                intra_op_parallelism=THREADS_PER_FOLDER,
            )
        )
        tensor = buffers[0].tensor(torch.uint8, 0, region_bytes)

        def deepspeed_pass(direction: str) -> None:
            for i in range(total_bytes // region_bytes):
                path = str(tier.folders[0].path / f"deepspeed{i}")
                getattr(handle, f"sync_p{direction}")(tensor, path, 0)

        found["deepspeed"] = deepspeed_pass
    found["close"] = tier.close
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", nargs="+", type=Path, default=[Path(tempfile.gettempdir())])
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--region-mib", type=int, default=256)
    parser.add_argument("--in-flight", type=int, default=3, help="regions read or written at once, as nvme_slots")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deepspeed", action="store_true")
    options = parser.parse_args()
    total_bytes = int(options.gib * GIB) // (options.region_mib * MIB) * options.region_mib * MIB
    found = passes(options.folder, total_bytes, options.region_mib * MIB, options.in_flight, options.deepspeed)
    close = found.pop("close")
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
    finally:
        close()
    share = {d: round(best["tier", d] / best["plain", d], 3) for d in ("write", "read")}
    print(json.dumps({"best_gb_per_s": {" ".join(k): round(v, 3) for k, v in best.items()}, "tier_share": share}))


if __name__ == "__main__":
    main()
