"""Saving, resuming and exporting a training run, independent of the plan.

Files and folder: `checkpoint_layout`, `checkpoint_folder`. Memory stays at one parameter's master and states, when
saving and when loading.
"""

from __future__ import annotations

import copy
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lazytrain_plugin.errors import CheckpointError
from lazytrain_plugin.integration import checkpoint_layout as layout
from lazytrain_plugin.integration.checkpoint_folder import (
    MODEL_STATES,
    OPTIM_STATES,
    complete_or_nothing,
    complete_tags,
    find_files,
    read_latest,
    write_latest,
)
from lazytrain_plugin.runtime.state import ParamRecord, TrainState
from lazytrain_plugin.runtime.streamed_file import DamagedFileError, MappedFile, StreamedSave, streamed_bytes
from lazytrain_plugin.units import format_bytes

logger = logging.getLogger(__name__)

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Engine attributes that a checkpoint keeps."""

_RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
_STRUCTURE_KEYS = frozenset(
    "module buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params".split()
)
_NAMED_DIFFERENCES = 3  # how many of each kind an error lists


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What a load hands back to the engine; parameters, states and hyper-parameters are already in place."""

    path: Path
    """The model file, as DeepSpeed returns it."""
    counters: dict[str, int]
    """The `COUNTERS` that the checkpoint has."""
    client_state: dict[str, Any]
    data_sampler: dict | None
    """State of DeepSpeed's curriculum sampler."""


def save_checkpoint(
    state: TrainState,
    module: nn.Module,
    save_dir: str | Path,
    tag: str,
    *,
    counters: dict[str, int],
    param_groups: list[dict],
    ds_config: dict,
    client_state: dict[str, Any] | None = None,
    lr_scheduler: Any = None,
    data_sampler: dict | None = None,
    bf16: bool = False,
    exclude_frozen_parameters: bool = False,
    save_latest: bool = True,
) -> Path:
    """Writes `save_dir/tag`; returns that folder.

    A checkpoint appears whole or not at all, `latest` names it only then, and until then the older ones stay valid.

    Args:
        counters: the values of `COUNTERS`.
        param_groups: the optimizer's groups, in the order that `ParamRecord.group` counts them.
        ds_config: the raw DeepSpeed dict, for the record.
        lr_scheduler: anything with `state_dict()`; None if the engine owns none.
        bf16: the run is in bf16; only the file name tells.

    Raises:
        CheckpointError: the disk is too small or ran full, or `client_state` would overwrite the checkpoint itself.
    """
    save_dir, started_s = Path(save_dir), time.monotonic()
    client_state = client_state or {}
    if taken := sorted(_STRUCTURE_KEYS & client_state.keys()):
        raise CheckpointError(f"client_state holds {', '.join(taken)}, keys of the checkpoint itself; rename them")
    state.flush()
    header = {
        "lr_scheduler": lr_scheduler.state_dict() if lr_scheduler is not None else None,
        "data_sampler": data_sampler,
        "random_ltd": None,
        "ds_config": ds_config,
        **counters,
        **client_state,
    }
    model = layout.model_skeleton(state, module, exclude_frozen_parameters=exclude_frozen_parameters, header=header)
    optim = layout.optim_skeleton(state, param_groups, ds_config)
    need_bytes = streamed_bytes(model) + streamed_bytes(optim)
    logger.info("saving checkpoint %s (%s)", save_dir / tag, format_bytes(need_bytes))
    with complete_or_nothing(save_dir, tag, need_bytes=need_bytes) as folder:
        optim_name = OPTIM_STATES.format(bf16="bf16_" if bf16 else "", rank=0)
        _write_file(folder / optim_name, optim, layout.optim_leaves(state))
        _write_file(folder / MODEL_STATES.format(rank=0), model, layout.model_leaves(state, module, model))
        for script in _RECOVERY_SCRIPTS:
            shutil.copy(Path(deepspeed.__file__).parent / "utils" / script, save_dir / script)
            (save_dir / script).chmod(0o755)
    if save_latest:
        write_latest(save_dir, tag)
    logger.info("saved checkpoint %s in %.1f s", save_dir / tag, time.monotonic() - started_s)
    return save_dir / tag


def _write_file(path: Path, skeleton: dict, leaves: Iterable[layout.Leaf]) -> None:
    with StreamedSave(path, skeleton) as file:
        for key_path, tensor in leaves:
            file.write(key_path, tensor)


def load_checkpoint(
    state: TrainState,
    module: nn.Module,
    load_dir: str | Path,
    tag: str | None = None,
    *,
    param_groups: list[dict],
    lr_scheduler: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> LoadedCheckpoint:
    """Puts a checkpoint's values in place, whatever plan or fidelity saved it.

    Everything is checked before the first value is written: after an error the run is as it was.

    Args:
        tag: None takes `latest`.
        param_groups: hyper-parameters are set in these very dicts, as the LR scheduler holds them.
        load_module_strict: False keeps the present value of weights that the checkpoint lacks (a frozen base model
            under LoRA) and ignores those that the model lacks.
        load_optimizer_states: False loads weights, scheduler and counters only.
        load_module_only: weights and buffers only.

    Raises:
        CheckpointError: missing, torn, or of another model; the message names the first differences.
    """
    load_dir = Path(load_dir)
    tag = tag if tag is not None else read_latest(load_dir)
    if tag is None:
        raise CheckpointError(f"{load_dir} has no file 'latest', so no complete checkpoint; pass its folder or a tag")
    model_paths, optim_paths = find_files(load_dir, tag)
    try:
        model_files = [MappedFile(path) for path in model_paths]
        optim_files = [MappedFile(path) for path in optim_paths]
        model = model_files[0].content
        if (optim_files[0].content.get("lazytrain") or {}).get("crc32"):
            for file in (*model_files, *optim_files):
                file.verify_from_now()
        trained = layout.SavedParameters(optim_files, model["param_shapes"], model_files)
        frozen = _frozen_fragments(model_files)
    except Exception as error:  # unpickling a damaged file can raise anything
        raise CheckpointError(
            f"{load_dir / tag} is damaged or not a ZeRO stage-3 checkpoint ({type(error).__name__}: {error}); "
            f"{complete_tags(load_dir, but=tag)}"
        ) from error
    state.flush()
    with_states = load_optimizer_states and not load_module_only
    sources = _match(state.records, trained.shapes, frozen, load_dir / tag, with_states, load_module_strict)
    buffers = {name: model["module"][name] for name in model["buffer_names"]}
    _check_buffers(module, buffers, load_dir / tag, load_module_strict)
    if with_states and len(trained.param_groups) != len(param_groups):
        raise CheckpointError(
            f"{load_dir / tag} has {len(trained.param_groups)} optimizer groups, this run {len(param_groups)}; build "
            "the optimizer as before, or pass load_optimizer_states=False to start it anew"
        )

    try:
        # Buffers, scheduler and client state; weights when they are read.
        trained.verify(tree_leaves({key: value for key, value in model.items() if key != "frozen_param_fragments"}))
        for record, name in sources:
            _load_parameter(state, record, name, trained, frozen, with_states=with_states)
    except DamagedFileError as error:
        raise CheckpointError(
            f"{error}: the disk is failing, or something else wrote there. Values that were read before are in place "
            f"already: start anew; {complete_tags(load_dir, but=tag)}"
        ) from error
    module.load_state_dict(buffers, strict=False)
    if with_states:
        _restore_hyperparameters(param_groups, trained.param_groups)
    if load_module_only:
        return LoadedCheckpoint(path=model_paths[0], counters={}, client_state={}, data_sampler=None)
    if load_lr_scheduler_states and lr_scheduler is not None and model.get("lr_scheduler") is not None:
        lr_scheduler.load_state_dict(model["lr_scheduler"])
    # Copied: what the user keeps must not hang on the mapping of a file that may be deleted.
    client_state = {key: copy.deepcopy(value) for key, value in model.items() if key not in layout.INTERNAL_KEYS}
    return LoadedCheckpoint(
        path=model_paths[0],
        counters={key: model[key] for key in COUNTERS if key in model},
        client_state=client_state,
        data_sampler=model.get("data_sampler"),
    )


Frozen = dict[str, tuple[torch.Size, Callable[[], Tensor]]]


def _frozen_fragments(files: list[MappedFile]) -> Frozen:
    """Name -> (shape, function that gives the flat values) of every weight that was saved as it was."""
    shapes = files[0].content.get("frozen_param_shapes") or {}
    fragments = [file.content.get("frozen_param_fragments") or {} for file in files]

    def flat(name: str) -> Tensor:
        pieces = [fragment[name] for fragment in fragments]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole[: shapes[name].numel()]

    return {name: (torch.Size(shape), lambda name=name: flat(name)) for name, shape in shapes.items()}


def _match(
    records: list[ParamRecord],
    trained_shapes: dict[str, torch.Size],
    frozen: Frozen,
    path: Path,
    with_states: bool,
    strict: bool,
) -> list[tuple[ParamRecord, str]]:
    """Each parameter with the name that the checkpoint has it under; raises CheckpointError on differences."""
    saved_shapes = {name: shape for name, (shape, _) in frozen.items()} | trained_shapes
    sources: list[tuple[ParamRecord, str]] = []
    missing, other_shape, other_role, untied = [], [], [], []
    for record in records:
        names = [name for name in (record.name, *record.aliases) if name in saved_shapes]
        name = names[0] if names else None
        untied += [f"{name} and {other}" for other in names[1:]]
        is_trained = record.group is not None and record.numel > 0
        if name is None:
            if strict or (is_trained and with_states):
                missing.append(record.name)
        elif saved_shapes[name] != record.shape:
            other_shape.append(f"{name} {tuple(saved_shapes[name])} saved, {tuple(record.shape)} here")
        elif with_states and (name in trained_shapes) != is_trained:
            other_role.append(f"{name} {'frozen' if is_trained else 'trained'} there, not here")
        else:
            sources.append((record, name))
    known = {name for record in records for name in (record.name, *record.aliases)}
    unexpected = [
        name for name in saved_shapes if name not in known and (strict or (with_states and name in trained_shapes))
    ]
    differences = [
        _first_of("missing there", missing),
        _first_of("unknown here", unexpected),
        _first_of("other shape", other_shape),
        _first_of("tied here, separate there", untied),
        _first_of("frozen or trained", other_role),
    ]
    if any(differences):
        raise CheckpointError(
            f"checkpoint {path} does not fit this model: {'; '.join(filter(None, differences))}. "
            + _remedy(missing, [*unexpected, *other_shape, *untied], frozen)
        )
    return sources


def _remedy(missing: list[str], others: list[str], frozen: Frozen) -> str:
    if missing and not others and not frozen:
        return "Was it saved with exclude_frozen_parameters? Then load_module_strict=False keeps this run's values"
    if missing or others:
        return "Build the model (and its adapters) as for the saved run"
    return "Freeze the same weights as the saved run, or pass load_module_only=True to start the optimizer anew"


def _first_of(kind: str, items: list[str]) -> str:
    rest = f" and {len(items) - _NAMED_DIFFERENCES} more" if len(items) > _NAMED_DIFFERENCES else ""
    return f"{kind}: {', '.join(items[:_NAMED_DIFFERENCES])}{rest}" if items else ""


def _check_buffers(module: nn.Module, saved: dict[str, Tensor], path: Path, strict: bool) -> None:
    here = module.state_dict(keep_vars=True)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names = {name for name, value in here.items() if torch.is_tensor(value) and name not in parameters}
    differences = [
        _first_of("buffers missing there", sorted(names - saved.keys()) if strict else []),
        _first_of("buffers unknown here", sorted(saved.keys() - names) if strict else []),
        _first_of(
            "other shape",
            [
                f"{name} {tuple(saved[name].shape)} saved, {tuple(here[name].shape)} here"
                for name in sorted(names & saved.keys())
                if saved[name].shape != here[name].shape
            ],
        ),
    ]
    if any(differences):
        raise CheckpointError(
            f"checkpoint {path} does not fit this model: {'; '.join(filter(None, differences))}. "
            "Build the model as for the saved run"
        )


def _load_parameter(
    state: TrainState,
    record: ParamRecord,
    name: str,
    trained: layout.SavedParameters,
    frozen: Frozen,
    *,
    with_states: bool,
) -> None:
    master = trained.master(name) if name in trained.shapes else frozen[name][1]()
    trained.verify([master])
    if record.numel:
        # Frozen ones too: what is written to the parameter itself is this rank's own, with the page that it is on.
        state.write_master(record, master if record.group is None else master.float())
    trained.release([master])
    if with_states and name in trained.shapes:
        values = trained.state(name)
        trained.verify(list(values.values()))
        state.write_state(record, values)
        trained.release(list(values.values()))


def _restore_hyperparameters(param_groups: list[dict], saved_groups: list[dict]) -> None:
    """In place: the LR scheduler and the update hold these dicts (and tensors in them, for capturable optimizers)."""
    for group, saved in zip(param_groups, saved_groups, strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            if torch.is_tensor(group.get(key)) and torch.is_tensor(value):
                group[key].copy_(value)
            else:
                group[key] = value


def consolidated_state_dict(
    state: TrainState, module: nn.Module, *, exclude_frozen_parameters: bool = False
) -> OrderedDict[str, Tensor]:
    """`module.state_dict()` with every tensor on the CPU, in the weights' own dtypes.

    A weight whose home is on the CPU is not copied: the dict aliases it and is good until the next update. Tied names
    share one storage.
    """
    state.flush()
    frozen = {
        name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad
    }
    on_cpu: dict[int, Tensor] = {}
    consolidated: OrderedDict[str, Tensor] = OrderedDict()
    for name, value in module.state_dict(keep_vars=True).items():
        if exclude_frozen_parameters and name in frozen:
            continue
        if torch.is_tensor(value):
            if id(value) not in on_cpu:
                on_cpu[id(value)] = value.detach().cpu()
            value = on_cpu[id(value)]
        consolidated[name] = value
    return consolidated
