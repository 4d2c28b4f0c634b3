"""Several ranks against one rank with the same global batch, and against each other.

One set of processes runs every case of a world size: starting them takes longer than training.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lazytrain_plugin.comm import hops
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.runtime import activation_store, gradient_exchange, resident_updates, streamed_updates
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.train_state import ExecutorState
from lazytrain_plugin.vocab import Tier
from tests.comm.ranks import Failure, run_ranks, stay_until_told, succeed, telling_others, wait_in_vain
from tests.runtime.rig import HIDDEN, VOCAB, Block, Model, make_executor, plan_for

STEPS = 5
HOMES = ["cpu", "gpu", "mirror", "mixed", "streamed", "streamed from gpu", "every kind"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.multiprocess


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight


class Twice(Model):
    """Runs its first layer again at the end."""

    def run_layers(self, x):
        return self.layers[0](super().run_layers(x))


class Wide(Model):
    """Layers of several dozen blocks, whose parts cut through tensors."""

    def __init__(self):
        super().__init__([WideBlock() for _ in range(2)])


class WideBlock(Block):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 301)
        self.down = nn.Linear(301, HIDDEN)


class Skips(Model):
    """Leaves out a layer where the batch says so, and never uses one of its tensors."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids):
        x = self.embedding(ids)
        for i, layer in enumerate(self.layers):
            if i != 1 or not bool((ids[0, 0] == 0).item()):
                x = layer(x)
        return self.head(x)


class Experts(Model):
    """One expert for each rank's batch, and one that no batch asks for; as a tower without images does."""

    def __init__(self):
        super().__init__([ExpertBlock() for _ in range(2)])

    def forward(self, ids):
        for layer in self.layers:
            layer.route = int(ids[0, 0])
        return super().forward(ids)


class ExpertBlock(Block):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x):
        return super().forward(x + self.experts[self.route](x))


def frozen(model_class):
    model = model_class()
    for parameter in (*model.layers[0].parameters(), *model.embedding.parameters()):
        parameter.requires_grad_(False)
    return model


MODELS = {
    "plain": Model,
    "tied": Tied,
    "twice": Twice,
    "wide": Wide,
    "frozen": partial(frozen, Wide),
    "skips": Skips,
    "experts": Experts,
}
BY_FIRST_ROW = ("skips", "experts")
"""What a rank runs depends on the first row of its own batch."""
MOVES = ["gpu", "cpu", "mixed", "gpu", "streamed", "gpu", "streamed from gpu", "mixed"]
"""Another plan before every micro-batch."""
CASES = {
    **{f"wide, {home}": {"model": "wide", "home": home} for home in HOMES},
    "bf16": {"model": "wide", "dtype": torch.bfloat16},
    "bf16, mixed": {"model": "wide", "dtype": torch.bfloat16, "home": "mixed"},
    "8 bit, fp32": {"model": "wide", "state_bits": 8},
    "8 bit": {"model": "wide", "dtype": torch.bfloat16, "state_bits": 8},
    "8 bit, mirror": {"model": "wide", "dtype": torch.bfloat16, "state_bits": 8, "home": "mirror"},
    "8 bit, streamed": {"model": "wide", "dtype": torch.bfloat16, "state_bits": 8, "home": "streamed"},
    "8 bit, every kind": {"model": "wide", "dtype": torch.bfloat16, "state_bits": 8, "home": "every kind"},
    "clip": {"model": "wide", "max_norm": 0.1},
    "clip, mixed": {"model": "wide", "max_norm": 0.1, "home": "mixed"},
    "accumulation": {"model": "wide", "accumulation": 3, "max_norm": 0.1},
    "accumulation, mixed": {"model": "wide", "accumulation": 3, "max_norm": 0.1, "home": "mixed"},
    "accumulation, streamed": {"model": "wide", "accumulation": 3, "max_norm": 0.1, "home": "streamed"},
    "8 bit, gpu": {"model": "wide", "dtype": torch.bfloat16, "state_bits": 8, "home": "gpu"},
    "8 bit, moves": {"model": "wide", "dtype": torch.bfloat16, "state_bits": 8, "moves": MOVES},
    "accumulation, moves": {"model": "wide", "accumulation": 3, "max_norm": 0.1, "moves": MOVES},
    "skips, gpu": {"model": "skips", "home": "gpu"},
    "keep": {"model": "wide", "keep": "all"},
    "offload": {"model": "wide", "keep": "mixed", "offload": True},
    "offload, accumulation": {"model": "wide", "keep": "all", "offload": True, "accumulation": 3, "max_norm": 0.1},
    "plain": {"model": "plain"},
    "tied": {"model": "tied"},
    "twice": {"model": "twice"},
    "frozen": {"model": "frozen"},
    "skips": {"model": "skips"},
    "skips, streamed": {"model": "skips", "home": "streamed"},
    "experts": {"model": "experts"},
    "experts, gpu": {"model": "experts", "home": "gpu"},
    "experts, streamed": {"model": "experts", "home": "streamed", "keep": "mixed"},
    "twice, streamed": {"model": "twice", "home": "every kind"},
}
SAME_BITS = [(f"wide, {home}", "wide, cpu") for home in HOMES[1:]] + [
    ("bf16, mixed", "bf16"),
    ("8 bit, mirror", "8 bit"),
    ("8 bit, streamed", "8 bit"),
    ("8 bit, every kind", "8 bit"),
    ("8 bit, gpu", "8 bit"),
    ("8 bit, moves", "8 bit"),
    ("accumulation, moves", "accumulation"),
    ("skips, gpu", "skips"),
    ("accumulation, streamed", "accumulation"),
    ("skips, streamed", "skips"),
    ("experts, gpu", "experts"),
    ("experts, streamed", "experts"),
    ("twice, streamed", "twice"),
    ("clip, mixed", "clip"),
    ("accumulation, mixed", "accumulation"),
    ("keep", "wide, cpu"),
    ("offload", "wide, cpu"),
    ("offload, accumulation", "accumulation"),
]


@pytest.fixture(autouse=True)
def small_tensors_leave(monkeypatch):
    monkeypatch.setattr(activation_store, "SMALLEST_BYTES", 1)


def global_batches(count, world_size):
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, VOCAB, (2 * world_size, 7), generator=generator) for _ in range(count)]
    for batch in batches:
        batch[0, 0], batch[2, 0] = 0, 1  # what `BY_FIRST_ROW` look at: the ranks of two differ
    return batches


def train(
    model,
    ranks,
    device,
    batches,
    *,
    home="cpu",
    state_bits=32,
    dtype=None,
    keep="none",
    offload=False,
    disk=None,
    max_norm=0.0,
    accumulation=1,
    moves=(),
):
    plan = plan_for(model, home=home, keep=keep, state_bits=state_bits, device=device.type)
    if offload or disk:  # inputs, and what is saved
        tier = Tier.NVME if disk else Tier.CPU
        plan = plan.with_units(boundary=tier, saved=tier)
    nvme = None if disk is None else NvmeTier([disk], block_bytes=4096)
    executor = make_executor(model, plan, device=str(device), native=True, dtype=dtype, ranks=ranks, nvme=nvme)
    batches, moves = iter(batches), itertools.cycle(moves)
    norms = []
    for _ in range(STEPS):
        for micro in range(accumulation):
            if (move := next(moves, None)) is not None:
                executor.place(plan_for(model, home=move, state_bits=state_bits, device=device.type))
            batch = next(batches).to(device)
            shards = [batch] if ranks is None else [batch.chunk(ranks.size)[ranks.rank]]
            executor.begin_forward()
            executor.set_last_micro_batch(micro == accumulation - 1)
            for ids in shards:
                (model.loss(ids) / accumulation).backward()
            executor.end_backward()
        norms.append(executor.step(max_norm)[0].total)
    executor.flush()
    for home in (unit.home for unit in executor.all_units if unit.home.is_read_together and unit.trained):
        first, end = home.part(ranks.own_part)
        assert len(next(iter(home.held.flats.values()))) == end - first, "a rank has its part only"
    assert (executor.activations.tier.free_bytes > 0) == offload  # buffers that were used
    assert nvme is None or nvme.used_bytes > 0
    return executor, norms


def weights(executor):
    state = ExecutorState(executor)
    return {record.name: state.read_master(record).clone() for record in state.records}


def run_case(ranks, device, world_size, case):
    case = dict(case)
    torch.manual_seed(7 if ranks is None or ranks.is_first else 8)  # the first rank's weights count
    model = MODELS[case.pop("model")]()
    batches = global_batches(STEPS * case.get("accumulation", 1), world_size)
    executor, norms = train(model, ranks, device, batches, **case)
    found = weights(executor)
    executor.close()
    return found, norms


def every_case(rank, device, world_size, names, ranks_per_node=None):
    activation_store.SMALLEST_BYTES = 1
    streamed_updates.STEM_STAGING_BYTES = 12 << 10  # units pass in several chunks
    topology = None if ranks_per_node is None else Topology.consecutive(world_size, ranks_per_node)
    gradient_exchange.CHUNK_ELEMENTS, resident_updates.GATHERED_BYTES = 1024, 4096
    ranks = RankGroup(device, topology=topology)
    found = {name: run_case(ranks, device, world_size, CASES[name]) for name in names}
    if device.type == "cuda":
        found["in use"] = list(filter(torch._C._cuda_hasPrimaryContext, range(torch.cuda.device_count())))
    return found


@pytest.fixture(scope="module", params=DEVICES)
def two(request):
    return request.param, succeed(every_case, 2, 2, list(CASES), device=request.param, timeout_s=200)


def one_rank(name, device, world_size):
    if CASES[name]["model"] not in BY_FIRST_ROW:
        return run_case(None, torch.device(device), world_size, CASES[name])
    # Micro-batches stand for the ranks.
    torch.manual_seed(7)
    model = MODELS[CASES[name]["model"]]()
    batches = [part for batch in global_batches(STEPS, world_size) for part in batch.chunk(world_size)]
    executor, norms = train(model, None, torch.device(device), batches, accumulation=world_size)
    return weights(executor), norms


def initial_weights(name):
    torch.manual_seed(7)
    return {key: p.detach().reshape(-1) for key, p in MODELS[CASES[name]["model"]]().named_parameters()}


def assert_close(name, found, expected):
    ours, norms = found
    theirs, their_norms = expected
    initial = initial_weights(name)
    if "dtype" not in CASES[name]:
        assert norms == pytest.approx(their_norms, rel=1e-5)
        for key, values in theirs.items():
            # Adam makes much of the rounding of gradients near zero, and a last bit may make another 8-bit code.
            moved, apart = (values - initial[key]).norm(), ours[key] - values
            assert apart.norm() <= (1e-3 if "state_bits" in CASES[name] else 1e-5) * moved, key
            assert apart.abs().max() <= (1e-3 if "state_bits" in CASES[name] else 1e-4), key
        return
    # bf16 gradients of halves of the batch are rounded otherwise, and Adam makes much of small ones.
    assert norms == pytest.approx(their_norms, rel=5e-3)
    whole = lambda tensors: torch.cat([tensors[key] for key in initial])  # noqa: E731
    assert (whole(ours) - whole(theirs)).norm() < 0.02 * (whole(theirs) - whole(initial)).norm()


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one(two, name):
    device, results = two
    for found in results:
        assert_close(name, found[name], one_rank(name, device, 2))


@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_the_same_bits(two, name):
    _, ((first, norms), (second, second_norms)) = two[0], [found[name] for found in two[1]]
    assert norms == second_norms
    for key, values in first.items():
        assert torch.equal(values, second[key])


def test_a_rank_takes_memory_on_its_own_gpu_only(two):
    """A new thread begins on the first one."""
    device, results = two
    for rank, found in enumerate(results):
        assert found.get("in use", [rank]) == [rank]


@pytest.mark.parametrize(("name", "like"), SAME_BITS)
def test_bits_do_not_depend_on_the_plan(two, name, like):
    found = two[1][0]
    assert found[name][1] == found[like][1]
    for key, values in found[like][0].items():
        assert torch.equal(found[name][0][key], values)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("experts")])
def test_an_expert_without_tokens_on_any_rank_is_untouched(two, name):
    """S-31, S-34: and one that a single rank used is trained, on both."""
    found, initial = two[1][0][name][0], initial_weights(name)
    for key, values in found.items():
        assert torch.equal(values, initial[key]) == ("experts.2." in key), key


def activations_on_disk(rank, device, disk):
    activation_store.SMALLEST_BYTES = 1
    ranks = RankGroup(device)
    case = {"model": "wide", "keep": "mixed", "max_norm": 0.1}
    found = [run_case(ranks, device, 2, case | more) for more in ({"disk": disk}, {})]
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_each_rank_may_have_its_activations_on_disk(device, tmp_path):
    ranks = succeed(activations_on_disk, 2, str(tmp_path), device=device)
    for (on_disk, norms), (expected, expected_norms) in ranks:
        assert norms == expected_norms
        for key, values in expected.items():
            assert torch.equal(on_disk[key], values)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
def test_four_ranks_train_as_one(device, ranks_per_node):
    """On one node, on two (a copy of the model on each), and each for itself."""
    names = ["clip, mixed", "accumulation", "tied", "8 bit, fp32"]
    results = succeed(every_case, 4, 4, names, ranks_per_node, device=device)
    for name in names:
        expected = one_rank(name, device, 4)
        for found in results:
            assert_close(name, found[name], expected)
            for key, values in results[0][name][0].items():
                assert torch.equal(found[name][0][key], values), (name, key)


def dies_in_backward(module, inputs, output):
    output.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))


def loses_a_rank(rank, device, when):
    hops.SIGN_OF_LIFE_S = 0.3
    ranks = RankGroup(device, timeout_s=60)
    model = MODELS["wide"]()
    executor = make_executor(model, plan_for(model, device=device.type), device=str(device), native=True, ranks=ranks)
    for step, batch in enumerate(global_batches(2, 2)):
        if rank == 1 and step == 1 and when == "in backward":
            model.layers[0].register_forward_hook(dies_in_backward)
        if rank == 1 and step == 1 and when == "before its update":
            executor.worker.submit(lambda: os.kill(os.getpid(), signal.SIGKILL), "the end")
        executor.begin_forward()
        model.loss(batch.chunk(2)[rank].to(device)).backward()
        executor.end_backward()
        executor.step(0.0)
    executor.flush()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("when", ["in backward", "before its update"])
def test_a_rank_that_is_killed_ends_the_other_one_at_once_with_its_name(device, when):
    begin = time.monotonic()
    other, killed = run_ranks(loses_a_rank, 2, when, device=device, timeout_s=80)
    assert killed == Failure("ended with exit code -9")
    assert "CommunicationError: Rank 0: the " in other.text, other.text
    assert re.search("No sign of life from rank 1;|on rank 1 ended with that process;", other.text), other.text
    assert time.monotonic() - begin < 40


def ends_its_epoch_early(rank, device, folder):
    ranks = RankGroup(device, timeout_s=60)
    ended, given_up = Path(folder, "ended"), Path(folder, "given up")
    model = MODELS["wide"]()
    executor = make_executor(model, plan_for(model, device=device.type), device=str(device), native=True, ranks=ranks)
    with telling_others(given_up):
        for number, batch in enumerate(global_batches(3 - rank, 2)):
            if number == 2:
                stay_until_told(ended)
                wait_in_vain(ranks.hops, 1.0, ranks._control, ranks._control_inside)
                ranks.timeout_s = 1.0
            executor.begin_forward()
            model.loss(batch.chunk(2)[rank].to(device)).backward()
            executor.end_backward()
            executor.step(0.0)
    if rank == 1:
        executor.flush()
        ended.touch()
        stay_until_told(given_up)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_with_more_batches_says_for_whom_it_waits(device, tmp_path):
    """S-50: it ends after the time-out, instead of waiting for ever."""
    longer, _ = run_ranks(ends_its_epoch_early, 2, str(tmp_path), device=device)
    assert "CommunicationError: Rank 0: the " in longer.text and "No sign of life from rank 1;" in longer.text


class NeverDone:
    """Stands for the event of a kernel that waits for a rank that is gone."""

    def query(self) -> bool:
        return False


def waits_for_the_dead(rank, device):
    hops.SIGN_OF_LIFE_S = 0.3
    ranks = RankGroup(device, timeout_s=60)
    ranks.barrier("start")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    streams = Streams(device)
    streams.patience = partial(ranks.give_up_on_others, "exchange")
    streams.reach(NeverDone())


def test_a_host_that_waits_for_its_device_hears_that_a_rank_is_gone():
    other, _ = run_ranks(waits_for_the_dead, 2, timeout_s=40)
    assert "CommunicationError: Rank 0: the exchange failed" in other.text
    assert "No sign of life from rank 1;" in other.text and "process of rank 1 has ended" in other.text


def fails_to_launch(rank, device):
    hops.SIGN_OF_LIFE_S = 0.3
    ranks = RankGroup(device, timeout_s=60)
    model = MODELS["wide"]()
    plan = plan_for(model, home="streamed", device=device.type)
    executor = make_executor(model, plan, device=str(device), native=True, ranks=ranks)
    if rank == 1:
        executor._streamed_updates.launch = None  # not to be called
    executor.begin_forward()
    model.loss(global_batches(1, 2)[0].chunk(2)[rank].to(device)).backward()
    executor.end_backward()
    executor.step(0.0)
    executor.flush()


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_that_cannot_pass_its_gpu_ends_the_other_rank_too(device):
    begin = time.monotonic()
    first, second = run_ranks(fails_to_launch, 2, device=device, timeout_s=50)
    assert "on rank 1 failed there" in first.text and "'NoneType' object is not callable" in second.text
    assert time.monotonic() - begin < 40
