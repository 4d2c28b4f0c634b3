"""Solves a plan in a process of its own, so that a training step never shares its interpreter with the search.

    python -m lazytrain_plugin.plan.background < request > plan      # what `BackgroundSolve` starts

The planner needs no torch, so the process starts in a moment; it runs at the lowest priority on one core.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile

from lazytrain_plugin.errors import LazyTrainError
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.profile.model import ModelProfile


class BackgroundSolve:
    """One search under way.

    Args: as `make_plan`.
    """

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, request: PlanRequest) -> None:
        self._input, self._output, self._errors = (tempfile.TemporaryFile() for _ in range(3))
        pickle.dump((model, hardware, request), self._input)
        self._input.seek(0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lazytrain_plugin.plan.background"],
            stdin=self._input,
            stdout=self._output,
            stderr=self._errors,
            # torch's plug-ins are of no use there, and a launcher's variables would make it a rank.
            env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
            | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )

    def poll(self) -> PlacementPlan | None:
        """The plan once it is there, else None.

        Raises:
            LazyTrainError: the search failed; the message is its own.
        """
        status = self._process.poll()
        if status is None:
            return None
        for file in (self._output, self._errors):
            file.seek(0)
        if status != 0:
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise LazyTrainError(f"planning in the background failed: {lines[-1] if lines else f'status {status}'}")
        return PlacementPlan.from_json(self._output.read().decode())

    def cancel(self) -> None:
        """Ends the search. Safe to call at any time."""
        self._process.kill()
        self._process.wait()
        for file in (self._input, self._output, self._errors):
            file.close()


def main() -> None:
    from lazytrain_plugin.plan.planner import make_plan

    os.nice(19)
    arguments = pickle.load(sys.stdin.buffer)
    sys.stdout.write(make_plan(*arguments).to_json())


if __name__ == "__main__":
    main()
