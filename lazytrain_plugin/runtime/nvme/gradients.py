"""`NvmeGradients`: gradients of one unit on NVMe between backward and update, and their sums over micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lazytrain_plugin.runtime.gradient_format import GradientFormat
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.nvme.region import Region
from lazytrain_plugin.runtime.nvme.releases import Releases
from lazytrain_plugin.runtime.nvme.staging import Staging, StagingBuffer
from lazytrain_plugin.runtime.nvme.states import NvmeStates
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.state_layout import ACCUMULATOR


class GradientStaging:
    """The buffers that all units' gradients pass through; made when first needed.

    Args:
        count: units whose gradients may be on their way at once.
        gradient_bytes: of the largest unit, as they arrive.
        sum_bytes: of the largest unit's sums.
        pin: whether gradients come from a GPU.
    """

    def __init__(self, count: int, gradient_bytes: int, sum_bytes: int, *, pin: bool) -> None:
        self.arrivals = Staging(count, gradient_bytes, pin=pin)
        self.sums = Staging(count, sum_bytes, pin=False)
        self.releases = Releases("lazytrain-gradients")

    @property
    def allocated_bytes(self) -> int:
        return self.arrivals.allocated_bytes + self.sums.allocated_bytes

    def drain(self) -> None:
        """Returns when all of it is on disk. Raises StorageError for what failed."""
        self.releases.wait()
        self.arrivals.drain()
        self.sums.drain()

    def close(self) -> None:
        self.releases.close()
        self.arrivals.close()
        self.sums.close()


class NvmeGradients:
    """Stands for the gradient buffer and the accumulator of a unit. Used by one thread at a time.

    Args:
        form: of the unit's gradients and sums. The space of the sums is taken at first use.
        name: the unit's, for messages.
    """

    def __init__(self, tier: NvmeTier, staging: GradientStaging, form: GradientFormat, *, name: str) -> None:
        self.region: Region = tier.region(form.arrival_bytes, what=f"gradients of {name}")
        self._format = form
        self._tier = tier
        self._name = name
        self._staging = staging
        self._sums: NvmeStates | None = None
        self._arriving: StagingBuffer | None = None

    @property
    def staging(self) -> GradientStaging:
        return self._staging

    @staging.setter
    def staging(self, staging: GradientStaging) -> None:
        self._staging = staging
        if self._sums is not None:
            self._sums.staging = staging.sums

    # On their way home.

    def arrive(self, *, fresh: bool) -> HostBuffer:
        """The memory that gradients are to be copied to; `arrived` must follow.

        Args:
            fresh: nothing that arrived before is needed any more.

        Raises:
            StorageError: the disk is full, or failed.
        """
        self._staging.releases.check()
        self._arriving = self._staging.arrivals.acquire(self, fresh=fresh)
        return self._arriving.memory

    def arrived(self, event, *, stays: bool) -> None:
        """They are there once `event` has happened. `stays`: until the update, so that the disk gets them now."""
        buffer, self._arriving = self._arriving, None
        self._staging.releases.after(event, self._staging.arrivals, buffer, changed=True, write=stays)

    # Where they are used.

    @property
    def sums(self) -> NvmeStates:
        """The sums over micro-batches, which are zero at first.

        Raises:
            StorageError: the disk has no room for them.
        """
        if self._sums is None:
            flats = [(ACCUMULATOR, self._format.sum_dtype, self._format.sum_numel)]
            self._sums = NvmeStates(self._tier, self._staging.sums, flats, what=f"gradient sums of {self._name}")
        return self._sums

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[torch.Tensor]:
        """Within: what has arrived, as a flat uint8 tensor; the event of the arrival must have happened.

        Raises:
            StorageError: the disk failed.
        """
        buffer = self._staging.arrivals.acquire(self)
        try:
            yield buffer.memory.tensor(torch.uint8, 0, self._format.arrival_bytes)
        finally:
            self._staging.arrivals.release(buffer)

    def forget(self) -> None:
        """What has arrived was used, or is not going to be."""
        self._staging.arrivals.forget(self)

    def close(self) -> None:
        """Gives the disk space back."""
        self.forget()
        self._tier.give_back(self.region)
        if self._sums is not None:
            self._sums.close()
