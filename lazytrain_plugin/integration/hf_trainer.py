"""Two places where Trainer's order of events surprises a user of LazyTrain: both say so.

A save writes `trainer_state.json` last: one that was interrupted leaves a folder that looks like the newest checkpoint.
And `on_pre_optimizer_step` comes after the step in every DeepSpeed job, because Accelerate steps inside `backward`: a
callback that changes weights there changes the updated ones.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lazytrain_plugin.config.parse import lazytrain_block
from lazytrain_plugin.errors import CheckpointError
from lazytrain_plugin.integration.hf_loading import hf_deepspeed_config

if TYPE_CHECKING:  # torch and the executor are there once a model is managed
    import torch
    from torch import nn

    from lazytrain_plugin.runtime.executor import Executor

logger = logging.getLogger(__name__)

EVENT = "on_pre_optimizer_step"
COMPARED_STEPS = 3
"""Steps whose weights are compared by value: writes through `.data` leave no other trace."""
SAMPLES = 256
"""Elements of a tensor that are compared, spread evenly."""


def patch(module: ModuleType) -> None:
    """Patches `transformers.trainer_callback`."""
    if hasattr(module.CallbackHandler, "_lazytrain_patched"):
        return
    module.CallbackHandler._lazytrain_patched = True
    _explain_missing_state(module.TrainerState)
    _watch_event(module.CallbackHandler, module.TrainerCallback)


def _explain_missing_state(state_class: type) -> None:
    original = state_class.load_from_json.__func__

    @functools.wraps(original)
    def load_from_json(cls: type, json_path: str) -> Any:
        try:
            return original(cls, json_path)
        except (FileNotFoundError, ValueError) as error:
            if lazytrain_block(hf_deepspeed_config()) is None:
                raise
            raise CheckpointError(_cannot_resume(Path(json_path))) from error

    state_class.load_from_json = classmethod(load_from_json)


def _cannot_resume(path: Path) -> str:
    folder = path.parent
    others = [each for each in folder.parent.glob("checkpoint-*") if each != folder and (each / path.name).is_file()]
    newest = max(others, key=lambda each: [int(digits) for digits in re.findall(r"\d+", each.name)], default=None)
    remedy = f"resume from {newest}" if newest else "no complete checkpoint is beside it: start the training anew"
    if not folder.is_dir():
        return f"there is no checkpoint {folder}; {remedy}"
    what = f"its {path.name} is damaged" if path.is_file() else f"it has no {path.name}"
    return (
        f"{folder} can't be resumed from: {what}, which Trainer writes last, so this save was interrupted. Delete the "
        f"folder (resume_from_checkpoint=True takes the highest number) and {remedy}"
    )


def _watch_event(handler_class: type, base_class: type) -> None:
    original = getattr(handler_class, EVENT)

    @functools.wraps(original)
    def on_pre_optimizer_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = [each for each in self.callbacks if getattr(type(each), EVENT, None) is not getattr(base_class, EVENT)]
        before = _Seen.by(self) if theirs else None
        result = original(self, *args, **kwargs)
        if before is not None and (changed := before.changes()):
            self._lazytrain_warned = True
            names = ", ".join(sorted({type(callback).__name__ for callback in theirs}))
            logger.warning(
                "%s changed %s in %s. With DeepSpeed that event comes after the optimizer step (Accelerate steps "
                "inside backward), so the change comes on top of this step's update, where without DeepSpeed it would "
                "come before. Make it in on_optimizer_step, which comes after the update in both",
                names, changed, EVENT,
            )  # fmt: skip
        return result

    setattr(handler_class, EVENT, on_pre_optimizer_step)


class _Seen:
    """What a callback could change, as it was before."""

    def __init__(self, model: nn.Module, optimizer: Any, executor: Executor | None) -> None:
        self._model, self._optimizer, self._executor = model, optimizer, executor
        self._versions, self._rates = self._now()
        self._values = {} if executor is None else self._sample(executor)

    @classmethod
    def by(cls, handler: Any) -> _Seen | None:
        """None where nothing is to be said (any more), or the model is not ours."""
        managed = sys.modules.get("lazytrain_plugin.integration.managed_model")
        executor = managed and handler.model is not None and managed.executor_of(handler.model)
        if not executor or getattr(handler, "_lazytrain_warned", False):
            return None
        handler._lazytrain_events = events = getattr(handler, "_lazytrain_events", 0) + 1
        by_value = events <= COMPARED_STEPS and executor.ranks is None
        return cls(handler.model, handler.optimizer, executor if by_value else None)

    def changes(self) -> str:
        """What has changed since; empty: nothing that can be seen."""
        import torch

        versions, rates = self._now()
        written = [name for name, version in versions.items() if version != self._versions[name]]
        if not written and self._executor is not None:
            now = self._sample(self._executor)
            written = [name for name, values in self._values.items() if not torch.equal(values, now[name])]
        if written:
            return written[0] + (f" (and {len(written) - 1} more weights)" if len(written) > 1 else "")
        return "the learning rate" if rates != self._rates else ""

    def _now(self) -> tuple[dict[str, int], list]:
        import torch

        with torch._C.DisableTorchFunctionSubclass():  # looking at versions must not wait for updates
            versions = {name: parameter._version for name, parameter in self._model.named_parameters()}
        return versions, [group["lr"] for group in getattr(self._optimizer, "param_groups", [])]

    def _sample(self, executor: Executor) -> dict[str, torch.Tensor]:
        executor.flush()
        return {
            name: parameter.detach().reshape(-1)[:: max(1, parameter.numel() // SAMPLES)].clone()
            for name, parameter in self._model.named_parameters()
        }
