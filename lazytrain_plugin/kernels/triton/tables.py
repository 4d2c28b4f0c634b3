"""Many tensors in one launch: a launch takes the host longer than the GPU needs for a small tensor.

What differs between tensors comes in a table of int64, a row for each; its first column is the tensor's first program.

[Note: how a table comes to the device] A kernel reads it out of page-locked memory. A copy would wait for the copy
engine, which moves weights and states for milliseconds at a time, and the stream's next kernel would wait with it.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lazytrain_plugin.kernels.triton import on_device

TABLE_NUMEL = 2048
"""Most elements of a table."""

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
}


@triton.jit
def row_of(table_ptr, num_rows, COLUMNS: tl.constexpr, MAX_ROWS: tl.constexpr):
    """The row of the tensor that this program works on: the last one that begins here or before."""
    rows = tl.arange(0, MAX_ROWS)
    begins = tl.load(table_ptr + rows * COLUMNS, mask=rows < num_rows, other=0x7FFFFFFF)
    return table_ptr + (tl.sum((begins <= tl.program_id(0)).to(tl.int32)) - 1) * COLUMNS


@triton.jit
def pointer(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    found = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def length(row, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):
    numel = tl.load(row + COLUMN)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    return numel


@triton.jit(do_not_specialize=["numel"])
def copy_table_kernel(host_ptr, table_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(table_ptr + offsets, tl.load(host_ptr + offsets, mask=offsets < numel), mask=offsets < numel)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor's part of a launch, and what must be alike in one launch."""

    num_programs: int
    device: torch.device
    values: list[int]
    """Without the first column."""
    switches: dict[str, object]
    tensors: tuple[torch.Tensor | None, ...]
    """What addresses among the values are of: alive until the launch."""


@dataclass(frozen=True, slots=True)
class Launch:
    """`table` and `num_rows` are a kernel's first arguments."""

    table: torch.Tensor
    num_rows: int
    num_programs: int
    switches: dict[str, object]


def launches(rows: Iterable[Row], max_rows: int) -> Iterator[Launch]:
    """Launches for all rows, at most `max_rows` in each. Carry each out on the current stream before the next one."""
    kinds: dict[tuple, list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.device, *row.switches.values()), []).append(row)
    for alike in kinds.values():
        device, switches = alike[0].device, {**alike[0].switches, "MAX_ROWS": max_rows}
        for first in range(0, len(alike), max_rows):
            flat, begin = [], 0
            together = alike[first : first + max_rows]
            for row in together:
                flat += (begin, *row.values)
                begin += row.num_programs
            table = torch.tensor(flat, dtype=torch.int64)
            if device.type == "cuda":
                table = _tables_for(device).bring(table)
            yield Launch(table, len(together), begin, switches)


class _Tables:
    """Brings tables to one device. See [Note: how a table comes to the device]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        """Page-locked memory of former tables, the oldest first, and when the device has read them."""
        self._lock = threading.Lock()  # updates of several ranks are launched by a thread of their own

    def bring(self, table: torch.Tensor) -> torch.Tensor:
        """The table on the device, in the current stream's order. Never waits for the device."""
        numel = table.numel()
        with self._lock:
            host, read = self._used.popleft() if self._used and self._used[0][1].query() else self._make()
        host[:numel].copy_(table)
        with on_device(self._device):
            arrived = torch.empty(numel, dtype=torch.int64, device=self._device)
            copy_table_kernel[(1,)](host, arrived, numel, BLOCK=TABLE_NUMEL)
            read.record()
        with self._lock:
            self._used.append((host, read))
        return arrived

    @staticmethod
    def _make() -> tuple[torch.Tensor, torch.cuda.Event]:
        return torch.empty(TABLE_NUMEL, dtype=torch.int64, pin_memory=True), torch.cuda.Event()


@functools.cache
def _tables_for(device: torch.device) -> _Tables:
    return _Tables(device)
