"""Cross-entropy of a linear layer's output without ever holding all logits.

    loss = sum over tokens of cross_entropy(float(hidden @ weight^T + bias), target) / divisor

The forward computes loss *and* gradients chunk by chunk (`CHUNK_TOKENS` tokens, a constant: the order of summation
must not depend on a plan), the backward only scales them. Rounding follows what autograd does for Hugging Face's
`ForCausalLMLoss` on whole logits: logits in the compute dtype, softmax in fp32, their gradient rounded once to the
logits' dtype. The weight's gradient is summed over chunks in fp32 and rounded once.

Memory beside inputs and gradients: one chunk of logits on CUDA (the gradient overwrites them), one more in fp32 on
the CPU, and the fp32 sum of the weight's gradient.
"""

import functools
import importlib.util
import logging

import torch
from torch.autograd.function import once_differentiable

from lazytrain_plugin.errors import KernelError

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 2048


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    divisor: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Scalar fp32 loss; differentiable once in `hidden`, `weight` and `bias`.

    `hidden` [..., hidden_size]; `weight` [classes, hidden_size]; `bias` [classes] or None, all of one floating dtype
    and on one device; `targets` integer, one per row of `hidden`, already shifted. Targets equal to `ignore_index`
    count for nothing. `divisor`: what the sum of losses is divided by, a number or a scalar tensor; None means the
    number of targets that count (the mean; NaN with zero gradients if none does, as in torch).

    Raises KernelError on shapes or dtypes that don't fit; a target outside [0, classes) fails an assertion on the
    device, as in torch.
    """
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    flat_targets = targets.reshape(-1)
    _check(flat_hidden, weight, bias, flat_targets)
    if not flat_hidden.requires_grad and not weight.requires_grad and (bias is None or not bias.requires_grad):
        return _LinearCrossEntropy.forward(None, flat_hidden, weight, bias, flat_targets, ignore_index, divisor)
    return _LinearCrossEntropy.apply(flat_hidden, weight, bias, flat_targets, ignore_index, divisor)


def _check(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> None:
    if weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise KernelError(
            f"linear_cross_entropy: hidden is [{hidden.shape[0]}, {hidden.shape[1]}] but weight {list(weight.shape)}; "
            "give weight as [classes, hidden_size]"
        )
    if targets.shape[0] != hidden.shape[0]:
        raise KernelError(
            f"linear_cross_entropy: {hidden.shape[0]} rows of hidden but {targets.shape[0]} targets; give one per row"
        )
    dtypes = {hidden.dtype, weight.dtype} | (set() if bias is None else {bias.dtype})
    if len(dtypes) > 1 or not hidden.dtype.is_floating_point:
        raise KernelError(
            f"linear_cross_entropy: dtypes {sorted(map(str, dtypes))} differ; cast them to the compute dtype first"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, ignore_index, divisor):
        needs_hidden, needs_weight, needs_bias = (False,) * 3 if ctx is None else ctx.needs_input_grad[:3]
        num_tokens, num_classes = hidden.shape[0], weight.shape[0]
        targets = targets.to(device=hidden.device, dtype=torch.int64).contiguous()
        counted = targets != ignore_index
        torch._assert_async(  # without a wait for the device
            (~counted | ((targets >= 0) & (targets < num_classes))).all(),
            f"linear_cross_entropy: a target is outside [0, {num_classes}) and is not ignore_index ({ignore_index})",
        )
        scale = 1.0 / _divisor(divisor, counted)
        losses = hidden.new_empty(num_tokens, dtype=torch.float32)
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_sum = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        bias_sum = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        logits_buffer = hidden.new_empty(min(CHUNK_TOKENS, num_tokens), num_classes)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, num_tokens, CHUNK_TOKENS):
                rows = slice(start, min(start + CHUNK_TOKENS, num_tokens))
                hidden_chunk = hidden[rows]
                logits = logits_buffer[: hidden_chunk.shape[0]]
                if bias is None:
                    torch.mm(hidden_chunk, weight.t(), out=logits)
                else:
                    torch.addmm(bias, hidden_chunk, weight.t(), out=logits)
                gradient = _rows(
                    logits,
                    targets[rows],
                    losses[rows],
                    scale,
                    ignore_index=ignore_index,
                    write_gradient=needs_hidden or needs_weight or needs_bias,
                )
                if needs_hidden:
                    torch.mm(gradient, weight, out=hidden_grad[rows])
                if needs_weight:
                    add_product(weight_sum, gradient.t(), hidden_chunk)
                if needs_bias:
                    bias_sum += gradient.sum(0, dtype=torch.float32)
            logits = gradient = logits_buffer = None  # all three hold the buffer, which the rounded sum may take
            if ctx is not None:
                ctx.save_for_backward(
                    hidden_grad,
                    weight_sum.to(weight.dtype) if needs_weight else None,
                    bias_sum.to(bias.dtype) if needs_bias else None,
                )
            # Multiplied, not divided, would differ from torch's mean in the last bit.
            return losses.sum() / _divisor(divisor, counted)

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_grad):
        # A graph that is kept may run again: only then may the saved gradients not be scaled in place.
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        gradients = [
            None if saved is None else (saved * loss_grad if keep_graph else saved.mul_(loss_grad))
            for saved in ctx.saved_tensors
        ]
        return *gradients, None, None, None


def _divisor(divisor: torch.Tensor | float | None, counted: torch.Tensor) -> torch.Tensor:
    """fp32 scalar on the device of `counted`, made without a wait."""
    if divisor is None:
        return counted.sum(dtype=torch.float32)
    if isinstance(divisor, torch.Tensor):
        if divisor.numel() != 1:
            raise KernelError(f"linear_cross_entropy: divisor has {divisor.numel()} elements; give a scalar")
        return divisor.detach().reshape(()).to(device=counted.device, dtype=torch.float32, non_blocking=True)
    return torch.full((), float(divisor), dtype=torch.float32, device=counted.device)


def _rows(logits, targets, losses_out, scale, *, ignore_index, write_gradient):
    """Writes losses; returns the gradient of `logits` in their dtype (their own memory on CUDA)."""
    if logits.is_cuda and _triton_available():
        from lazytrain_plugin.kernels.triton.cross_entropy import cross_entropy_rows

        with torch.cuda.device(logits.device):
            cross_entropy_rows(
                logits, targets, losses_out, scale, ignore_index=ignore_index, write_gradient=write_gradient
            )
        return logits
    return cross_entropy_rows_reference(
        logits, targets, losses_out, scale, ignore_index=ignore_index, write_gradient=write_gradient
    )


def cross_entropy_rows_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses_out: torch.Tensor,
    scale: torch.Tensor,
    *,
    ignore_index: int,
    write_gradient: bool,
) -> torch.Tensor | None:
    """What the Triton kernel computes, in plain torch; `logits` are overwritten. Arguments as there."""
    counted = targets != ignore_index
    columns = torch.where(counted, targets, 0).unsqueeze(1)
    x = logits.float()
    x.sub_(x.amax(dim=1, keepdim=True))
    target_logit = x.gather(1, columns).squeeze(1)
    total = x.exp_().sum(dim=1, keepdim=True)
    losses_out.copy_(torch.where(counted, total.squeeze(1).log() - target_logit, 0.0))
    if not write_gradient:
        return None
    x.div_(total).scatter_add_(1, columns, x.new_full((), -1.0).expand(columns.shape))
    # Assigned, not multiplied by 0: the scale is infinite when nothing counts.
    x.mul_(scale).masked_fill_(~counted.unsqueeze(1), 0.0)
    return logits.copy_(x) if x is not logits else logits


def add_product(accumulator: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """accumulator += left @ right, with fp32 sums: fp32 [m, n], and any floating [m, k] and [k, n]."""
    if left.dtype is torch.float32:
        accumulator.addmm_(left, right)
    elif left.is_cuda and _addmm_has_out_dtype(left.dtype, left.device):
        torch.addmm(accumulator, left, right, out_dtype=torch.float32, out=accumulator)
    else:
        accumulator.addmm_(left.float(), right.float())


@functools.cache
def _addmm_has_out_dtype(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch adds a low-precision product into an fp32 matrix; tried once, on values that bf16 holds."""
    accumulator = torch.full((16, 16), 0.5, device=device)
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(accumulator, ones, ones, out_dtype=torch.float32, out=accumulator)
        if bool((accumulator == 16.5).all()):
            return True
    except (RuntimeError, TypeError, NotImplementedError):
        pass
    logger.warning(
        "torch %s can't add a %s product into an fp32 matrix on %s: the head's weight gradient is computed in fp32, "
        "several times slower; torch >= 2.11 can",
        torch.__version__,
        dtype,
        device,
    )
    return False


@functools.cache
def _triton_available() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning(
        "triton is not installed: the loss on the GPU runs in plain torch, with several more passes over each chunk of "
        "logits and one more chunk in fp32; `pip install triton`"
    )
    return False
