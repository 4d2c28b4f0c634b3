"""The engine on four ranks of two nodes: resumed on two ranks and on four again, and with a rank that is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.comm.ranks import Failure, run_ranks, succeed
from tests.integration.test_several_ranks import (
    STEPS,
    close,
    comm,
    debug_api,
    make_engine,
    masters,
    prepare,
    same,
    states,
    train,
)

pytestmark = pytest.mark.multiprocess


NODE, JOB = {"shard": "node"}, {"shard": "job"}
BALANCED = {"bf16": True, "fidelity": "balanced"}
CHAINS = {
    "node": (NODE, NODE, NODE),
    "job": (JOB, JOB, JOB),
    "mixed": (JOB, NODE, JOB),
    "balanced": tuple({**BALANCED, **shard} for shard in (JOB, NODE, JOB)),
}
"""How each leg's engine is made; what it leaves, the next one loads."""
LEGS = [(4, None, "a", range(1)), (2, "a", "b", range(1, 3)), (4, "b", "c", range(3, STEPS))]
"""Ranks, what they load (None: they start), what they save, and steps in between."""


def stay(rank, device, leg, folder):
    """One leg of every chain; every rank starts from weights of its own."""
    world_size, load, save, steps = LEGS[leg]
    prepare(rank, world_size)
    return {
        chain: train_and_save(rank, world_size, str(folder / chain), load, save, steps, options[leg])
        for chain, options in CHAINS.items()
    } | {"debug": debug_api(rank, **JOB, **comm(1)) if world_size == 2 else None}


def train_and_save(rank, world_size, folder, load, save, steps, options):
    # Two ranks that divide states over the job are a node each.
    ranks_per_node = 1 if (world_size, options["shard"]) == (2, "job") else 2
    engine = make_engine(10 * world_size + rank, world_size, **options, **comm(ranks_per_node))
    found = {"divides": engine.lazytrain.holds_parts}
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


@pytest.fixture(scope="module")
def legs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("legs")
    return [succeed(stay, size, leg, folder, timeout_s=300) for leg, (size, *_) in enumerate(LEGS)]


@pytest.mark.parametrize("chain", CHAINS)
def test_four_ranks_resume_on_two_and_on_four_again(legs, chain):
    """Whatever states are divided over, then and now."""
    found = [[rank[chain] for rank in leg] for leg in legs]
    for leg, options in zip(found, CHAINS[chain], strict=True):
        assert {rank["divides"] for rank in leg} == {options["shard"] == "job"}
    for before, after in zip(found, found[1:], strict=False):
        for rank in after:
            for kept, loaded in zip(before[0]["left"], rank["loaded"], strict=True):
                same(kept, loaded)
    for rank in found[-1]:
        same(rank["left"][0], found[-1][0]["left"][0])
        assert rank["steps"] == STEPS
    if chain == "balanced":
        assert any(key.endswith(".codes") for _, key in found[0][0]["left"][1])
    else:
        close(found[0][0]["without a break"], found[-1][0]["left"][0])


def test_what_states_are_divided_over_changes_no_bit(legs):
    for rank in legs[0]:
        for mine, theirs in zip(rank["job"]["left"], rank["node"]["left"], strict=True):
            same(mine, theirs)
        same(rank["job"]["without a break"], rank["node"]["without a break"])


def test_debug_functions_read_and_set_what_all_ranks_have_parts_of(legs):
    for rank in (found["debug"] for found in legs[1]):
        close(rank["expected"], rank["gradients"])
        for key in ("gradients", "before"):
            same(rank[key], legs[1][0]["debug"][key])
        same(rank["halves"], rank["before"])


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
