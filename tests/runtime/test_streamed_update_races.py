"""Streamed updates never race with what else uses the same memory: found on the CPU, by the waits alone."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from lazytrain_plugin.runtime import streamed_updates
from tests.runtime.race_check import RaceCheck, install
from tests.runtime.rig import Model, batches, make_executor, plan_for

STREAMED = ["streamed", "streamed from gpu", "every kind"]


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """Units of the tests pass in several chunks."""
    monkeypatch.setattr(streamed_updates, "STEM_STAGING_BYTES", 12 << 10)


def train_checked(
    check: RaceCheck, monkeypatch, home: str, accumulation: int = 1, look=lambda *_: None, *, frozen_embedding=False
) -> None:
    """Trains under the race check; `look` runs where other code may look at the model."""
    install(check, monkeypatch)
    torch.manual_seed(0)
    model = Model(num_layers=5)
    model.embedding.requires_grad_(not frozen_embedding)
    if home.endswith("not ahead"):
        monkeypatch.setattr(streamed_updates.StreamedUpdates, "bring_ahead", lambda self: None)
    if home.startswith("one unit in one piece"):
        monkeypatch.setattr(streamed_updates, "STEM_STAGING_BYTES", 1 << 20)
        plan, other = plan_for(model), plan_for(model, home="streamed from gpu")
        plan = replace(plan, units=(*plan.units[:4], other.units[4]))
    else:
        plan = plan_for(model, home=home)
    executor = make_executor(model, plan, native=True)
    for module in (model.embedding, model.head):
        module.register_forward_pre_hook(
            lambda module, args: check.access(module.weight.data, writes=False, what="use of the stem", by="compute")
        )
    data = batches(3 * accumulation, "cpu")
    for first in range(0, len(data), accumulation):
        for i, ids in enumerate(data[first : first + accumulation]):
            executor.begin_forward()
            executor.set_last_micro_batch(i == accumulation - 1)
            loss = model.loss(ids)
            look(executor, check, "forward")
            loss.backward()
        executor.step(0.05)
        look(executor, check, "step")
    executor.close()


def read_after(executor, check: RaceCheck, after: str, *, when: str) -> None:
    """What rests on the device is read there, in order with the compute stream; what rests off it, by the host."""
    if after != when:
        return
    for parameter, (unit, tensor) in executor.owner.items():
        by = check.host() if streamed_updates.streams_weights(unit) else "compute"
        parameter.detach()
        check.access(parameter.data, writes=False, what=f"reading {tensor.name}", by=by)


def evaluate(executor, check: RaceCheck, after: str) -> None:
    executor.model.eval()
    executor.begin_forward()
    with torch.no_grad():
        executor.model.loss(batches(1, "cpu")[0])
    executor.model.train()


def keep_a_graph(executor, check: RaceCheck, after: str) -> None:
    """Backward through a graph from before a step: its gradients arrive while updates wait."""
    loss, executor.kept_loss = executor.__dict__.pop("kept_loss", None), None
    if loss is not None:
        loss.backward()
    executor.kept_loss = executor.model.loss(batches(1, "cpu")[0])


@pytest.mark.parametrize(
    ("home", "accumulation", "look"),
    [(home, accumulation, None) for home in (*STREAMED, "cpu", "mirror") for accumulation in (1, 2)]
    + [
        (home, 1, look)
        for home in STREAMED
        for look in (partial(read_after, when="step"), partial(read_after, when="forward"), evaluate, keep_a_graph)
    ],
)
def test_every_access_is_ordered(home, accumulation, look, monkeypatch):
    check = RaceCheck()
    train_checked(check, monkeypatch, home, accumulation, look or (lambda *_: None))
    assert len(check.actors) > 2
    assert not check.races, sorted(set(check.races))[:10]


WAITS = {
    "weights come after their return": (
        "streamed",
        "returned_event",
        "unit",
        evaluate,
        "upload by h2d .* arrival at home",
    ),
    "a slot's next weights come after the last ones left": (
        "streamed",
        "left",
        "slot",
        None,
        "arrival in a slot by h2d .* departure",
    ),
    "a slot's next weights come after the last use": (
        "streamed",
        "last_use",
        "slot",
        None,
        "arrival in a slot by h2d .* last use",
    ),
    "the update follows the weights' arrival": (
        "streamed",
        "ready",
        "weights",
        None,
        "update of .* arrival in a slot by h2d",
    ),
    "the unit runs after its update": ("streamed", "ready", "slot", None, "first use of .* update of"),
    "the same with resident weights": ("streamed from gpu", "publish_event", "unit", None, "first use of .* update of"),
    "states come after the gradients": (
        "streamed",
        "gradient_event",
        "unit",
        None,
        "upload by slot .* arrival at home by d2h",
    ),
    "resident weights are updated after their last use": (
        "streamed from gpu",
        "stepped",
        "update",
        None,
        "update of .* last use of",
    ),
    "states come ahead after their return": (
        "one unit in one piece",
        "returned_event",
        "unit",
        None,
        "upload by slot .* arrival at home by slot",
    ),
    "states come after their return": (
        "one unit in one piece, not ahead",
        "before",
        None,
        None,
        "upload by slot .* arrival at home by slot",
    ),
    "gradients come after the last ones were read": (
        "streamed from gpu",
        "after",
        None,
        keep_a_graph,
        "arrival at home by d2h .* upload by slot",
    ),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_found(wait, monkeypatch):
    """What the test above relies on: each of the waits matters somewhere, and would be missed."""
    home, name, holder, look, race = WAITS[wait]

    def drop(local, event):
        return event is (local.get(name) if holder is None else getattr(local.get(holder), name, None))

    check = RaceCheck(drop=drop)
    # The embedding's gradient is the last to come, and its update the first: it would order much by itself.
    train_checked(check, monkeypatch, home, look=look or (lambda *_: None), frozen_embedding=name == "stepped")
    pattern = race.replace(" .* ", ".* is not ordered after .*")
    assert any(re.match(pattern, found) for found in check.races), sorted(set(check.races))[:10]
