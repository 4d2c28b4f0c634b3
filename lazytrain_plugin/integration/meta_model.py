"""Profiles of models that are never built: a config on the meta device."""

from __future__ import annotations

import difflib
import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from lazytrain_plugin.errors import ConfigError, first_line
from lazytrain_plugin.profile.model import TRAINED_DTYPES, ModelProfile

HUB_ANSWERS_S = 3.0
"""Longer than a hub within reach takes for a small question. Its own client goes on trying for half a minute."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


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
        ConfigError: no such file and no network, or a dtype that LazyTrain doesn't train.
        UnsupportedModelError: a layer can't be timed.
    """
    import torch

    from lazytrain_plugin.profile.extract import extract_model_profile
    from lazytrain_plugin.runtime.discovery import discover

    check_dtype(dtype, "--dtype")
    config = _load_config(model)
    built = _build_on_meta(config, getattr(torch, dtype), model)
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


def check_dtype(dtype: str, what: str) -> None:
    """Raises ConfigError unless weights of this dtype (torch's name) can be trained."""
    if dtype not in TRAINED_DTYPES:
        raise ConfigError(
            f"{what} is {dtype}, and LazyTrain trains bfloat16 and float32 weights: use bfloat16 (float16 needs loss "
            "scaling; bfloat16 has float32's range and does not)"
        )


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

    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"{model!r} holds no config.json; give a model folder as save_pretrained writes it")
    asks_hub = not path.exists()
    if asks_hub:
        _check_hub_id(model, path)
    try:
        local_only = asks_hub and not _hub_answers(model)
        return AutoConfig.from_pretrained(model if asks_hub else str(path), local_files_only=local_only)
    except (OSError, ValueError) as error:
        if not asks_hub:
            raise ConfigError(f"{model!r} is no model config: {first_line(error)}") from error
        raise ConfigError(
            f"{model!r} is no file or folder here{_nearest(path)}, and can't be had from the hub (no such model, or no "
            "network): give a config.json, a folder that holds one, or the id of a model on the hub"
        ) from error


def _check_hub_id(model: str, path: Path) -> None:
    """Raises ConfigError for what can only be a path: the hub need not be asked for it.

    An id is NAME or OWNER/NAME.
    """
    if not _HUB_ID.fullmatch(model) or model.endswith(".json"):
        kind = "config" if model.endswith(".json") else "file or folder"
        raise ConfigError(
            f"no {kind} at {model!r}{_nearest(path)}; give a config.json, a folder that holds one, or the id of a "
            "model on the hub"
        )


def _nearest(path: Path) -> str:
    """ "; did you mean ...?" where the folder holds something of nearly that name."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f" (did you mean {str(path.with_name(near[0]))!r}?)" if near else ""


def _hub_answers(model: str) -> bool:
    """Whether the hub (on the way that the environment names) says anything of a model within seconds.

    An answer such as "no such model" is one; its own client says it better.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        return False
    hub = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{hub}/{model}/resolve/main/config.json", method="HEAD")
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(request, timeout=HUB_ANSWERS_S).close()
        except urllib.error.HTTPError as error:
            if error.code >= 500 or error.code == 407:  # a proxy's, or a hub that is down
                return
        except (OSError, ValueError):
            return
        answered.set()

    # In a thread: looking a name up has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
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
