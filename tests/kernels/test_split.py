"""fp32 master = bf16 weight + int16 remainder: every value, on every implementation."""

import pytest
import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels.split import join_master, split_master
from tests.kernels.implementations import use

EDGES = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]


def split(master):
    weight = torch.empty(master.numel(), dtype=torch.bfloat16, device=master.device)
    remainder = torch.empty(master.numel(), dtype=torch.int16, device=master.device)
    split_master(master, weight, remainder)
    return weight, remainder


def join(weight, remainder):
    master = torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
    join_master(weight, remainder, master)
    return master


@pytest.mark.timeout(600)
def test_all_values_are_exact(isa):
    """All 2^32 bit patterns: the expected halves come from a pattern's place in the grid, not from the encoding.

    Plain code is the compiler's lowering of the same source, and slow here: it gets every eighth group of patterns.
    """
    group = 32  # upper halves at a time; infinity and NaN, 0x7F80 to 0x7FFF and 0xFF80 to 0xFFFF, fill whole groups
    low = torch.arange(65536, dtype=torch.int32)
    low16, rounds_up = low.to(torch.int16), (low >= 0x8000).to(torch.int16)
    bits, back = torch.empty(group, 65536, dtype=torch.int32), torch.empty(group, 65536)
    weight = torch.empty(group, 65536, dtype=torch.bfloat16)
    remainder, expected = torch.empty_like(weight, dtype=torch.int16), torch.empty_like(weight, dtype=torch.int16)
    one_nan = torch.tensor(0x7FC00000, dtype=torch.int32)
    for begin in range(0, 65536, group * (8 if isa == "generic" else 1)):
        high = torch.arange(begin, begin + group, dtype=torch.int32)[:, None]
        torch.bitwise_or(high << 16, low, out=bits)
        split_master(bits.view(-1).view(torch.float32), weight.view(-1), remainder.view(-1))
        join_master(weight.view(-1), remainder.view(-1), back.view(-1))
        if begin & 0x7F80 == 0x7F80:
            assert torch.equal(back.view(torch.int32), torch.where(bits.view(torch.float32).isnan(), one_nan, bits))
            continue
        torch.add(high.to(torch.int16), rounds_up, out=expected)
        assert torch.equal(weight.view(torch.int16), expected)
        assert torch.equal(remainder, low16.expand_as(remainder))
        assert torch.equal(back.view(torch.int32), bits)


def test_every_implementation_agrees(implementation):
    device = use(implementation)
    highs = torch.arange(65536, dtype=torch.int32) << 16
    bits = (highs[:, None] | torch.tensor(EDGES, dtype=torch.int32)).view(-1)
    bits = torch.cat([bits, torch.randint(-(2**31), 2**31 - 1, (100_003,), dtype=torch.int32)])
    master = bits.view(torch.float32)
    weight, remainder = split(master.to(device))
    back = join(weight, remainder).cpu().view(torch.int32)
    assert torch.equal(back, torch.where(master.isnan(), torch.tensor(0x7FC00000, dtype=torch.int32), bits))
    finite = master.isfinite()
    exact, rounded = master[finite].double(), weight.cpu()[finite]
    nearest = master[finite].to(torch.bfloat16)  # half to even: as near, and equal but for ties
    distance = (rounded.double() - exact).abs()
    both_finite = nearest.isfinite() & rounded.isfinite()
    assert torch.equal(distance[both_finite], (nearest.double() - exact).abs()[both_finite])
    assert (distance == 0)[(bits[finite] & 0xFFFF) == 0].all()


def test_weights_replaced_from_outside(implementation):
    """A zeroed weight decodes to zero whatever its stale remainder; any other to within half a bf16 ulp."""
    device = use(implementation)
    weight, remainder = split(torch.randn(4000).to(device))
    replaced = torch.randn(4000).to(torch.bfloat16).to(device)
    replaced[::5], replaced[1::5] = 0.0, -0.0
    master = join(replaced, remainder)
    zero = replaced == 0
    negative = zero & (remainder < 0)
    assert bool((master[negative] == 0).all()) and bool((remainder[zero] < 0).any())
    assert (master[zero].abs() < 1e-38).all()
    half_ulp = replaced.abs().float() * 2.0**-8
    assert ((master - replaced.float()).abs() <= half_ulp)[~zero].all()


def test_wrong_tensors_are_refused():
    master, weight, remainder = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int16)
    for wrong in ((master[:7], weight, remainder), (master.double(), weight, remainder), (master, weight, weight)):
        with pytest.raises(KernelError, match="contiguous 1-D"):
            split_master(*wrong)
