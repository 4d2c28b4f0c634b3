"""Measures this machine: capacities always, rates by short benchmarks (about 2 s) that are cached per machine."""

from __future__ import annotations

import json
import logging
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.profile._json import digest_of
from lazytrain_plugin.profile.cache import default_cache_dir, write_atomically
from lazytrain_plugin.profile.capacity import host_capacity, usable_threads
from lazytrain_plugin.profile.hardware import HardwareProfile

logger = logging.getLogger(__name__)

MEASURE_VERSION = 5
"""Part of the cache key: raise it when a benchmark changes."""
COPY_BYTES = 256 * 2**20
LAYER_FLOP_FRAC = 0.74
"""Share of the matmul rate that decoder layers with fused kernels reached on an H200; refined once units are timed."""
# Without the update kernel's own measurement: AdamW reads and writes this much per parameter (weight, remainder,
# gradient, two moments), and a core computes this many parameters a second with AVX-512 (both measured).
UPDATE_BYTES_PER_PARAMETER = {32: 26, 8: 14}
UPDATE_PARAMETERS_PER_S_PER_THREAD = {32: 0.77e9, 8: 0.57e9}
HOST_MARGIN_FRAC = 0.04
"""Of the machine's memory, what is not planned with unless a budget says so: the kernel's own (page tables of pinned
memory), and what other processes take later. A plan up to the last GiB was killed on a 128 GiB machine."""
SHARED_UPDATE_FRAC = 0.9
"""What is left of the update rate while both links are busy."""
SHARED_LINK_FRAC = 0.87
"""Of what both directions of the link reach together: the CPU's update reads and writes the same host memory. In steps
on an H200 copies to the GPU ran at 45 GB/s, 48 to 52 without the update. The rest is a margin: a plan that needs all of
a link takes 3 to 7 % longer where it is a tenth slower, one that has some to spare 0.5 % longer where it is not."""


def measure_hardware(
    device: torch.device | str,
    *,
    update_parameters_per_s: Callable[[int, torch.device], float] | None = None,
    coding_bytes_per_s: Callable[[torch.device], tuple[float, float]] | None = None,
    cache_dir: Path | None = None,
    local_world_size: int = 1,
) -> HardwareProfile:
    """Profile of the machine that this process runs on, as seen from `device`.

    Args:
        device: the device that computes: a CUDA device, or the CPU.
        update_parameters_per_s: state bits (32, 8) and device (the CPU, or `device`) -> parameters that the kernel in
            use updates there in a second; None: derived from measured memory bandwidth and the number of threads.
        coding_bytes_per_s: `device` -> bytes read and written in a second by what makes 4-bit codes of 16-bit values
            there, and by what makes values of them; None, or without a GPU: left to the profile, which derives them.
        cache_dir: where rates are kept between runs; None: `default_cache_dir()`. Capacities are never cached.
        local_world_size: processes that share this host's memory, cores and links.
    """
    device = torch.device(device)
    sizes = measure_capacities(device, local_world_size=local_world_size)
    kernels = update_parameters_per_s, coding_bytes_per_s
    return HardwareProfile(**sizes, **_cached_rates(device, sizes["cpu_threads"], *kernels, cache_dir))


def measure_capacities(device: torch.device, *, local_world_size: int = 1) -> dict[str, Any]:
    """The fields of a `HardwareProfile` that are no rates: name, bytes and threads. Takes no time."""
    capacity = host_capacity()
    free_bytes = max(0, capacity.free_bytes - int(HOST_MARGIN_FRAC * capacity.total_bytes))
    gpu_total = gpu_free = 0
    if device.type == "cuda":
        gpu_free, gpu_total = torch.cuda.mem_get_info(device)
        gpu_free += torch.cuda.memory_reserved(device)  # what this process holds is its own to use
    return {
        "name": _machine_name(device),
        "gpu_bytes": gpu_total,
        "gpu_free_bytes": gpu_free,
        "cpu_bytes": capacity.total_bytes // local_world_size,
        "cpu_free_bytes": free_bytes // local_world_size,
        "pin_limit_bytes": capacity.pin_limit_bytes,
        "cpu_threads": max(1, usable_threads() // local_world_size),
    }


def _cached_rates(device, threads: int, update_rate, coding_rate, cache_dir: Path | None) -> dict[str, float | str]:
    folder = cache_dir if cache_dir is not None else default_cache_dir()
    measured = [update_rate is not None, coding_rate is not None]
    key = digest_of([MEASURE_VERSION, _machine_name(device), threads, torch.__version__, measured])
    path = folder / f"rates-{key}.json"
    kept = _read_rates(path, device)
    if kept is not None:
        return kept
    rates = _measure_rates(device, threads, update_rate)
    if coding_rate is not None and device.type == "cuda":  # a CPU takes seconds for it, and codes decide nothing there
        rates["quantize_bytes_per_s"], rates["dequantize_bytes_per_s"] = coding_rate(device)
    try:
        write_atomically(path, json.dumps(rates, indent=1))
    except OSError as error:
        logger.warning("measured rates can't be kept in %s (%s): every run measures again, about 2 s", folder, error)
    return rates


def _read_rates(path: Path, device: torch.device) -> dict[str, float | str] | None:
    """Kept rates, None where there are none that a profile takes (damaged, or written by another version)."""
    try:
        rates = json.loads(path.read_text())
        # Sizes are of no matter here; the profile refuses unknown, missing and impossible rates.
        sizes = {"cpu_bytes": 1, "cpu_free_bytes": 1, "cpu_threads": 1, "gpu_bytes": int(device.type == "cuda")}
        HardwareProfile(name=path.stem, gpu_free_bytes=0, **sizes, **rates)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, ConfigError) as error:
        logger.info("the rates kept in %s can't be used (%s): measuring again", path, error)
        return None
    return rates


def _measure_rates(device: torch.device, threads: int, update_rate) -> dict[str, float | str]:
    host_rate = _host_memory_bytes_per_s()
    rates: dict[str, float | str] = {"host_memory_bytes_per_s": host_rate, "layer_flop_frac": LAYER_FLOP_FRAC}
    source = "measured"
    for bits in (32, 8):
        if update_rate is not None:
            rate = update_rate(bits, torch.device("cpu"))
        else:
            source = "measured; CPU update rates derived from memory bandwidth"
            rate = min(host_rate / UPDATE_BYTES_PER_PARAMETER[bits], threads * UPDATE_PARAMETERS_PER_S_PER_THREAD[bits])
        rates[f"cpu_update_{bits}bit_parameters_per_s"] = rate
        rates[f"cpu_update_{bits}bit_shared_parameters_per_s"] = rate * SHARED_UPDATE_FRAC
    rates.update(_gpu_rates(device, update_rate) if device.type == "cuda" else _cpu_compute_rates())
    return {"source": source, **rates}


def _cpu_compute_rates() -> dict[str, float]:
    side = 768
    left, right = torch.randn(side, side), torch.randn(side, side)
    seconds = best_wall_s(lambda: left @ right)
    return {
        "matmul_flop_per_s": 2 * side**3 / seconds,
        # Copies between "devices" are copies within host memory; nothing is planned by them.
        **dict.fromkeys(
            ("h2d_bytes_per_s", "d2h_bytes_per_s", "h2d_shared_bytes_per_s", "d2h_shared_bytes_per_s"), 0.0
        ),
        "gpu_memory_bytes_per_s": 0.0,
        "gpu_update_32bit_parameters_per_s": 0.0,
        "gpu_update_8bit_parameters_per_s": 0.0,
    }


def _gpu_rates(device: torch.device, update_rate) -> dict[str, float]:
    with torch.cuda.device(device):
        side = 8192
        left = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        right = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        matmul_s = _median_cuda_s(lambda: torch.mm(left, right), repeats=6)
        count = COPY_BYTES
        on_gpu = [torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2)]
        on_host = [torch.empty(count, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

        def up() -> None:
            on_gpu[0].copy_(on_host[0], non_blocking=True)

        def down() -> None:
            on_host[1].copy_(on_gpu[1], non_blocking=True)

        h2d_s, d2h_s = _median_cuda_s(up, repeats=4), _median_cuda_s(down, repeats=4)
        h2d_shared_s, d2h_shared_s = _both_directions_s(up, down)
        device_copy_s = _median_cuda_s(lambda: on_gpu[0].copy_(on_gpu[1]), repeats=6)
        gpu_memory = 2 * count / device_copy_s
        updates = {
            f"gpu_update_{bits}bit_parameters_per_s": (
                gpu_memory / UPDATE_BYTES_PER_PARAMETER[bits] if update_rate is None else update_rate(bits, device)
            )
            for bits in (32, 8)
        }
    return {
        "matmul_flop_per_s": 2 * side**3 / matmul_s,
        "h2d_bytes_per_s": count / h2d_s,
        "d2h_bytes_per_s": count / d2h_s,
        "h2d_shared_bytes_per_s": SHARED_LINK_FRAC * count / h2d_shared_s,
        "d2h_shared_bytes_per_s": SHARED_LINK_FRAC * count / d2h_shared_s,
        "gpu_memory_bytes_per_s": gpu_memory,
        "launch_s": _launch_s(device),
        **updates,
    }


def _both_directions_s(up: Callable[[], None], down: Callable[[], None]) -> tuple[float, float]:
    """Seconds per copy of each direction while the other one runs too."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]
    repeats = 6
    torch.cuda.synchronize()
    for stream, (start, _) in zip(streams, events):
        start.record(stream)
    for _ in range(repeats):
        for stream, copy in zip(streams, (up, down)):
            with torch.cuda.stream(stream):
                copy()
    for stream, (_, end) in zip(streams, events):
        end.record(stream)
    torch.cuda.synchronize()
    first, second = (start.elapsed_time(end) / 1e3 / repeats for start, end in events)
    return first, second


def _median_cuda_s(action: Callable[[], object], *, repeats: int) -> float:
    action()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _launch_s(device: torch.device) -> float:
    """Host time for one operator of a layer: modules and plain operators in turn, with autograd's part."""
    linear, x = torch.nn.Linear(16, 16, device=device), torch.ones(16, 16, device=device)
    num_operators = 200  # far fewer than wait in a GPU's queue before the host has to

    def launch() -> None:
        y = x
        for _ in range(num_operators // 2):
            y = linear(y) * 0.5

    best_s = float("inf")
    for _ in range(6):
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        launch()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return best_s / num_operators


def _host_memory_bytes_per_s() -> float:
    """Reads and writes of a copy, over torch's threads."""
    # Far beyond any cache, small beside the memory of a machine that trains.
    source = torch.ones(128 * 2**20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_wall_s(lambda: target.copy_(source))


def best_wall_s(action: Callable[[], object], repeats: int = 4) -> float:
    """Seconds of the fastest of `repeats` runs, after one that is not timed."""
    action()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def _machine_name(device: torch.device) -> str:
    threads = usable_threads()
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {threads} cores ({_cpu_model()})"
    return f"no GPU, {threads} cores ({_cpu_model()})"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
