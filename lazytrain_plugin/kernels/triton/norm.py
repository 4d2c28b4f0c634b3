"""Sums of squares per lane on CUDA, in the order of summation that norm.py fixes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.reference import LANES, PARTS
from lazytrain_plugin.kernels.triton import on_device
from lazytrain_plugin.kernels.triton.coded_gradient import load_gradient, pointers

LANES_PER_PROGRAM = 512
ROWS_IN_FLIGHT = 8  # their loads don't wait for each other's additions
FOLD_LANES = 64


@triton.jit
def sum_squares_parts_kernel(
    values_ptr, steps_ptr, parts_ptr, numel, num_rounds,
    CODED: tl.constexpr, NUM_LANES: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets = part * NUM_LANES + lanes
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for _ in range(num_rounds):
        for _row in tl.static_range(ROWS):
            x = load_gradient(values_ptr, steps_ptr, offsets, offsets < numel, CODED).to(tl.float64)
            total += x * x  # exact, and a masked row adds 0, which changes nothing
            offsets += NUM_PARTS * NUM_LANES
    tl.store(parts_ptr + part * NUM_LANES + lanes, total)


@triton.jit
def add_parts_kernel(parts_ptr, lanes_ptr, num_parts, NUM_LANES: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts_ptr + lanes)
    for part in range(1, num_parts):
        total += tl.load(parts_ptr + part * NUM_LANES + lanes)
    tl.store(lanes_ptr + lanes, total)


def sum_squares(values: torch.Tensor | CodedGradient, lanes: torch.Tensor) -> None:
    numel = values.numel()
    num_parts = min(PARTS, triton.cdiv(numel, LANES))
    if num_parts == 0:
        lanes.zero_()
        return
    parts = torch.empty(num_parts, LANES, dtype=torch.float64, device=values.device)
    codes, steps, coded = pointers(values)
    with on_device(values.device):
        sum_squares_parts_kernel[(num_parts, LANES // LANES_PER_PROGRAM)](
            codes, steps, parts, numel, triton.cdiv(numel, LANES * PARTS * ROWS_IN_FLIGHT),
            CODED=coded, NUM_LANES=LANES, NUM_PARTS=PARTS, BLOCK=LANES_PER_PROGRAM, ROWS=ROWS_IN_FLIGHT,
        )  # fmt: skip
        add_parts_kernel[(LANES // FOLD_LANES,)](parts, lanes, num_parts, NUM_LANES=LANES, BLOCK=FOLD_LANES)
