"""The DeepSpeed config that transformers holds globally."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def hf_config() -> Iterator[Callable]:
    """hf_config(micro_batch=1, **block) makes it, as TrainingArguments does; it lives until the test ends."""
    import transformers.integrations.deepspeed as hf_deepspeed

    alive = []

    def make(*, micro_batch: int = 1, **block):
        config = {"train_micro_batch_size_per_gpu": micro_batch, "zero_optimization": {"stage": 3}, "lazytrain": block}
        alive.append(hf_deepspeed.HfDeepSpeedConfig(config))
        return alive[-1]

    yield make
    alive.clear()
    gc.collect()
    hf_deepspeed.unset_hf_deepspeed_config()
