"""What ranks of an engine do whose weights and states rest on NVMe, for tests/integration/test_several_ranks.py."""

from __future__ import annotations

import os

import torch

from lazytrain_plugin.integration import measure_nvme, training_request
from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.greedy import leanest_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.profile.extract import extract_model_profile
from lazytrain_plugin.runtime.discovery import discover
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Tier
from tests.plan import builders
from tests.runtime.nvme.rig import full_state, on_nvme


def leg(engine, train, folder, load, save, later=None):
    """Loads a checkpoint (None: starts), trains and saves another, with states and every second unit's weights on disk;
    `later`: trains on, and moves everything back to host memory. Returns masters and states at each point."""
    executor = engine.lazytrain.executor
    plan = on_nvme(on_nvme(executor.plan), every=2, weights=Tier.NVME)
    executor.place(plan)
    found = {}
    look = lambda: (engine.flush(), full_state(executor))[1]  # noqa: E731
    if load is not None:
        engine.load_checkpoint(folder, load)
        found["loaded"] = look()
    train(engine)
    assert executor.plan is plan
    engine.save_checkpoint(folder, save)
    found["saved"] = look()
    if later is not None:
        later(engine)
        found["later"] = look()
        executor.place(plan.with_units(weights=Tier.CPU, states=Tier.CPU))
        found["moved"] = look()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # each reads what is on the others' disk
    engine.destroy()
    return found


def is_on_disk(engine):
    return [unit.states == Tier.NVME for unit in engine.lazytrain.executor.plan.units]


def describe_small_machine(cache):
    """Plans are for a described machine with a GPU; its disk is measured, in small blocks."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    training_request.measure_hardware = lambda *args, **kwargs: builders.hardware()
    measure_nvme.REGION_BYTES = 2**20


def tight_budgets(model, **request) -> dict[str, float]:
    """A host with room for everything but half of the states, and a GPU for little beside what must be there."""
    found = discover(model)
    profile = extract_model_profile(
        model,
        [(unit.name, unit.module) for unit in found.units],
        [(unit.name, [p for _, p in unit.parameters]) for unit in found.stem],
        fused_kernels=False,
        dtypes={parameter: parameter.dtype for parameter in model.parameters()},
    )
    problem = build_problem(profile, builders.hardware(), PlanRequest(**request))
    need = account(problem, leanest_plan(problem)).need_bytes()
    states = sum(cost.rest_state_bytes for cost in problem.units)
    return {"gpu_memory_gib": need["gpu"] / GIB, "cpu_memory_gib": (need["cpu"] - states / 2) / GIB}
