"""Gradients in 8-bit codes between nodes, under the executor: error, identical bits, norm, skips, bytes."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from lazytrain_plugin.comm.between_nodes import BetweenNodes, ring_bytes
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.errors import CommunicationError
from lazytrain_plugin.runtime.comm_lane import CommLane
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.train_state import ExecutorState
from tests.comm.ranks import succeed
from tests.comm.test_reducer import check_bound
from tests.runtime.rig import make_executor, plan_for
from tests.runtime.test_several_ranks import Skips, WideBlock, global_batches, weights

LAYOUTS = [("cpu", 2, 1), ("cpu", 4, 2), ("cpu", 3, 1), pytest.param(("cuda", 2, 1), marks=pytest.mark.gpu)]
"""Device, ranks, ranks per node."""
ACCUMULATION, SMALL = 2, 10_000
pytestmark = pytest.mark.multiprocess


class Model(Skips):
    """Its second layer is left out on the first rank, and one of its tensors on all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(WideBlock() for _ in range(3))


def build(ranks, device, *, smallest=1, home="cpu", slots=3, bits=8, late_s=0.0):
    torch.manual_seed(7)
    model = Model()
    plan = replace(plan_for(model, home=home, device=device.type), gradient_slots=slots)
    between = BetweenNodes(ranks.hops, bits, smallest)
    options = {"device": str(device), "native": True, "ranks": ranks, "between_nodes": between}
    return make_executor(model, plan, transfer_delay_s=late_s, **options), between


def backward(executor, ranks, device, *, accumulation=1, factor=1.0):
    for micro, batch in enumerate(global_batches(accumulation, ranks.size)):
        executor.begin_forward()
        executor.set_last_micro_batch(micro == accumulation - 1)
        (executor.model.loss(batch.chunk(ranks.size)[ranks.rank].to(device)) * factor).backward()
        executor.end_backward()


def own_gradients(ranks, device, accumulation):
    """What plain torch computes on each rank: name -> fp32 [ranks, numel]; zeros for what a rank does not use."""
    torch.manual_seed(7)
    model = copy.deepcopy(Model()).to(device)
    for batch in global_batches(accumulation, ranks.size):
        model.loss(batch.chunk(ranks.size)[ranks.rank].to(device)).backward()
    flats = {name: (p.grad if p.grad is not None else torch.zeros_like(p)) for name, p in model.named_parameters()}
    return {name: ranks.gather(flat.reshape(-1).cpu(), "test") for name, flat in flats.items()}


def found_gradients(executor, ranks):
    executor.flush()
    state = ExecutorState(executor)
    found = {record.name: state.read_gradient(record) for record in state.records}
    return {name: value.float().cpu().clone() for name, value in found.items() if value is not None}


def everything(rank, device, ranks_per_node):
    world_size = torch.distributed.get_world_size()
    num_nodes = world_size // ranks_per_node
    # Neighbouring ranks are on different nodes: nothing may take them for those of one.
    ranks = RankGroup(device, topology=Topology.from_keys([rank % num_nodes for rank in range(world_size)]))
    out = {"own": {a: own_gradients(ranks, device, a) for a in (1, ACCUMULATION)}}
    for name, options in {
        "codes": {},
        "on the gpu": {"home": "gpu"},
        "one after the other": {"slots": 1},
        "late": {"late_s": 0.01} if device.type == "cuda" else {"slots": 2},
        "in full": {"bits": 16},
        "small in full": {"smallest": SMALL},
    }.items():
        executor, between = build(ranks, device, **options)
        sent = count_sent(ranks)
        backward(executor, ranks, device)
        gradients = found_gradients(executor, ranks)
        norm, applied = executor.step(0.01)
        executor.flush()
        planned = sum(between.sent_bytes(unit.layout.state_numel) for unit in executor.exchange.units)
        out[name] = gradients, norm.total, applied, weights(executor), between.stats(), sum(sent), planned
        out["sizes"] = {unit.name: unit.layout.state_numel for unit in executor.exchange.units}
        out["unit of"] = {t.name: unit.name for unit in executor.exchange.units for t in unit.trained}
        executor.close()

    executor, _ = build(ranks, device)
    backward(executor, ranks, device, accumulation=ACCUMULATION)
    out["accumulated"] = found_gradients(executor, ranks)
    executor.step(0.0)
    executor.flush()

    before = weights(executor)
    backward(executor, ranks, device, factor=float("inf") if ranks.rank == 1 else 1.0)
    _, applied = executor.step(0.0)
    executor.flush()
    out["overflow"] = applied, all(torch.equal(before[name], value) for name, value in weights(executor).items())
    executor.close()
    return out


def count_sent(ranks):
    """Bytes given to the backend for ranks of other nodes from now on, counted at the collectives."""
    hops, sent = ranks.hops, []
    for name in ("exchange", "gather", "sum_across"):
        original = getattr(type(hops), name)

        def counting(phase, first, *rest, _original=original, _name=name):
            group = rest[-1] if rest else hops.across
            if group is hops.across:
                size, mine = hops.nodes, rest[0] if rest else first
                others = {"exchange": (size - 1) / size, "gather": size - 1, "sum_across": 2 * (size - 1) / size}
                sent.append(mine.nbytes * others[_name])
            return _original(hops, phase, first, *rest)

        setattr(hops, name, counting)
    return sent


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def job(request):
    device, world_size, ranks_per_node = request.param
    results = succeed(everything, world_size, ranks_per_node, device=device, timeout_s=300)
    return world_size // ranks_per_node, ranks_per_node, results


def nodes_of(own, ranks_per_node):
    """Each node's mean, fp64 [nodes, numel]."""
    return own.double().view(ranks_per_node, -1, own.shape[1]).mean(0)


@pytest.mark.parametrize("which", ["codes", "on the gpu", "accumulated"])
def test_error_is_that_of_one_quantization(job, which):
    """Also of a layer that one rank leaves out. Each element is off by half a step of what nodes contributed, and with
    more than two nodes half a step of the mean."""
    nodes, ranks_per_node, results = job
    own = results[0]["own"][ACCUMULATION if which == "accumulated" else 1]
    found = results[0][which] if which == "accumulated" else results[0][which][0]
    off = exact_square = once = 0.0
    for name, gradient in found.items():
        parts = nodes_of(own[name], ranks_per_node)
        exact = parts.mean(0)
        if which != "accumulated":
            check_bound(gradient, list(parts), result_step=0 if nodes == 2 else 1 / 511)
        off += float((gradient.double() - exact).square().sum())
        exact_square += float(exact.square().sum())
        once += float(rounded_once(exact).sub(exact).square().sum())
    assert 1e-3 < (off / exact_square) ** 0.5 <= 1.1 * (once / exact_square) ** 0.5


def rounded_once(values):
    from lazytrain_plugin.kernels import gradient_codes as codes

    blocks = codes.num_blocks(values.numel())
    row = torch.empty(1, codes.row_bytes(blocks, 8), dtype=torch.uint8)
    codes.encode(values.float(), 8, blocks, row)
    decoded = torch.empty(values.numel())
    codes.decode(row, 8, blocks, decoded)
    return decoded.double()


def test_all_ranks_hold_the_same_bits_wherever_gradients_rest(job):
    *_, results = job
    reference = results[0]["codes"]
    for rank in results:
        for which in ("codes", "on the gpu", "one after the other", "late"):
            gradients, norm, applied, masters, *_ = rank[which]
            assert applied and norm == reference[1]
            assert all(torch.equal(gradients[name], value) for name, value in reference[0].items())
            assert all(torch.equal(masters[name], value) for name, value in reference[3].items())


def test_the_norm_is_that_of_the_gradient_that_is_applied(job):
    *_, results = job
    gradients, norm, *_ = results[0]["codes"]
    exact = float(torch.cat([g.double() for g in gradients.values()]).norm())
    assert norm == pytest.approx(exact, rel=1e-6)
    assert norm != results[0]["in full"][1]


def test_a_tensor_that_no_rank_uses_gets_no_gradient(job):
    for rank in job[2]:
        assert not any(name.startswith("unused") for name in rank["codes"][0] if rank["codes"][0][name].any())


def test_an_overflow_on_one_rank_makes_all_skip(job):
    assert [rank["overflow"] for rank in job[2]] == [(False, True)] * len(job[2])


def test_small_units_travel_in_full_precision(job):
    _, ranks_per_node, results = job
    gradients, *_, stats, _, _ = results[0]["small in full"]
    small = [name for name, size in results[0]["sizes"].items() if size < SMALL]
    assert 0 < len(small) < len(results[0]["sizes"]) and stats.fallbacks == {"small bucket": len(small)}
    for name, gradient in gradients.items():
        exact = results[0]["own"][1][name].double().mean(0)
        error = float((gradient - exact).norm() / exact.norm().clamp(min=1e-30))
        if exact.any():
            assert (error < 1e-6) == (results[0]["unit of"][name] in small), name


def test_bytes_on_the_wire(job):
    nodes, ranks_per_node, results = job
    # Parts are whole blocks of 256, and all as long as the longest.
    elements = sum(-(-size // 256 // ranks_per_node) * 256 * ranks_per_node for size in results[0]["sizes"].values())
    bf16 = ring_bytes(elements, nodes, 2)
    of_node = sum(rank["codes"][5] for rank in results) / nodes
    assert of_node == sum(rank["codes"][4].wire_bytes for rank in results) / nodes
    assert of_node == pytest.approx(results[0]["codes"][6], rel=0.02)
    contributions = sum(rank["codes"][4].reduce_scatter_bytes for rank in results) / nodes
    assert contributions <= 0.52 * bf16 / (1 if nodes == 2 else 2)  # of more nodes' contributions in bf16
    assert of_node <= (0.52 if nodes == 2 else 0.58) * bf16
    full = sum(rank["in full"][5] for rank in results) / nodes
    assert full == pytest.approx(2 * bf16, rel=1e-3)
    assert full == pytest.approx(sum(rank["in full"][4].wire_bytes for rank in results) / nodes, rel=1e-3)


def test_backward_does_not_wait_for_the_network():
    lane, sent, free = CommLane(Streams(torch.device("cpu")), lambda: None), [], threading.Event()
    lane.submit(lambda: (free.wait(10), sent.append(1)), "first", [])
    assert not sent
    second = threading.Thread(target=lane.submit, args=(lambda: sent.append(2), "second", []))
    second.start()
    second.join(0.2)
    assert second.is_alive() and not sent, "only so many gradients wait for the network"
    free.set()
    second.join(10)
    lane.finish()
    assert sent == [1, 2]
    lane.close()


def test_a_failed_exchange_is_raised_where_the_model_runs():
    lane = CommLane(Streams(torch.device("cpu")), lambda: None)

    def fail():
        raise CommunicationError("Rank 0: nobody answers")

    lane.submit(fail, "first", [])
    for call in (lane.finish, lambda: lane.submit(lambda: None, "second", []) or lane.finish()):
        with pytest.raises(CommunicationError, match=r"^Rank 0: nobody answers$"):
            call()
    lane.close()
