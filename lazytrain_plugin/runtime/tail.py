"""The products at the end of a recomputed unit whose values nobody needs: zeros take their place when it runs again.

See [Note: the tail] of runtime/selective.py for when that is safe. There every operator of the unit passes through
Python, in its forward and when it runs again, which takes the host longer than the operators themselves. A unit that
saves nothing is looked at twice only:

1. the first time it runs again, `_Look` notes its operators, and how often autograd had saved something before each;
2. the second time, `_Skip` comes in where autograd saves something for the last time before the tail (the pack hook
   of that moment starts it) and notes which operators it gets to see;
3. from then on it comes in there, and expects those operators and no others: the first tail product becomes zeros
   without being computed.

[Note: no trust] What was found may be wrong for a later call: a layer can take another way any time. So nothing counts
before the unit has ended as expected, operator by operator, with no value saved after the zeros, and with torch's own
nodes alone from the product to the outputs. Else the unit runs once more, whole, and what was found is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lazytrain_plugin.profile.operator_kinds import OperatorKind
from lazytrain_plugin.runtime.selective import Mode, ends_in_own_nodes, has_hooks, traits_of

MOST_LOOKS = 4
"""Times that a unit is looked at before it is left alone: its way changes from call to call."""

aten = torch.ops.aten
_SHAPES: dict[object, Callable] = {
    aten.mm.default: lambda a, b: (a.shape[0], b.shape[1]),
    aten.bmm.default: lambda a, b: (*a.shape[:2], b.shape[2]),
    aten.addmm.default: lambda _, a, b: (a.shape[0], b.shape[1]),
    aten.baddbmm.default: lambda _, a, b: (*a.shape[:2], b.shape[2]),
}
"""Of products that can be left out: the result's shape, contiguous and of the last argument's dtype."""


@dataclass(slots=True)
class _Seen:
    """One call of an operator."""

    operator: object
    packs: int
    """How often autograd had saved something before."""
    sequence: int
    """Autograd's number of its node, if it has one."""
    is_product: bool
    can_be_blank: bool
    value_is_needed: bool


class WrongWayError(RuntimeError):
    """The unit does not end as expected. Raised through the layer's code, and caught by who runs it."""


class UnitTail:
    """What is known of the end of one unit."""

    def __init__(self) -> None:
        self._looks = 0
        self._learnt: _Learnt | None = None
        self._is_known = False

    def run_again(self, module: nn.Module | None) -> TailRun:
        """For one recompute; see `TailRun`."""
        if not self._is_known and self._looks < MOST_LOOKS:
            self._looks += 1
            return _Look(self, module)
        if self._learnt is None or has_hooks(module):
            return TailRun()
        return _Skip(self, self._learnt)

    def found(self, learnt: _Learnt | None) -> None:
        """None: there is nothing to leave out."""
        self._is_known, self._learnt = True, learnt

    def forget(self) -> None:
        self._is_known, self._learnt = False, None


class TailRun:
    """A unit runs again. Context manager; the run's pack hook is what `packing` gives."""

    def __enter__(self) -> TailRun:
        return self

    def __exit__(self, *exc_info) -> None:
        pass

    def packing(self, pack: Callable) -> Callable:
        """The pack hook to use instead of `pack`."""
        return pack

    def ended_well(self, outputs: list[torch.Tensor]) -> bool:
        """Whether the graph of `outputs` is the unit's; False: run it again, whole. Call it once, at the end, and
        don't call it after an error, `WrongWayError` apart."""
        return True


class _Counting(Mode, TailRun):
    """Notes operators, and how often autograd had saved something before."""

    def __init__(self, tail: UnitTail) -> None:
        super().__init__()
        self._tail = tail
        self._packs = 0
        self._is_packing = False
        self._seen: list[_Seen] = []

    def packing(self, pack: Callable) -> Callable:
        def counted(tensor: torch.Tensor):
            self._packs += 1
            self._is_packing = True  # what the hook itself does is none of the unit's operators
            try:
                self._saves()
                return pack(tensor)
            finally:
                self._is_packing = False

        return counted

    def _saves(self) -> None:
        """Autograd saves something, for the `_packs`th time."""

    def _note(self, func) -> _Seen:
        traits = traits_of(func)
        seen = _Seen(
            operator=func,
            packs=self._packs,
            sequence=torch.autograd._get_sequence_nr() - 1,
            is_product=traits.kind != OperatorKind.OTHER,
            can_be_blank=func in _SHAPES,
            value_is_needed=traits.value_is_needed,
        )
        self._seen.append(seen)
        return seen


class _Look(_Counting):
    """The first time: everything is noted, nothing left out."""

    def __init__(self, tail: UnitTail, module: nn.Module | None) -> None:
        super().__init__(tail)
        self._module = module
        self._seen_before: list[int] = []
        """By pack: operators before it."""

    def _saves(self) -> None:
        self._seen_before.append(len(self._seen))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._is_packing:
            return func(*args, **(kwargs or {}))
        seen = self._note(func)
        result = func(*args, **(kwargs or {}))
        if seen.can_be_blank:
            shape, last = _SHAPES[func](*args), args[-1]
            seen.can_be_blank = result.shape == shape and result.is_contiguous() and result.dtype == last.dtype
        return result

    def ended_well(self, outputs: list[torch.Tensor]) -> bool:
        self._tail.found(None if has_hooks(self._module) else self._learn(outputs))
        return True

    def _learn(self, outputs: list[torch.Tensor]) -> _Learnt | None:
        seen = self._seen
        # Behind the last save and the last value that anybody may have looked at.
        needed = [place for place, call in enumerate(seen) if call.packs < self._packs or call.value_is_needed]
        products = [place for place in range(max(needed, default=-1) + 1, len(seen)) if seen[place].is_product]
        if not products or not all(seen[place].can_be_blank for place in products):
            return None
        if not ends_in_own_nodes({seen[place].sequence for place in products}, outputs):
            return None
        # The operator that a pack belongs to may be under way already: then the mode sees only what follows it.
        starts = [pack for pack, before in enumerate(self._seen_before, 1) if before + 1 <= products[0]]
        if not starts:
            return None
        first = products[0]
        return _Learnt(starts[-1], self._packs, seen[first:], frozenset(place - first for place in products))


@dataclass(slots=True)
class _Learnt:
    start: int
    """At which pack `_Skip` comes in."""
    num_packs: int
    calls: list[_Seen]
    """From the first product of the tail on; all that `_Skip` gets to see, once it has looked."""
    blanks: frozenset[int]
    """Places in `calls` of what is left out."""
    is_exact: bool = False
    """Whether `_Skip` has looked."""


class _Skip(_Counting):
    """Leaves out what was found; the first time it only looks at what it gets to see."""

    def __init__(self, tail: UnitTail, learnt: _Learnt) -> None:
        super().__init__(tail)
        self._learnt = learnt
        self._place = 0
        self._runs = self._is_lost = False
        self._depth = 0
        self._blank_sequences: set[int] = set()

    def __enter__(self) -> TailRun:
        self._depth = torch._C._len_torch_dispatch_stack()
        return self  # it comes in at a pack

    def __exit__(self, *exc_info) -> None:
        if self._runs:
            self._runs = False
            super().__exit__(*exc_info)

    def _saves(self) -> None:
        if self._blank_sequences:
            self._lose()
        # Not inside a mode of the layer's own, which ends before the unit does.
        elif self._packs == self._learnt.start and torch._C._len_torch_dispatch_stack() == self._depth:
            self._runs = True
            super().__enter__()

    def _lose(self) -> None:
        self._is_lost = True
        if self._blank_sequences:
            raise WrongWayError("this layer does not end as it did before")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        learnt, place = self._learnt, self._place
        if not (self._is_packing or self._is_lost):
            if not learnt.is_exact:
                self._note(func)
            elif (
                place < len(learnt.calls)
                and func is learnt.calls[place].operator
                and self._packs == learnt.calls[place].packs
            ):
                self._place += 1
                if place in learnt.blanks:
                    self._blank_sequences.add(torch.autograd._get_sequence_nr() - 1)
                    return args[-1].new_zeros(_SHAPES[func](*args))
            else:
                self._lose()
        return func(*args, **(kwargs or {}))

    def ended_well(self, outputs: list[torch.Tensor]) -> bool:
        learnt = self._learnt
        if not learnt.is_exact:
            self._learn()
            return True
        as_expected = not self._is_lost and self._place == len(learnt.calls) and self._packs == learnt.num_packs
        if not self._blank_sequences:
            if not as_expected:
                self._tail.forget()
            return True
        if not as_expected or not ends_in_own_nodes(self._blank_sequences, outputs):
            self._tail.forget()
            return False
        return True

    def _learn(self) -> None:
        learnt, seen = self._learnt, self._seen
        before = len(seen) - len(learnt.calls)
        same = before >= 0 and all(
            one.operator is other.operator and one.packs == other.packs
            for one, other in zip(seen[before:], learnt.calls, strict=True)
        )
        if not same or self._packs != learnt.num_packs:
            self._tail.forget()
            return
        blanks = frozenset(before + place for place in learnt.blanks)
        self._tail.found(_Learnt(learnt.start, learnt.num_packs, seen, blanks, is_exact=True))
