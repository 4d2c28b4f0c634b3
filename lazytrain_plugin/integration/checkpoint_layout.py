"""What stands in the two files of a checkpoint: DeepSpeed's ZeRO stage-3 layout, one flat tensor per parameter.

DeepSpeed packs parameters into flat groups of about 1e9 elements; the number of groups is free, so here every
parameter is a group of its own. `zero_to_fp32.py` and DeepSpeed's universal conversion read the result, and nothing
in it depends on the plan. DeepSpeed's own stage-3 checkpoints, of any number of ranks, are read too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import Tensor, nn

from lazytrain_plugin.runtime.state import ParamRecord, StateValue, TrainState
from lazytrain_plugin.runtime.streamed_file import KeyPath, MappedFile, TensorSpec

ZERO_STAGE = 3
FORMAT = 1
"""Of the "lazytrain" section in the optimizer file."""

INTERNAL_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler "
    "data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config "
    "ds_version checkpoint_parallel_dimensions universal_checkpoint_info".split()
)
"""Top-level keys of the model file that are not the user's client state."""

Leaf = tuple[KeyPath, Tensor]


def trained_records(state: TrainState) -> list[ParamRecord]:
    """Records with a flat fp32 group in the file, in file order; empty tensors are kept with the frozen ones."""
    return [record for record in state.records if record.group is not None and record.numel]


def kept_records(state: TrainState) -> list[ParamRecord]:
    """Records that are stored as they are: frozen or empty."""
    return [record for record in state.records if record.group is None or not record.numel]


def optim_skeleton(state: TrainState, param_groups: list[dict], ds_config: dict) -> dict:
    """The optimizer file with specs for its tensors; `optim_leaves` gives the tensors."""
    trained = trained_records(state)
    states: dict[int, dict[str, Any]] = {}
    codec: dict[int, dict[str, Any]] = {}
    untouched: dict[int, str] = {}
    for index, record in enumerate(trained):
        specs = state.state_specs(record)
        codec[index] = {key: spec for key, spec in specs.items() if "." in key}
        states[index] = {key: spec for key, spec in specs.items() if "." not in key}
        if not states[index]:
            untouched[index] = record.name
    _stand_in_for_untouched(states, untouched, trained)
    groups = []
    for number, group in enumerate(param_groups):
        indices = [index for index, record in enumerate(trained) if record.group == number]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": indices})
    return {
        "optimizer_state_dict": {
            "zero_stage": ZERO_STAGE,
            "loss_scaler": LossScaler(scale=1),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": 1,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": [TensorSpec(torch.Size([record.numel]), torch.float32) for record in trained],
        },
        "ds_config": ds_config,
        "ds_version": deepspeed.__version__,
        "lazytrain": {
            "format": FORMAT,
            "crc32": True,
            "codec": {index: entries for index, entries in codec.items() if entries},
            "untouched": list(untouched.values()),
        },
    }


def _stand_in_for_untouched(states: dict[int, dict], untouched: dict[int, str], trained: list[ParamRecord]) -> None:
    """Zero moments for parameters that were never updated, as the universal conversion wants every parameter's.

    They are expanded from one element, so they take no room in the file.
    """
    touched = next((index for index in states if index not in untouched), None)
    if touched is None:
        return
    for index in untouched:
        for key, value in states[touched].items():
            if not isinstance(value, TensorSpec):
                states[index][key] = type(value)(0) if isinstance(value, int | float) else value
            elif value.shape == (trained[touched].numel,):
                states[index][key] = torch.zeros(1, dtype=value.dtype).expand(trained[index].numel)
            elif not value.shape:
                states[index][key] = torch.zeros((), dtype=value.dtype)


def optim_leaves(state: TrainState) -> Iterator[Leaf]:
    """The tensors that `optim_skeleton` announced, one parameter at a time, a large one's in pieces."""
    root = "optimizer_state_dict"
    for index, record in enumerate(trained_records(state)):
        for span in state.spans(record):
            yield (root, "fp32_flat_groups", index), state.read_master(record, span)
            for key, value in state.read_state(record, span).items():
                if torch.is_tensor(value):
                    yield (("lazytrain", "codec") if "." in key else (root, root, "state")) + (index, key), value


def model_skeleton(
    state: TrainState, module: nn.Module, *, exclude_frozen_parameters: bool, header: dict[str, Any]
) -> dict:
    """The model file with specs for its tensors; `model_leaves` gives the tensors.

    Args:
        header: counters, scheduler, config and client state: the keys that are not about tensors.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    frozen_names = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    entries: OrderedDict[str, Any] = OrderedDict()
    for name, value in module.state_dict().items():
        if name not in parameters:
            entries[name] = TensorSpec.like(value) if torch.is_tensor(value) else value
        elif not (exclude_frozen_parameters and name in frozen_names):
            entries[name] = torch.empty(0, dtype=value.dtype)  # DeepSpeed's placeholder: the value is in a flat group
    kept = kept_records(state)
    if exclude_frozen_parameters:
        kept = [record for record in kept if record.group is not None]
    return {
        "module": entries,
        "buffer_names": [name for name, _ in module.named_buffers(remove_duplicate=False) if name in entries],
        "optimizer": None,
        "param_shapes": [OrderedDict([(record.name, record.shape)]) for record in trained_records(state)],
        "frozen_param_shapes": OrderedDict((record.name, record.shape) for record in kept),
        "frozen_param_fragments": OrderedDict(
            (record.name, TensorSpec(torch.Size([record.numel]), record.dtype)) for record in kept
        ),
        "shared_params": {alias: record.name for record in state.records for alias in record.aliases},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": deepspeed.__version__,
        **header,
    }


def model_leaves(state: TrainState, module: nn.Module, skeleton: dict) -> Iterator[Leaf]:
    """The tensors that `model_skeleton` announced: frozen weights one at a time, and buffers."""
    for record in kept_records(state):
        if record.name in skeleton["frozen_param_fragments"]:
            yield ("frozen_param_fragments", record.name), record.parameter.detach().reshape(-1)
    for name, value in module.state_dict().items():
        if isinstance(skeleton["module"].get(name), TensorSpec):
            yield ("module", name), value


class SavedParameters:
    """Masters and states by parameter name, from the mapped optimizer files of all saving ranks.

    Rank r holds elements [r * ceil(numel / ranks), ...) of each parameter; a rank's groups, laid end to end, hold
    its pieces in the order of `param_shapes`.
    """

    def __init__(
        self, files: list[MappedFile], param_shapes: list[dict[str, torch.Size]], model_files: list[MappedFile]
    ) -> None:
        self._files = [*files, *model_files]
        self._ranks = [file.content["optimizer_state_dict"] for file in files]
        self._section = files[0].content.get("lazytrain")
        self.shapes = {name: torch.Size(shape) for group in param_shapes for name, shape in group.items()}
        self._bounds = [0, *accumulate(flat.numel() for flat in self._ranks[0]["fp32_flat_groups"])]
        piece_ends = [0, *accumulate(-(-shape.numel() // len(files)) for shape in self.shapes.values())]
        self._pieces = dict(zip(self.shapes, pairwise(piece_ends), strict=True))
        if self._bounds[-1] != piece_ends[-1]:
            raise ValueError(f"the flat groups hold {self._bounds[-1]} elements, the shapes ask for {piece_ends[-1]}")

    @property
    def param_groups(self) -> list[dict]:
        """Hyper-parameters of the optimizer groups."""
        return self._ranks[0]["optimizer_state_dict"]["param_groups"]

    def master(self, name: str) -> Tensor:
        """fp32 [numel]; a view of the mapping if one piece holds it."""
        flats = [rank["fp32_flat_groups"] for rank in self._ranks]
        return self._join(name, lambda rank, group: flats[rank][group])

    def state(self, name: str) -> dict[str, StateValue]:
        """The optimizer state and its codec entries; `{}` for a parameter that was never updated."""
        first = self._spans(name)[0][0]
        states = [rank["optimizer_state_dict"]["state"] for rank in self._ranks]
        if first not in states[0] or (self._section and name in self._section["untouched"]):
            return {}
        values = {}
        for key, value in states[0][first].items():
            if torch.is_tensor(value) and value.shape == (self._group_numel(first),):
                value = self._join(name, lambda rank, group: states[rank][group][key])  # noqa: B023
            elif torch.is_tensor(value) and not value.shape:
                value = value.clone()  # a step counter, which DeepSpeed keeps once for all parameters of a group
            values[key] = value
        if self._section:
            values |= self._section["codec"].get(first, {})
        return values

    def verify(self, values: list[StateValue]) -> None:
        """Raises DamagedFileError where what was read, of frozen weights too, is not what was saved."""
        for value in values:
            if torch.is_tensor(value):
                for file in self._files:
                    file.verify(value)

    def release(self, values: list[StateValue]) -> None:
        """Gives back the memory that reading `values` took, those of frozen weights too."""
        for value in values:
            if torch.is_tensor(value):
                for file in self._files:
                    file.release(value)

    def _group_numel(self, group: int) -> int:
        return self._bounds[group + 1] - self._bounds[group]

    def _spans(self, name: str) -> list[tuple[int, int, int]]:
        """(group, start in the group, end in the group) of the parameter's piece, the same on every rank."""
        piece_start, piece_end = self._pieces[name]
        spans = []
        group = bisect_right(self._bounds, piece_start) - 1
        while piece_start < piece_end:
            start, end = self._bounds[group], min(piece_end, self._bounds[group + 1])
            spans.append((group, piece_start - start, end - start))
            piece_start, group = end, group + 1
        return spans

    def _join(self, name: str, flat_of: Callable[[int, int], Tensor]) -> Tensor:
        ranks = range(len(self._ranks))
        pieces = [flat_of(rank, group)[start:end] for rank in ranks for group, start, end in self._spans(name)]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole[: self.shapes[name].numel()]
