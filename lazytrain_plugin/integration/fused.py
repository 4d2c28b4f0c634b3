"""Fused kernels for a Hugging Face model, put on and taken off one model instance.

On a GPU: RMSNorm, SwiGLU and RoPE (`fused_modules`), and the chunked loss: in a training forward with labels the
head returns `DeferredLogits`, and the model's loss function, if it is transformers' causal language model loss,
computes loss and gradients from them chunk by chunk. Everything else about the model, evaluation and generation
included, is as before.
"""

import importlib.util
import inspect
import logging
import sys

import torch
from torch import nn

from lazytrain_plugin.integration.deferred_logits import DeferredLogits, LossCall, defer_logits
from lazytrain_plugin.integration.fused_modules import (
    bind_forward,
    fuse_rms_norms,
    fuse_ropes,
    fuse_swiglus,
    is_patched,
    unbind_forward,
    unfuse_modules,
)
from lazytrain_plugin.kernels.cross_entropy import CHUNK_TOKENS, linear_cross_entropy
from lazytrain_plugin.units import format_bytes

logger = logging.getLogger(__name__)

_CALL = "_lazytrain_loss_call"  # attribute of the model and of its head: their shared LossCall


def apply_fused_kernels(model: nn.Module, device: torch.device | str) -> list[str]:
    """Patches `model` (a transformers model, or a PEFT wrapper of one) for training on `device`.

    Returns one line per kind of kernel: what was applied to how much, or "not applied" and why; the same is logged
    once. On a device without CUDA nothing is applied: training there keeps plain torch's bits.
    Applying twice is harmless.
    """
    device = torch.device(device)
    if device.type != "cuda":
        report = [f"fused kernels: not applied, they are for CUDA and the device is {device.type}"]
    elif importlib.util.find_spec("triton") is None:
        report = ["RMSNorm, SwiGLU, RoPE: not applied, triton is not installed", apply_chunked_loss(model)]
    else:
        report = [fuse_rms_norms(model), fuse_swiglus(model), fuse_ropes(model), apply_chunked_loss(model)]
    logger.info("fused kernels: %s", "; ".join(line.removeprefix("fused kernels: ") for line in report))
    return report


def remove(model: nn.Module) -> None:
    """Takes every patch off again; harmless on a model that has none."""
    unfuse_modules(model)
    remove_chunked_loss(model)


def weights_changed(model: nn.Module) -> None:
    """To be called when an optimizer step begins: logits of earlier forwards can't be computed any more."""
    for module in model.modules():
        call = vars(module).get(_CALL)
        if call is not None:
            call.weights_epoch += 1
            return


def keep_heads_eager(model: nn.Module) -> None:
    """Undoes `compile` of heads whose logits the chunked loss defers: traced, they would be computed in full."""
    for module in model.modules():
        if _CALL in vars(module) and module._compiled_call_impl is not None:
            module._compiled_call_impl = None
            logger.info("the output head is not compiled: the chunked loss needs it as it is")


def apply_chunked_loss(model: nn.Module) -> str:
    """The chunked loss alone, on any device (`apply_fused_kernels` decides where it pays). Returns the report line."""
    causal_lm = _find_causal_lm(model)
    if causal_lm is None:
        return "chunked loss: not applied, no transformers model with an output head"
    if _CALL in vars(causal_lm):
        return "chunked loss: applied already"
    heads = _linear_heads(causal_lm.get_output_embeddings())
    if not heads:
        return (
            f"chunked loss: not applied, the head is {type(causal_lm.get_output_embeddings()).__name__}, "
            "not a plain linear layer"
        )
    if any(is_patched(head) for head in heads):
        return "chunked loss: not applied, somebody else has replaced the head's forward"
    if getattr(causal_lm, "loss_function", None) is not _transformers_loss():
        name = getattr(getattr(causal_lm, "loss_function", None), "__name__", "none")
        return f"chunked loss: not applied, the model's loss function is {name}, not ForCausalLMLoss"
    call = LossCall()
    for head in heads:
        vars(head)[_CALL] = call
        bind_forward(head, _head_forward)
    vars(causal_lm)[_CALL] = call
    causal_lm.loss_function = _chunked_loss
    causal_lm.register_forward_pre_hook(_before_forward, with_kwargs=True)
    causal_lm.register_forward_hook(_after_forward, always_call=True)
    num_classes, hidden_size = heads[0].weight.shape
    chunk_bytes = CHUNK_TOKENS * num_classes * heads[0].weight.element_size()
    chunk = f"{CHUNK_TOKENS} tokens, {format_bytes(chunk_bytes)} a chunk"
    return f"chunked loss: applied to the {num_classes} x {hidden_size} head, {chunk}"


def remove_chunked_loss(model: nn.Module) -> None:
    """Undoes `apply_chunked_loss`, also on a deepcopy of a patched model."""
    for module in model.modules():
        if unbind_forward(module, _head_forward):
            vars(module).pop(_CALL, None)
        # Its own attribute: a wrapper (PeftModel) shows those of the model inside as if they were its own.
        if vars(module).get("_loss_function") is _chunked_loss:
            del module._loss_function
            if module.loss_function is not _transformers_loss():
                module.loss_function = _transformers_loss()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, hook in hooks.items() if hook in (_before_forward, _after_forward)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
        vars(module).pop(_CALL, None)


def _transformers_loss():
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss


def _find_causal_lm(model: nn.Module) -> nn.Module | None:
    """The outermost transformers model that has an output head, inside whatever wraps it."""
    if "transformers" not in sys.modules:  # an optional dependency
        return None
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and isinstance(_output_head(module), nn.Module):
            return module
    return None


def _output_head(model: nn.Module) -> nn.Module | None:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # what models without one do, depending on the version
        return None


def _linear_heads(head: nn.Module) -> list[nn.Linear]:
    """The head itself; or, where PEFT trains a full copy beside the original, each of the two.

    A head with a LoRA adapter is none: its output is a sum, which has to exist.
    """
    if type(head) is nn.Linear:
        return [head]
    if type(head).__name__ == "ModulesToSaveWrapper":
        inner = [head.original_module, *head.modules_to_save.values()]
        return inner if all(type(m) is nn.Linear for m in inner) else []
    return []


def _before_forward(model: nn.Module, args: tuple, kwargs: dict) -> None:
    call = vars(model).get(_CALL)
    if call is not None:
        call.active = torch.is_grad_enabled() and _labels(model, args, kwargs) is not None and not call.pointless


def _after_forward(model: nn.Module, args: tuple, output) -> None:
    call = vars(model).get(_CALL)
    if call is None or not call.active:
        return
    call.active = False
    if call.materialised_early and not call.consumed:
        call.pointless = True
        logger.info(
            "chunked loss: %s uses its logits before (or without) its loss function, so they are computed in full "
            "each step; the loss is the model's own",
            type(model).__name__,
        )


def _labels(model: nn.Module, args: tuple, kwargs: dict):
    if "labels" in kwargs or not args:
        return kwargs.get("labels")
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return args[names.index("labels")] if "labels" in names[: len(args)] else None


def _head_forward(self, hidden):
    call, weight, bias = vars(self).get(_CALL), self.weight, self.bias
    if (
        call is None
        or not call.active
        or not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not (hidden.requires_grad or weight.requires_grad)
        or hidden.device != weight.device
        or (hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type))
    ):
        return type(self).forward(self, hidden)
    return defer_logits(hidden, weight, bias, call)


_head_forward.__name__ = "forward"  # see fused_modules: an unpickled model has its class's own forward again


def _chunked_loss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
) -> torch.Tensor:
    """transformers' ForCausalLMLoss, from `DeferredLogits` without their logits; anything else goes to the original."""
    source = logits.source if isinstance(logits, DeferredLogits) else None
    targets = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    if (
        source is None
        or source.is_materialised
        or vocab_size != source.weight.shape[0]
        or targets.numel() != source.hidden.shape[:-1].numel()
    ):
        return _transformers_loss()(
            logits.materialise() if source is not None else logits,
            labels,
            vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            shift_labels=shift_labels,
            **kwargs,
        )
    source.call.consumed += 1
    return linear_cross_entropy(
        source.hidden,
        source.weight,
        source.bias,
        targets,
        ignore_index=ignore_index,
        divisor=num_items_in_batch,
    )
