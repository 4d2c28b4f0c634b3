"""What was done to weights from outside between two runs of the model: taken over, or refused by name.

New values (`load_state_dict`, an average copied in for evaluation, clipping of weights) count from the next forward on:
stale copies in slots are dropped, and of two copies the one that `parameter.data` shows is the true one. In-place
operations raise a parameter's version. Writes through `.data` do not; so weights that someone reached for while their
update was pending, those that a step did not update, and all weights after a flush or when training turns into
evaluation or back, are compared in full.
What is written through `.data` between a forward and its step goes unseen where a weight has two copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from lazytrain_plugin.errors import UnsupportedModelError
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.rank_group import RankGroup, Source
from lazytrain_plugin.runtime.unit import Unit

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor

PHASE = "taking over of changed weights"


class OutsideChanges:
    """Watches the weights of one executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._was_training = executor.model.training
        self._versions: dict[Unit, int] = {}
        """Sum of the parameters' versions when they were last looked at."""
        self._touched: set[Unit] = set()
        """Units whose weights someone may have changed without a trace."""
        self._model_runs = False
        """Since the model began to run, it is itself what asks for pending weights (of the stem)."""

    def suspect(self, units: Iterable[Unit]) -> None:
        """Nothing is pending for these, so nobody would notice who writes through `.data`."""
        self._touched.update(units)

    def settle_asked(self, unit: Unit) -> None:
        """Someone wants a pending weight's data: the model, or code between a step and the next forward."""
        if not self._model_runs:
            self._touched.add(unit)
        self._executor.settle(unit)

    def before_update(self) -> None:
        """`step()` was called: of two copies, the one that will be updated must not be the old one."""
        self._model_runs = False
        for unit in self._executor.all_units:
            if unit.slot is None and unit.home.has_two_copies:
                self._look_at(unit, compare=False)

    def before_forward(self, ranks: RankGroup | None = None) -> None:
        """`ranks`: those that are all here."""
        self.take_over()
        if ranks is not None:
            self.share(ranks)
        self._model_runs = True

    def take_over(self) -> None:
        """Looks at every weight.

        Raises:
            UnsupportedModelError: a weight's memory is no longer its home (`p.data = ...`, resized embeddings): the
                next transfer would undo that.
        """
        executor, training = self._executor, self._executor.model.training
        mode_changed, self._was_training = training != self._was_training, training
        for unit in executor.all_units:
            if unit.slot is None:
                self._look_at(unit, compare=unit in self._touched or mode_changed)
        self._touched.clear()

    def _look_at(self, unit: Unit, *, compare: bool) -> None:
        """Takes a unit's weights over if its versions changed, or if `compare` says that they may have without."""
        version = _check_memory(unit)
        if unit.home.shows_shared and unit.home.host_buffer.was_written():
            self._executor.settle(unit)
            unit.home.host_buffer.notice_writes()
            compare = True
        if compare or version != self._versions.get(unit):
            self._executor.forget_copies(unit)
            if unit.home.has_two_copies:
                self._executor.settle(unit)
                if unit.home.shares_weights:  # others may still be fetching those of the last update
                    unit.home.look_for_own_weights()
                else:
                    unit.home.take_shown_weights()
        self._versions[unit] = version

    def share(self, ranks: RankGroup) -> None:
        """Weights that ranks have in common take the values that were written in a rank. Every rank is here.

        Till then each rank sees what it wrote itself, as if it had a copy: adapters that all ranks merge are merged
        once. Where ranks wrote different values, those of the first one count, on all nodes.
        """
        units = [unit for unit in self._executor.all_units if unit.home.shares_weights]
        sources = ranks.sources([unit.home.digest_of_own_weights() for unit in units], "comparison of weights")
        changed = [(unit, source) for unit, source in zip(units, sources, strict=True) if source is not None]
        if not changed:
            return
        for unit, _ in changed:
            self._executor.settle(unit)
        self._executor.streams.synchronize()
        ranks.barrier(PHASE)  # nobody reads
        for unit, source in changed:
            self._executor.forget_copies(unit)
            if source.rank == ranks.rank:
                unit.home.take_shown_weights()
            if source.crosses_nodes:
                self._bring_to_nodes(unit, source, ranks)
        ranks.barrier(PHASE)
        for unit, _ in changed:
            unit.home.show_shared_weights()

    @staticmethod
    def _bring_to_nodes(unit: Unit, source: Source, ranks: RankGroup) -> None:
        for tensor in unit.layout.tensors:
            weight = unit.home.weight(tensor)
            values = weight if source.rank == ranks.rank else torch.empty_like(weight)
            ranks.copy_of(source.rank, values, PHASE)
            if ranks.is_first_of_node and source.rank not in ranks.local_indices:
                weight.copy_(values)


def _check_memory(unit: Unit) -> int:
    """Refuses weights that were moved; returns the sum of the parameters' versions."""
    version = 0
    with torch._C.DisableTorchFunctionSubclass():  # looking at addresses must not wait for updates
        for tensor, view in unit.home.views.items():
            if tensor.parameter.data_ptr() != view.data_ptr():
                _refuse_moved(tensor)
            version += tensor.parameter._version
    return version


def _refuse_moved(tensor: UnitTensor) -> None:
    if tensor.parameter.shape == tensor.shape:
        remedy = "write new values into it with p.data.copy_(values) or load_state_dict"
    else:
        remedy = "resize it before the Trainer (or accelerator.prepare) sees the model"
    raise UnsupportedModelError(
        f"{tensor.name} was given other memory through .data after the engine was made (shape now "
        f"{tuple(tensor.parameter.shape)}, managed as {tuple(tensor.shape)}); {remedy}"
    )
