"""`NvmeStores`: what an executor has on NVMe, and the staging buffers in between."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from lazytrain_plugin.errors import LazyTrainError, PlanMismatchError
from lazytrain_plugin.plan.choices import WEIGHTS_AND_JOB
from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
from lazytrain_plugin.runtime.arrival import Arrival
from lazytrain_plugin.runtime.gradient_format import GradientFormat
from lazytrain_plugin.runtime.nvme.gradients import GradientStaging, NvmeGradients
from lazytrain_plugin.runtime.nvme.peers import agree_on_places
from lazytrain_plugin.runtime.nvme.region import padded
from lazytrain_plugin.runtime.nvme.staging import Staging
from lazytrain_plugin.runtime.nvme.states import Flats, NvmeStates, lay_out_parts
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.nvme.weights import NvmeWeights, WeightStaging
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.state_layout import state_flats
from lazytrain_plugin.runtime.worker import UpdateWorker
from lazytrain_plugin.vocab import Tier

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.layout import FlatLayout, UnitTensor
    from lazytrain_plugin.runtime.unit import Unit


class NvmeStores:
    """Makes and stages what rests on NVMe.

    Args:
        tier: None where no folder is configured.
        native: whether the update kernels keep the states.
        pin: whether weights go on to a GPU.
        ranks: those that train together; each has its own part of the states.
    """

    def __init__(self, tier: NvmeTier | None, *, native: bool, pin: bool, ranks: RankGroup | None = None) -> None:
        self.tier = tier
        self._ranks = ranks
        self._follower: UpdateWorker | None = None
        """Notes for other ranks when writes are done."""
        self._native = native
        self._pin = pin
        self._staging: Staging | None = None
        self._weights: WeightStaging | None = None
        self._gradients: GradientStaging | None = None
        self._before: list[Staging | WeightStaging | GradientStaging | None] = []
        self._num_slots = 0
        self._to_warm: deque[NvmeWeights] = deque()
        self._warming = threading.Lock()

    def begin(self, plan: PlacementPlan, units: Iterable[Unit]) -> None:
        """Before homes are made for `plan`: buffers of the right size. Homes of the plan before keep theirs till `end`.

        Raises:
            PlanMismatchError: the plan wants something on NVMe that can't rest there.
        """
        largest_bytes = largest_weight_bytes = largest_gradient_bytes = largest_sum_bytes = 0
        for unit in units:
            unit_plan = plan.unit(unit.name)
            activations = (unit_plan.boundary, unit_plan.saved) if unit.module is not None else ()
            if Tier.NVME in (unit_plan.weights, unit_plan.states, unit_plan.gradients, *activations):
                self._check(unit_plan)
            if unit_plan.states == Tier.NVME and unit.trained:
                for flats in itertools.chain(*self._state_flats(unit.layout, unit_plan)):
                    largest_bytes = max(largest_bytes, lay_out_parts(flats)[1])
            if unit_plan.gradient_tier == Tier.NVME and unit.trained:
                form = GradientFormat(unit.layout, unit_plan.gradient_bits, self._own_part(unit.layout))
                largest_gradient_bytes = max(largest_gradient_bytes, padded(form.arrival_bytes))
                largest_sum_bytes = max(largest_sum_bytes, padded(form.sum_numel * form.sum_dtype.itemsize))
            if unit_plan.weights == Tier.NVME:
                largest_weight_bytes = max(largest_weight_bytes, padded(unit.layout.weight_bytes))
        for staging in (self._staging, self._gradients):
            if staging is not None:
                staging.drain()
        self._before = [self._staging, self._weights, self._gradients]
        self._num_slots = plan.nvme_slots
        # Updates read and write host memory: their states never go on to a GPU, so they are not page-locked.
        self._staging = Staging(plan.nvme_slots, largest_bytes, pin=False) if largest_bytes else None
        self._gradients = None
        if largest_gradient_bytes:
            self._gradients = GradientStaging(plan.nvme_slots, largest_gradient_bytes, largest_sum_bytes, pin=self._pin)
        self._weights = None
        if largest_weight_bytes:
            self._weights = WeightStaging(plan.nvme_slots, largest_weight_bytes, pin=self._pin)

    def _check(self, unit_plan) -> None:
        if self.tier is None:
            raise PlanMismatchError(
                f'{unit_plan.name}: the plan uses NVMe, but no folder is named for it; set "nvme_path" in the '
                '"lazytrain" block, or plan again without'
            )
        if unit_plan.weights == Tier.NVME and self._ranks is not None and self._ranks.shards_job:
            raise PlanMismatchError(f"{unit_plan.name}: {WEIGHTS_AND_JOB}")
        if unit_plan.states == Tier.NVME and not self._native:
            raise PlanMismatchError(
                f"{unit_plan.name}: states on NVMe need the native kernels, and the client's own optimizer keeps its "
                'states in memory; set "optimizer": {"implementation": "native"}, or plan its states on the CPU'
            )

    def _own_part(self, layout: FlatLayout) -> tuple[int, int]:
        return layout.part(0, 1) if self._ranks is None else self._ranks.part(layout)

    def _state_flats(self, layout: FlatLayout, plan: UnitPlan) -> list[list[Flats]]:
        """Of each piece, those of the part of each rank of this node; of this rank alone where others have no use for
        its disk."""
        ranks = self._ranks
        num_parts, local_size = (1, 1) if ranks is None else (ranks.num_parts, ranks.local_size)
        parts = range(num_parts) if ranks is None or not ranks.shards_job else [ranks.own_part]
        flats_of = partial(state_flats, layout, plan, native=self._native)
        _, nbytes = lay_out_parts(flats_of(part=layout.part(0, num_parts)))
        count = self.tier.pieces(nbytes, local_size)
        return [[flats_of(part=layout.piece(i, count, part, num_parts)) for part in parts] for i in range(count)]

    def states(self, layout: FlatLayout, plan: UnitPlan) -> tuple[NvmeStates, ...]:
        """Makes room for one unit's states, of this rank's part of them, piece by piece. Raises StorageError if there
        is none."""
        pieces, what = self._state_flats(layout, plan), f"states of {plan.name}"
        make = partial(NvmeStates, self.tier, self._staging, what=what)
        if self._ranks is None:
            return tuple(make(flats) for (flats,) in pieces)
        if self._ranks.shards_job:
            return tuple(self._on_all_ranks(partial(make, flats), what) for (flats,) in pieces)
        if self._follower is None:
            self._follower = UpdateWorker("disk")
        of_ranks = partial(NvmeStates.of_ranks, self.tier, self._staging, what=what)
        return tuple(of_ranks(flats, self._ranks, self._follower) for flats in pieces)

    def write_for_others(self) -> None:
        """Returns when other ranks can read every change of this one's states. Raises StorageError."""
        if self._follower is not None:
            if self._staging is not None:
                self._staging.drain()
            self._follower.drain()

    def weights(self, layout: FlatLayout, plan: UnitPlan) -> NvmeWeights:
        """Makes room for one unit's weights. Raises StorageError if there is none."""
        own = layout.weight_bytes_of(self._own_part(layout))
        what = f"weights of {plan.name}"
        return NvmeWeights(self.tier, self._weights, layout.weight_bytes, what=what, own=own, ranks=self._ranks)

    def gradients(self, form: GradientFormat, *, name: str) -> NvmeGradients:
        """Makes room for one unit's gradients, of this rank's part of them. Raises StorageError if there is none."""
        make = partial(NvmeGradients, self.tier, self._gradients, form, name=name)
        return make() if self._ranks is None else self._on_all_ranks(make, f"gradients of {name}")

    def _on_all_ranks(self, make: Callable[[], Any], what: str) -> Any:
        """What has a region on this rank's disk, if every rank has room. Raises StorageError otherwise."""
        made = failure = None
        try:
            made = make()
        except LazyTrainError as error:
            failure = error
        agree_on_places(self._ranks, made and made.region, failure, what=what)
        return made

    def end(self, units: Iterable[Unit]) -> None:
        """After everything moved to the new plan's homes."""
        for unit in units:
            for states in unit.home.nvme_states:
                states.staging = self._staging
            if unit.home.nvme_gradients is not None:
                unit.home.nvme_gradients.staging = self._gradients
            if unit.home.nvme_weights is not None:
                unit.home.nvme_weights.staging = self._weights
        self._close_before()

    def _close_before(self) -> None:
        for staging in self._before:
            if staging is not None:
                staging.close()
        self._before = []

    def read_ahead(self, arrivals: dict[Unit, dict[UnitTensor, Arrival]]) -> None:
        """Updates follow in this order: states and gradients come in as far as there are buffers."""
        units = list(arrivals)
        if self._staging is not None:
            self._staging.read_ahead([states for unit in units for states in unit.home.nvme_states])
        if self._gradients is not None:
            on_nvme = [u for u in units if u.home.nvme_gradients is not None]
            for staging, kind in ((self._gradients.arrivals, Arrival.WHOLE), (self._gradients.sums, Arrival.SUMMED)):
                found = [u.home.nvme_gradients for u in on_nvme if kind in arrivals[u].values()]
                staging.read_ahead(found if kind == Arrival.WHOLE else [gradients.sums for gradients in found])
        with self._warming:
            self._to_warm = deque(u.home.nvme_weights for u in units if u.home.nvme_weights is not None)
            self._warm()

    def before_update(self, unit: Unit) -> None:
        """On the update thread: the unit's weights are in memory; those of the next come in meanwhile."""
        weights = unit.home.nvme_weights
        if weights is not None:
            with self._warming:
                if self._to_warm and self._to_warm[0] is weights:
                    self._to_warm.popleft()
                self._warm()
            weights.wait_until_warm()

    def _warm(self) -> None:
        for weights in list(self._to_warm)[: self._num_slots]:
            weights.warm()

    def read_weights_ahead(self, units: Iterable[Unit]) -> None:
        """These units run next, in this order: their weights come in as far as there are buffers, up to the first whose
        update is still to come."""
        if self._weights is None:
            return
        upcoming: list[NvmeWeights] = []
        for unit in units:
            pending = unit.update_ticket is not None and not unit.update_ticket.done
            if pending or len(upcoming) == self._num_slots:
                break
            if unit.home.nvme_weights is not None:
                upcoming.append(unit.home.nvme_weights)
        self._weights.buffers.read_ahead(upcoming)

    def close(self) -> None:
        """Ends the I/O threads, and removes the folders."""
        if self._follower is not None:
            self._follower.close()
        if self.tier is not None:
            self.tier.close()
        self._before += [self._staging, self._weights, self._gradients]
        self._staging = self._weights = self._gradients = None
        self._close_before()
