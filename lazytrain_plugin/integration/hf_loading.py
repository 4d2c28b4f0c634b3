"""Loading with transformers under an enabled block: the ordinary low-memory road, with true weights.

With stage 3 in the config, transformers would build models under `deepspeed.zero.Init` and hold a second copy of the
checkpoint on every rank while it fills partitioned placeholders. Our weights are never placeholders, so its question
`is_deepspeed_zero3_enabled()` is answered with no. Everything that asks it (transformers 5.17 to 5.24) is about
placeholders: building, loading and resizing a model, counting parameters, and `synced_gpus` in `generate`, where ranks
must stay in step for all-gathers that LazyTrain does not make. What must go on seeing stage 3 asks otherwise:
evaluation without training asks `hf_deepspeed_config.is_zero3()`, saving asks Accelerate.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType

from lazytrain_plugin.config.parse import lazytrain_block

_QUESTION = "is_deepspeed_zero3_enabled"
_MODULE = "transformers.integrations.deepspeed"


def hf_deepspeed_config() -> dict | None:
    """The DeepSpeed config that transformers holds for the life of a TrainingArguments or Accelerator, or None."""
    module = sys.modules.get(_MODULE)
    return None if module is None else module.deepspeed_config()


def patch(module: ModuleType) -> None:
    """Patches `transformers.integrations.deepspeed`, and the modules that took the function by value before us."""
    original = getattr(module, _QUESTION)
    if getattr(original, "_lazytrain_original", None) is not None:
        return

    @functools.wraps(original)
    def is_deepspeed_zero3_enabled() -> bool:
        return original() and lazytrain_block(module.deepspeed_config()) is None

    is_deepspeed_zero3_enabled._lazytrain_original = original
    setattr(module, _QUESTION, is_deepspeed_zero3_enabled)
    for holder in list(sys.modules.values()):
        if isinstance(holder, ModuleType) and vars(holder).get(_QUESTION) is original:
            setattr(holder, _QUESTION, is_deepspeed_zero3_enabled)
