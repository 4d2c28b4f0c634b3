"""The engine on four ranks of two nodes: resumed on two ranks and on four again, and with a rank that is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.comm.ranks import Failure, run_ranks, succeed
from tests.integration.test_several_ranks import STEPS, close, comm, make_engine, masters, prepare, same, states, train

pytestmark = pytest.mark.multiprocess


def stay(rank, device, world_size, folder, load, save, steps):
    """Loads a checkpoint (None: starts), trains and saves another; every rank starts from weights of its own."""
    prepare(rank, world_size)
    engine = make_engine(10 * world_size + rank, world_size, **comm(2))
    found = {}
    if load is not None:
        engine.load_checkpoint(folder, load)
        found["loaded"] = masters(engine), states(engine)
    train(engine, rank, world_size, steps)
    engine.save_checkpoint(folder, save)
    found |= {"left": (masters(engine), states(engine)), "steps": engine.global_steps}
    if load is None:
        train(engine, rank, world_size, range(steps.stop, STEPS))
        found["without a break"] = masters(engine)
    engine.destroy()
    return found


def test_four_ranks_resume_on_two_and_on_four_again(tmp_path):
    legs = [(4, None, "a", range(1)), (2, "a", "b", range(1, 3)), (4, "b", "c", range(3, STEPS))]
    found = [succeed(stay, size, size, str(tmp_path), *leg, timeout_s=200) for size, *leg in legs]
    for before, after in zip(found, found[1:], strict=False):
        for rank in after:
            for kept, loaded in zip(before[0]["left"], rank["loaded"], strict=True):
                same(kept, loaded)
    for rank in found[-1]:
        same(rank["left"][0], found[-1][0]["left"][0])
        assert rank["steps"] == STEPS
    close(found[0][0]["without a break"], found[-1][0]["left"][0])


def loses_a_rank(rank, device):
    """The last rank is killed when backward has come to the first layer."""
    prepare(rank, 4)
    engine = make_engine(0, 4, **comm(2, bits=8))
    train(engine, rank, 4, range(1))
    if rank == 3:

        def die(module, inputs, output):
            output.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))

        engine.module.layers[0].register_forward_hook(die)
    train(engine, rank, 4, range(1))


def test_a_rank_killed_in_backward_ends_the_others_with_its_name():
    begin = time.monotonic()
    *others, killed = run_ranks(loses_a_rank, 4, timeout_s=120)
    assert killed == Failure("ended with exit code -9")
    for rank, failure in enumerate(others):
        assert f"CommunicationError: Rank {rank}: the " in failure.text, failure.text
        assert "exchange" in failure.text or "end of backward" in failure.text
        assert "No sign of life from rank 3;" in failure.text
    assert time.monotonic() - begin < 110
