"""Reductions of several chunks at once: while the link carries one, the next is encoded and the last decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_DONE = object()


def overlapped(chunks: Iterable[Iterator[None]]) -> None:
    """Advances every chunk by one step at a time, the newest first, so that the link always has something to do.

    A chunk yields where a collective is under way. The order of steps depends on their number alone, so all ranks
    launch their collectives in one order.
    """
    waiting, under_way = iter(chunks), []
    started = next(waiting, None)
    while started is not None or under_way:
        if started is not None:
            under_way.insert(0, started)
        under_way = [steps for steps in under_way if next(steps, _DONE) is not _DONE]
        started = next(waiting, None)
