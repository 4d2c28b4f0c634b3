"""`NvmeStores`: what an executor has on NVMe, and the staging buffers in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lazytrain_plugin.errors import PlanMismatchError
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.runtime.nvme.staging import Staging
from lazytrain_plugin.runtime.nvme.states import NvmeStates, lay_out_parts
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.state_layout import state_flats
from lazytrain_plugin.vocab import Tier

if TYPE_CHECKING:
    import torch

    from lazytrain_plugin.runtime.unit import Unit


class NvmeStores:
    """Makes and stages what rests on NVMe.

    Args:
        tier: None where no folder is configured.
        native: whether the update kernels keep the states.
    """

    def __init__(self, tier: NvmeTier | None, *, native: bool) -> None:
        self.tier = tier
        self._native = native
        self._staging: Staging | None = None
        self._before: Staging | None = None

    def begin(self, plan: PlacementPlan, units: Iterable[Unit]) -> None:
        """Before homes are made for `plan`: buffers of the right size. Homes of the plan before keep theirs till `end`.

        Raises:
            PlanMismatchError: the plan wants something on NVMe that can't rest there.
        """
        largest_bytes = 0
        for unit in units:
            unit_plan = plan.unit(unit.name)
            if Tier.NVME in (unit_plan.weights, unit_plan.states, unit_plan.gradients):
                self._check(unit_plan)
            if unit_plan.states == Tier.NVME and unit.trained:
                flats = state_flats(unit.layout, unit_plan, native=self._native)
                largest_bytes = max(largest_bytes, lay_out_parts(flats)[1])
        if self._staging is not None:
            self._staging.drain()
        self._before = self._staging
        # Updates read and write host memory: nothing here goes on to a GPU, so nothing is page-locked.
        self._staging = Staging(plan.nvme_slots, largest_bytes, pin=False) if largest_bytes else None

    def _check(self, unit_plan) -> None:
        if self.tier is None:
            raise PlanMismatchError(
                f'{unit_plan.name}: the plan uses NVMe, but no folder is named for it; set "nvme_path" in the '
                '"lazytrain" block, or plan again without'
            )
        if unit_plan.gradients == Tier.NVME:
            raise PlanMismatchError(
                f"{unit_plan.name}: gradients on NVMe are not supported; put them on the CPU (gradients: null)"
            )
        if unit_plan.states == Tier.NVME and not self._native:
            raise PlanMismatchError(
                f"{unit_plan.name}: states on NVMe need the native kernels, and the client's own optimizer keeps its "
                'states in memory; set "optimizer": {"implementation": "native"}, or plan its states on the CPU'
            )

    def states(self, flats: list[tuple[str, torch.dtype, int]], *, what: str) -> NvmeStates:
        """Makes room for one unit's states. Raises StorageError if there is none."""
        return NvmeStates(self.tier, self._staging, flats, what=what)

    def end(self, units: Iterable[Unit]) -> None:
        """After everything moved to the new plan's homes."""
        for unit in units:
            if unit.home.nvme_states is not None:
                unit.home.nvme_states.staging = self._staging
        if self._before is not None:
            self._before.close()
            self._before = None

    def read_ahead(self, units: Iterable[Unit]) -> None:
        """Updates follow in this order: their states come in as far as there are buffers."""
        if self._staging is not None:
            self._staging.read_ahead([u.home.nvme_states for u in units if u.home.nvme_states is not None])

    def close(self) -> None:
        """Ends the I/O threads, and removes the folders."""
        if self.tier is not None:
            self.tier.close()
        for staging in (self._staging, self._before):
            if staging is not None:
                staging.close()
        self._staging = self._before = None
