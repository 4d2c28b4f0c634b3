"""`NvmeActivations`: activations on NVMe between forward and backward.

What a unit sends at once is one record: it crosses a staging buffer in host memory on its way to a region, and again on
its way back. Buffers keep what they hold until they are needed for others: of the units that ran last, which run
backward first, nothing is read from the disk.

[Note: who waits] The thread that runs the model waits for a staging buffer (`put`) and for the disk (`get`), never for
a transfer: buffers are given back by a thread that waits for their events. Every event was launched before that thread
sees it, so no wait depends on what is launched later.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lazytrain_plugin.errors import StorageError
from lazytrain_plugin.plan.simulate import Resource
from lazytrain_plugin.runtime.nvme.io import Job
from lazytrain_plugin.runtime.nvme.region import Region, padded
from lazytrain_plugin.runtime.nvme.releases import Releases
from lazytrain_plugin.runtime.nvme.staging import Staging
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.size_pool import SizePool
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.units import align_up

_ALIGNMENT_BYTES = 256
"""Of a tensor inside its record."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The front of a region that may be larger: regions serve again for records of other sizes."""

    whole: Region
    nbytes: int

    @property
    def busy(self) -> bool:
        return self.whole.busy

    def read(self, address: int, keep) -> Job:
        return self.whole.read(address, keep, nbytes=self.nbytes)

    def write(self, address: int, keep) -> Job:
        return self.whole.write(address, keep, nbytes=self.nbytes)


@dataclass(slots=True, eq=False)
class _Record:
    """What one unit sent at once."""

    region: _Part
    num_tickets: int
    """Of those that were not dropped yet."""


@dataclass(slots=True, eq=False)
class NvmeTicket:
    """A tensor's bytes inside a record."""

    record: _Record
    offset_bytes: int
    nbytes: int
    left: object


class NvmeActivations:
    """The tier on disk of an `ActivationStore` (runtime/activation_tier.py describes the interface).

    Args:
        streams: of the device that activations come from.
        tier: where regions come from.
        count: staging buffers; each is as large as the largest record so far.
    """

    def __init__(self, streams: Streams, tier: NvmeTier, *, count: int = 1) -> None:
        self._streams = streams
        self._tier = tier
        self.count = count
        self._staging: Staging | None = None
        self._releases = Releases("lazytrain-activations")
        self._regions: SizePool[Region] = SizePool(self._make_region, self._end_region)
        self._dropped: deque[NvmeTicket] = deque()
        """Appended to by whoever lets go of a graph, on any thread and at any time."""

    def _make_region(self, nbytes: int) -> Region:
        return self._tier.region(nbytes, what="activations")

    def _end_region(self, region: Region) -> None:
        with contextlib.suppress(StorageError):  # who needs the bytes is told
            self._tier.give_back(region)

    @property
    def free_bytes(self) -> int:
        """Disk space that waits for its next use."""
        self._take_back()
        return self._regions.free_bytes

    def put(self, sources: Sequence[torch.Tensor]) -> list[NvmeTicket]:
        """See `ActivationTier.put`. Waits for a staging buffer.

        Raises:
            StorageError: the disk is full, or failed.
        """
        self._take_back()
        offsets, end = [], 0
        for source in sources:
            offsets.append(end)
            end += align_up(source.nbytes, _ALIGNMENT_BYTES)
        staging = self._staging_of(padded(end))
        record = _Record(_Part(self._regions.take(padded(end)), end), len(sources))
        streams = self._streams
        with streams.host_waits("activations"):
            buffer = staging.acquire(record, fresh=True)
        written = streams.record()
        with streams.on(streams.d2h):
            streams.wait(streams.d2h, written)
            name = f"activations ({streams.phase})"
            with streams.span(name, Resource.D2H, stream=streams.d2h, num_bytes=end):
                for offset_bytes, source in zip(offsets, sources, strict=True):
                    buffer.memory.write(offset_bytes, source)
        left = streams.record(streams.d2h, blocking=True)
        self._releases.after(left, staging, buffer, changed=True)
        return [
            NvmeTicket(record, offset_bytes, source.nbytes, left)
            for offset_bytes, source in zip(offsets, sources, strict=True)
        ]

    def read_ahead(self, tickets: Sequence[NvmeTicket]) -> None:
        self._take_back()
        if self._staging is not None:
            self._staging.read_ahead(_records(tickets))

    def ready(self, tickets: Sequence[NvmeTicket]) -> bool:
        return self._staging is not None and all(self._staging.holds(record) for record in _records(tickets))

    def get(self, tickets: Sequence[NvmeTicket]) -> tuple[list[torch.Tensor], object]:
        """See `ActivationTier.get`. Waits for the disk.

        Raises:
            StorageError: the disk failed, or gave back other bytes.
        """
        self._take_back()
        streams = self._streams
        found = {ticket: torch.empty(ticket.nbytes, dtype=torch.uint8, device=streams.device) for ticket in tickets}
        allocated, arrived = streams.record(), None
        for record, group in _records(tickets).items():
            staging = self._staging_of(padded(record.region.nbytes))
            with streams.host_waits("activations"):
                buffer = staging.acquire(record)
            with streams.on(streams.h2d):
                streams.wait(streams.h2d, allocated)
                streams.wait(streams.h2d, group[0].left)  # it may still be in the buffer that it left to
                name = f"activations ({streams.phase})"
                num_bytes = sum(ticket.nbytes for ticket in group)
                with streams.span(name, Resource.H2D, stream=streams.h2d, num_bytes=num_bytes):
                    for ticket in group:
                        buffer.memory.read(ticket.offset_bytes, found[ticket])
            arrived = streams.record(streams.h2d, blocking=True)
            self._releases.after(arrived, staging, buffer)
        return [found[ticket] for ticket in tickets], arrived

    def drop(self, ticket: NvmeTicket) -> None:
        self._dropped.append(ticket)

    def close(self) -> None:
        """Gives back staging memory, and the disk space of what nobody holds any more.

        A disk that failed is no error any more: activations are of no use later.
        """
        with contextlib.suppress(StorageError):
            self._take_back()
        with contextlib.suppress(StorageError):
            self._end_staging()
        self._releases.close()
        self._regions.clear()

    def _staging_of(self, nbytes: int) -> Staging:
        """Buffers that hold `nbytes`, `count` of them; made again where a larger record comes than any before."""
        staging = self._staging
        if staging is None or staging.nbytes < nbytes or staging.count != max(self.count, 1):
            largest_bytes = max(nbytes, staging.nbytes if staging is not None else 0)
            self._end_staging()
            self._staging = Staging(self.count, largest_bytes, pin=self._streams.is_cuda)
        return self._staging

    def _end_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            try:
                self._releases.wait()
                staging.drain()
            finally:
                staging.close()

    def _take_back(self) -> None:
        """Makes space of what was dropped, and raises what went wrong meanwhile."""
        while self._dropped:
            record = self._dropped.popleft().record
            record.num_tickets -= 1
            if record.num_tickets == 0:
                if self._staging is not None:
                    self._staging.forget(record)
                self._regions.give(record.region.whole.padded_bytes, record.region.whole)
        self._releases.check()


def _records(tickets: Sequence[NvmeTicket]) -> dict[_Record, list[NvmeTicket]]:
    groups: dict[_Record, list[NvmeTicket]] = {}
    for ticket in tickets:
        groups.setdefault(ticket.record, []).append(ticket)
    return groups
