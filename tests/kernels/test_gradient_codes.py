"""Gradient codes: error bounds against fp64, values that must survive, sizes of rows, and the Triton kernels."""

import importlib.util

import pytest
import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels import gradient_codes as codes
from tests.kernels.gradient_code_cases import awkward_values
from tests.kernels.test_triton_fused import run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def encoded(values, bits, rows=1, blocks=None):
    blocks = codes.num_blocks(-(-values.numel() // rows)) if blocks is None else blocks
    out = torch.full((rows, codes.row_bytes(blocks, bits)), 0xA5, dtype=torch.uint8, device=values.device)
    codes.encode(values, bits, blocks, out)
    return out, blocks


def round_trip(values, bits, rows=1, blocks=None, dtype=torch.float32):
    out, blocks = encoded(values, bits, rows, blocks)
    result = torch.empty(values.numel(), dtype=dtype, device=values.device)
    codes.decode(out, bits, blocks, result)
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 10])
@pytest.mark.parametrize("numel, rows", [(1, 1), (63, 1), (64 * 5000 + 7, 1), (1000, 3), (64 * 7, 7)])
def test_the_error_is_at_most_half_a_step(device, dtype, bits, numel, rows):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype).to(device)
    error = (round_trip(x, bits, rows).double() - x.double()).abs()
    padded = torch.nn.functional.pad(x.double(), (0, -numel % 64)).view(-1, 64)
    step = padded.abs().amax(1) / codes.LARGEST_CODE[bits] * (1 + 2**-7 + 2**-20)  # rounded up to bf16
    assert (error <= (step / 2).repeat_interleave(64)[:numel]).all()


def test_the_largest_of_a_block_is_never_cut(device):
    x = torch.randn(64 * 999, generator=torch.Generator().manual_seed(0)).to(device)
    for bits in (8, 10):
        out = round_trip(x, bits)
        largest = x.view(-1, 64).abs().amax(1)
        assert ((out.view(-1, 64).abs().amax(1) - largest).abs() <= 0.51 * largest / codes.LARGEST_CODE[bits]).all()


@pytest.mark.parametrize("bits", [8, 10])
def test_non_finite_zero_tiny_and_huge_values(device, bits):
    x = awkward_values(1000).to(device)
    out = round_trip(x, bits).view(-1)
    assert (out[64:128] == 0).all()
    assert out[320:384].isfinite().all() and out[256:320].isfinite().all()
    for block in (6, 7, 8):
        assert out[block * 64 : block * 64 + 64].isnan().all()
    assert out[576:].isfinite().all()
    torch.testing.assert_close(out[320:384], x[320:384], rtol=0, atol=float(x[320:384].abs().max()) / 200)


def test_every_non_finite_bit_pattern_survives(device):
    patterns = torch.tensor([0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
    x = torch.zeros(6, 64, device=device)
    x[:, 17] = patterns.to(torch.int64).to(torch.int32).view(torch.float32).to(device)
    assert round_trip(x.view(-1), 8).isnan().all()


@pytest.mark.parametrize("bits", [8, 10])
def test_the_device_writes_the_bytes_of_the_reference(device, bits):
    for numel, rows in ((1000, 2), (64 * 4097 + 5, 3), (64, 4)):
        for dtype in DTYPES:
            x = awkward_values(numel, seed=rows, dtype=dtype)
            blocks = codes.num_blocks(-(-numel // rows))
            expected = torch.empty(rows, codes.row_bytes(blocks, bits), dtype=torch.uint8)
            codes._encode_reference(x, bits, blocks, expected)
            got, _ = encoded(x.to(device), bits, rows, blocks)
            assert torch.equal(got.cpu(), expected)
            for out_dtype in DTYPES:
                theirs, ours = torch.empty(numel, dtype=out_dtype), torch.empty(numel, dtype=out_dtype, device=device)
                codes._decode_reference(expected, bits, blocks, theirs)
                codes.decode(got, bits, blocks, ours)
                torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


def test_the_mean_is_added_in_fp32_in_the_order_of_rows(device):
    rows, blocks = 5, 300
    x = torch.randn(rows * blocks * 64, generator=torch.Generator().manual_seed(1)).to(device)
    out, _ = encoded(x, 8, rows, blocks)
    values = torch.empty(rows * blocks * 64, device=device)
    codes.decode(out, 8, blocks, values)
    expected = torch.zeros(blocks * 64, device=device)
    for row in values.view(rows, -1):
        expected += row
    mean = torch.empty(blocks * 64, device=device)
    codes.decode_mean(out, 8, blocks, 3.0, mean)
    # By a tensor: on a GPU, torch multiplies by the reciprocal of a number.
    assert torch.equal(mean, expected / torch.full_like(expected, 3.0))


def test_ten_bits_have_a_quarter_of_the_error_of_eight(device):
    x = torch.randn(2**18, generator=torch.Generator().manual_seed(2)).to(device)
    error = [(round_trip(x, bits) - x).double().norm() for bits in (8, 10)]
    assert error[1] < 0.26 * error[0]
    assert error[0] < 0.0065 * x.double().norm()


def test_bytes_of_a_row():
    assert codes.row_bytes(100, 8) == 6600 <= 0.52 * 2 * 6400
    assert codes.row_bytes(100, 10) == 8200


def test_refuses_what_does_not_fit():
    rows = torch.empty(2, 66, dtype=torch.uint8)
    for values, bits, blocks in (
        (torch.empty(129), 8, 1),
        (torch.empty(64, dtype=torch.float64), 8, 1),
        (torch.empty(64), 4, 1),
        (torch.empty(64), 10, 1),
        (torch.empty(8, 8), 8, 1),
    ):
        with pytest.raises(KernelError):
            codes.encode(values, bits, blocks, rows)
    with pytest.raises(KernelError, match="fp32"):
        codes.decode_mean(rows, 8, 1, 2.0, torch.empty(64, dtype=torch.bfloat16))


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.timeout(600)
def test_interpreted_kernels_agree_with_plain_torch():
    output = run("run_gradient_codes_interpreted.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert "all kernels agree" in output


@needs_triton
@pytest.mark.timeout(600)
def test_kernels_compile_for_an_h100(tmp_path):
    assert "all kernels compile" in run("run_gradient_codes_compile.py", TRITON_CACHE_DIR=str(tmp_path))
