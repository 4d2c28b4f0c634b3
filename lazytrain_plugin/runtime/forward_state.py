"""Random state and autocast settings of a forward, for whoever runs it again."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ForwardState:
    """As they are now.

    Args:
        device_type: where the forward runs.
        inputs: its tensors; random states of their devices are kept.
    """

    def __init__(self, device_type: str, inputs: Sequence[torch.Tensor]) -> None:
        self._autocast = AutocastState(device_type)
        self._cpu_rng = torch.get_rng_state()
        self._gpu_rng = _gpu_generators(inputs) if device_type == "cuda" else []

    def restored(self) -> _Restored:
        """Within: as they were; after: as they are."""
        return _Restored(self._autocast, self._cpu_rng, self._gpu_rng)


class _Restored:
    def __init__(self, autocast: AutocastState, cpu_rng: torch.Tensor, gpu_rng: list[GpuRng]) -> None:
        self._autocast, self._cpu_rng, self._gpu_rng = autocast, cpu_rng, gpu_rng

    def __enter__(self) -> None:
        self._cpu_rng_after = torch.get_rng_state()
        self._gpu_rng_after = [_gpu_rng(generator) for generator, _, _ in self._gpu_rng]
        self._autocast.__enter__()
        torch.set_rng_state(self._cpu_rng)
        for rng in self._gpu_rng:
            _set_gpu_rng(*rng)

    def __exit__(self, *exc_info) -> None:
        torch.set_rng_state(self._cpu_rng_after)
        for rng in self._gpu_rng_after:
            _set_gpu_rng(*rng)
        self._autocast.__exit__(*exc_info)


GpuRng = tuple[torch.Generator, int, int]
"""A device's generator, its seed and how far it is."""


def _gpu_generators(inputs: Sequence[torch.Tensor]) -> list[GpuRng]:
    devices = {tensor.get_device() for tensor in inputs if tensor.is_cuda}
    return [_gpu_rng(torch.cuda.default_generators[device]) for device in sorted(devices)]


def _gpu_rng(generator: torch.Generator) -> GpuRng:
    # Two numbers are a GPU's whole random state. A copy of it as bytes, and the way back, take the host much longer.
    return generator, generator.initial_seed(), generator.get_offset()


def _set_gpu_rng(generator: torch.Generator, seed: int, offset: int) -> None:
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    if generator.get_offset() != offset:
        generator.set_offset(offset)


class AutocastState:
    """The autocast settings of a forward, entered again around its recompute."""

    def __init__(self, device_type: str) -> None:
        self.settings = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in dict.fromkeys((device_type, "cpu"))
        ]
        self.contexts: list[torch.autocast] = []

    def __enter__(self) -> None:
        for kind, enabled, dtype, cache in self.settings:
            if not enabled and not torch.is_autocast_enabled(kind):
                continue  # as it is; a context takes the host as long as a small operator
            context = torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache)
            context.__enter__()
            self.contexts.append(context)

    def __exit__(self, *exc_info) -> None:
        while self.contexts:
            self.contexts.pop().__exit__(*exc_info)
