"""Plans of earlier runs, and what those runs measured, in the cache folder (`profile.cache`)."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

from lazytrain_plugin.errors import LazyTrainError
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.formats import GRADIENT_ERROR
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import SCHEMA_VERSION, PlacementPlan
from lazytrain_plugin.profile._json import digest_of
from lazytrain_plugin.profile.cache import default_cache_dir, write_atomically
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile
from lazytrain_plugin.units import GIB

logger = logging.getLogger(__name__)

CACHE_VERSION = 2
"""Part of every key: raise it when the planner finds other plans for the same question."""
FREE_MEMORY_GRAIN_BYTES = GIB // 4
"""Free memory differs a little from run to run; plans are looked up by what is surely free."""

DISK_GRAIN_BYTES = 16 * GIB

UnitTimes = tuple[float, float, float, float]
"""Seconds per token of a forward and a backward, and seconds in which the host launches them (0: not measured)."""


def parse_errors(text: str) -> dict[str, dict[int, float]] | None:
    """Errors of gradients by class of operator and bits, as `PlanCache.store_errors` writes them; None: not that."""
    try:
        errors = {name: {int(bits): float(e) for bits, e in row.items()} for name, row in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return None
    whole = all(row.keys() == wanted.keys() for row in errors.values() for wanted in GRADIENT_ERROR.values())
    possible = all(0 <= error < float("inf") for row in errors.values() for error in row.values())
    return errors if errors and whole and possible and errors.keys() <= GRADIENT_ERROR.keys() else None


class PlanCache:
    """One folder of plans. Wrong, stale and unreadable entries are as good as none; writes are atomic.

    Args:
        folder: None: `default_cache_dir()`.
        enabled: False: finds nothing and keeps nothing.
    """

    def __init__(self, folder: Path | None = None, *, enabled: bool = True) -> None:
        self._folder = folder or default_cache_dir()
        self._enabled = enabled

    def load_plan(self, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> PlacementPlan | None:
        """A plan that was made for the same question, and that fits what is free now."""
        text = self._read(self._plan_path(model, hardware, request))
        if text is None:
            return None
        try:
            plan = PlacementPlan.from_json(text)
            check_plan(plan, model, hardware, request)
        except LazyTrainError as error:
            logger.debug("a cached plan is not used: %s", error)
            return None
        return plan

    def store_plan(
        self, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest, plan: PlacementPlan
    ) -> None:
        self._write(self._plan_path(model, hardware, request), plan.to_json())

    def load_rates(self, model: ModelProfile, hardware: HardwareProfile, max_tokens: int) -> dict[str, float]:
        """Fields of `HardwareProfile` as steps of this model have measured them; {} if none has."""
        text = self._read(self._rates_path(model, hardware, max_tokens))
        try:
            rates = json.loads(text) if text is not None else {}
            replace(hardware, **rates)  # refuses unknown names and impossible values
        except (ValueError, TypeError, LazyTrainError):
            return {}
        return rates

    def store_rates(
        self, model: ModelProfile, hardware: HardwareProfile, max_tokens: int, rates: dict[str, float]
    ) -> None:
        self._write(self._rates_path(model, hardware, max_tokens), json.dumps(rates, indent=1) + "\n")

    def load_unit_times(self, model: ModelProfile, conditions: list) -> list[UnitTimes] | None:
        """Of each unit, measured under `conditions`; None if they weren't."""
        text = self._read(self._unit_times_path(model, conditions))
        try:
            times = [(float(f), float(b), float(fl), float(bl)) for f, b, fl, bl in json.loads(text)] if text else []
        except (ValueError, TypeError):
            return None
        usable = len(times) == len(model.units) > 0 and all(
            0 < each[0] < float("inf") and 0 < each[1] < float("inf") and min(each) >= 0 for each in times
        )
        return times if usable else None

    def store_unit_times(self, model: ModelProfile, conditions: list, times: list[UnitTimes]) -> None:
        self._write(self._unit_times_path(model, conditions), json.dumps(times) + "\n")

    def load_errors(self, model: ModelProfile) -> dict[str, dict[int, float]] | None:
        """Errors of gradients by class of operator and bits, as this model has shown them; None if it hasn't."""
        text = self._read(self._errors_path(model))
        return parse_errors(text) if text is not None else None

    def store_errors(self, model: ModelProfile, errors: dict[str, dict[int, float]]) -> Path:
        """Where they are, for `lazytrain plan --error-prices`."""
        self._write(path := self._errors_path(model), json.dumps(errors) + "\n")
        return path

    def _errors_path(self, model: ModelProfile) -> Path:
        return self._folder / f"errors-{self._key(model, None, 'errors')}.json"

    def _unit_times_path(self, model: ModelProfile, conditions: list) -> Path:
        return self._folder / f"units-{self._key(model, None, conditions)}.json"

    def _plan_path(self, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> Path:
        grain = FREE_MEMORY_GRAIN_BYTES
        rounded = replace(
            hardware,
            gpu_free_bytes=hardware.gpu_free_bytes // grain * grain,
            cpu_free_bytes=max(1, hardware.cpu_free_bytes // grain * grain),
            # Other users' files come and go.
            nvme_bytes=hardware.nvme_bytes // DISK_GRAIN_BYTES * DISK_GRAIN_BYTES,
        )
        if request.cluster is not None:
            # Measured anew in each run; what a step takes is predicted with what this one found.
            request = replace(request, cluster=request.cluster.rounded())
        question = repr(sorted(asdict(request).items(), key=lambda item: item[0]))
        return self._folder / f"plan-{self._key(model, rounded, question)}.json"

    def _rates_path(self, model: ModelProfile, hardware: HardwareProfile, max_tokens: int) -> Path:
        machine = [hardware.name, hardware.cpu_threads, hardware.source]
        return self._folder / f"observed-{self._key(model, None, [machine, max_tokens])}.json"

    @staticmethod
    def _key(model: ModelProfile, hardware: HardwareProfile | None, more: object) -> str:
        return digest_of([CACHE_VERSION, SCHEMA_VERSION, model.digest, hardware and hardware.digest, more])

    def _read(self, path: Path) -> str | None:
        try:
            return path.read_text() if self._enabled else None
        except (OSError, UnicodeDecodeError):
            return None

    def _write(self, path: Path, text: str) -> None:
        if not self._enabled:
            return
        try:
            write_atomically(path, text)
        except OSError as error:
            logger.warning("%s can't be kept in %s (%s): it is found again next time", path.stem, path.parent, error)
