"""The reducer as DDP's communication hook, with torch alone and through Accelerate."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lazytrain_plugin
from lazytrain_plugin.comm.topology import Topology
from tests.comm.ranks import Failure, run_ranks, succeed

pytestmark = pytest.mark.multiprocess


def reducer():
    return lazytrain_plugin.QuantizedReducer(
        topology=Topology.consecutive(dist.get_world_size(), 1), smallest_bucket_elements=1, timeout_s=20
    )


class TwoRoads(nn.Module):
    """`side` takes part on some ranks only."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(33, 257), nn.Tanh(), nn.Linear(257, 7))
        self.side = nn.Linear(33, 7)

    def forward(self, x, with_side=True):
        return self.main(x) + (self.side(x) if with_side else 0)


def model_and_batch(rank, device):
    torch.manual_seed(0)
    model = TwoRoads().to(device)
    generator = torch.Generator().manual_seed(rank)
    # the last batch of an epoch is smaller on the last rank
    return model, torch.randn(5 - rank, 33, generator=generator).to(device)


def wrap(model, device, **options):
    ids = [device] if device.type == "cuda" else None
    # buckets of 10 KB: several are under way at once
    return DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=0.01, **options)


def exact_gradients(model, rank, device, run):
    """Means over ranks in fp64 of what the ranks compute by themselves."""
    plain = copy.deepcopy(model)
    run(plain)
    out = []
    for parameter in plain.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.double()
        dist.all_reduce(gradient)
        out.append(gradient / dist.get_world_size())
    return out


def worst(ddp, exact):
    return max(float((p.grad.double() - e).norm() / e.norm()) for p, e in zip(ddp.parameters(), exact))


def trains(rank, device, default_state):
    model, batch = model_and_batch(rank, device)
    exact = exact_gradients(model, rank, device, lambda m: m(batch).square().sum().backward())
    ddp = wrap(model, device)
    state = None if default_state else reducer()
    ddp.register_comm_hook(state, lazytrain_plugin.ddp_comm_hook)
    for _ in range(2):  # DDP forms its small buckets after the first
        ddp.zero_grad()
        ddp(batch).square().sum().backward()
    return worst(ddp, exact), None if default_state else state.stats(), [p.grad.cpu() for p in ddp.parameters()]


def test_gradients_are_the_mean_on_all_ranks(device):
    results = succeed(trains, 2, False, device=device.type)
    for error, stats, gradients in results:
        assert 1e-4 < error < 0.02
        assert stats.quantized_buckets > 1
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0][2]))


def test_without_a_state_the_nodes_are_found(device):
    for error, _, _ in succeed(trains, 2, True, device=device.type):
        assert error < 1e-6  # one node: full precision


def accumulates(rank, device):
    model, batch = model_and_batch(rank, device)

    def run(m):
        for scale in (1.0, 2.0):
            (scale * m(batch).square().sum()).backward()

    exact = exact_gradients(model, rank, device, run)
    ddp = wrap(model, device)
    state = reducer()
    ddp.register_comm_hook(state, lazytrain_plugin.ddp_comm_hook)
    with ddp.no_sync():
        ddp(batch).square().sum().backward()
    silent = state.stats().wire_bytes
    (2.0 * ddp(batch).square().sum()).backward()
    return silent, worst(ddp, exact)


def test_no_sync_sends_nothing_and_accumulates(device):
    for silent, error in succeed(accumulates, 2, device=device.type):
        assert silent == 0 and error < 0.02


def skips_a_branch(rank, device):
    model, batch = model_and_batch(rank, device)

    def run(m):
        m(batch, with_side=rank == 0).square().sum().backward()

    exact = exact_gradients(model, rank, device, run)
    ddp = wrap(model, device, find_unused_parameters=True)
    ddp.register_comm_hook(reducer(), lazytrain_plugin.ddp_comm_hook)
    run(ddp)
    return worst(ddp, exact)


def test_a_parameter_unused_on_one_rank(device):
    assert max(succeed(skips_a_branch, 2, device=device.type)) < 0.02


def overflows(rank, device):
    model, batch = model_and_batch(rank, device)
    ddp = wrap(model, device)
    ddp.register_comm_hook(reducer(), lazytrain_plugin.ddp_comm_hook)
    loss = ddp(batch).square().sum()
    (loss * float("inf") if rank == 1 else loss).backward()
    return [bool(p.grad.isfinite().all()) for p in ddp.parameters()]


def test_inf_on_one_rank_is_seen_by_all(device):
    for finite in succeed(overflows, 2, device=device.type):
        assert not any(finite)


def loses_a_rank(rank, device):
    import os

    model, batch = model_and_batch(rank, device)
    ddp = wrap(model, device)
    ddp.register_comm_hook(reducer(), lazytrain_plugin.ddp_comm_hook)
    for _ in range(2):  # the second forms DDP's final buckets, with a collective of its own
        ddp(batch).square().sum().backward()
    if rank == 1:
        os._exit(3)
    ddp(batch).square().sum().backward()


def test_a_dead_rank_ends_backward_with_its_name():
    results = run_ranks(loses_a_rank, 2)
    assert results[1] == Failure("ended with exit code 3")
    assert "No sign of life from rank 1;" in results[0].text


def with_accelerate(rank, device):
    import os

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    from accelerate import Accelerator

    options = {"topology": Topology.consecutive(2, 1), "smallest_bucket_elements": 1}
    kwargs = lazytrain_plugin.LazyTrainDDPKwargs(find_unused_parameters=True, bucket_cap_mb=1, reducer_options=options)
    accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[kwargs])
    model, batch = model_and_batch(rank, device)
    exact = exact_gradients(model, rank, device, lambda m: m(batch).square().sum().backward())
    prepared = accelerator.prepare(model)
    accelerator.backward(prepared(batch).square().sum())
    return worst(prepared, exact), kwargs.reducer.stats().quantized_buckets, type(prepared).__name__


def test_accelerates_ddp_kwargs(device):
    for error, buckets, kind in succeed(with_accelerate, 2, device=device.type):
        assert kind == "DistributedDataParallel" and buckets > 0
        assert 1e-4 < error < 0.02
