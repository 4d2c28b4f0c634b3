"""Profiles of models that are never built: a config on the meta device."""

from __future__ import annotations

import os
import socket
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from lazytrain_plugin.errors import ConfigError, first_line
from lazytrain_plugin.profile.model import ModelProfile

HUB_ANSWERS_S = 3.0
"""Longer than a hub within reach takes to accept a connection. Its own client goes on trying for half a minute."""


def profile_from_config(
    model: str,
    dtype: str = "bfloat16",
    *,
    sequence_length: int = 1024,
    fused_kernels: bool = True,
    measured_batch: int | None = None,
) -> ModelProfile:
    """Profile of a model that is never built: its config on the meta device.

    Args:
        model: a config.json, a folder that holds one, or a hub id.
        dtype: torch's name of the weights' dtype.
        measured_batch: sequences of a batch in which each kind of layer is timed on this machine; None: none is.

    Raises:
        ConfigError: no such file and no network, or a dtype that torch doesn't know.
        UnsupportedModelError: a layer can't be timed.
    """
    import torch

    from lazytrain_plugin.profile.extract import extract_model_profile
    from lazytrain_plugin.runtime.discovery import discover

    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is not one of torch's; use bfloat16 or float32")
    config = _load_config(model)
    built = _build_on_meta(config, torch_dtype, model)
    found = discover(built)
    units = [(unit.name, unit.module) for unit in found.units]
    profile = extract_model_profile(
        built,
        units,
        [(unit.name, [parameter for _, parameter in unit.parameters]) for unit in found.stem],
        sequence_length=sequence_length,
        fused_kernels=fused_kernels,
        name=Path(model).name if not model.endswith(".json") else type(built).__name__,
    )
    if measured_batch is None:
        return profile
    return _measured(profile, built, units, measured_batch, sequence_length, fused_kernels)


def _measured(
    profile: ModelProfile, model: Any, units: list, batch_size: int, length: int, fused: bool
) -> ModelProfile:
    import torch

    from lazytrain_plugin.integration.fused import apply_fused_kernels
    from lazytrain_plugin.profile.unit_timing import measure_units

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prepare = (lambda unit: apply_fused_kernels(unit, device)) if fused and device.type == "cuda" else None
    return measure_units(profile, model, units, device, batch_size=batch_size, sequence_length=length, prepare=prepare)


def _load_config(model: str) -> Any:
    from transformers import AutoConfig

    path = Path(model)
    if model.endswith(".json") and not path.is_file():
        raise ConfigError(f"no config at {model!r}; give a config.json, a model folder or a hub id")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"{model!r} holds no config.json; give a model folder as save_pretrained writes it")
    asks_hub = not path.exists()
    try:
        return AutoConfig.from_pretrained(model, local_files_only=asks_hub and not _hub_answers())
    except (OSError, ValueError) as error:
        if not asks_hub:
            raise ConfigError(f"{model!r} is no model config: {first_line(error)}") from error
        raise ConfigError(
            f"{model!r} is no file or folder here, and can't be had from the hub (no such model, or no network): give "
            "a config.json, a folder that holds one, or the id of a model on the hub"
        ) from error


def _hub_answers() -> bool:
    """Whether the hub, or the proxy on the way there, accepts a connection."""
    url = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80))).close()
        except (OSError, ValueError):
            return
        answered.set()

    # In a thread: looking a name up has no time limit of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HUB_ANSWERS_S)
    return answered.is_set()


def _build_on_meta(config: Any, dtype: Any, model: str) -> Any:
    import torch
    import transformers

    class_names = getattr(config, "architectures", None) or []
    model_class = getattr(transformers, class_names[0], None) if class_names else None
    try:
        with torch.device("meta"):
            if model_class is not None and hasattr(model_class, "_from_config"):
                return model_class._from_config(config, dtype=dtype)
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ConfigError(f"{model!r} describes no model that can be built: {first_line(error)}") from error
