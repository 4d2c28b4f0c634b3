"""In which order the host starts a step's updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lazytrain_plugin.runtime.streamed_updates import StreamedUpdates
from lazytrain_plugin.runtime.update import NativeAdamW
from lazytrain_plugin.runtime.worker import UpdateWorker
from tests.runtime.rig import DEVICES, HOMES, Model, batches, make_executor, plan_for


@pytest.mark.parametrize("device", DEVICES)
def test_worker_and_link_begin_before_the_gpu_has_all_of_its_updates(monkeypatch, device):
    torch.manual_seed(0)
    model = Model(num_layers=6).to(device)
    plan = plan_for(model, device=device, home="gpu")
    homes = ("gpu", "gpu", "cpu", "streamed", "gpu", "cpu")
    units = [
        replace(unit, **dict(zip(("weights", "states", "updater"), HOMES[home], strict=True)))
        for unit, home in zip(plan.units, homes, strict=True)
    ]
    executor = make_executor(model, replace(plan, units=tuple(units)), device=device, native=True)
    ids = batches(1, device)[0]
    executor.begin_forward()
    model.loss(ids).backward()
    started = []

    def spy(cls, name, unit_of):
        plain = getattr(cls, name)

        def called(self, *args, **kwargs):
            started.append(unit_of(args))
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, called)

    with monkeypatch.context() as monkeypatch:
        on_gpu = {unit: unit.home.states_on_gpu for unit in executor.all_units}
        spy(NativeAdamW, "update", lambda args: "gpu" if on_gpu[args[0]] else "on the worker")
        spy(UpdateWorker, "submit", lambda args: "worker")
        spy(StreamedUpdates, "begin", lambda args: "link")
        executor.step(0.5)
    order = [start for start in started if start != "on the worker"]
    num_on_gpu = sum(on_gpu.values())
    assert order == ["gpu", "worker", "worker", "link", *["gpu"] * (num_on_gpu - 1)]
    executor.flush()
    executor.close()
