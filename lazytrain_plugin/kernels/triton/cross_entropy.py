"""Softmax cross-entropy over a chunk of logits, and its gradient, in place.

For row r with logits x, target t and scale s (a device scalar, so that nobody waits for its value):

    loss[r] = logsumexp(x) - x[t]                    logsumexp in fp32, one pass, running maximum
    x[v]   <- (softmax(x)[v] - [v == t]) * s         second pass, rounded once to the logits' dtype

A row whose target is `ignore_index` has loss 0 and gradient 0. A chunk is read twice and written once.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # classes per step: 8 warps hold 16 fp32 values a thread, several rows fit a multiprocessor
NUM_WARPS = 8


@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    row_stride,
    targets_ptr,
    losses_ptr,
    scale_ptr,
    num_classes,
    ignore_index,
    WRITE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row)
    offsets = tl.arange(0, BLOCK)
    if target == ignore_index:
        if WRITE_GRADIENT:
            for start in range(0, num_classes, BLOCK):
                column = start + offsets
                zeros = tl.zeros((BLOCK,), dtype=tl.float32)
                tl.store(row_ptr + column, zeros.to(logits_ptr.dtype.element_ty), mask=column < num_classes)
        tl.store(losses_ptr + row, 0.0)
    else:
        # Read before the first reduction: its barrier keeps every warp's read ahead of the second pass's writes.
        target_logit = tl.load(row_ptr + target).to(tl.float32)
        maximum = -float("inf")
        total = 0.0
        for start in range(0, num_classes, BLOCK):
            column = start + offsets
            x = tl.load(row_ptr + column, mask=column < num_classes, other=-float("inf")).to(tl.float32)
            new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
            # A row may begin with -inf only (masked classes): exp(-inf - -inf) would be NaN.
            shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
            total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift), axis=0)
            maximum = new_maximum
        # In this order: logsumexp - x[t] would lose the digits that a large maximum takes.
        tl.store(losses_ptr + row, tl.log(total) - (target_logit - maximum))
        if WRITE_GRADIENT:
            scale = tl.load(scale_ptr).to(tl.float32)
            inverse_total = 1.0 / total
            for start in range(0, num_classes, BLOCK):
                column = start + offsets
                inside = column < num_classes
                x = tl.load(row_ptr + column, mask=inside, other=-float("inf")).to(tl.float32)
                probability = tl.exp(x - maximum) * inverse_total
                gradient = (probability - tl.where(column == target, 1.0, 0.0)) * scale
                tl.store(row_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def cross_entropy_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses_out: torch.Tensor,
    scale: torch.Tensor,
    *,
    ignore_index: int,
    write_gradient: bool,
) -> None:
    """Losses of `logits` [rows, classes] (rows contiguous), which then hold their gradient if `write_gradient`.

    `targets` int64 [rows]; `losses_out` fp32 [rows]; `scale` fp32 [1] on the same device.
    """
    rows, num_classes = logits.shape
    if rows == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(num_classes))
    cross_entropy_kernel[(rows,)](
        logits,
        logits.stride(0),
        targets,
        losses_out,
        scale,
        num_classes,
        ignore_index,
        WRITE_GRADIENT=write_gradient,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
