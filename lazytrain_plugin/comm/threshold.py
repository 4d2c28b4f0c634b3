"""From which size on the quantized reduction is the faster one: measured at the start, decided alike on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

SIZES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
"""Elements of the buckets that are tried, smallest first."""
REPEATS = ((2**16, 9), (2**18, 5), (2**62, 3))
"""(up to this size, timed runs of each way): small buckets cost little, and other processes disturb them most."""
BUDGET_S = 5.0
"""No larger size is tried once this much time is spent."""
NEVER = 2**62


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency in s and time per element in s of the line through the times that is nearest in relative terms."""
    # Least squares of (latency / t + slope * size / t - 1): small buckets count as much as large ones.
    a = [1 / t for t in seconds]
    b = [size / t for size, t in zip(sizes, seconds, strict=True)]
    aa, ab, bb = sum(x * x for x in a), sum(x * y for x, y in zip(a, b, strict=True)), sum(y * y for y in b)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:  # one size
        return 0.0, sum(b) / bb
    latency_s = (sum(a) * bb - sum(b) * ab) / determinant
    slope_s = (sum(b) * aa - sum(a) * ab) / determinant
    return max(0.0, latency_s), max(0.0, slope_s)


def choose(sizes: Sequence[int], full_s: Sequence[float], quantized_s: Sequence[float]) -> int:
    """The size in elements from which on quantized is the faster, at least the smallest tried; `NEVER` if it never is.

    From a line through the times of each, so that one disturbed measurement does not decide. A busy CPU delays small
    quantized buckets most and may turn the lines against codes; then the largest buckets are asked themselves.
    """
    full_latency_s, full_slope_s = fit(sizes, full_s)
    latency_s, slope_s = fit(sizes, quantized_s)
    if slope_s >= full_slope_s:
        faster = [quantized < full for full, quantized in zip(full_s, quantized_s, strict=True)]
        slower_until = max((index for index, is_faster in enumerate(faster) if not is_faster), default=-1)
        return sizes[slower_until + 1] if slower_until + 1 < len(sizes) else NEVER
    return max(min(sizes), math.ceil((latency_s - full_latency_s) / (full_slope_s - slope_s)))


def measure(
    run: Callable[[int, bool], None],
    slowest: Callable[[Sequence[float]], list[float]],
    sizes: Sequence[int] = SIZES,
    budget_s: float = BUDGET_S,
) -> tuple[int, list[tuple[int, float, float]]]:
    """Times both ways and chooses.

    Args:
        run: reduces a bucket of so many elements, quantized or not, and returns when it is done.
        slowest: takes this rank's times and returns those of the slowest rank, so that all ranks decide the same.
        sizes: elements, ascending.
        budget_s: of the slowest rank, for all sizes together.

    Returns:
        The threshold in elements, and (size, full_s, quantized_s) of each size tried.
    """
    rows: list[tuple[int, float, float]] = []
    spent_s = 0.0
    for size in sizes:
        begin = time.perf_counter()
        times: dict[bool, list[float]] = {False: [], True: []}
        repeats = next(count for up_to, count in REPEATS if size <= up_to)
        for number in range(1 + repeats):  # the first warms up: connections, kernels, buffers
            for quantized in (False, True):  # alternating: what disturbs one disturbs the other
                start = time.perf_counter()
                run(size, quantized)
                if number:
                    times[quantized].append(time.perf_counter() - start)
        best = [min(times[quantized]) for quantized in (False, True)]
        full_s, quantized_s, took_s = slowest([*best, time.perf_counter() - begin])
        rows.append((size, full_s, quantized_s))
        spent_s += took_s
        if spent_s + 4 * took_s > budget_s:  # the next size has four times the bytes
            break
    return choose(*zip(*rows, strict=True)), rows
