"""Loading with transformers under an enabled block: the ordinary low-memory road, with true weights.

With stage 3 in the config, transformers would build models under `deepspeed.zero.Init` and hold a second copy of the
checkpoint on every rank while it fills partitioned placeholders. Our weights are never placeholders, so its question
`is_deepspeed_zero3_enabled()` is answered with no. Everything that asks it (transformers 5.17 to 5.24) is about
placeholders: building, loading and resizing a model, counting parameters, and `synced_gpus` in `generate`, where ranks
must stay in step for all-gathers that LazyTrain does not make. What must go on seeing stage 3 asks otherwise:
evaluation without training asks `hf_deepspeed_config.is_zero3()`, saving asks Accelerate.

The question is also the moment to see a checkpoint coming: `from_pretrained` asks it before it builds the model on the
meta device, and reads the files after that. In between stands `PreTrainedModel._load_pretrained_model`, where a model
that can't be trained within the budgets is refused (early_refusal.py).
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
        if not original():
            return False
        if lazytrain_block(module.deepspeed_config()) is None:
            return True
        _watch_loading()
        return False

    is_deepspeed_zero3_enabled._lazytrain_original = original
    setattr(module, _QUESTION, is_deepspeed_zero3_enabled)
    for holder in list(sys.modules.values()):
        if isinstance(holder, ModuleType) and vars(holder).get(_QUESTION) is original:
            setattr(holder, _QUESTION, is_deepspeed_zero3_enabled)


def _watch_loading() -> None:
    """Looks at every model between its construction and the reading of its files, while a block is enabled."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    original = getattr(base, "_load_pretrained_model", None)
    if original is None or getattr(original, "_lazytrain_original", None) is not None:
        return

    @functools.wraps(original)
    def _load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs):
        ds_config = hf_deepspeed_config()
        if lazytrain_block(ds_config) is not None:
            from lazytrain_plugin.integration.early_refusal import check_before_loading, check_copies_of_ranks

            check_before_loading(model, ds_config)
            check_copies_of_ranks(model, checkpoint_files)
        return original(model, state_dict, checkpoint_files, *args, **kwargs)

    _load_pretrained_model._lazytrain_original = original
    base._load_pretrained_model = staticmethod(_load_pretrained_model)
