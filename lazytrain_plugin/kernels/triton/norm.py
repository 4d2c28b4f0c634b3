"""Sums of squares per lane on CUDA, in the order of summation that norm.py fixes; two launches for many tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lazytrain_plugin.kernels.batch import Batch, run_or_add
from lazytrain_plugin.kernels.coded_gradient import CodedGradient
from lazytrain_plugin.kernels.reference import LANES, PARTS
from lazytrain_plugin.kernels.triton import on_device
from lazytrain_plugin.kernels.triton.coded_gradient import load_gradient, pointers
from lazytrain_plugin.kernels.triton.tables import TYPES, Row, launches, length, pointer, row_of

LANES_PER_PROGRAM = 512
PROGRAMS_PER_PART = LANES // LANES_PER_PROGRAM
ROWS_IN_FLIGHT = 8  # their loads don't wait for each other's additions
FOLD_LANES = 64
PARTS_IN_FLIGHT = 16  # the same of parts
FOLD_WARPS = 2

MAX_ROWS = 16
"""Tensors of a launch: their parts take 2 MiB each."""

# Columns of the table.
VALUES, STEPS, SUMS, NUMEL = (tl.constexpr(column) for column in range(1, 5))
COLUMNS = tl.constexpr(5)


@triton.jit
def sum_squares_parts_kernel(
    table_ptr, num_rows, parts_ptr,
    GRADIENT: tl.constexpr, CODED: tl.constexpr, ALIGNED: tl.constexpr, NUM_LANES: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MAX_ROWS: tl.constexpr,
):  # fmt: skip
    row = row_of(table_ptr, num_rows, COLUMNS, MAX_ROWS)
    values_ptr = pointer(row, VALUES, GRADIENT, ALIGNED)
    steps_ptr = pointer(row, STEPS, tl.int16, False)
    numel = length(row, NUMEL, ALIGNED)
    num_rounds = (numel + NUM_LANES * NUM_PARTS * ROWS - 1) // (NUM_LANES * NUM_PARTS * ROWS)
    programs_per_part: tl.constexpr = NUM_LANES // BLOCK
    part = (tl.program_id(0) - tl.load(row)) // programs_per_part
    lanes = tl.program_id(0) % programs_per_part * BLOCK + tl.arange(0, BLOCK)
    offsets = part * NUM_LANES + lanes
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for _ in range(num_rounds.to(tl.int32)):
        for _row in tl.static_range(ROWS):
            x = load_gradient(values_ptr, steps_ptr, offsets, offsets < numel, CODED).to(tl.float64)
            total += x * x  # exact, and a masked row adds 0, which changes nothing
            offsets += NUM_PARTS * NUM_LANES
    tl.store(parts_ptr + (tl.program_id(0) // programs_per_part).to(tl.int64) * NUM_LANES + lanes, total)


@triton.jit
def add_parts_kernel(
    table_ptr, parts_ptr,
    NUM_LANES: tl.constexpr, NUM_PARTS: tl.constexpr, PROGRAMS_PER_PART: tl.constexpr, BLOCK: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    row = table_ptr + tl.program_id(0) * COLUMNS
    num_parts = tl.minimum((tl.load(row + NUMEL) + NUM_LANES - 1) // NUM_LANES, NUM_PARTS).to(tl.int32)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    parts_ptr += tl.load(row) // PROGRAMS_PER_PART * NUM_LANES + lanes
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(0, num_parts, IN_FLIGHT):
        for part in tl.static_range(IN_FLIGHT):
            # One after the other; a part that is not there adds 0.
            inside = tl.full((BLOCK,), first + part, tl.int32) < num_parts
            total += tl.load(parts_ptr + (first + part) * NUM_LANES, mask=inside, other=0.0)
    tl.store(pointer(row, SUMS, tl.float64, False) + lanes, total)


@triton.jit
def combine_lanes_kernel(lanes_ptr, squares_ptr, NUM_LANES: tl.constexpr, HALVINGS: tl.constexpr):
    total = tl.load(lanes_ptr + tl.program_id(0).to(tl.int64) * NUM_LANES + tl.arange(0, NUM_LANES))
    for level in tl.static_range(HALVINGS):
        total = tl.sum(tl.reshape(total, (2, NUM_LANES >> (level + 1))), axis=0)
    tl.store(squares_ptr + tl.program_id(0) + tl.arange(0, 1), total)


def sum_squares(values: torch.Tensor | CodedGradient, lanes: torch.Tensor, batch: Batch | None = None) -> None:
    numel = values.numel()
    if numel == 0:
        lanes.zero_()
        return
    codes, steps, coded = pointers(values)
    address = codes.data_ptr()
    row = Row(
        num_programs=min(PARTS, -(-numel // LANES)) * PROGRAMS_PER_PART,
        device=values.device,
        values=[address, steps.data_ptr() if coded else 0, lanes.data_ptr(), numel],
        switches={"GRADIENT": TYPES[codes.dtype], "CODED": coded, "ALIGNED": numel % 16 == address % 16 == 0},
        tensors=(codes, steps, lanes),
    )
    run_or_add(_sum_together, row, batch)


def _sum_together(rows: list[Row]) -> None:
    for launch in launches(rows, MAX_ROWS):
        table = launch.table
        with on_device(table.device):
            num_parts = launch.num_programs // PROGRAMS_PER_PART
            parts = torch.empty(num_parts, LANES, dtype=torch.float64, device=table.device)
            sum_squares_parts_kernel[(launch.num_programs,)](
                table, launch.num_rows, parts, **launch.switches,
                NUM_LANES=LANES, NUM_PARTS=PARTS, BLOCK=LANES_PER_PROGRAM, ROWS=ROWS_IN_FLIGHT,
            )  # fmt: skip
            add_parts_kernel[(launch.num_rows, LANES // FOLD_LANES)](
                table, parts, NUM_LANES=LANES, NUM_PARTS=PARTS, PROGRAMS_PER_PART=PROGRAMS_PER_PART, BLOCK=FOLD_LANES,
                IN_FLIGHT=PARTS_IN_FLIGHT, num_warps=FOLD_WARPS,
            )  # fmt: skip


def combine_lanes(lanes: torch.Tensor, squares: torch.Tensor) -> None:
    with on_device(lanes.device):
        combine_lanes_kernel[(lanes.shape[0],)](
            lanes, squares, NUM_LANES=LANES, HALVINGS=LANES.bit_length() - 1, num_warps=4
        )
