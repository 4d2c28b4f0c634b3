"""Weights changed by hand between steps count from the next forward on, under every plan and on every road to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lazytrain_plugin.errors import UnsupportedModelError
from lazytrain_plugin.vocab import Activations, Tier
from tests.runtime.rig import DEVICES, Model, assert_same_weights, batches, make_executor, plan_for


def make(num_layers: int = 2) -> Model:
    torch.manual_seed(0)
    return Model(num_layers=num_layers)


def planned(model: Model, home: str, device: str):
    """`home`: as in the rig, or "two copies"."""
    if home == "two copies":
        return resident_with_cpu_updates(plan_for(model, device=device))
    return plan_for(model, home=home, device=device)


def resident_with_cpu_updates(plan):
    """GPU-resident weights whose updates run on a host copy: two copies that must not part."""
    units = tuple(replace(unit, weights=Tier.GPU) for unit in plan.units)
    stem = tuple(replace(unit, weights=Tier.GPU) for unit in plan.stem)
    return replace(plan, units=units, stem=stem)


homes = pytest.mark.parametrize("home", ["cpu", "gpu", "mixed", "two copies"])
WRITES = {
    "in place": lambda p, values: p.copy_(values),
    "through data": lambda p, values: p.data.copy_(values),
    "through detach": lambda p, values: p.detach().copy_(values),
}


@pytest.mark.parametrize("device", DEVICES)
@homes
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("when", ["pending", "flushed"])
def test_weights_clipped_after_every_step(device, home, write, when):
    """As torch does it: the clipped value is what the next forward reads and the next update starts from."""

    def train(model, step):
        for ids in batches(4, device):
            model.loss(ids).backward()
            step()
            with torch.no_grad():
                for p in model.parameters():
                    WRITES[write](p, p.clamp(-0.05, 0.05))

    reference = make().to(device)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    train(reference, lambda: (optimizer.step(), optimizer.zero_grad()))

    model = make().to(device)
    executor = make_executor(model, planned(model, home, device), device=device)

    def step():
        executor.step(0.0)
        if when == "flushed":
            executor.flush()

    hook = model.register_forward_pre_hook(lambda *_: executor.begin_forward())
    train(model, step)
    executor.flush()
    masters = [executor.owner[p][0].home.read_master(executor.owner[p][1]) for p in model.parameters()]
    for master, p, q in zip(masters, model.parameters(), reference.parameters(), strict=True):
        tolerance = 0 if device == "cpu" else 1e-5
        torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=0, atol=tolerance)
        assert torch.equal(master, p.detach().cpu().flatten())
    hook.remove()
    executor.close()


@homes
@pytest.mark.parametrize("write", WRITES)
def test_average_swapped_in_for_evaluation_and_out_again(home, write):
    def losses(model, run):
        torch.manual_seed(4)
        average = [torch.randn_like(p) * 0.1 for p in model.parameters()]
        found = []
        for ids in batches(3, "cpu"):
            run(ids)
            kept = [p.detach().clone() for p in model.parameters()]
            model.eval()
            with torch.no_grad():
                for p, values in zip(model.parameters(), average, strict=True):
                    WRITES[write](p, values)
                found.append(model.loss(ids).item())
                found.append(model.loss(ids.flip(0)).item())
                for p, values in zip(model.parameters(), kept, strict=True):
                    WRITES[write](p, values)
            model.train()
        return found

    reference = make()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)

    def run_reference(ids):
        reference.loss(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    expected = losses(reference, run_reference)
    model = make()
    executor = make_executor(model, planned(model, home, "cpu"))

    def run(ids):
        model.loss(ids).backward()
        executor.step(0.0)

    model.register_forward_pre_hook(lambda *_: executor.begin_forward())
    assert losses(model, run) == expected
    executor.flush()
    assert_same_weights(model, reference)
    executor.close()


def test_a_bf16_master_survives_a_look_at_its_weight():
    """Only a weight whose value was changed gives its master up; being looked at, or saved, costs no bit."""
    outcomes = []
    for look in (False, True):
        model = make()
        plan = resident_with_cpu_updates(plan_for(model))
        executor = make_executor(model, plan, native=True, dtype=torch.bfloat16)
        model.register_forward_pre_hook(lambda *_, executor=executor: executor.begin_forward())
        for ids in batches(3, "cpu"):
            model.loss(ids).backward()
            executor.step(0.0)
            if look:
                [p.data.sum() for p in model.parameters()]
                executor.flush()
        executor.flush()
        outcomes.append([executor.owner[p][0].home.read_master(executor.owner[p][1]) for p in model.parameters()])
        assert any(not torch.equal(m, m.bfloat16().float()) for m in outcomes[-1])
        executor.close()
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_an_ordinary_step_waits_for_no_update(monkeypatch):
    """Looking for changes reads addresses and versions only: updates go on while the next forward begins."""
    model = make(num_layers=4)
    executor = make_executor(model, resident_with_cpu_updates(plan_for(model)))
    ids = batches(1, "cpu")[0]
    executor.begin_forward()
    model.loss(ids).backward()
    executor.step(0.0)
    settled = []
    monkeypatch.setattr(executor, "settle", settled.append)
    executor.begin_forward()
    assert not settled
    monkeypatch.undo()
    executor.close()


@homes
def test_moved_memory_is_refused_by_name_and_the_engine_still_closes(home):
    model = make()
    executor = make_executor(model, planned(model, home, "cpu"))
    executor.begin_forward()
    weight = model.layers[1].up.weight
    mine = weight.data
    weight.data = torch.zeros_like(mine)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.up\.weight was given other memory.*copy_"):
        executor.begin_forward()
    weight.data = torch.zeros(3, 3)
    with pytest.raises(UnsupportedModelError, match=r"shape now \(3, 3\), managed as \(37, 24\).*resize it before"):
        executor.begin_forward()
    weight.data = mine
    executor.begin_forward()
    weight.data = torch.zeros(3, 3)
    executor.close()


@homes
@pytest.mark.parametrize("write", WRITES)
def test_a_frozen_weight_beside_trained_ones_keeps_what_was_written_to_it(home, write):
    """As a checkpoint's frozen weights do: also when the layer moves to another plan."""
    model = make()
    frozen = model.layers[0].up.weight.requires_grad_(False)
    executor = make_executor(model, planned(model, home, "cpu"))
    executor.flush()
    with torch.no_grad():
        WRITES[write](frozen, torch.full_like(frozen, 0.25))
    executor.place(plan_for(model, home="gpu" if home == "cpu" else "cpu"))
    assert (frozen == 0.25).all()
    executor.close()


@homes
def test_a_write_through_data_after_a_skipped_step_counts(home):
    """Nothing is pending then, so nothing but a comparison can tell."""
    found = []
    for planned_home in ("cpu", home):
        model = make()
        executor = make_executor(model, planned(model, planned_home, "cpu"), native=True)
        executor.begin_forward()
        (model.loss(batches(1, "cpu")[0]) * float("inf")).backward()
        assert not executor.step(1.0)[1]
        model.layers[1].up.weight.data.mul_(0.5)
        executor.begin_forward()
        found.append(model.loss(batches(1, "cpu")[0]).item())
        executor.close()
    expected = make()
    with torch.no_grad():
        expected.layers[1].up.weight.mul_(0.5)
        assert found == [expected.loss(batches(1, "cpu")[0]).item()] * 2


def test_a_frozen_weight_written_on_the_gpu_moves_along():
    model = make()
    model.layers[1].up.weight.requires_grad_(False)
    executor = make_executor(model, planned(model, "two copies", "cpu"), native=True)
    with torch.no_grad():
        model.layers[1].up.weight.fill_(0.25)
    executor.place(planned(model, "cpu", "cpu"))
    assert (model.layers[1].up.weight == 0.25).all()
    executor.close()


@homes
@pytest.mark.parametrize("keep", ["none", "all"])
def test_an_evaluation_in_inference_mode_may_come_first(home, keep):
    model = make()
    plan = planned(model, home, "cpu")
    activations = Activations.KEEP if keep == "all" else Activations.RECOMPUTE
    ids = batches(1, "cpu")[0]
    with torch.inference_mode():
        executor = make_executor(model, plan.with_units(activations=activations), native=True)
        executor.begin_forward(training=False)
        model.loss(ids)
    executor.begin_forward()
    model.loss(ids).backward()
    assert executor.step(1.0)[1]
    executor.close()
