"""States divided over all ranks of the job, against states that each node has: same bits, a part of the memory."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from lazytrain_plugin.comm.between_nodes import BetweenNodes, ring_bytes
from lazytrain_plugin.comm.hops import Hops
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.runtime import activation_store, streamed_updates, weights_between_nodes
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.resident_updates import ResidentUpdates
from lazytrain_plugin.runtime.weights_between_nodes import WeightsBetweenNodes
from lazytrain_plugin.vocab import Shard
from tests.comm.ranks import run_ranks, succeed
from tests.comm.test_reducer import check_bound
from tests.runtime.rig import make_executor, plan_for
from tests.runtime.test_gradients_between_nodes import (
    Model,
    backward,
    count_sent,
    found_gradients,
    nodes_of,
    own_gradients,
)
from tests.runtime.test_several_ranks import CASES, MODELS, assert_close, one_rank, run_case, weights

LAYOUTS = [("cpu", 4, 2), ("cpu", 3, 1), pytest.param(("cuda", 2, 1), marks=pytest.mark.gpu)]
"""Device, ranks, ranks per node."""
NAMES = {
    4: ["accumulation, moves", "8 bit, every kind"],
    3: ["tied"],
    2: list(CASES),
}
pytestmark = pytest.mark.multiprocess


def groups_of(rank, device, ranks_per_node):
    """The same ranks with both ways to divide states. Neighbouring ranks are on different nodes."""
    world_size = torch.distributed.get_world_size()
    nodes = world_size // ranks_per_node
    topology = Topology.from_keys([rank % nodes for rank in range(world_size)])
    return {shard: RankGroup(device, topology=topology, shard=shard) for shard in Shard}


def everything(rank, device, ranks_per_node):
    activation_store.SMALLEST_BYTES = 1
    streamed_updates.STEM_STAGING_BYTES = 12 << 10  # units pass in several chunks
    weights_between_nodes.WEIGHTS_EXCHANGE_BYTES = 8 << 10
    groups = groups_of(rank, device, ranks_per_node)
    size = groups[Shard.JOB].size
    out = {"cases": {}, "held": held_bytes(groups, device), "late": late_weights(groups[Shard.JOB], device)}
    out["launched"] = launched(groups[Shard.JOB], device)
    for name in NAMES[size]:
        out["cases"][name] = {shard: run_case(ranks, device, size, CASES[name]) for shard, ranks in groups.items()}
    out["own"] = own_gradients(groups[Shard.JOB], device, 1)
    out["wire"] = {
        (shard, bits): on_the_wire(groups[shard], device, bits)
        for shard, bits in ((Shard.JOB, 16), (Shard.JOB, 8), (Shard.NODE, 8))
    }
    out["overflow"] = overflow(groups[Shard.JOB], device)
    return out


def executor_for(ranks, device, home, **options):
    torch.manual_seed(7)
    model = MODELS["wide"]()
    plan = plan_for(model, home=home, device=device.type, **options)
    return make_executor(model, plan, device=str(device), native=True, dtype=torch.bfloat16, ranks=ranks)


def held_bytes(groups, device):
    """Bytes of states, and of gradients at rest in host memory, that each rank has for itself; where they are in memory
    that a node has in common, its share."""
    found = {}
    for shard, ranks in groups.items():
        for home in ("cpu", "gpu"):
            executor = executor_for(ranks, device, home)
            homes = [unit.home for unit in executor.all_units]
            share = 1 if home == "gpu" or shard == Shard.JOB else 1 / ranks.local_size
            states = sum(flat.nbytes for each in homes for flat in each.held.flats.values()) * share
            gradients = sum(each.gradient_buffer.nbytes for each in homes if each.gradient_buffer) * share
            found[shard, home] = states, gradients
            executor.close()
    return found


def late_weights(ranks, device):
    """A weight as someone sees it who asks for it right after `step`, while its parts are on their way from the other
    nodes; and as all see it in the end."""
    bring = WeightsBetweenNodes.bring

    def late(self, unit, after):
        time.sleep(0.05 * ranks.rank)
        bring(self, unit, after)

    WeightsBetweenNodes.bring = late
    executor = executor_for(ranks, device, "cpu")
    weight = executor.model.layers[1].up.weight
    before = weight.detach().clone()
    ids = torch.arange(14, device=device).view(2, 7)
    executor.begin_forward()
    executor.model.loss(ids).backward()
    executor.end_backward()
    executor.step(0.0)
    asked = weight.detach().clone()
    executor.flush()
    WeightsBetweenNodes.bring = bring
    found = before, asked, weight.detach().clone()
    executor.close()
    return found


def launched(ranks, device):
    """Names of the collectives in the order in which this rank launches them, and whether each is of weights in host
    memory: three steps of units on the GPU, and of one in host memory that some forwards leave out; each rank is late
    elsewhere."""
    names, late = [], {WeightsBetweenNodes: "bring", ResidentUpdates: "_gather"}
    for number, (owner, name) in enumerate(late.items()):
        late[owner] = getattr(owner, name)
        setattr(owner, name, later(late[owner], 0.03 * ((ranks.rank + number) % 2)))
    plain = Hops.gather, Hops.exchange, Hops.sum_across
    for method in plain:
        setattr(Hops, method.__name__, noting(method, names, ranks.weights_group))
    torch.manual_seed(7)
    model = MODELS["skips"]()
    plan = plan_for(model, home="gpu", device=device.type)
    unit = plan_for(model, home="cpu", device=device.type).units[1]
    plan = replace(plan, units=(plan.units[0], unit, *plan.units[2:]))
    executor = make_executor(model, plan, device=str(device), native=True, ranks=ranks)
    for first in (1, 0, 1):
        ids = torch.full((2, 7), first, device=device)
        executor.begin_forward()
        model.loss(ids).backward()
        executor.end_backward()
        executor.step(0.0)
    executor.flush()
    executor.close()
    WeightsBetweenNodes.bring, ResidentUpdates._gather = late.values()
    for method in plain:
        setattr(Hops, method.__name__, method)
    return names


def later(function, seconds):
    def late(*args):
        time.sleep(seconds)
        return function(*args)

    return late


def noting(method, names, group):
    def noted(self, phase, *args):
        names.append((phase, group in args))
        return method(self, phase, *args)

    return noted


def on_the_wire(ranks, device, bits):
    """Gradients and weights of a step, and the bytes of both that went to other nodes."""
    torch.manual_seed(7)
    model = Model()
    between = BetweenNodes(ranks.hops, bits, 1, of_parts=ranks.shards_job)
    executor = make_executor(
        model,
        plan_for(model, device=device.type),
        device=str(device),
        native=True,
        ranks=ranks,
        between_nodes=between,
    )
    sent = count_sent(ranks)
    backward(executor, ranks, device)
    gradients = found_gradients(executor, ranks)
    norm, _ = executor.step(0.01)
    executor.flush()
    stats, sizes = between.stats(), [unit.layout.state_numel for unit in executor.exchange.units]
    found = gradients, norm.total, weights(executor), stats, sum(sent), sizes
    executor.close()
    return found


def overflow(ranks, device):
    executor = executor_for(ranks, device, "cpu")
    before = weights(executor)
    backward(executor, ranks, device, factor=float("inf") if ranks.rank == 1 else 1.0)
    _, applied = executor.step(0.0)
    executor.flush()
    same = all(torch.equal(before[name], value) for name, value in weights(executor).items())
    executor.close()
    return applied, same


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def job(request):
    device, world_size, ranks_per_node = request.param
    results = succeed(everything, world_size, ranks_per_node, device=device, timeout_s=300)
    return device, world_size // ranks_per_node, ranks_per_node, results


def test_training_is_that_of_nodes_that_have_all_states(job):
    """To the bit where sums of nodes have one order only; those are near one rank's (test_several_ranks.py)."""
    device, nodes, _, results = job
    for rank in results:
        for name, found in rank["cases"].items():
            (of_node, node_norms), (of_job, job_norms) = found[Shard.NODE], found[Shard.JOB]
            if nodes == 2:
                assert job_norms == node_norms, name
                assert all(torch.equal(of_job[key], value) for key, value in of_node.items()), name
            first = results[0]["cases"][name][Shard.JOB][0]
            assert all(torch.equal(first[key], value) for key, value in of_job.items()), name
    if nodes > 2:
        for name, found in results[0]["cases"].items():
            assert_close(name, found[Shard.JOB], one_rank(name, device, len(results)))


def test_a_rank_has_its_part_of_the_states_only(job):
    _, nodes, ranks_per_node, results = job
    for home in ("cpu", "gpu"):
        totals = {shard: [sum(rank["held"][shard, home][i] for rank in results) for i in range(2)] for shard in Shard}
        assert totals[Shard.NODE][0] == pytest.approx(nodes * totals[Shard.JOB][0])
        # What is whole has padding between small tensors.
        assert totals[Shard.JOB][1] == pytest.approx(totals[Shard.NODE][1] / nodes, rel=0.1)
        assert (totals[Shard.JOB][1] > 0) == (home != "gpu")
        states = [rank["held"][Shard.JOB, home][0] for rank in results]
        assert max(states) < 1.2 * sum(states) / len(states), "blocks of 256 in one part more"


def test_nobody_sees_a_weight_of_which_a_part_is_old(job):
    *_, results = job
    for rank in results:
        before, asked, after = rank["late"]
        assert torch.equal(asked, after) and torch.equal(after, results[0]["late"][2])
        assert (asked != before).all(1).any()


def test_all_ranks_launch_the_collectives_of_all_groups_in_one_order(job):
    *_, results = job
    for rank in results:
        assert rank["launched"] == results[0]["launched"]
    assert len(set(results[0]["launched"])) >= 3


def test_gradients_in_codes_are_rounded_once(job):
    _, nodes, ranks_per_node, results = job
    for rank in results:
        gradients, norm, masters, *_ = rank["wire"][Shard.JOB, 8]
        for name, gradient in gradients.items():
            parts = nodes_of(results[0]["own"][name], ranks_per_node)
            check_bound(gradient, list(parts), result_step=0)
        assert norm == results[0]["wire"][Shard.JOB, 8][1]
        assert all(torch.equal(results[0]["wire"][Shard.JOB, 8][2][name], value) for name, value in masters.items())
        if nodes == 2:
            assert all(torch.equal(rank["wire"][Shard.NODE, 8][2][name], value) for name, value in masters.items())


def test_bytes_on_the_wire(job):
    """A gradient is sent one way, and not back; weights in fp32 here."""
    _, nodes, ranks_per_node, results = job
    parts = nodes * ranks_per_node
    # Parts are whole blocks of 256, and all as long as the longest.
    sizes = results[0]["wire"][Shard.JOB, 8][5]
    elements = sum(-(-size // 256 // parts) * 256 * parts for size in sizes)
    one_way = ring_bytes(elements, nodes, 2) / 2
    for bits, each in ((16, 4), (8, 66 / 64)):
        found = [rank["wire"][Shard.JOB, bits] for rank in results]
        counted = sum(stats.wire_bytes for *_, stats, _, _ in found) / nodes
        assert counted == pytest.approx(one_way * each / 2, rel=1e-3)
        weights_sent = sum(stats.weight_bytes for *_, stats, _, _ in found) / nodes
        assert weights_sent == pytest.approx((nodes - 1) / nodes * 4 * sum(sizes), rel=0.1)
        assert sum(sent for *_, sent, _ in found) / nodes == pytest.approx(counted, rel=0.01)
    of_node = sum(rank["wire"][Shard.NODE, 8][3].wire_bytes for rank in results) / nodes
    assert counted <= (0.51 if nodes == 2 else 0.47) * of_node * 1.05


def test_an_overflow_on_one_rank_makes_all_skip(job):
    assert [rank["overflow"] for rank in job[3]] == [(False, True)] * len(job[3])


def loses_weights(rank, device):
    """The first update of the last rank fails."""
    ranks = groups_of(rank, device, 2)[Shard.JOB]
    executor = executor_for(ranks, device, "cpu")
    executor.begin_forward()
    executor.model.loss(torch.arange(14).view(2, 7)).backward()
    executor.end_backward()
    if rank == 3:

        def fails(*_):
            raise MemoryError("no memory for the update")

        executor.updater.update = fails
    executor.step(0.0)
    executor.flush()


def test_a_rank_that_cannot_update_ends_the_others_of_its_node():
    """And, once its process is gone, those that wait for its weights, and those of their nodes."""
    texts = [failure.text for failure in run_ranks(loses_weights, 4, timeout_s=60)]
    assert "no memory for the update" in texts[3]
    assert "on rank 3 failed there" in texts[1]
    assert "the all-gather of weights between nodes" in texts[2]
    assert "on rank 2 failed there" in texts[0]
