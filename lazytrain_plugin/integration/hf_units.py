"""What transformers does inside a unit that the executor must know: recorded outputs and caches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from lazytrain_plugin.errors import UnsupportedModelError

LEGACY_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")
"""Names under which layers take a cache that is a plain tuple; cache objects are known by their class."""


class RecordedOutputs:
    """transformers collects router logits, attentions and the like with hooks on inner modules.

    Under a streamed unit those tensors would come from a forward without gradients. They become outputs of the unit's
    node instead: the hooks collect into a dict of the unit's own, which is added to the model's collection afterwards.
    The collector is a context variable, so it is set anew in backward, which runs on another thread.
    """

    @property
    def _collector(self) -> Any:
        module = sys.modules.get("transformers.utils.output_capturing")
        return getattr(module, "_active_collector", None)

    def active_keys(self) -> tuple[str, ...]:
        collected = self._collector.get() if self._collector is not None else None
        return tuple(key for key, values in (collected or {}).items() if isinstance(values, list))

    @contextlib.contextmanager
    def collecting(self, keys: tuple[str, ...]) -> Iterator[dict[str, list]]:
        captured: dict[str, list] = {key: [] for key in keys}
        if not keys:
            yield captured
            return
        # `hidden_states` records its first layer's input when its list is empty, which it never is inside a unit.
        inner = {**captured, **({"hidden_states": captured["hidden_states"]} if "hidden_states" in keys else {})}
        token = self._collector.set(inner)
        try:
            yield captured
        finally:
            self._collector.reset(token)

    def append(self, captured: dict[str, list]) -> None:
        if captured:
            collected = self._collector.get()
            for key, values in captured.items():
                collected[key].extend(values)


def drop_caches(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments of a layer for a differentiable run: without a cache, as gradient checkpointing gives them.

    A recompute would write to the cache a second time, and then attend to twice the keys.

    Raises:
        UnsupportedModelError: the cache already holds something (prefix tuning), which the gradient depends on.
    """
    args = tuple(None if _is_cache(value) else value for value in args)
    changes: dict[str, Any] = {}
    for name, value in kwargs.items():
        if _is_cache(value) or (name in LEGACY_CACHE_ARGUMENTS and isinstance(value, tuple)):
            changes[name] = None
        elif name == "use_cache" and value:
            changes[name] = False
    return args, {**kwargs, **changes} if changes else kwargs


def _is_cache(value: Any) -> bool:
    module = sys.modules.get("transformers.cache_utils")
    if module is None or not isinstance(value, module.Cache):
        return False
    if int(value.get_seq_length()) > 0:
        raise UnsupportedModelError(
            "the model is trained with a cache that already holds keys and values (prefix tuning?); LazyTrain runs "
            "layers again in backward and can't reproduce it. Use another PEFT method, or disable LazyTrain"
        )
    return True
