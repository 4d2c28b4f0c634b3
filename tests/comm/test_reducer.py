"""The quantized reducer on real ranks: error, identical bits, bytes, sizes and dtypes, NaN, failures."""

import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lazytrain_plugin.comm import threshold
from lazytrain_plugin.comm.parts import blocks_of_part
from lazytrain_plugin.comm.reducer import QuantizedReducer
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.kernels import gradient_codes as codes
from tests.comm.ranks import Failure, run_ranks, stay_until_told, succeed, telling_others, wait_in_vain

pytestmark = pytest.mark.multiprocess
LAYOUTS = [(2, 1), (4, 1), (4, 2)]
"""Ranks, ranks per node."""


def make(ranks_per_node, **options):
    options = {"smallest_bucket_elements": 0, "timeout_s": 30, **options}
    return QuantizedReducer(topology=Topology.consecutive(dist.get_world_size(), ranks_per_node), **options)


def gradient(numel, seed, dtype=torch.float32):
    """Heavy-tailed and of a different scale in each stretch, as real gradients are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()
    scale = torch.randn(numel // 500 + 1, generator=torch.Generator().manual_seed(7)).exp()
    return (x * scale.repeat_interleave(500)[:numel] * 1e-3).to(dtype)


def relative_error(ours, exact):
    return float((ours.double() - exact).norm() / exact.norm())


def check_bound(ours, parts, result_step=1 / 511):
    """Each element is at most half an 8-bit step of the mean contribution and half a 10-bit step of the mean off."""
    exact = (sum(part.double() for part in parts) / len(parts)).reshape(-1)
    padding = (0, -exact.numel() % 64)
    largest = [torch.nn.functional.pad(p.double().reshape(-1), padding).view(-1, 64).abs().amax(1) for p in parts]
    mean_largest = (sum(largest) / len(parts)).repeat_interleave(64)[: exact.numel()]
    steps = mean_largest * (1 + 2**-6) * (1 / 127 + result_step) / 2
    rounding = torch.finfo(ours.dtype).eps / 2 * (exact.abs() + steps) + torch.finfo(ours.dtype).smallest_normal
    error = (ours.double().reshape(-1) - exact).abs()
    assert (error <= steps + rounding).all(), float((error - steps - rounding).max())


def one_quantization(values):
    """Relative error of a single round trip in 8-bit codes."""
    blocks = codes.num_blocks(values.numel())
    row = torch.empty(1, codes.row_bytes(blocks, 8), dtype=torch.uint8)
    codes.encode(values, 8, blocks, row)
    decoded = torch.empty(values.numel())
    codes.decode(row, 8, blocks, decoded)
    return relative_error(decoded, values.double())


def reduce_all(rank, device, ranks_per_node, tensors_of, options):
    reducer = make(ranks_per_node, **options)
    out = []
    for tensor in tensors_of(rank):
        tensor = tensor.to(device)
        reducer.reduce(tensor)
        out.append(tensor.cpu())
    return out, reducer.stats()


def many_sizes(rank):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for numel in (0, 1, 3, 64, 257, 1000, 64 * 1024 * 4 + 64, 300_001):
            yield gradient(numel, seed=100 * rank + numel % 97, dtype=dtype)
    yield gradient(4 * 2**18 + 1000, seed=rank)  # several parts under way at once
    yield gradient(600, seed=rank).view(20, 30).t()
    yield torch.full((5,), 7 + 2 * rank)


@pytest.mark.parametrize("world_size, ranks_per_node", LAYOUTS)
def test_any_size_and_dtype_gives_the_mean_with_identical_bits(device, world_size, ranks_per_node):
    results = succeed(reduce_all, world_size, ranks_per_node, many_sizes, {}, device=device.type)
    for index, parts in enumerate(zip(*(many_sizes(rank) for rank in range(world_size)))):
        outs = [out[index] for out, _ in results]
        assert outs[0].dtype == parts[0].dtype and outs[0].shape == parts[0].shape
        assert all(torch.equal(outs[0], other) for other in outs[1:])
        if outs[0].dtype is torch.float64:
            torch.testing.assert_close(outs[0], sum(parts) / world_size)
        elif not outs[0].is_floating_point():
            assert torch.equal(outs[0], sum(parts) // world_size)
        else:
            check_bound(outs[0], parts)
    stats = results[0][1]
    assert stats.fallbacks == {"float64 tensor": 8, "int64 tensor": 1, "small bucket": 3}
    assert stats.quantized_buckets == 23 and stats.full_precision_buckets == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size, ranks_per_node", LAYOUTS)
def test_error_is_that_of_one_quantization(device, world_size, ranks_per_node, dtype):
    parts = [gradient(500_000, seed=rank, dtype=dtype) for rank in range(world_size)]
    results = succeed(reduce_all, world_size, ranks_per_node, PartsOf(parts), {}, device=device.type)
    exact = sum(part.double() for part in parts) / world_size
    single = one_quantization(parts[0])
    assert single > 0.004
    # bf16's own rounding of the result is not quantization, and is added to what one quantization costs
    rounding = relative_error(exact.to(dtype), exact)
    assert relative_error(results[0][0][0], exact) <= (1.1**2 * single**2 + rounding**2) ** 0.5


class PartsOf:
    """A function of the rank that other processes can be given."""

    def __init__(self, parts):
        self.parts = parts

    def __call__(self, rank):
        return [self.parts[rank]]


def simulated_error(gradients):
    """The algorithm of many nodes without the processes."""
    blocks = codes.num_blocks(gradients[0].numel())
    rows = torch.empty(len(gradients), codes.row_bytes(blocks, 8), dtype=torch.uint8)
    for row, values in zip(rows, gradients):
        codes.encode(values, 8, blocks, row[None])
    mean = torch.empty(blocks * codes.BLOCK)
    codes.decode_mean(rows, 8, blocks, len(gradients), mean)
    result_row = torch.empty(1, codes.row_bytes(blocks, 10), dtype=torch.uint8)
    codes.encode(mean, 10, blocks, result_row)
    codes.decode(result_row, 10, blocks, mean)
    return relative_error(mean, sum(values.double() for values in gradients) / len(gradients))


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_error_does_not_grow_with_the_number_of_ranks(nodes):
    independent = [torch.randn(2**15, generator=torch.Generator().manual_seed(seed)) for seed in range(nodes)]
    single = one_quantization(independent[0])
    assert simulated_error(independent) <= 1.1 * single
    common = torch.randn(2**15, generator=torch.Generator().manual_seed(999))
    assert simulated_error([common + 0.5 * values for values in independent]) <= 1.1 * single
    assert simulated_error([common] * nodes) <= 1.1 * single  # every rank makes the same rounding errors


@pytest.mark.parametrize("world_size, ranks_per_node", LAYOUTS)
def test_nan_and_inf_on_one_rank_reach_all(device, world_size, ranks_per_node):
    parts = [gradient(10_000, seed=rank) for rank in range(world_size)]
    parts[1][77] = float("inf")
    parts[0][5000] = float("nan")
    parts[-1][9999] = -float("inf")
    results = succeed(reduce_all, world_size, ranks_per_node, PartsOf(parts), {}, device=device.type)
    for (out,), _ in results:
        assert not out[77].isfinite() and not out[5000].isfinite() and not out[9999].isfinite()
        assert out[128:4900].isfinite().all()  # the damage stays in its block


def count_sent(rank, device, ranks_per_node, numel):
    """Bytes given to the backend for ranks of other nodes, counted at torch's own functions."""
    sent = {"a2a": 0, "gather": 0}
    reducer = make(ranks_per_node)
    exchange, gather = dist.all_to_all_single, reducer._hops.gather

    def counting_exchange(received, values, *sizes, group, **options):
        if group is reducer._hops.across:
            size = dist.get_world_size(group)
            sent["a2a"] += values.numel() * values.element_size() * (size - 1) // size
        return exchange(received, values, *sizes, group=group, **options)

    def counting_gather(phase, received, values, group):
        if group is reducer._hops.across:
            sent["gather"] += values.numel() * values.element_size() * (dist.get_world_size(group) - 1)
        return gather(phase, received, values, group)

    dist.all_to_all_single, reducer._hops.gather = counting_exchange, counting_gather
    reducer.reduce(gradient(numel, seed=rank, dtype=torch.bfloat16).to(device))
    dist.all_to_all_single = exchange
    return sent, reducer.stats()


@pytest.mark.parametrize("world_size, ranks_per_node", LAYOUTS)
def test_bytes_on_the_wire(device, world_size, ranks_per_node):
    numel = 400_000
    results = succeed(count_sent, world_size, ranks_per_node, numel, device=device.type)
    for sent, stats in results:
        assert stats.wire_bytes == sent["a2a"] + sent["gather"]
        nodes = world_size // ranks_per_node
        assert stats.reduce_scatter_bytes == sent["gather" if nodes == 2 else "a2a"]
        bf16_bytes = (nodes - 1) / nodes * 2 * numel / ranks_per_node  # each way, with the same two hops
        # two nodes get all contributions and no results
        contributions, of_results = (2 * bf16_bytes, 0) if nodes == 2 else (bf16_bytes, 0.65 * bf16_bytes)
        assert 0.515 * contributions < stats.reduce_scatter_bytes <= 0.52 * contributions
        assert stats.wire_bytes - stats.reduce_scatter_bytes <= of_results
        assert (stats.node_bytes > 0) == (ranks_per_node > 1)


def owned_parts(rank, sizes, dtype):
    return [gradient(size, seed=10 * rank + owner, dtype=dtype) for owner, size in enumerate(sizes)]


def reduce_owned(rank, device, ranks_per_node, sizes, dtype):
    reducer = make(ranks_per_node)
    owned = [tensor.to(device) for tensor in owned_parts(rank, sizes, dtype)]
    kept = [tensor.clone() for tensor in owned]
    reducer.reduce_to_owners(owned)
    untouched = all(torch.equal(a, b) for r, (a, b) in enumerate(zip(owned, kept)) if r != rank)
    return owned[rank].cpu(), untouched, reducer.stats(), reducer.reduces_to_owners(sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(5000, 1, 0, 700_001), (300_000, 300_000, 300_000, 300_000), (0, 0, 900_000, 0)])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_owners_get_their_means_with_one_quantization(device, ranks_per_node, sizes, dtype):
    results = succeed(reduce_owned, 4, ranks_per_node, sizes, dtype, device=device.type)
    nodes = 4 // ranks_per_node
    for rank, (mean, untouched, stats, _) in enumerate(results):
        assert untouched and mean.numel() == sizes[rank] and stats.quantized_elements == sum(sizes)
        check_bound(mean, [owned_parts(other, sizes, dtype)[rank] for other in range(4)], result_step=0)
    # each node sends the other nodes' elements once, and no result
    sent = sum(stats.wire_bytes for _, _, stats, _ in results)
    assert sent == pytest.approx((nodes - 1) * sum(sizes) * 66 / 64, rel=5e-3)  # whole blocks
    assert sent == sum(stats.reduce_scatter_bytes for _, _, stats, _ in results)
    # four nodes: one owner's link would carry thrice its elements, more than an all-reduce's
    assert {chosen for *_, chosen in results} == {ranks_per_node == 2 or len(set(sizes)) == 1}


def inf_for_an_owner(rank, device):
    owned = [torch.ones(3000, device=device), torch.ones(200, device=device)]
    if rank == 1:
        owned[0][1000] = float("inf")
    make(1).reduce_to_owners(owned)
    return owned[rank].cpu()


def test_an_owner_sees_the_inf_of_another_rank(device):
    first, second = succeed(inf_for_an_owner, 2, device=device.type)
    assert not first[1000].isfinite() and first[:900].isfinite().all() and second.isfinite().all()


def overlapping(rank, device):
    reducer = make(1)
    tensors = [gradient(50_000 + 1000 * i, seed=10 * rank + i).to(device) for i in range(6)]
    expected = [tensor.clone() for tensor in tensors]
    for tensor in expected:
        reducer.reduce(tensor)
    order = []
    under_way = [reducer.reduce_async(t, then=lambda i=i: order.append(i)) for i, t in enumerate(tensors)]
    between = gradient(2000, seed=rank).to(device)
    for reduction in under_way:
        reduction.wait()
    reducer.reduce(between)  # after what is under way, on every rank
    same = all(torch.equal(a, b) for a, b in zip(tensors, expected))
    reducer.close()
    return same, order


def test_asynchronous_reductions_give_the_same_bits_in_order(device):
    for same, order in succeed(overlapping, 2, device=device.type):
        assert same and order == list(range(6))


def makes_and_closes(rank, device):
    for ranks_per_node in (1, 2, 1, 1):
        if rank == 0:
            time.sleep(0.2)  # the others must not meet what the last reducer's groups left
        reducer = make(ranks_per_node, timeout_s=10)
        values = torch.full((3000,), float(rank), device=device)
        reducer.reduce(values)
        assert abs(float(values.mean()) - 1.5) < 0.02
        reducer.close()


def test_a_reducer_may_follow_a_closed_one(device):
    succeed(makes_and_closes, 4, device=device.type, timeout_s=60)


def late_writer(rank, device):
    """The tensor is written by a slow kernel just before, and read just after, with no host synchronisation."""
    reducer = make(1)
    good = True
    for _ in range(5):
        values = torch.zeros(3_000_000, device=device)
        torch.cuda._sleep(20_000_000)
        values += 1 + rank
        reduction = reducer.reduce_async(values)
        reduction.wait()
        copy = values.clone()
        values.fill_(-1)
        good &= bool(((copy - 1.5).abs() < 0.02).all())
    return good


@pytest.mark.gpu
def test_streams_wait_for_each_other():
    assert all(succeed(late_writer, 2, device="cuda"))


def measured(rank, device):
    clock = SimpleNamespace(now_s=0.0)
    clock.perf_counter = lambda: clock.now_s
    threshold.time = clock

    def timed_run(self, numel, quantized):
        # one rank's times alone would choose another threshold
        per_element = 1e-8 if quantized else (3e-8 if rank == 0 else 1e-8)
        clock.now_s += 1e-3 + numel * per_element + (4e-4 if quantized else 0)

    QuantizedReducer._timed_run = timed_run
    reducer = QuantizedReducer(topology=Topology.consecutive(2, 1))
    small, large = torch.ones(16, device=device), torch.ones(2**20, device=device)
    reducer.reduce(small)
    reducer.reduce(large)
    return reducer.smallest_bucket_elements, dict(reducer.stats().fallbacks), reducer.stats().quantized_buckets


def test_the_threshold_is_measured_and_the_same_on_all_ranks(device):
    results = succeed(measured, 2, device=device.type)
    assert results[0] == results[1]
    smallest, fallbacks, quantized = results[0]
    assert smallest == pytest.approx(4e-4 / 2e-8, rel=1e-3) and fallbacks == {"small bucket": 1} and quantized == 1


def on_one_node(rank, device):
    reducer = QuantizedReducer()
    values = gradient(5000, seed=rank).to(device)
    reducer.reduce(values)
    return values.cpu(), reducer.describe(), reducer.stats()


def test_ranks_of_one_node_use_full_precision(device):
    results = succeed(on_one_node, 2, device=device.type)
    exact = (gradient(5000, 0).double() + gradient(5000, 1).double()) / 2
    for values, description, stats in results:
        assert relative_error(values, exact) < 1e-6
        assert description == "full precision (one node), 1 node of 2 ranks"
        assert stats.wire_bytes == 0 and stats.fallbacks == {"one node": 1}


def found_by_launcher(rank, device):
    reducer = QuantizedReducer(smallest_bucket_elements=1)
    return reducer.topology.nodes, reducer.describe()


@pytest.mark.parametrize(
    "groups, nodes",
    [("0011", ((0, 1), (2, 3))), ("0101", ((0, 2), (1, 3))), ("0012", ((0, 1), (2,), (3,))), ("0000", ((0, 1, 2, 3),))],
)
def test_nodes_are_found_from_the_launcher(groups, nodes):
    results = succeed(found_by_launcher, 4, env=lambda rank: {"GROUP_RANK": groups[rank]})
    assert all(found == nodes for found, _ in results)
    if groups == "0012":
        assert "unequal" in results[0][1]


def unequal(rank, device):
    reducer = QuantizedReducer(topology=Topology(((0, 2), (1,))), smallest_bucket_elements=1)
    values = gradient(9000, seed=rank).to(device)
    reducer.reduce(values)
    return values.cpu()


def test_nodes_of_unequal_size(device):
    results = succeed(unequal, 3, device=device.type)
    assert all(torch.equal(values, results[0]) for values in results)
    check_bound(results[0], [gradient(9000, seed) for seed in range(3)])


def dies(rank, device, ranks_per_node, asynchronous, to_owners=False):
    reducer = make(ranks_per_node, timeout_s=10)
    values = gradient(200_000, seed=rank)
    reducer.reduce(values)
    if rank == 1:
        os._exit(3)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(3):
            if to_owners:
                reducer.reduce_to_owners(list(values.split(70_000)))
            elif asynchronous:
                reducer.reduce_async(values).wait()
            else:
                reducer.reduce(values)
    with pytest.raises(RuntimeError, match="failed after"):
        reducer.reduce(values)  # at once: no second time-out
    raise RuntimeError(f"{time.monotonic() - begin:.1f} s: {caught.value}")


@pytest.mark.parametrize("asynchronous, to_owners", [(False, False), (True, False), (False, True)])
def test_a_dead_rank_stops_the_others_and_is_named(asynchronous, to_owners):
    results = run_ranks(dies, 3, 1, asynchronous, to_owners)
    assert results[1] == Failure("ended with exit code 3")
    for rank in (0, 2):
        text = results[rank].text
        assert f"Rank {rank}: the quantized exchange between nodes failed" in text
        assert "No sign of life from rank 1;" in text


def hangs(rank, device, folder):
    reducer = make(1, timeout_s=60)
    ended, given_up = Path(folder, "ended"), Path(folder, "given up")
    values = gradient(100_000, seed=rank)
    reducer.reduce(values)
    if rank == 1:
        ended.touch()
        stay_until_told(given_up)
        os._exit(0)
    with telling_others(given_up):
        stay_until_told(ended)
        wait_in_vain(reducer._hops, 1.0)
        reducer.reduce(values)


def test_a_rank_that_hangs_is_named_after_the_time_out(tmp_path):
    results = run_ranks(hangs, 2, str(tmp_path))
    assert "No sign of life from rank 1;" in results[0].text
    assert float(re.search(r"after (\d+\.\d) s", results[0].text)[1]) >= 1


def test_parts_are_aligned_and_pad_little():
    for numel in (1, 64, 100, 10_000, 2**20, 2**24 + 1):
        for parts in (2, 4, 64):
            blocks = blocks_of_part(numel, parts)
            assert blocks * parts * 64 >= numel
            if numel >= 2**20:
                assert blocks * parts * 64 <= 1.01 * numel
    assert blocks_of_part(2**24, 4) % 8 == 0
