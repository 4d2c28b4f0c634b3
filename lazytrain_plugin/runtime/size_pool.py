"""`SizePool`: memory (or disk space) of many sizes, used again step after step."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SizePool(Generic[T]):
    """Hands out things of at least the size that is asked for.

    Sequence lengths vary from batch to batch, and every size with them. So what serves is the smallest free thing that
    is large enough. Where none is, a longer batch than any before has come: what is free is too small for it and is
    discarded, so that no more is ever held than the longest batch needs.

    Args:
        make: a new thing of that many bytes.
        discard: ends one.
    """

    def __init__(self, make: Callable[[int], T], discard: Callable[[T], None]) -> None:
        self._make = make
        self._discard = discard
        self._free: list[tuple[int, T]] = []
        """Sorted by size; the latest of a size is the last, and is taken first: it is warm."""

    def take(self, nbytes: int) -> T:
        """The smallest free one of at least `nbytes`, else a new one of exactly that size."""
        place = bisect.bisect_left(self._free, nbytes, key=_size)
        if place == len(self._free):
            self.clear()
            return self._make(nbytes)
        place = bisect.bisect_right(self._free, self._free[place][0], key=_size) - 1
        return self._free.pop(place)[1]

    def give(self, nbytes: int, thing: T) -> None:
        """Takes back one whose whole size is `nbytes`."""
        self._free.insert(bisect.bisect_right(self._free, nbytes, key=_size), (nbytes, thing))

    def clear(self) -> None:
        """Discards what is free."""
        free, self._free = self._free, []
        for _, thing in free:
            self._discard(thing)

    @property
    def free_bytes(self) -> int:
        """Of what nobody has taken."""
        return sum(nbytes for nbytes, _ in self._free)


def _size(entry: tuple[int, object]) -> int:
    return entry[0]
