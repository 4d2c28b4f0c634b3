"""Sums of squares: one order of summation on every implementation."""

import math

import numpy as np
import pytest
import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels.norm import LANES, combine_lanes, sum_squares_lanes
from tests.kernels.implementations import use

SIZES = [0, 1, 1023, 1024, 1025, 262_144, 300_007, 1_000_003]


def lanes_of(values):
    lanes = torch.full((LANES,), torch.nan, dtype=torch.float64, device=values.device)
    sum_squares_lanes(values, lanes)
    return lanes


def read_literally(values: torch.Tensor) -> np.ndarray:
    """The order of summation as norm.py words it."""
    rows = np.zeros((-(-values.numel() // 1024), 1024))
    rows.reshape(-1)[: values.numel()] = values.double().numpy()
    parts = np.zeros((256, 1024))
    for number, row in enumerate(rows):
        parts[number % 256] += row * row
    lanes = np.zeros(1024)
    for part in parts:
        lanes += part
    return lanes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", SIZES)
def test_order_of_summation(implementation, threads, numel, dtype):
    device = use(implementation)
    torch.manual_seed(numel)
    values = (torch.randn(numel) * 10 ** (torch.rand(numel) * 20 - 10)).to(dtype)
    expected = torch.from_numpy(read_literally(values))
    for count in (1, 2, 5):
        threads(count)
        assert torch.equal(lanes_of(values.to(device)).cpu(), expected)
    total = combine_lanes(expected[None])
    exact = math.fsum((values.double() ** 2).tolist())
    assert total.shape == (1,) and abs(total.item() - exact) <= 1e-13 * exact


def test_lanes_are_halved_whatever_the_batch(device):
    lanes = torch.rand(5, LANES, dtype=torch.float64, device=device)
    together = combine_lanes(lanes)
    for row, total in zip(lanes, together, strict=True):
        assert combine_lanes(row[None])[0] == total
        values = row.tolist()
        while len(values) > 1:
            values = [a + b for a, b in zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True)]
        assert values[0] == total.item()


def test_infinity_and_nan_propagate(implementation):
    values = torch.ones(5000, device=use(implementation))
    values[4321] = torch.inf
    assert combine_lanes(lanes_of(values)[None]).isinf().all()
    values[17] = torch.nan
    assert combine_lanes(lanes_of(values)[None]).isnan().all()
    assert combine_lanes(lanes_of(torch.full((3,), 3e38, device=values.device))[None]).isfinite().all()  # no overflow


def test_wrong_tensors_are_refused():
    with pytest.raises(KernelError, match="lanes"):
        sum_squares_lanes(torch.ones(10), torch.empty(512, dtype=torch.float64))
    with pytest.raises(KernelError, match="gradient"):
        sum_squares_lanes(torch.ones(10, dtype=torch.float16), torch.empty(LANES, dtype=torch.float64))
