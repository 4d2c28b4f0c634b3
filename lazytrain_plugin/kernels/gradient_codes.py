"""Block-wise codes for gradients on the wire: 8 bits for a rank's contribution, 10 bits for the sum that all receive.

A block is 64 consecutive elements. It holds one step, a bf16 number, and a whole number of steps per element: at most
127 of them in 8 bits, 511 in 10. A step is the block's largest magnitude / 127 (or 511), rounded up to bf16, so the
largest magnitude is never cut; an element is rounded to the nearest step, halves away from zero. Both conversions are
exact in fp32 apart from that rounding: error at most step / 2.

A row of `blocks` blocks is, byte for byte:

    8 bits    codes int8 [64 * blocks] | steps bf16 [blocks]                                       66 bytes a block
    10 bits   high 8 bits of code + 512, uint8 [64 * blocks] | low 2 bits [16 * blocks] | steps    82 bytes a block

Byte j of a block's low bits holds elements j, j + 16, j + 32 and j + 48, from its lowest bits up. A block with NaN or
an infinity decodes to NaN throughout: an overflow on one rank reaches all of them.

Why blocks of 64 and bf16 steps: rms error of normally distributed values in % of their rms, and bytes an element, with
fp32 | bf16 steps. Block 32: 0.535, 1.125 | 0.546, 1.063. 64: 0.593, 1.063 | **0.601, 1.031**. 128: 0.648, 1.031 |
0.653, 1.016. 256: 0.697, 1.016 | 0.701, 1.008. It is the smallest error within 0.52 of the bytes of bf16.
"""

from __future__ import annotations

import torch

from lazytrain_plugin.errors import KernelError

BLOCK = 64
LARGEST_CODE = {8: 127, 10: 511, 16: 32767}
"""16 bits: of sums at rest (coded_gradient.py), never on the wire."""
BYTES_PER_BLOCK = {8: BLOCK + 2, 10: BLOCK + BLOCK // 4 + 2}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CHUNK_BLOCKS = 4096
"""Blocks that the CPU works through at a time, so that temporaries stay in its cache."""
SMALLEST_NORMAL_FP32 = 2.0**-126
INFINITY_BITS = 0x7F800000
MAGNITUDE_BITS = 0x7FFFFFFF
BF16_NAN = 0x7FC0


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def row_bytes(blocks: int, bits: int) -> int:
    """Bytes of a row of `blocks` blocks in `bits` (8 or 10) bits."""
    return blocks * BYTES_PER_BLOCK[bits]


def inverse_of_largest(bits: int) -> float:
    """A little above 1 / 127 (511, 32767): a product with it is never below the quotient, and steps are rounded up."""
    return (1.0 + 2.0**-22) / LARGEST_CODE[bits]


def encode(values: torch.Tensor, bits: int, blocks: int, rows_out: torch.Tensor) -> None:
    """Writes `values` [n] (fp32, bf16 or fp16) to `rows_out` [rows, row_bytes(blocks, bits)] uint8, row by row.

    Row r takes the elements from r * blocks * 64 on; beyond n they count as zero. n <= rows * blocks * 64. Raises
    KernelError when shapes, dtypes or devices don't fit.
    """
    _check(values, bits, blocks, rows_out, whole=False)
    if rows_out.numel() == 0:
        return
    if values.device.type == "cpu":
        _encode_reference(values, bits, blocks, rows_out)
    else:
        _triton(values.device).encode(values, bits, blocks, rows_out)


def decode(rows: torch.Tensor, bits: int, blocks: int, values_out: torch.Tensor) -> None:
    """Writes the first n elements of `rows`, one row after the other, to `values_out` [n], rounded to its dtype.

    Shapes and errors as in `encode`.
    """
    _check(values_out, bits, blocks, rows, whole=False)
    if values_out.numel() == 0:
        return
    if rows.device.type == "cpu":
        _decode_reference(rows, bits, blocks, values_out)
    else:
        _triton(rows.device).decode(rows, bits, blocks, values_out)


def decode_mean(rows: torch.Tensor, bits: int, blocks: int, divisor: float, values_out: torch.Tensor) -> None:
    """Writes (row 0 + row 1 + ...) / divisor, added and divided in fp32, to `values_out` fp32 [blocks * 64].

    Errors as in `encode`.
    """
    if values_out.dtype != torch.float32:
        raise KernelError(f"The sum of gradient rows is fp32, but values_out is {values_out.dtype}.")
    _check(values_out, bits, blocks, rows, whole=True)
    if values_out.numel() == 0:
        return
    if rows.device.type == "cpu":
        _decode_mean_reference(rows, bits, blocks, divisor, values_out)
    else:
        _triton(rows.device).decode_mean(rows, bits, blocks, divisor, values_out)


def _triton(device: torch.device):
    if device.type != "cuda":
        raise KernelError(f"There is no gradient code kernel for {device.type} tensors. Use the CPU or a CUDA GPU.")
    from lazytrain_plugin.kernels.triton import require_triton

    require_triton()
    from lazytrain_plugin.kernels.triton import gradient_codes as triton_gradient_codes

    return triton_gradient_codes


def _check(values: torch.Tensor, bits: int, blocks: int, rows: torch.Tensor, *, whole: bool) -> None:
    if bits not in BYTES_PER_BLOCK:
        raise KernelError(f"Gradient codes have 8 or 10 bits, not {bits}.")
    if values.dtype not in DTYPES or values.dim() != 1 or not values.is_contiguous():
        raise KernelError(
            f"values is {values.dtype} {list(values.shape)}; expected fp32, bf16 or fp16, flat and contiguous."
        )
    if rows.dtype != torch.uint8 or rows.dim() != 2 or not rows.is_contiguous() or rows.device != values.device:
        raise KernelError(f"rows is {rows.dtype} {list(rows.shape)} on {rows.device}; expected uint8, 2-D, contiguous.")
    if rows.shape[1] != row_bytes(blocks, bits):
        raise KernelError(
            f"A row has {rows.shape[1]} bytes; {blocks} blocks of {bits} bits are {row_bytes(blocks, bits)}."
        )
    room = blocks * BLOCK * (1 if whole else rows.shape[0])
    if values.numel() > room or (whole and values.numel() != room):
        raise KernelError(f"values has {values.numel()} elements; the rows hold {room}.")


def _parts(row: torch.Tensor, bits: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Views of one row: codes [blocks, 64] uint8, low bits [blocks, 16] uint8 or None, steps [blocks] int16."""
    codes_end, steps_begin = blocks * BLOCK, blocks * (BYTES_PER_BLOCK[bits] - 2)
    low = row[codes_end:steps_begin].view(blocks, BLOCK // 4) if bits == 10 else None
    return row[:codes_end].view(blocks, BLOCK), low, row[steps_begin:].view(torch.int16)


def _encode_reference(values: torch.Tensor, bits: int, blocks: int, rows_out: torch.Tensor) -> None:
    for r in range(rows_out.shape[0]):
        codes, low, steps = _parts(rows_out[r], bits, blocks)
        for begin in range(0, blocks, CHUNK_BLOCKS):
            part = slice(begin, min(blocks, begin + CHUNK_BLOCKS))
            first = (r * blocks + begin) * BLOCK
            wanted = (part.stop - begin) * BLOCK
            x = values[first : first + wanted].to(torch.float32)
            if x.numel() < wanted:
                x = torch.nn.functional.pad(x, (0, wanted - x.numel()))
            q, step_bits = codes_of(x.view(-1, BLOCK), bits)
            steps[part].copy_(step_bits)
            if low is None:
                codes[part].view(torch.int8).copy_(q)
            else:
                biased = q.to(torch.int32) + 512
                codes[part].copy_(biased >> 2)
                quarters = (biased & 3).view(-1, 4, BLOCK // 4)
                low[part].copy_(quarters[:, 0] | quarters[:, 1] << 2 | quarters[:, 2] << 4 | quarters[:, 3] << 6)


def codes_of(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x fp32 [blocks, 64] as fp32 [blocks, 64], and the bf16 bits of their steps, int16 [blocks]."""
    largest_bits = (x.view(torch.int32) & MAGNITUDE_BITS).amax(dim=1)  # ordered as magnitudes, NaN above infinity
    finite = largest_bits < INFINITY_BITS
    largest = largest_bits.view(torch.float32)
    step = torch.where(largest > 0, (largest * inverse_of_largest(bits)).clamp(min=SMALLEST_NORMAL_FP32), 0.0)
    high = torch.where(finite, (step.view(torch.int32) + 0xFFFF) >> 16, BF16_NAN)
    step = (high << 16).view(torch.float32)
    inverse = torch.where(finite & (step > 0), 1.0 / step, 0.0)[:, None]
    top = float(LARGEST_CODE[bits])
    q = (x.abs() * inverse).add_(0.5).floor_().clamp_(max=top).copysign_(x)
    if not bool(finite.all()):
        q = torch.where(finite[:, None], q, 0.0)
    return q, high.to(torch.int16)


def _decoded(row: torch.Tensor, bits: int, blocks: int, part: slice) -> torch.Tensor:
    """Blocks `part` of one row as fp32 [blocks, 64]."""
    codes, low, steps = _parts(row, bits, blocks)
    step = (steps[part].to(torch.int32) << 16).view(torch.float32)[:, None]
    if low is None:
        return codes[part].view(torch.int8).to(torch.float32) * step
    packed = low[part].to(torch.int32)
    bits_0_1 = torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).view(-1, BLOCK)
    return ((codes[part].to(torch.int32) << 2 | bits_0_1) - 512).to(torch.float32) * step


def _decode_reference(rows: torch.Tensor, bits: int, blocks: int, values_out: torch.Tensor) -> None:
    for r in range(rows.shape[0]):
        for begin in range(0, blocks, CHUNK_BLOCKS):
            part = slice(begin, min(blocks, begin + CHUNK_BLOCKS))
            target = values_out[(r * blocks + begin) * BLOCK : (r * blocks + part.stop) * BLOCK]
            if target.numel() > 0:
                target.copy_(_decoded(rows[r], bits, blocks, part).view(-1)[: target.numel()])


def _decode_mean_reference(
    rows: torch.Tensor, bits: int, blocks: int, divisor: float, values_out: torch.Tensor
) -> None:
    for begin in range(0, blocks, CHUNK_BLOCKS):
        part = slice(begin, min(blocks, begin + CHUNK_BLOCKS))
        total = _decoded(rows[0], bits, blocks, part)
        for row in rows[1:]:
            total += _decoded(row, bits, blocks, part)
        values_out[begin * BLOCK : part.stop * BLOCK].copy_(total.div_(divisor).view(-1))
