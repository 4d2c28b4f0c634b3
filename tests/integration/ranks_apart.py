"""What ranks do at the engine while one of them is ahead, or alone."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from lazytrain_plugin.errors import CheckpointError
from tests.runtime.nvme.rig import on_nvme


def everything(rank, make_engine, ids, folder):
    """`make_engine`: (seed, keys of the block) -> an engine of two ranks; `ids`: this rank's batch."""
    engine = make_engine()
    out = {"loaded": loaded_by_one(engine, rank), "set": set_after_a_write(engine, ids)}
    out["failing"] = failing_loads(engine, rank, folder)
    out["compiled"] = compiled(engine, rank, ids, folder)
    engine.destroy()
    out["frozen"] = loaded_beside_frozen(make_engine, ids, folder)
    disk = Path(folder, "disk of ranks apart")
    disk.mkdir(exist_ok=True)
    out["read"] = read_at_the_end(make_engine(nvme_path=str(disk)), rank, ids)
    return out


def loaded_by_one(engine, rank):
    """A weight before, and its master after the second rank has loaded another value into the module."""
    from deepspeed import utils

    weight = engine.module.layers[0].up.weight
    before = utils.safe_get_full_fp32_param(weight)
    if rank == 1:
        weight.data.add_(1.0)
    engine.optimizer.refresh_fp32_params()
    return before, utils.safe_get_full_fp32_param(weight), weight.detach().clone()


def set_after_a_write(engine, ids):
    """A weight that is set after it was written to: what is set, and what it is then and in the next forward."""
    from deepspeed import utils

    weight = engine.module.layers[1].up.weight
    value = utils.safe_get_full_fp32_param(weight) + 1.0
    weight.data.mul_(0.5)
    utils.safe_set_full_fp32_param(weight, value)
    shown = weight.detach().clone()
    engine(ids)
    return value, shown, weight.detach().clone()


def failing_loads(engine, rank, folder):
    """What each rank raises where one of them can't load, and where they would load different tags."""
    from lazytrain_plugin.integration import checkpoint_mixin

    found = []
    load = checkpoint_mixin.load_checkpoint

    def fails(*args, **options):
        raise ValueError("damaged here")

    if rank == 1:
        checkpoint_mixin.load_checkpoint = fails
    for tag in ("two", None):
        try:
            engine.load_checkpoint(folder if tag or rank == 0 else str(Path(folder, "nothing here")), tag)
        except (CheckpointError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        checkpoint_mixin.load_checkpoint = load
    return found


def loaded_beside_frozen(make_engine, ids, folder):
    """Masters as they are saved, and as an engine that began with other weights has them in its first forward."""
    found = []
    for seed in (0, 5):
        engine = make_engine(seed, frozen=True)
        if seed:
            engine.load_checkpoint(folder, "beside frozen")
        else:
            engine.save_checkpoint(folder, "beside frozen")
        engine(ids)
        state = engine.lazytrain
        state.flush()
        found.append({record.name: state.read_master(record).clone() for record in state.records})
        torch.distributed.barrier()
        engine.destroy()
    return found


def compiled(engine, rank, ids, folder):
    """The first rank alone evaluates once layers are compiled; then all save, and train."""
    engine.compile(backend="eager")
    engine.eval()
    with torch.no_grad():
        if rank == 0:
            engine(ids)
    engine.save_checkpoint(folder, "compiled")
    planned = engine._plans_compiled
    engine.train()
    engine(ids)
    return planned, engine._plans_compiled


def read_at_the_end(engine, rank, ids):
    """Moments that rest on both ranks' disks, read by a rank that is late while the other one ends."""
    from deepspeed import utils

    executor = engine.lazytrain.executor
    engine(ids)
    executor.place(on_nvme(executor.plan))
    while True:
        engine.backward(engine(ids).square().mean())
        engine.step()
        if engine.global_steps:
            break
    found = {}
    for name, parameter in engine.module.named_parameters():
        time.sleep(0.01 * rank)
        found[name] = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
    engine.destroy()
    return found
