"""The first rank reads masters and states of which other ranks hold parts: those of its node on their GPUs, or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.state import ParamRecord, StateValue
from lazytrain_plugin.runtime.streamed_file import TensorSpec
from lazytrain_plugin.runtime.train_state import ExecutorState

PHASE = "saving"


def read_by_first(state: ExecutorState, ranks: RankGroup, action: Callable[[Any], Any]) -> Any:
    """What `action` returns on the first rank, which gets a `TrainState`; what it raises there is raised everywhere.

    The other ranks read whatever it reads, until it is done. Every rank calls it, at rest.
    """
    if not state.holds_parts:
        return ranks.from_first(lambda: action(state), PHASE)
    result, error = None, None
    if ranks.is_first:
        try:
            result = action(_AskingState(state, ranks))
        except Exception as raised:
            error = raised
        ranks.from_first(lambda: None, PHASE)
    else:
        while (asked := ranks.from_first(_nothing, PHASE)) is not None:
            method, index, span = asked
            if ranks.is_of_first_node or ranks.shards_job:
                getattr(state, method)(state.records[index], span)

    def answer() -> Any:
        if error is not None:
            raise error
        return result

    return ranks.from_first(answer, PHASE)


def _nothing() -> None:
    """Only the first rank's is called."""


class _AskingState:
    """The first rank's `TrainState`: has others read with it what it can't read alone."""

    def __init__(self, state: ExecutorState, ranks: RankGroup) -> None:
        self._state, self._ranks = state, ranks
        self.records = state.records
        self._place = {record: index for index, record in enumerate(state.records)}

    def spans(self, record: ParamRecord) -> list[slice]:
        return self._state.spans(record)

    def read_master(self, record: ParamRecord, span: slice | None = None) -> Tensor:
        self._ask("read_master", record, span)
        return self._state.read_master(record, span)

    def state_specs(self, record: ParamRecord) -> dict[str, TensorSpec | StateValue]:
        return self._state.state_specs(record)  # of native updaters, as all of several ranks are, without reading

    def read_state(self, record: ParamRecord, span: slice | None = None) -> dict[str, StateValue]:
        self._ask("read_state", record, span)
        return self._state.read_state(record, span)

    def flush(self) -> None:
        self._state.flush()

    def _ask(self, method: str, record: ParamRecord, span: slice | None) -> None:
        if self._state.holds_part(record):
            self._ranks.from_first(lambda: (method, self._place[record], span), PHASE)
