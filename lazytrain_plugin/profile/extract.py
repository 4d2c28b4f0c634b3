"""From a model (live, or on the meta device) to its `ModelProfile`, without touching a weight.

The model is run once on meta tensors: shapes flow, no memory is used and nothing is computed. Tensors that autograd
saves inside a unit are counted, each storage once, without weights and without the unit's own inputs.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lazytrain_plugin.errors import first_line
from lazytrain_plugin.profile import shapes
from lazytrain_plugin.profile.model import ModelProfile, TensorProfile, UnitProfile, UnitRole
from lazytrain_plugin.profile.probe import Probe, ProbeRecorder

logger = logging.getLogger(__name__)

PROBE_TOKENS = 256
"""Length of the meta run: past it every activation grows linearly with tokens."""


def extract_model_profile(
    model: nn.Module,
    units: Sequence[tuple[str, nn.Module]],
    stem_units: Sequence[tuple[str, Sequence[nn.Parameter]]],
    *,
    sequence_length: int = 1024,
    fused_kernels: bool = True,
    chunked_loss: bool | None = None,
    name: str | None = None,
    dtypes: Mapping[nn.Parameter, torch.dtype] | None = None,
) -> ModelProfile:
    """Profiles `model`; call it before forwards are replaced (its modules' own `forward` must run on meta tensors).

    Args:
        model: any module; HF configs are used for sizes when there is one. Left as it was.
        units: (name, module) in forward order.
        stem_units: (name, parameters) of everything else, in forward order, tied parameters once.
        sequence_length: what attention's FLOP are counted at.
        fused_kernels: count RMSNorm, SwiGLU and attention as the fused kernels save them; False: as eager PyTorch does.
        chunked_loss: whether logits exist for a chunk of tokens only; None: as `fused_kernels` says.
        dtypes: what weights are going to be at home where that is not what they are now (a cast to bf16).
    """
    dtypes = dtypes or {}
    names = {id(parameter): parameter_name for parameter_name, parameter in model.named_parameters()}
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    embedding = _weight_of(model, "get_input_embeddings")
    head = _weight_of(model, "get_output_embeddings")
    probes, estimate = _probe_units(model, units, fused_kernels, dtypes)

    # A parameter that a unit shares with the stem rests with the stem.
    stem_ids = {id(parameter) for _, parameters in stem_units for parameter in parameters}
    unit_profiles = []
    for unit_name, module in units:
        owned = [parameter for parameter in module.parameters() if id(parameter) not in stem_ids]
        probe = probes.get(unit_name)
        if probe is None:
            probe = _structural_probe(module, config, _activation_bytes(module, dtypes))
        unit_profiles.append(
            UnitProfile(
                name=unit_name,
                tensors=_tensor_profiles(owned, names, dtypes),
                boundary_bytes_per_token=probe.boundary_bytes,
                fused_input=probe.fused_input,
                kept_bytes_per_token=probe.kept_bytes,
                workspace_bytes_per_token=probe.workspace_bytes,
                flop_per_token=_matrix_flop(module, config) + probe.attention_flop(sequence_length),
                num_operators=probe.num_operators,
                strategies=probe.strategies(sequence_length),
                kept_bytes_per_token_by_class=probe.bytes_by_class,
            )
        )
    stem_profiles = []
    for stem_name, parameters in stem_units:
        role = _stem_role(stem_name, parameters, embedding, head)
        is_head = role == UnitRole.HEAD or (role == UnitRole.EMBEDDING and embedding is head)
        stem_profiles.append(
            UnitProfile(
                name=stem_name,
                tensors=_tensor_profiles(parameters, names, dtypes),
                role=role,
                flop_per_token=2.0 * sum(p.numel() for p in parameters) if is_head else 0.0,
            )
        )
    hidden_size = head.shape[-1] if head is not None else _config_int(config, "hidden_size", "n_embd", "d_model")
    return ModelProfile(
        name=name or type(model).__name__,
        units=tuple(unit_profiles),
        stem=tuple(stem_profiles),
        hidden_size=hidden_size,
        vocab_size=int(head.shape[0]) if head is not None else 0,
        sequence_length=sequence_length,
        activation_bytes=_activation_bytes(model, dtypes),
        tied=embedding is not None and embedding is head,
        chunked_loss=fused_kernels if chunked_loss is None else chunked_loss,
        estimate=estimate,
    )


def _probe_units(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]], fused_kernels: bool, dtypes: Mapping
) -> tuple[dict[str, Probe], str]:
    """Runs the whole model on meta tensors; returns what was seen per unit and, if that failed, how it's estimated."""
    recorder = ProbeRecorder(PROBE_TOKENS)
    meta = {
        name: torch.empty_like(
            tensor, dtype=dtypes.get(tensor, tensor.dtype), device="meta", requires_grad=tensor.requires_grad
        )
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    weights = {tensor.untyped_storage()._cdata for tensor in meta.values()}
    recorder.ignored |= weights
    try:
        inputs = meta_inputs(model, 1, PROBE_TOKENS)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_gradient_checkpointing(model))
            stack.enter_context(recorder.watch(units))
            stack.enter_context(
                shapes.shape_kernels(
                    model, fused=fused_kernels, on_attention=recorder.attention, on_fused=recorder.fused
                )
            )
            stack.enter_context(recorder.operators())
            stack.enter_context(saved_tensors_hooks(recorder.pack, lambda tensor: tensor))
            stack.enter_context(torch.enable_grad())
            torch.func.functional_call(model, meta, kwargs=inputs)
        missing = [name for name, _ in units if name not in recorder.probes]
        if missing:
            raise RuntimeError(f"{missing[0]} did not run")
    except Exception as error:  # whatever a model's own code raises on meta tensors
        message = first_line(error)[:120]
        logger.info(
            "activation bytes of %s are estimated from its layers' shapes (up to 1.5x high): it does not run on meta "
            "tensors: %s",
            type(model).__name__,
            message,
        )
        return {}, f"structural: {message}"
    return recorder.finish(eager=not fused_kernels), ""


def _structural_probe(module: nn.Module, config: object, element: int) -> Probe:
    """Upper estimate without running: each linear map keeps its input and its output."""
    hidden = _config_int(config, "hidden_size", "n_embd", "d_model")
    width = largest = attention = 0.0
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2 or "lora_" in name:
            continue
        visits = _visits_per_token(name, parameter, config)
        width += visits * (parameter.shape[-1] + parameter.shape[-2])
        largest = max(largest, visits * max(parameter.shape[-2:]))
        hidden = hidden or int(parameter.shape[-1])
        if name.split(".")[-2:-1] in (["q_proj"], ["q"], ["query"]):
            attention += parameter.shape[0]
    kept = int(element * width)
    return Probe(
        boundary_bytes=element * hidden,
        kept_bytes=kept,
        workspace_bytes=kept + int(element * (3 * largest + 2 * hidden)),
        attention_widths=[int(attention)] if attention else [],
    )


def _visits_per_token(name: str, parameter: torch.Tensor, config: object) -> float:
    """How many matrices of this parameter a token is multiplied with.

    Below 1 for one expert of a list, `top_k` for stacked experts [experts, out, in], 1 for a plain matrix.
    """
    top_k = _config_int(config, "num_experts_per_tok", "num_selected_experts") or 1
    if parameter.ndim >= 3:
        return float(min(top_k, parameter.shape[0]))
    experts = _config_int(config, "num_local_experts", "num_experts", "n_routed_experts")
    return min(1.0, top_k / experts) if experts and ".experts." in f".{name}" else 1.0


def _matrix_flop(module: nn.Module, config: object) -> float:
    """2 FLOP per weight of every matrix that a token visits."""
    return sum(
        2.0 * parameter.shape[-1] * parameter.shape[-2] * _visits_per_token(name, parameter, config)
        for name, parameter in module.named_parameters()
        if parameter.ndim in (2, 3)
    )


def meta_inputs(model: nn.Module, batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
    """Arguments of a forward on meta tensors. Raises RuntimeError for a model that takes no token ids."""
    tokens = torch.zeros(batch_size, sequence_length, dtype=torch.long, device="meta")
    accepted = inspect.signature(model.forward).parameters
    # Wrappers (PEFT) take **kwargs and hand them on.
    names = {"input_ids"} if "input_ids" in accepted or "kwargs" in accepted else set()
    if not names:
        raise RuntimeError("its forward takes no input_ids")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        names.add("decoder_input_ids")
    inputs: dict = dict.fromkeys(sorted(names), tokens)
    if hasattr(getattr(model, "config", None), "use_cache"):
        inputs["use_cache"] = False
    return inputs


@contextlib.contextmanager
def _without_gradient_checkpointing(model: nn.Module) -> Iterator[None]:
    switched = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in switched:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True


def _tensor_profiles(parameters, names: dict[int, str], dtypes: Mapping) -> tuple[TensorProfile, ...]:
    seen: dict[int, nn.Parameter] = {id(parameter): parameter for parameter in parameters}
    return tuple(
        TensorProfile(
            name=names.get(key, ""),
            shape=tuple(parameter.shape),
            dtype=str(dtypes.get(parameter, parameter.dtype)).removeprefix("torch."),
            trainable=parameter.requires_grad,
        )
        for key, parameter in seen.items()
    )


def _stem_role(name: str, parameters, embedding: torch.Tensor | None, head: torch.Tensor | None) -> UnitRole:
    if any(parameter is embedding for parameter in parameters):
        return UnitRole.EMBEDDING
    if any(parameter is head for parameter in parameters):
        return UnitRole.HEAD
    return UnitRole.EMBEDDING if "embed" in name or "wte" in name else UnitRole.REST


def _weight_of(model: nn.Module, getter: str) -> torch.Tensor | None:
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return getattr(module, "weight", None)


def _activation_bytes(module: nn.Module, dtypes: Mapping) -> int:
    found = {dtypes.get(parameter, parameter.dtype) for parameter in module.parameters()}
    return 2 if found & {torch.bfloat16, torch.float16} else 4


def _config_int(config: object, *keys: str) -> int:
    """The first of these keys that the config has; 0 if none."""
    return next((int(value) for key in keys if (value := getattr(config, key, None))), 0)
