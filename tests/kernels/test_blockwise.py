"""The block formats: error against fp64, awkward values, packing, noise, and sums of gradients.

The oracle is the ideal format in fp64: the exact scale, and the nearest of the format's levels.
"""

import pytest
import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels import blockwise
from tests.kernels.blockwise_cases import SIZES, awkward

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LOW_BIT = blockwise.LOW_BIT_FORMATS


def ideal(x: torch.Tensor, name: str) -> torch.Tensor:
    """`x` after the format with an exact scale, in fp64."""
    levels = blockwise.FORMATS[name].levels()
    blocks = torch.nn.functional.pad(x.double().flatten(), (0, -x.numel() % 128)).view(-1, 128)
    scale = blocks.abs().amax(1, keepdim=True) / levels.max()
    scaled = blocks / torch.where(scale > 0, scale, 1)
    nearest = levels[(scaled[..., None] - levels).abs().argmin(-1)] * scale
    return nearest.flatten()[: x.numel()].view(x.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", LOW_BIT)
def test_error_is_that_of_the_ideal_format(name, dtype, device):
    torch.manual_seed(0)
    x = torch.randn(33, 131)
    x[3, 7] = 90.0
    x *= torch.logspace(-3, 3, 33)[:, None]
    x = x.to(dtype)
    decoded = blockwise.dequantize(blockwise.quantize(x.to(device), name), torch.float32).cpu()
    for ours, exact, best in zip(decoded.double(), x.double(), ideal(x, name), strict=True):
        assert (ours - exact).norm() <= 1.1 * (best - exact).norm()


@pytest.mark.parametrize("name", LOW_BIT)
def test_every_value_is_within_half_a_gap(name):
    x = awkward(7 * 128, torch.float32)[: 4 * 128]
    decoded = blockwise.dequantize(blockwise.quantize(x, name)).double()
    levels = blockwise.FORMATS[name].levels()
    half_gap = (levels.diff().max() / levels.max() / 2).item()
    largest = x.double().view(-1, 128).abs().amax(1).repeat_interleave(128)
    assert ((decoded - x.double()).abs() <= 1.01 * half_gap * largest).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", LOW_BIT)
def test_awkward_values(name, numel, device):
    x = awkward(numel, torch.float32)
    quantized = blockwise.quantize(x.to(device), name)
    decoded = blockwise.dequantize(quantized).cpu()
    assert decoded.shape == x.shape and quantized.storage_bytes == blockwise.FORMATS[name].storage_bytes(numel)
    for index, (block, source) in enumerate(zip(decoded.split(128), x.split(128), strict=True)):
        if source.isfinite().all():
            assert block.isfinite().all(), index
            tiniest = 2.0**-133  # the least scale in bf16
            gap = blockwise.FORMATS[name].levels().diff().max() / blockwise.FORMATS[name].levels().max()
            limit = (
                0.51 * gap * (source.abs().max().double() if numel else 0.0)
                + blockwise.FORMATS[name].largest_level * tiniest
            )
            assert ((block.double() - source.double()).abs() <= limit).all(), index
        else:
            assert block.isnan().all(), index  # visible, and in this block alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", LOW_BIT)
def test_the_largest_finite_value_stays_finite_and_infinity_does_not(name, dtype, device):
    x = torch.full((129,), torch.finfo(dtype).max, dtype=dtype, device=device)
    x[128] = torch.inf
    decoded = blockwise.dequantize(blockwise.quantize(x, name)).cpu().double()
    assert decoded[128].isnan()
    torch.testing.assert_close(decoded[:128], x[:128].cpu().double(), rtol=0.01, atol=0)


@pytest.mark.parametrize("name", LOW_BIT)
def test_every_code_survives_packing(name):
    form = blockwise.FORMATS[name]
    codes = torch.stack([torch.randperm(128) for _ in range(9)]).to(torch.int32) % 2**form.bits
    packed = blockwise._packed(codes, form.bits)
    assert packed.dtype == torch.uint8 and packed.shape == (9, form.block_bytes)
    assert torch.equal(blockwise._unpacked(packed, form.bits), codes)


def test_fp4_rounds_ties_to_the_even_code():
    x = torch.zeros(128)
    x[:9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75])
    decoded = blockwise.dequantize(blockwise.quantize(x, "fp4"))
    assert decoded[:9].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0]


def test_nf4_levels_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.get_4bit_type("nf4", device="cpu").double()
    torch.testing.assert_close(blockwise.FORMATS["nf4"].levels(), theirs, rtol=0, atol=3e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (128, 2), (0, 4)])
def test_views_and_bf16(shape, device):
    x = torch.randn(shape, device=device).transpose(0, 1)
    assert torch.equal(
        blockwise.dequantize(blockwise.quantize(x, "int8")),
        blockwise.dequantize(blockwise.quantize(x.contiguous(), "int8")),
    )
    assert torch.equal(blockwise.dequantize(blockwise.quantize(x, "bf16")), x.bfloat16().float())


@pytest.mark.parametrize("device", DEVICES)
def test_noise_is_unbiased_and_a_function_of_key_and_index(device):
    x = torch.full((64 * 128,), 0.3, device=device)
    x[::128] = 127.0  # the scale is 1
    decoded = [blockwise.dequantize(blockwise.quantize(x, "int8", noise_key=key)) for key in (1, 1, 2)]
    assert torch.equal(decoded[0], decoded[1]) and not torch.equal(decoded[0], decoded[2])
    small = decoded[0][x < 1]
    assert set(small.tolist()) == {0.0, 1.0}
    assert abs(small.mean().item() - 0.3) < 4 * (0.21 / small.numel()) ** 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_sixteen_micro_batches_accumulate(device):
    torch.manual_seed(0)
    micro_batches = torch.randn(16, 5000) * torch.logspace(-4, 0, 5000) + 0.02
    exact = micro_batches.double().sum(0)
    errors = {}
    for noisy in (False, True):
        total = blockwise.zeros((5000,), torch.float32, "int8", device)
        for index, gradient in enumerate(micro_batches):
            blockwise.accumulate(total, gradient.to(device), noise_key=index if noisy else None)
        errors[noisy] = ((blockwise.dequantize(total).cpu().double() - exact).norm() / exact.norm()).item()
    once = ((ideal(exact.float(), "int8") - exact).norm() / exact.norm()).item()
    assert errors[False] <= 4.5 * once  # 16 independent roundings: sqrt(16), on scales that grow as they sum
    assert errors[True] <= 1.42 * 4.5 * once  # noise doubles a rounding's variance


@pytest.mark.parametrize("device", DEVICES)
def test_overflow_survives_accumulation(device):
    total = blockwise.zeros((300,), torch.float32, "int8", device)
    gradient = torch.ones(300, device=device)
    gradient[200] = torch.inf
    blockwise.accumulate(total, gradient)
    blockwise.accumulate(total, torch.ones(300, device=device))
    decoded = blockwise.dequantize(total).cpu()
    assert decoded[128:256].isnan().all() and decoded[:128].isfinite().all() and decoded[256:].isfinite().all()


def test_refusals_say_what_to_do():
    with pytest.raises(KernelError, match="Use one of fp4"):
        blockwise.quantize(torch.zeros(3), "fp8")
    with pytest.raises(KernelError, match="Use bfloat16"):
        blockwise.quantize(torch.zeros(3, dtype=torch.float64), "int8")
    with pytest.raises(KernelError, match="nearest only"):
        blockwise.quantize(torch.zeros(3), "fp4", noise_key=1)
    with pytest.raises(KernelError, match="must be the same"):
        blockwise.accumulate(blockwise.zeros((4,), torch.float32, "int8", "cpu"), torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOW_BIT)
def test_cuda_has_the_bits_of_plain_torch(name):
    x = awkward(40 * 128 + 5, torch.float32)
    here, there = blockwise.quantize(x, name), blockwise.quantize(x.cuda(), name)
    finite = ~here.scales.isnan()
    assert torch.equal(here.scales.nan_to_num(), there.scales.cpu().nan_to_num())
    assert torch.equal(here.codes[finite], there.codes.cpu()[finite])
