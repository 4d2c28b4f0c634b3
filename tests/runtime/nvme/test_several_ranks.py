"""Several ranks of a node with homes on NVMe: the same bits as in host memory, and one failing disk ends all of them.

One set of processes runs every case: starting them takes longer than training.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.runtime.homes import UnitHome
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.train_state import ExecutorState
from lazytrain_plugin.vocab import Tier, Updater
from tests.comm.ranks import run_ranks, succeed
from tests.runtime.nvme.rig import assert_same, big_model, full_state, in_three, on_nvme
from tests.runtime.rig import make_executor, plan_for
from tests.runtime.test_several_ranks import DEVICES, MODELS, global_batches

STEPS = 3
STATES = {"states": Tier.NVME}
WEIGHTS = {"weights": Tier.NVME}
ALL = STATES | WEIGHTS | {"gradients": Tier.NVME}
pytestmark = pytest.mark.multiprocess


def gpu(plan):
    return plan.with_units(weights=Tier.GPU, states=Tier.GPU, updater=Updater.GPU)


def in_memory(plan):
    return plan.with_units(weights=Tier.CPU, states=Tier.CPU)


def in_8_bits(plan):
    return plan.with_units(state_bits=8)


def same(plan):
    return plan


CASES = {
    "clipped": (
        {"max_norm": 0.1, "writes": True},
        {
            "states, one slot": {"disk": STATES, "slots": 1},
            "weights": {"disk": WEIGHTS},
            "all": {"disk": ALL},
            "weights and states, to the GPU and back": {"disk": WEIGHTS | STATES, "moves": (gpu, same)},
            "states, to memory and back": {"disk": STATES, "moves": (in_memory, same)},
        },
    ),
    "twice, fp32": (
        {"model": "twice", "dtype": torch.float32, "accumulation": 2},
        {"states": {"disk": STATES}, "all": {"disk": ALL}},
    ),
    "8 bit": (
        {"model": "skips", "state_bits": 8, "least_coded_numel": 300},
        {
            "states": {"disk": STATES, "home": "mirror"},
            "every second unit": {"disk": WEIGHTS | STATES, "every": 2},
        },
    ),
    "compact": ({"model": "frozen", "state_bits": 8, "gradient_bits": 8, "accumulation": 2}, {"all": {"disk": ALL}}),
    "tied": ({"model": "tied"}, {"weights and states": {"disk": WEIGHTS | STATES}}),
    "to 8 bits": ({"moves": (same, in_8_bits)}, {"states": {"disk": STATES}}),
}
"""What several runs have in common, and what each of them has on disk."""


def run_case(
    ranks, device, tier, *, model="wide", home="cpu", state_bits=32, dtype=torch.bfloat16, least_coded_numel=0,
    gradient_bits=16, max_norm=0.0, accumulation=1, slots=2, every=1, disk=None, moves=(), writes=False,
):  # fmt: skip
    """The first gradients; norms, masters and states after some steps.

    `disk`: what rests there. `moves`: other plans, made of the first one, for the steps after the first. `writes`: from
    outside, to weights.
    """
    torch.manual_seed(7 if ranks.is_first else 8)  # the first rank's weights count
    model = MODELS[model]()
    place = same if disk is None else partial(on_nvme, slots=slots, every=every, **disk)
    plan = replace(plan_for(model, home=home, state_bits=state_bits, device=device.type), fidelity="compact")
    plan = plan.with_units(gradient_bits=gradient_bits)
    executor = make_executor(
        model, place(plan), device=str(device), native=True, dtype=dtype, least_coded_numel=least_coded_numel,
        ranks=ranks, nvme=tier,
    )  # fmt: skip
    assert (disk is None) == (tier is None or tier.used_bytes == 0)
    data, norms = iter(global_batches(STEPS * accumulation, ranks.size)), []
    for step in range(STEPS):
        if step in range(1, len(moves) + 1):
            move = moves[step - 1]
            executor.flush()
            executor.share_changes()
            before = full_state(executor)
            executor.place(move(plan) if move in (gpu, in_memory) else place(move(plan)))
            if move is not in_8_bits:
                assert_same(full_state(executor), before)  # also what other ranks have moved
        for micro in range(accumulation):
            executor.begin_forward()
            executor.set_last_micro_batch(micro == accumulation - 1)
            ids = next(data).chunk(ranks.size)[ranks.rank].to(device)
            (model.loss(ids) / accumulation).backward()
            executor.end_backward()
        if step == 0:
            gradients = read_gradients(executor)
        norms.append(executor.step(max_norm)[0].total)
        if writes and step == 0:
            write_from_outside(model, ranks)
    executor.flush()
    found = {"norms": torch.tensor(norms, dtype=torch.float64), **gradients, **full_state(executor)}
    ranks.barrier("end of a case")  # each reads what is on the others' disk
    executor.close()
    return found


def read_gradients(executor):
    executor.flush()
    state = ExecutorState(executor)
    read = {f"gradient of {record.name}": state.read_gradient(record) for record in state.records}
    return {name: gradient.clone() for name, gradient in read.items() if gradient is not None}


def write_from_outside(model, ranks):
    """On every rank, as adapters are merged; and on the second one alone."""
    with torch.no_grad():
        model.layers[0].up.weight.mul_(0.5)
        if ranks.rank == 1:
            model.layers[1].up.weight.add_(1.0)


def every_case(rank, device, folder, names, shard="node"):
    """(case, run) -> what it found; the run None is in host memory. Where states are divided over the job each rank is
    a node, and weights rest in memory."""
    topology = Topology.consecutive(torch.distributed.get_world_size(), 1) if shard == "job" else None
    ranks = RankGroup(device, topology=topology, shard=shard)
    copy_from = UnitHome.copy_from

    def late_copy(self, other):
        time.sleep(0.03 * rank)
        copy_from(self, other)

    UnitHome.copy_from = late_copy  # who reads what was moved must wait for all
    found = {}
    for name in names:
        common, runs = CASES[name]
        for run, special in {None: {}, **runs}.items():
            # Later ranks have slower disks: who reads their parts must wait for them.
            tier = None if run is None else NvmeTier([folder], block_bytes=8192, pieces=in_three, delay_s=0.003 * rank)
            if ranks.shards_job and run is not None:
                special = special | {"disk": STATES | special["disk"] | {"weights": Tier.CPU}}
            found[name, run] = run_case(ranks, device, tier, **common, **special)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("size", "names", "shard"),
    [(2, tuple(CASES), "node"), (3, ("compact", "tied"), "node"), (2, ("clipped", "8 bit", "compact"), "job")],
)
def test_the_same_bits_as_in_host_memory(device, disk, size, names, shard):
    """S-15, S-19, S-22: weights, states and gradients on disk, every request late."""
    ranks = succeed(every_case, size, str(disk), names, shard, device=device, timeout_s=200)
    for (name, _), in_memory in ((key, value) for key, value in ranks[0].items() if key[1] is None):
        for found in ranks:
            for run in (None, *CASES[name][1]):
                for key, value in in_memory.items():
                    assert torch.equal(found[name, run][key], value), (name, run, key)
    assert not list(disk.iterdir())


def peaks_of_memory(rank, device, disk, num_layers):
    """Peak RSS in MiB with the model made, when it is placed, and after a step; a small model first."""
    ranks, peaks = RankGroup(device), []
    for model in (big_model(2), big_model(num_layers)):
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        plan = on_nvme(plan_for(model), **ALL)
        executor = make_executor(model, plan, device=str(device), native=True, ranks=ranks, nvme=NvmeTier([disk]))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        executor.begin_forward()
        model.loss(global_batches(1, 2)[0].chunk(2)[rank]).backward()
        executor.step(0.0)
        executor.flush()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        executor.close()
    return peaks[3:]


def test_two_ranks_never_hold_in_memory_what_is_on_disk(disk):
    """S-07, S-17: 30 MiB of weights, 60 of states and 30 of gradients; each rank has the weights as it made them."""
    for made, placed, trained in succeed(peaks_of_memory, 2, str(disk), 30):
        assert placed - made < 15 and trained - made < 40, (made, placed, trained)


def has_no_room(rank, device, disk):
    ranks = RankGroup(device)
    run_case(ranks, device, NvmeTier([disk], limit_bytes=4096 if rank else None), disk=STATES)


def test_no_room_on_one_rank_is_an_error_on_all(disk):
    first, second = run_ranks(has_no_room, 2, str(disk))
    assert "StorageError: no room on NVMe for states of layers.0" in second.text
    assert "StorageError: Rank 1: no room on NVMe for states of layers.0" in first.text


def loses_a_block(rank, device, disk):
    ranks = RankGroup(device)
    torch.manual_seed(7)
    model = MODELS["wide"]()
    tier = NvmeTier([disk])
    plan = on_nvme(plan_for(model), slots=1)
    executor = make_executor(model, plan, device=str(device), native=True, ranks=ranks, nvme=tier)
    for step, batch in enumerate(global_batches(3, 2)):
        executor.begin_forward()
        model.loss(batch.chunk(2)[rank]).backward()
        executor.step(0.0)
        executor.flush()
        if step == 0 and rank == 1:
            _, _, path = executor.units[1].home.nvme_states[0].region.files[0]
            with open(path, "r+b") as file:
                file.write(b"oops")


def test_a_damaged_block_on_one_rank_ends_all(disk):
    """S-14: none waits for what will never come."""
    first, second = run_ranks(loses_a_block, 2, str(disk), timeout_s=60)
    assert "not what was written there" in second.text and "resume from the last checkpoint" in second.text
    assert "the optimizer update of layers.1 on rank 1 failed there" in first.text
