"""The engine on several ranks: training, checkpoints on another number of ranks, and what ranks do on their own.

One set of processes of each size runs everything: importing deepspeed takes longer than training.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lazytrain_plugin.runtime import gradients
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.comm.ranks import succeed
from tests.integration import on_disk, ranks_apart
from tests.runtime.rig import VOCAB, Model
from tests.runtime.test_several_ranks import WideBlock

STEPS, ACCUMULATION, ROWS, TOKENS = 4, 2, 4, 7
pytestmark = pytest.mark.multiprocess


class Adapted(Model):
    def __init__(self, num_layers=2):
        super().__init__([WideBlock() for _ in range(num_layers)])
        self.register_buffer("seen", torch.zeros(3))


def prepare(rank, world_size, accelerator="cpu"):
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": 1, "DS_ACCELERATOR": accelerator}
    os.environ.update({key: str(value) for key, value in variables.items()})
    import deepspeed  # noqa: F401

    import lazytrain_plugin.install  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a minute of compilation


def make_engine(seed, world_size, *, bf16=False, num_layers=2, frozen=False, **block):
    import deepspeed

    torch.manual_seed(seed)
    model = Adapted(num_layers)
    for parameter in (*model.embedding.parameters(), *model.layers[0].up.parameters()) if frozen else ():
        parameter.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": ROWS // world_size,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}},
        "lazytrain": {"plan": {"cache": False}, **block},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def batches(steps):
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator) for _ in range(STEPS * ACCUMULATION)]
    return made[steps.start * ACCUMULATION : steps.stop * ACCUMULATION]


def train(engine, rank, world_size, steps):
    losses = []
    for ids in batches(steps):
        ids = ids.chunk(world_size)[rank]
        logits = engine(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masters(engine):
    engine.flush()
    state = engine.lazytrain
    return {r.name: state.read_master(r).clone() for r in state.records}


def states(engine):
    state = engine.lazytrain
    return {(r.name, k): torch.as_tensor(v).clone() for r in state.records for k, v in state.read_state(r).items()}


def to_the_gpu(engine):
    """Layers whose states rest where they compute, divided over the ranks."""
    executor = engine.lazytrain.executor
    executor.place(executor.plan.with_units(weights=Tier.GPU, states=Tier.GPU, updater=Updater.GPU))
    assert engine.lazytrain.holds_parts == (executor.ranks is not None)


def coded_states(rank, world_size, folder, *, load):
    """Masters and states in bf16 with 8-bit states on the GPU, after training or as loaded."""
    engine = make_engine(rank, world_size, bf16=True, fidelity="balanced")
    train(engine, rank, world_size, range(2))
    to_the_gpu(engine)
    train(engine, rank, world_size, range(2, 4))
    if load:
        engine.load_checkpoint(folder, "coded")
    else:
        engine.save_checkpoint(folder, "coded")
    found = masters(engine), states(engine)
    engine.destroy()
    return found


def two_then_save(rank, device, folder):
    prepare(rank, 2)
    engine = make_engine(rank, 2)
    train(engine, rank, 2, range(1))
    to_the_gpu(engine)
    train(engine, rank, 2, range(1, 2))
    engine.save_checkpoint(folder, "two")
    halfway = masters(engine), states(engine)
    train(engine, rank, 2, range(2, 4))
    out = {"halfway": halfway, "end": masters(engine), "norm": engine.get_global_grad_norm()}
    out["full"] = {name: value.clone() for name, value in engine._zero3_consolidated_16bit_state_dict().items()}
    engine.save_checkpoint(folder, "two_end")
    engine.destroy()
    later = lambda engine: train(engine, rank, 2, range(1, STEPS))  # noqa: E731
    out["disk"] = disk_leg(rank, 2, folder, "first disk", None, range(1), later)
    out["coded"] = coded_states(rank, 2, folder, load=False)
    out["debug"] = debug_api(rank)
    return out


def debug_api(rank, **block):
    """What DeepSpeed's functions give while the other rank is late: gradients, masters and moments as they are halved,
    twice the halves, and the gradients of plain torch."""
    from deepspeed import utils

    engine = make_engine(0, 2, **block)
    torch.manual_seed(0)
    plain = Adapted()
    add_up = gradients.add_up

    def slowly(*args, **kwargs):
        time.sleep(0.02 * rank)
        add_up(*args, **kwargs)

    gradients.add_up = slowly
    for ids in batches(range(1)):
        (nn.functional.cross_entropy(plain(ids).flatten(0, 1), ids.flatten()) / ACCUMULATION).backward()
        ids = ids.chunk(2)[rank]
        engine.backward(nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flatten()))
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    parameters = dict(engine.module.named_parameters())
    read = {name: utils.safe_get_full_grad(p) for name, p in parameters.items()}
    gradients.add_up = add_up
    engine.step()
    before, halves = {}, {}
    for name, parameter in parameters.items():
        time.sleep(0.02 * rank)
        before[name] = utils.safe_get_full_fp32_param(parameter)
        utils.safe_set_full_fp32_param(parameter, before[name] / 2)
        halves[name] = 2 * utils.safe_get_full_fp32_param(parameter)
        time.sleep(0.02 * rank)
        key = f"exp_avg of {name}"
        before[key] = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        utils.safe_set_full_optimizer_state(parameter, before[key] / 2, "exp_avg")
        halves[key] = 2 * utils.safe_get_full_optimizer_state(parameter, "exp_avg")
    engine.destroy()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return {"gradients": read, "expected": expected, "before": before, "halves": halves}


def disk_leg(rank, world_size, folder, disk, load, steps, later=None):
    """Every rank starts from weights of its own."""
    disk = Path(folder) / disk
    disk.mkdir(exist_ok=True)
    tokens = ROWS // world_size * TOKENS  # planned at the start: a plan from the first batch would undo this one
    engine = make_engine(10 * world_size + rank, world_size, bf16=True, nvme_path=str(disk), max_tokens=tokens)
    saved = f"to step {steps.stop}"
    found = on_disk.leg(engine, lambda engine: train(engine, rank, world_size, steps), folder, load, saved, later)
    torch.distributed.barrier()
    return found | {"left behind": [path.name for path in disk.iterdir()]}


def planned_on_disk(rank, folder):
    """Masters after training, and which units' states are on disk: with room in memory, and without."""
    (disk := Path(folder) / "planned disk").mkdir(exist_ok=True)
    on_disk.describe_small_machine(Path(folder) / f"cache {rank}")
    budgets = on_disk.tight_budgets(Adapted(12), max_tokens=14, accumulation_steps=ACCUMULATION, local_ranks=2)
    found = []
    for block in ({}, {**budgets, "nvme_path": str(disk)}):
        engine = make_engine(0, 2, num_layers=12, max_tokens=14, **block)
        train(engine, rank, 2, range(2))
        found.append((masters(engine), on_disk.is_on_disk(engine)))
        torch.distributed.barrier()
        engine.destroy()
    return found


def one_from_two(rank, device, folder):
    prepare(rank, 1)
    engine = make_engine(9, 1)
    engine.load_checkpoint(folder, "two")
    halfway = masters(engine), states(engine)
    train(engine, rank, 1, range(2, 4))
    engine.save_checkpoint(folder, "one_end")
    out = {"halfway": halfway, "end": masters(engine)}
    engine.destroy()
    engine = make_engine(0, 1)
    train(engine, rank, 1, range(4))
    out["whole run"] = masters(engine)
    engine.destroy()
    out["balanced"] = balanced(rank, 1)
    out["disk"] = disk_leg(rank, 1, folder, "second disk", "to step 1", range(1, 3))
    out["coded"] = coded_states(rank, 1, folder, load=True)
    return out


def two_from_one(rank, device, folder):
    prepare(rank, 2)
    engine = make_engine(9 + rank, 2)
    engine.load_checkpoint(folder, "one_end")
    out = {"loaded": masters(engine), "states": states(engine), "steps": engine.global_steps}
    out["alone"] = alone(engine, rank)
    out["outside"] = outside(engine, rank)
    out["larger"] = larger(engine, rank)
    out["overflow"] = overflow(engine, rank)
    engine.destroy()
    out["balanced"] = balanced(rank, 2)
    out["coded"] = coded_states(rank, 2, folder, load=True)
    out["swapping"] = swapping(rank)
    out["swap fails"] = swap_fails(rank)
    out["disk"] = disk_leg(rank, 2, folder, "third disk", "to step 3", range(3, STEPS))
    ids = batches(range(1))[0].chunk(2)[rank]
    out["apart"] = ranks_apart.everything(rank, lambda seed=0, **block: make_engine(seed, 2, **block), ids, folder)
    out["planned"] = planned_on_disk(rank, folder)
    return out


def swapping(rank):
    """Masters and plans after training in which the first rank finds a better plan, and in which none does."""
    found = []
    for swaps in (True, False):
        engine = make_engine(0, 2)
        executor = engine.lazytrain.executor
        if rank == 0 and swaps:
            plan = executor.plan.with_units(activations=Activations.KEEP, boundary=Tier.CPU, updater=Updater.GPU)
            ready = iter([None, plan, None, None])
            engine._planner._planner.better_plan = lambda ready=ready: next(ready)
        train(engine, rank, 2, range(STEPS))
        found.append((masters(engine), executor.plan.to_json()))
        engine.destroy()
    return found


def swap_fails(rank):
    """The first rank's search fails: what each rank raises."""
    engine = make_engine(0, 2)

    def fails():
        raise ValueError("no disk to search on")

    if rank == 0:
        engine._planner._planner.better_plan = fails
    try:
        train(engine, rank, 2, range(2))
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()


def balanced(rank, world_size):
    """Masters before and after training with bf16 weights and 8-bit states."""
    engine = make_engine(0, world_size, bf16=True, fidelity="balanced")
    before = masters(engine)
    train(engine, rank, world_size, range(STEPS))  # the schedule's first two have rate 0
    return before, masters(engine)


def alone(engine, rank):
    """One rank evaluates, reads and saves weights, while the other waits for it."""
    train(engine, rank, 2, range(1))
    found = None
    if rank == 0:
        found = engine.module.head.weight.detach().clone()
        engine.eval()
        with torch.no_grad():
            engine(batches(range(1))[0])
        engine.train()
    torch.distributed.barrier()
    return found, engine.module.head.weight.detach().clone()


def outside(engine, rank):
    """All ranks change a weight in place, each as if it were its own: the change counts once."""
    weight = engine.module.layers[0].up.weight
    before = weight.detach().clone()
    weight.data.mul_(0.5)
    if rank == 0:
        torch.distributed.barrier()  # one rank is done before the other begins
    else:
        torch.distributed.barrier()
    own = weight.detach().clone()
    with torch.no_grad():
        engine.eval()
        seen = engine(batches(range(1))[0]).clone()
        engine.train()
    loss = engine(batches(range(1))[0].chunk(2)[rank]).square().mean() * 0
    engine.backward(loss)
    engine.step()
    return before, own, seen, engine.module.layers[0].up.weight.detach().clone()


def larger(engine, rank):
    """A larger batch on one rank, in the middle of a window."""
    generator = torch.Generator().manual_seed(rank)
    for micro in range(ACCUMULATION + 1):
        rows = 9 if rank == 1 and micro == ACCUMULATION else 2
        ids = torch.randint(0, VOCAB, (rows, 7), generator=generator)
        engine.backward(nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flatten()))
        engine.step()
    return masters(engine), engine.lazytrain.executor.plan.max_tokens


def overflow(engine, rank):
    before = masters(engine)
    skipped = engine.skipped_steps
    while True:
        ids = batches(range(1))[0].chunk(2)[rank]
        loss = engine(ids).square().mean() * (float("inf") if rank == 1 else 1.0)
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary:
            break
    after = masters(engine)
    return engine.skipped_steps - skipped, all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("several_ranks")


@pytest.fixture(scope="module")
def two(folder):
    return succeed(two_then_save, 2, str(folder), timeout_s=200)


@pytest.fixture(scope="module")
def one(two, folder):
    return succeed(one_from_two, 1, str(folder), timeout_s=200)[0]


@pytest.fixture(scope="module")
def again(one, folder):
    return succeed(two_from_one, 2, str(folder), timeout_s=200)


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(b[key])), key


def close(a, b):
    for key, value in a.items():
        torch.testing.assert_close(b[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, k=key: f"{k}: {text}")


def in_codes(rank, **block):
    """What the engine trains; also what the log says of the exchange."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("lazytrain_plugin")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    engine = make_engine(0, 2, **block)
    train(engine, rank, 2, range(STEPS))
    logger.removeHandler(handler)
    planned = engine._planner.predicted(engine.lazytrain.executor.plan)
    comm = getattr(engine, "lazytrain_gradient_comm", None)
    lines = {begin: [line for line in said if line.startswith(begin)] for begin in ("gradients between", "links of")}
    found = masters(engine), lines["gradients between"], comm and comm.stats(), lines["links of"], planned
    engine.destroy()
    return found


def comm(ranks_per_node, **options):
    return {"gradient_comm": {"ranks_per_node": ranks_per_node, "smallest_bucket_elements": 1, **options}}


BALANCED = {"fidelity": "balanced", "optimizer": {"state_bits": 32}}
SETTINGS = {
    "8 bits": comm(1, bits=8, network_gbit=1e-3),
    "balanced": {**BALANCED, **comm(1)},
    "exact": comm(1),
    "one node": {**BALANCED, **comm(2)},
}


def in_every_setting(rank, device):
    prepare(rank, 2)
    return {name: in_codes(rank, **block) for name, block in SETTINGS.items()}


def test_the_block_says_in_which_format_gradients_cross_nodes():
    first, second = succeed(in_every_setting, 2, timeout_s=200)
    coded, told, stats, links, planned = first["8 bits"]
    assert len(told) == 1 and "2 nodes" in told[0] and "KiB" in told[0] and "in 8-bit codes" in told[0]
    assert stats.quantized_buckets > 0 == stats.full_precision_buckets and 0 < stats.wire_bytes
    same(first["balanced"][0], coded)
    # The plan knows what crosses, over the link that the block gives, in each micro-batch.
    assert len(links) == 1 and "0.001 Gbit/s between nodes (given)" in links[0]
    sent = ACCUMULATION * stats.wire_bytes / (STEPS * ACCUMULATION) / 125e3
    assert planned.busy_s["exchange"] == pytest.approx(sent, rel=0.2) and planned.step_s > planned.busy_s["exchange"]
    exact, told, stats, links, planned = first["exact"]
    assert len(links) == 1 and "(measured" in links[0] and 0 < planned.busy_s["exchange"] < sent
    assert len(told) == 1 and "all in fp32 (bits: 16)" in told[0] and stats.quantized_buckets == 0
    assert first["one node"][1:3] == ([], None) and "inside a node (measured)" in first["one node"][3][0]
    same(first["one node"][0], exact)  # two contributions have one sum, whoever adds them up
    assert any(not torch.equal(coded[name], exact[name]) for name in exact)
    for name in SETTINGS:
        same(first[name][0], second[name][0])


def test_two_ranks_train_as_one_rank(two, one):
    close(one["whole run"], two[0]["end"])
    same(two[0]["end"], two[1]["end"])
    assert two[0]["norm"] == two[1]["norm"] > 0.5  # clipped


def test_debug_functions_give_the_same_on_a_rank_that_is_early(two):
    """Gradients in host memory, of which each rank adds up a part; masters that are set once all ranks have read."""
    for rank in (found["debug"] for found in two):
        close(rank["expected"], rank["gradients"])
        for key in ("gradients", "before"):
            same(rank[key], two[0]["debug"][key])
        same(rank["halves"], rank["before"])


def test_one_rank_resumes_what_two_saved(two, one):
    for mine, saved in zip(one["halfway"], two[0]["halfway"], strict=True):
        same(mine, saved)
    close(one["end"], two[0]["end"])


def test_weights_and_states_on_disk_resume_on_other_ranks_and_disks(two, one, again):
    """S-16: two ranks, one, and two again, each with a disk of its own."""
    (first, other), alone, (third, last) = ([rank["disk"] for rank in two], one["disk"], [r["disk"] for r in again])
    same(first["saved"], alone["loaded"])
    same(alone["saved"], third["loaded"])
    same(first["later"], first["moved"])  # to host memory
    for mine, theirs in ((first, other), (third, last)):
        for point in mine.keys() - {"left behind"}:
            same(mine[point], theirs[point])
    whole = lambda tensors: torch.cat([value.flatten() for key, value in sorted(tensors.items())])  # noqa: E731
    # bf16 gradients of halves of the batch are rounded otherwise.
    apart, moved = (whole(third["saved"]) - whole(a) for a in (first["later"], first["saved"]))
    assert apart.norm() < 0.02 * moved.norm()
    assert all(found["left behind"] == [] for found in (first, other, alone, third, last))


def test_states_that_memory_does_not_hold_are_planned_on_disk(again):
    for (plain, in_memory), (tight, there) in (rank["planned"] for rank in again):
        assert not any(in_memory) and any(there)
        same(tight, plain)
    assert again[0]["planned"][1][1] == again[1]["planned"][1][1]


def test_states_that_ranks_have_parts_of_are_saved_and_loaded_whole(two, one, again):
    for found in (two[1]["coded"], one["coded"], *(rank["coded"] for rank in again)):
        for saved, values in zip(two[0]["coded"], found, strict=True):
            same(values, saved)
    assert any(key.endswith(".codes") for _, key in two[0]["coded"][1])


def test_two_ranks_resume_what_one_saved(one, again):
    for rank in again:
        same(rank["loaded"], one["end"])
        assert rank["steps"] == 4
    same(again[0]["states"], again[1]["states"])


def test_saved_weights_recover_without_lazytrain(two, folder):
    subprocess.run([sys.executable, folder / "zero_to_fp32.py", folder, folder / "out", "-t", "two_end"], check=True)
    recovered = torch.load(Path(folder) / "out" / "pytorch_model.bin")
    for name, value in two[0]["end"].items():
        assert torch.equal(recovered[name].reshape(-1), value)
    for name, value in two[0]["full"].items():
        assert torch.equal(recovered[name], value) or name == "seen"


def test_a_rank_may_read_weights_alone(again):
    (found, shown), (_, other) = (rank["alone"] for rank in again)
    assert torch.equal(found, shown) and torch.equal(found, other)


def test_what_all_ranks_change_in_place_changes_once(again):
    (before, own, seen, after), (other_before, other_own, other_seen, other_after) = (rank["outside"] for rank in again)
    assert torch.equal(before, other_before)
    assert torch.equal(own, before * 0.5) and torch.equal(other_own, own)
    assert torch.equal(seen, other_seen)
    assert torch.equal(after, other_after)
    assert (after - own).abs().max() < 0.05  # one step away from it


def test_a_larger_batch_on_one_rank_plans_for_all(again):
    (first, planned_tokens), (second, other_planned_tokens) = (rank["larger"] for rank in again)
    assert planned_tokens == other_planned_tokens == 9 * 7
    same(first, second)


def test_all_ranks_change_to_a_better_plan_at_once(again):
    """One whose states pass the device for their update."""
    (swapped, plan), (stayed, other_plan) = again[0]["swapping"]
    assert plan != other_plan and '"updater": "gpu"' in plan
    assert [found[1] for found in again[1]["swapping"]] == [plan, other_plan]
    same(swapped, stayed)
    same(swapped, again[1]["swapping"][0][0])


def test_a_search_that_fails_on_the_first_rank_ends_all(again):
    assert [rank["swap fails"] for rank in again] == ["no disk to search on"] * 2


def test_what_one_rank_loads_or_all_set_counts_for_all(again):
    for rank in (found["apart"] for found in again):
        before, master, shown = rank["loaded"]
        assert torch.equal(master, before + 1.0) and torch.equal(shown, master)
        value, *seen = rank["set"]
        assert all(torch.equal(each, value) for each in seen)


def test_ranks_hear_of_one_that_cannot_load(again):
    first, second = (rank["apart"]["failing"] for rank in again)
    assert "rank 1: ValueError: damaged here" in first[0] and second[0] == "ValueError: damaged here"
    assert all("rank 0 would load tag '" in text and "and rank 1 None" in text for _, text in (first, second))


def test_weights_beside_frozen_ones_are_loaded_as_they_were(again):
    """They have pages of memory in common."""
    for saved, loaded in (rank["apart"]["frozen"] for rank in again):
        same(saved, loaded)


def test_a_rank_may_evaluate_compiled_layers_alone(again):
    assert [rank["apart"]["compiled"] for rank in again] == [(False, True)] * 2


def test_a_rank_that_ends_leaves_its_states_to_one_that_reads(again):
    first, second = (rank["apart"]["read"] for rank in again)
    assert any(value.any() for value in first.values())
    same(first, second)


def test_an_overflow_on_one_rank_makes_all_skip(again):
    assert [rank["overflow"] for rank in again] == [(1, True)] * 2


def test_balanced_training_of_two_ranks_is_that_of_one(one, again):
    whole = lambda tensors: torch.cat([tensors[name].flatten() for name in sorted(tensors)])  # noqa: E731
    before, expected = map(whole, one["balanced"])
    for rank in again:
        # bf16 gradients of halves of the batch are rounded otherwise.
        apart, moved = (whole(rank["balanced"][1]) - expected).norm(), (expected - before).norm()
        assert apart < 0.02 * moved
    same(again[0]["balanced"][1], again[1]["balanced"][1])
