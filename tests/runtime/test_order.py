"""What the executor launches, in the order that the simulator assumes."""

import pytest
import torch
from torch import nn

from lazytrain_plugin.plan.simulate import Resource, simulate
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.runtime import discovery, slots
from lazytrain_plugin.runtime.slots import Outbox
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.update import NativeAdamW
from tests.plan.test_simulate import stem_unit, timed
from tests.runtime.rig import HIDDEN, VOCAB, Model, batches, make_executor, plan_for, train


class Normed(Model):
    """With a final norm, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def run_layers(self, x):
        return self.norm(super().run_layers(x))


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(discovery, "MIN_STEM_TENSOR_NUMEL", HIDDEN * VOCAB)
    torch.manual_seed(0)
    return Normed()


def test_gradients_go_home_in_the_order_of_the_simulator(model, monkeypatch):
    sent, send = [], Outbox.send

    def logged(self, unit, *args, **options):
        sent.append(unit.name)
        return send(self, unit, *args, **options)

    monkeypatch.setattr(Outbox, "send", logged)
    plan = plan_for(model)
    executor = make_executor(model, plan, native=True)
    train(executor, [batches(1, "cpu")])
    executor.close()
    roles = {"stem.rest": UnitRole.REST, "stem.embedding.weight": UnitRole.EMBEDDING, "stem.head.weight": UnitRole.HEAD}
    parts = [stem_unit(roles[part.name], gradient_d2h_s=1.0) for part in plan.stem]
    events = simulate(timed(len(plan.units), d2h=1.0, stem=parts), plan, record=True).events
    planned = [event.name.removeprefix("gradients ") for event in events if event.resource == Resource.D2H]
    role_of = {f"stem.{role}": name for name, role in roles.items()}
    unit_of = {f"layers.{index}": unit.name for index, unit in enumerate(plan.units)}
    assert sent == [{**role_of, **unit_of}[name] for name in planned]


def test_updates_on_the_compute_stream_are_no_idle_time(model, monkeypatch):
    """The time between two steps is booked around them; the planner takes them for computing."""
    log = []
    for owner, name in ((Streams, "begin_idle"), (Streams, "end_idle"), (NativeAdamW, "update")):
        original = getattr(owner, name)

        def logged(self, *args, original=original, name=name):
            log.append(name)
            return original(self, *args)

        monkeypatch.setattr(owner, name, logged)
    executor = make_executor(model, plan_for(model, home="gpu"), native=True)
    train(executor, [batches(1, "cpu")])
    executor.close()
    num_units = len(executor.all_units)
    assert log == ["end_idle", "begin_idle", "end_idle", *num_units * ["update"], "begin_idle"]


def test_small_gradients_of_the_stem_take_no_slot(model, monkeypatch):
    """The final norm's come just after the head's, and the compute stream would wait until those are home."""
    waits = []
    monkeypatch.setattr(
        Streams, "compute_waits", lambda self, event, cause, *, since=None: waits.append((cause, event))
    )
    executor = make_executor(model, plan_for(model), native=True)  # two gradient slots, one of them for the way home
    outbox = executor._sink.outbox = Outbox(executor.streams, 1)
    head, rest = (next(u for u in executor.stem if u.name == f"stem.{name}") for name in ("head.weight", "rest"))
    monkeypatch.setattr(slots, "SMALL_SEND_BYTES", rest.layout.gradient_bytes + 1)
    sent = {}
    for unit in (head, rest, executor.units[-1], executor.units[0]):
        flat = torch.zeros(unit.layout.gradient_bytes, dtype=torch.uint8)
        sent[unit] = outbox.send(unit, [(unit.home.gradient_buffer, 0, flat)])
        if unit is rest:
            assert not waits
    assert [event for cause, event in waits if cause == "gradients"] == [
        sent[head],
        sent[rest],
        sent[executor.units[-1]],
    ]
    outbox.trim(0)
    assert [event for cause, event in waits if cause == "gradients"] == list(sent.values())
    executor.close()
