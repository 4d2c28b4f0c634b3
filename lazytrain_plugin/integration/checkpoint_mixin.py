"""The checkpoint methods of the engine, with DeepSpeed's signatures."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lazytrain_plugin.errors import CheckpointError
from lazytrain_plugin.integration.checkpoint import (
    COUNTERS,
    consolidated_state_dict,
    load_checkpoint,
    logger,
    save_checkpoint,
)
from lazytrain_plugin.integration.checkpoint_folder import read_latest
from lazytrain_plugin.integration.read_together import read_by_first
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.state import TrainState


class CheckpointMixin:
    """Replaces DeepSpeed's checkpoint methods; stands before `DeepSpeedEngine` among the bases.

    Uses `self.lazytrain` (a `TrainState`) and DeepSpeed's own attributes: `module`, `optimizer`, `lr_scheduler`,
    `config`, `training_dataloader` and the counters.
    """

    lazytrain: TrainState

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves under `save_dir/tag` (`global_step<N>` by default); see DeepSpeed's method of this name.

        Raises:
            CheckpointError: the disk is too small or ran full; earlier checkpoints stay valid.
        """
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        save = functools.partial(
            save_checkpoint,
            module=self.module,
            save_dir=save_dir,
            tag=str(tag) if tag is not None else f"global_step{self.global_steps}",
            counters={name: getattr(self, name) for name in COUNTERS},
            param_groups=self._hyperparameter_groups(),
            ds_config=self.config,
            client_state=client_state,
            lr_scheduler=self.lr_scheduler,
            data_sampler=self._curriculum_sampler() and self._curriculum_sampler().state_dict(),
            bf16=self.bfloat16_enabled(),
            exclude_frozen_parameters=exclude_frozen_parameters,
            save_latest=save_latest,
        )
        # The first rank writes; it sees what all of them have, or asks for it.
        together(
            self.lazytrain,
            lambda ranks: save(self.lazytrain) if ranks is None else read_by_first(self.lazytrain, ranks, save),
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resumes from `load_dir/tag` (the newest complete one by default), on a fresh or a running engine.

        Returns:
            (path of the model file, client state); (None, None) if `load_dir` has no `latest` and no tag is given.

        Raises:
            CheckpointError: the checkpoint is missing, torn or of another model.
        """
        if custom_load_fn is not None:
            raise CheckpointError("custom_load_fn is not supported; load the checkpoint, then edit engine.module")
        if self.load_universal_checkpoint():
            raise CheckpointError(
                "checkpoint.load_universal is not supported; remove it: stage-3 checkpoints of any plan and rank count "
                "load directly"
            )
        tag = _tag_to_load(self.lazytrain, load_dir, tag)
        if tag is None:
            logger.warning("no file 'latest' in %s, so nothing is loaded; pass a tag if there is one", load_dir)
            return None, None
        load = functools.partial(
            load_checkpoint,
            self.lazytrain,
            self.module,
            load_dir,
            tag,
            param_groups=self._hyperparameter_groups(),
            lr_scheduler=self.lr_scheduler,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )
        # Every rank reads it, for what it has for itself; in memory that they share all write the same values.
        loaded = together(self.lazytrain, lambda ranks: load())
        self.lazytrain.discard_gradients()  # of the run that was left
        for name, value in loaded.counters.items():
            setattr(self, name, value)
        if loaded.data_sampler is not None and (sampler := self._curriculum_sampler()) is not None:
            sampler.load_state_dict(loaded.data_sampler)
        return str(loaded.path), loaded.client_state

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> OrderedDict[str, Tensor] | None:
        """The model's state dict on the CPU, as Accelerate, Trainer and `save_16bit_model` ask for it."""
        return consolidated_state_dict(self.lazytrain, self.module, exclude_frozen_parameters=exclude_frozen_parameters)

    def _hyperparameter_groups(self) -> list[dict]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def _curriculum_sampler(self) -> Any:
        if self.training_dataloader is None or not self.curriculum_learning_enabled():
            return None
        return self.training_dataloader.data_sampler


def together(state: TrainState, action: Callable[[RankGroup | None], Any]) -> Any:
    """`action(ranks)` while every rank is here and at rest; None: there is one rank only.

    Raises:
        CheckpointError: another rank failed.
    """
    ranks = _ranks_of(state)
    if ranks is None:
        return action(None)
    state.executor.share_changes()
    state.flush()
    ranks.barrier("start of a checkpoint")
    result = failure = None
    try:
        result = action(ranks)
        state.flush()  # to disk with what was loaded, where other ranks read it
    except Exception as raised:  # which the others, who wait, must hear of
        failure = raised
    texts = ranks.gather_objects(failure and f"{type(failure).__name__}: {failure}", "end of a checkpoint")
    if failure is not None:
        raise failure
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]:
        raise CheckpointError(f"other ranks failed, and training can't go on here alone. {failed[0]}")
    return result


def _tag_to_load(state: TrainState, load_dir: str, tag: str | None) -> str | None:
    """`tag`, or the newest complete one in `load_dir`, the same on every rank; None: there is none.

    Raises:
        CheckpointError: ranks find different ones.
    """
    found = str(tag) if tag is not None else read_latest(Path(load_dir))
    ranks = _ranks_of(state)
    everyone = [found] if ranks is None else ranks.gather_objects(found, "look for a checkpoint")
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        raise CheckpointError(
            f"rank 0 would load tag {everyone[0]!r} from {load_dir} and rank {other} {everyone[other]!r}; name one tag "
            "on all ranks, in a folder that all nodes see"
        )
    return found


def _ranks_of(state: TrainState) -> RankGroup | None:
    executor = getattr(state, "executor", None)
    return None if executor is None else executor.ranks
