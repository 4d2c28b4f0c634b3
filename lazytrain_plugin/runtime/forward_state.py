"""Random state and autocast settings of a forward, for whoever runs it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


class ForwardState:
    """As they are now.

    Args:
        device_type: where the forward runs.
        inputs: its tensors; random states of their devices are kept.
    """

    def __init__(self, device_type: str, inputs: Sequence[torch.Tensor]) -> None:
        self._autocast = AutocastState(device_type)
        self._cpu_rng = torch.get_rng_state()
        self._gpu_rng = get_device_states(*inputs) if device_type == "cuda" else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within: as they were; after: as they are."""
        devices = self._gpu_rng[0] if self._gpu_rng is not None else []
        with torch.random.fork_rng(devices=devices), self._autocast:
            torch.set_rng_state(self._cpu_rng)
            if self._gpu_rng is not None:
                set_device_states(*self._gpu_rng)
            yield


class AutocastState:
    """The autocast settings of a forward, entered again around its recompute."""

    def __init__(self, device_type: str) -> None:
        self.settings = [
            (
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys((device_type, "cpu"))
        ]
        self.contexts: list[torch.autocast] = []

    def __enter__(self) -> None:
        for kind, enabled, dtype, cache in self.settings:
            context = torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache)
            context.__enter__()
            self.contexts.append(context)

    def __exit__(self, *exc_info) -> None:
        while self.contexts:
            self.contexts.pop().__exit__(*exc_info)
