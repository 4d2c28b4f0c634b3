"""Sums of squares: one order of summation on every implementation."""

import math

import numpy as np
import pytest
import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels.batch import Batch
from lazytrain_plugin.kernels.norm import LANES, combine_lanes, read_squares, sum_squares_lanes
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_gradients_together_are_as_each_alone(device, dtype):
    """More than a launch of a GPU takes, and some that begin where no 16 bytes do."""
    torch.manual_seed(0)
    flat = torch.randn(2**20).to(dtype)
    sizes = [0, 1, 1023, 300_007, 262_144, *range(1000, 20_000, 1000)]
    starts = [0, 16, 3, 17, 0, *(i % 5 for i in range(19))]
    gradients = [flat[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    together = torch.full((len(gradients), LANES), torch.nan, dtype=torch.float64, device=device)
    batch = Batch()
    on_device = flat.to(device)
    for start, size, lanes in zip(starts, sizes, together, strict=True):
        sum_squares_lanes(on_device[start : start + size], lanes, batch=batch)
    batch.run()
    expected = torch.stack([lanes_of(gradient) for gradient in gradients])
    assert torch.equal(together.cpu(), expected)
    host = torch.empty(len(gradients), dtype=torch.float64, pin_memory=together.is_cuda)
    assert read_squares(together, host) == combine_lanes(expected).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_many_launches_at_once_do_not_mix_up_their_tables():
    gradients = [torch.full((1024,), float(i), device="cuda") for i in range(300)]
    lanes = torch.empty(300, LANES, dtype=torch.float64, device="cuda")
    torch.cuda._sleep(10**8)  # all are launched before the first one runs
    for gradient, row in zip(gradients, lanes, strict=True):
        sum_squares_lanes(gradient, row)
    assert lanes[:, 0].tolist() == [float(i) ** 2 for i in range(300)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_norm_does_not_wait_for_other_transfers(target):
    """In a step the engine that would bring the norm to the host moves the last gradients there."""
    source = torch.empty(
        2**30, dtype=torch.uint8, device="cuda" if target == "cpu" else "cpu", pin_memory=target == "cuda"
    )
    copy = torch.empty(2**30, dtype=torch.uint8, device=target, pin_memory=target == "cpu")
    gradient, lanes = torch.ones(5000, device="cuda"), torch.empty(1, LANES, dtype=torch.float64, device="cuda")
    host = torch.empty(1, dtype=torch.float64, pin_memory=True)
    for moves in (False, True):  # the first time kernels are compiled
        torch.cuda.synchronize()
        if moves:
            with torch.cuda.stream(torch.cuda.Stream()):
                copy.copy_(source, non_blocking=True)
                moved = torch.cuda.current_stream().record_event()
        sum_squares_lanes(gradient, lanes[0])
        assert read_squares(lanes, host) == [5000.0]
    assert not moved.query()


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
