"""Gradients stored in codes: bits of every implementation, errors, sums of many micro-batches, updates from them."""

import importlib.util

import pytest
import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels import reference
from lazytrain_plugin.kernels.coded_gradient import CodedGradient, add_codes, decode_gradient, encode_gradient
from lazytrain_plugin.kernels.gradient_codes import BLOCK, LARGEST_CODE
from lazytrain_plugin.kernels.norm import LANES, combine_lanes, sum_squares_lanes
from tests.kernels.adamw_cases import Case, State, assert_same_bits, gradients
from tests.kernels.gradient_code_cases import awkward_values
from tests.kernels.implementations import use
from tests.kernels.test_triton_fused import run

SIZES = [0, 1, 63, 64, 65, 1000, 64 * 4097 + 5]
NUM_MICRO_BATCHES = 64


def encoded(values: torch.Tensor, bits: int) -> CodedGradient:
    coded = CodedGradient.empty(values.numel(), bits, values.device)
    coded.codes.fill_(77)
    coded.steps.fill_(77)
    encode_gradient(values, coded)
    return coded


def decoded(coded: CodedGradient) -> torch.Tensor:
    values = torch.empty(coded.numel(), device=coded.device)
    decode_gradient(coded, values)
    return values


def added(arrivals: list[torch.Tensor]) -> CodedGradient:
    total = CodedGradient.empty(arrivals[0].numel(), 16, arrivals[0].device)
    total.codes.fill_(77)
    total.steps.fill_(77)
    for i, values in enumerate(arrivals):
        add_codes(total, encoded(values, 8), first=i == 0)
    return total


def assert_same_codes(got: CodedGradient, expected: CodedGradient) -> None:
    assert torch.equal(got.codes.cpu(), expected.codes.cpu()) and torch.equal(got.steps.cpu(), expected.steps.cpu())


def some_values(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return awkward_values(max(numel, 700), seed=seed, dtype=dtype)[:numel]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_implementation_gives_the_reference_s_bits(kernel, dtype):
    device = use(kernel)
    for numel in SIZES:
        values = some_values(numel, dtype)
        for bits in (8, 16):
            expected = CodedGradient.empty(numel, bits)
            reference.encode_gradient(values, expected)
            got = encoded(values.to(device), bits)
            assert_same_codes(got, expected)
            theirs = torch.empty(numel)
            reference.decode_gradient(expected, theirs)
            torch.testing.assert_close(decoded(got).cpu(), theirs, rtol=0, atol=0, equal_nan=True)
        arrivals = [values, values.roll(5) * 0.4, -2.0 * values]
        expected = CodedGradient.empty(numel, 16)
        for i, arrived in enumerate(arrivals):
            reference.add_codes(expected, encoded(arrived, 8), i == 0)
        assert_same_codes(added([arrived.to(device) for arrived in arrivals]), expected)


@pytest.mark.parametrize("bits", [8, 16])
def test_the_error_is_at_most_half_a_step(implementation, bits):
    device = use(implementation)
    values = torch.randn(64 * 3000 + 17, generator=torch.Generator().manual_seed(1)).to(device)
    values[1000] = 300.0
    error = (decoded(encoded(values, bits)).double() - values.double()).abs()
    largest = torch.nn.functional.pad(values.double(), (0, -values.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1)
    step = largest / LARGEST_CODE[bits] * (1 + 2**-7 + 2**-20)  # rounded up to bf16
    assert (error <= (step / 2).repeat_interleave(BLOCK)[: values.numel()]).all()


def in_blocks(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1, BLOCK)


@pytest.mark.parametrize("direction", ["random", "drifting", "same", "cancelling"])
def test_a_sum_of_64_micro_batches_has_at_most_twice_the_error_of_the_ideal_format(implementation, direction):
    """The ideal: every gradient in 8 bits, added up without rounding, and the sum rounded once to 8 bits."""
    device = use(implementation)
    generator = torch.Generator().manual_seed(4)
    numel = BLOCK * 400
    mean = torch.randn(numel, generator=generator)
    share = {"random": 0.0, "drifting": 0.5, "same": 1.0, "cancelling": 1.0}[direction]
    exact, ideal = torch.zeros(2, numel, dtype=torch.float64)
    total = CodedGradient.empty(numel, 16, device)
    for i in range(NUM_MICRO_BATCHES):
        values = share * mean + (1 - share) * torch.randn(numel, generator=generator)
        if direction == "cancelling":  # most of what was added is taken away again
            values = values * (1.0 if i < NUM_MICRO_BATCHES // 2 else -0.9)
        arrived = encoded(values.to(device), 8)
        add_codes(total, arrived, first=i == 0)
        exact += values.double()
        ideal += decoded(arrived).cpu().double()
    ideal = decoded(encoded(ideal.float().to(device), 8)).cpu().double()
    error = (decoded(total).cpu().double() - exact).norm()
    assert error <= 2 * (ideal - exact).norm()


def test_zeros_stay_zeros_and_outliers_do_not_reach_other_blocks(implementation):
    device = use(implementation)
    values = torch.zeros(BLOCK * 5, device=device)
    values[BLOCK * 2 + 3] = 1e20
    values[BLOCK * 4 :] = 1e-20
    total = decoded(added([values] * 3))
    assert (total[: BLOCK * 2] == 0).all() and (total[BLOCK * 3 : BLOCK * 4] == 0).all()
    assert (total[BLOCK * 2 : BLOCK * 3] != 0).sum() == 1
    torch.testing.assert_close(total[BLOCK * 4 :], 3 * values[BLOCK * 4 :], rtol=0.02, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_an_overflow_survives_coding_and_adding(implementation, bad):
    device = use(implementation)
    fine = torch.randn(BLOCK * 3 + 1, generator=torch.Generator().manual_seed(0)).to(device)
    for position in (0, BLOCK + 5, BLOCK * 3):
        values = fine.clone()
        values[position] = bad
        assert decoded(encoded(values, 8)).isnan().any()
        for order in ([values, fine, fine], [fine, values, fine], [fine, fine, values]):
            total = added(order)
            assert decoded(total).isnan().any()
            lanes = torch.empty(LANES, dtype=torch.float64, device=device)
            sum_squares_lanes(total, lanes)
            assert not combine_lanes(lanes[None]).isfinite().any()
    # A sum of finite gradients that is none itself.
    assert not decoded(added([torch.full((BLOCK,), 3e38, device=device)] * 2)).isfinite().any()


@pytest.mark.parametrize("bits", [8, 16])
def test_the_norm_of_codes_is_that_of_their_values(implementation, bits):
    device = use(implementation)
    for numel in (1, 1024, 300_007):
        coded = encoded(torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(device), bits)
        got, expected = torch.empty(2, LANES, dtype=torch.float64, device=device)
        sum_squares_lanes(coded, got)
        sum_squares_lanes(decoded(coded), expected)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("gradient_bits", [8, 16])
@pytest.mark.parametrize(
    "case",
    [
        Case(1),
        Case(5003, bits=8),
        Case(5003),
        Case(700, split=False, decoupled=False, maximize=True, beta1=0.3),
        Case(700, split=False, decoupled=False, bits=8, first_index=2**32 - 256),
    ],
    ids=str,
)
def test_an_update_from_codes_is_the_update_from_their_values(implementation, case, gradient_bits):
    device = use(implementation)
    from_codes, from_values = State(case, device), State(case, device)
    for index, gradient in enumerate(gradients(case.numel, 3, torch.float32)):
        coded = encoded(gradient.to(device), gradient_bits)
        from_codes.update(coded, index + 1)
        from_values.update(decoded(coded), index + 1)
    assert_same_bits(from_codes, from_values)


def test_a_part_of_codes_is_the_codes_of_that_part(implementation):
    device = use(implementation)
    for bits in (8, 16):
        coded = encoded(torch.randn(1000).to(device), bits)
        assert torch.equal(decoded(coded.part(256, 744)), decoded(coded)[256:])
        assert torch.equal(decoded(coded.part(64, 100)), decoded(coded)[64:164])


def test_refuses_what_does_not_fit():
    coded = CodedGradient.empty(100, 8)
    with pytest.raises(KernelError, match="values"):
        encode_gradient(torch.empty(100, dtype=torch.float16), coded)
    with pytest.raises(KernelError, match="coded"):
        encode_gradient(torch.empty(99), coded)
    with pytest.raises(KernelError, match="decode to fp32"):
        decode_gradient(coded, torch.empty(100, dtype=torch.bfloat16))
    with pytest.raises(KernelError, match="they are 16 and 8"):
        add_codes(coded, coded, first=True)
    with pytest.raises(KernelError, match="arrived"):
        add_codes(CodedGradient.empty(101, 16), coded, first=True)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.timeout(600)
def test_interpreted_kernels_give_the_cpu_s_bits():
    assert "same bits" in run("run_coded_gradient_interpreted.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@needs_triton
@pytest.mark.timeout(600)
def test_kernels_compile_for_an_h100(tmp_path):
    assert "all kernels compile" in run("run_coded_gradient_compile.py", TRITON_CACHE_DIR=str(tmp_path))
