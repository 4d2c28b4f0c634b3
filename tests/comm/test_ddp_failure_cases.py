"""What breaks other reductions in practice, with DDP on two ranks: odd model shapes, uneven epochs, odd gradients."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lazytrain_plugin
from tests.comm.ranks import run_ranks, stay_until_told, succeed, telling_others, wait_in_vain
from tests.comm.test_ddp import exact_gradients, reducer, wrap
from tests.comm.test_reducer import gradient, make

pytestmark = pytest.mark.multiprocess


class SharedBlock(nn.Module):
    """One block called twice, as in ALBERT (S-19)."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Linear(33, 33), nn.Linear(33, 7)

    def forward(self, x, rank):
        return self.head(torch.tanh(self.block(torch.tanh(self.block(x)))))


class Experts(nn.Module):
    """Top-1 of eight experts; with few tokens most experts get none, other ones on each rank (S-31)."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(33, 8)
        self.experts = nn.ModuleList(nn.Linear(33, 7) for _ in range(8))

    def forward(self, x, rank):
        gates = self.router(x).softmax(-1)
        out = x.new_zeros(len(x), 7)
        for index, expert in enumerate(self.experts):
            chosen = gates.argmax(-1) == index
            if chosen.any():
                out = out + chosen[:, None] * gates[:, index : index + 1] * expert(x)
        return out


class TwoTowers(nn.Module):
    """`images` on the first rank only, or on no rank (S-34)."""

    def __init__(self, ranks_with_images):
        super().__init__()
        self.text, self.images, self.ranks_with_images = nn.Linear(33, 7), nn.Linear(33, 7), ranks_with_images

    def forward(self, x, rank):
        return self.text(x) + (self.images(x) if rank < self.ranks_with_images else 0)


SHAPES = {
    "shared block": SharedBlock,
    "experts": Experts,
    "images on one rank": lambda: TwoTowers(1),
    "images on no rank": lambda: TwoTowers(0),
}


def one_step(rank, device, shape):
    torch.manual_seed(0)
    model = SHAPES[shape]().to(device)
    x = torch.randn(6, 33, generator=torch.Generator().manual_seed(100 + rank)).to(device)
    exact = exact_gradients(model, rank, device, lambda m: m(x, rank).square().sum().backward())
    ddp = wrap(model, device, find_unused_parameters=shape != "shared block")
    ddp.register_comm_hook(reducer(), lazytrain_plugin.ddp_comm_hook)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x, rank).square().sum().backward()
    used = [(p.grad, e) for p, e in zip(ddp.parameters(), exact) if e.norm() > 0]
    unused = [p.grad for p, e in zip(ddp.parameters(), exact) if e.norm() == 0]
    error = max(float((g.double() - e).norm() / e.norm()) for g, e in used)
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)  # S-22
    clipped = nn.utils.get_total_norm([p.grad for p in ddp.parameters() if p.grad is not None])
    flat = torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None]).cpu()
    return error, all(g is None or not g.any() for g in unused), len(unused), float(norm), float(clipped), flat


@pytest.mark.parametrize("shape", SHAPES)
def test_parity_of_odd_shapes(device, shape):
    results = succeed(one_step, 2, shape, device=device.type)
    for error, unused_are_zero, num_unused, norm, clipped, gradients in results:
        assert error < 0.03 and unused_are_zero
        assert norm > 0.01 and clipped == pytest.approx(0.01, rel=1e-3)
        assert norm == results[0][3] and torch.equal(gradients, results[0][5])
        if shape != "shared block":
            assert num_unused > 0 or shape == "images on one rank"


def uneven_epoch(rank, device, folder, joined):
    torch.manual_seed(0)
    model = nn.Linear(33, 7).to(device)
    state = lazytrain_plugin.QuantizedReducer(
        topology=lazytrain_plugin.comm.topology.Topology.consecutive(2, 1), smallest_bucket_elements=1, timeout_s=60
    )
    ended, given_up = Path(folder, "ended"), Path(folder, "given up")
    ddp = wrap(model, device)
    ddp.register_comm_hook(state, lazytrain_plugin.ddp_comm_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def epoch():
        for number in range(5 - rank):
            if number == 4 and not joined:
                stay_until_told(ended)
                wait_in_vain(state._hops, 1.0)
            x = torch.randn(4, 33, generator=torch.Generator().manual_seed(10 * number + rank)).to(device)
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()

    if joined:
        with ddp.join():
            epoch()
        return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]).cpu()
    with telling_others(given_up):
        epoch()
    if rank == 1:
        ended.touch()
        stay_until_told(given_up)
        raise RuntimeError("epoch ended")


def test_join_lets_ranks_have_different_numbers_of_batches(tmp_path):
    first, second = succeed(uneven_epoch, 2, str(tmp_path), True)
    assert torch.equal(first, second) and first.isfinite().all()


def test_without_join_the_waiting_rank_says_for_whom(tmp_path):
    first, second = run_ranks(uneven_epoch, 2, str(tmp_path), False)
    assert "No sign of life from rank 1;" in first.text and "exchange between nodes failed" in first.text
    assert "epoch ended" in second.text


def odd_values(rank, device, dtype):
    out = {}
    for name, values in {
        "zero": torch.zeros(5000),
        "one": torch.ones(1),
        "outlier": gradient(5000, seed=rank).index_fill_(0, torch.tensor([2500]), 6e4),
        "tiny": torch.full((777,), 6e-8 * (rank + 1)),
        "transposed": gradient(63 * 65, seed=rank).view(63, 65).t(),
    }.items():
        values = values.to(dtype).to(device)
        before = values.float().cpu()
        make(1).reduce(values)
        out[name] = before, values.cpu(), values.stride()
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_odd_values_keep_dtype_layout_and_scale(device, dtype):
    """S-26 and S-27."""
    first, second = succeed(odd_values, 2, dtype, device=device.type)
    for name in first:
        (a, mean, stride), (b, other, _) = first[name], second[name]
        assert mean.dtype == dtype and torch.equal(mean, other)
        exact = (a.double() + b.double()) / 2
        if name == "zero":
            assert not mean.any()
        if name == "transposed":
            assert stride == (1, 65)
        if name == "outlier":  # its own block alone is coarse
            assert float(mean[2500]) == pytest.approx(6e4, rel=0.01)
            outside = torch.ones(5000, dtype=torch.bool)
            outside[2500 // 64 * 64 : 2500 // 64 * 64 + 64] = False
            mean, exact = mean[outside], exact[outside]
        if exact.any():
            spacing = 6e-8 if dtype is torch.float16 else 0.0  # of fp16's smallest numbers
            assert (mean.double() - exact).norm() <= 0.02 * exact.norm() + spacing * exact.numel() ** 0.5


def hundred_steps(rank, device, bits):
    """A small regression; both ranks see different data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 129), nn.GELU(), nn.Linear(129, 7)).to(device)
    target = nn.Linear(33, 7).to(device).requires_grad_(False)
    ddp = wrap(model, device)
    if bits == 8:
        ddp.register_comm_hook(reducer(), lazytrain_plugin.ddp_comm_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    losses = []
    for step in range(100):
        x = torch.randn(16, 33, generator=torch.Generator().manual_seed(2 * step + rank)).to(device)
        loss = F.mse_loss(ddp(x), target(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(float(loss) / 2)
    return losses


def test_a_hundred_steps_follow_full_precision(device):
    (plain, _), (ours, _) = (succeed(hundred_steps, 2, bits, device=device.type) for bits in (16, 8))
    assert sum(plain[-10:]) < 0.3 * sum(plain[:10])
    assert sum(ours[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.02)
    assert ours != plain
