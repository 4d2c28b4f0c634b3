"""8-bit states: the code book, rounding against fp64, noise, and what may never happen."""

import math

import bitsandbytes
import pytest
import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels import native, state8
from lazytrain_plugin.kernels.adamw import AdamWStep, Moment8, adamw_8bit, adamw_fp32
from lazytrain_plugin.kernels.state8 import dequantize_moment, quantize_moment
from tests.kernels.adamw_cases import Case, State
from tests.kernels.implementations import use

# With betas of 0 an update stores the gradient itself as m and its square as v; lr 0 leaves the weight alone.
STORE = {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 1e-8, "weight_decay": 0.0, "step": 1}


def quantized(values, signed):
    moment = Moment8.zeros(values.numel(), signed=signed, device=values.device)
    quantize_moment(values, moment, signed=signed)
    return moment


def decoded(moment, signed):
    values = torch.empty(moment.codes.numel(), device=moment.codes.device)
    dequantize_moment(moment, values, signed=signed)
    return values


def stored(gradient, noise_key):
    numel, device = gradient.numel(), gradient.device
    m, v = (Moment8.zeros(numel, signed=signed, device=device) for signed in (True, False))
    adamw_8bit(torch.zeros(numel, device=device), None, gradient, m, v, AdamWStep(**STORE), noise_key=noise_key)
    return m, v


def decades(numel, signed, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = 10 ** (torch.rand(numel, generator=generator) * 9 - 9)
    return values * (torch.randint(0, 2, (numel,), generator=generator) * 2 - 1) if signed else values


@pytest.mark.parametrize("signed", [True, False])
def test_code_book_is_that_of_bitsandbytes(signed):
    theirs = bitsandbytes.functional.create_dynamic_map(signed)
    assert torch.equal(torch.tensor(state8.code_book(signed).values), theirs)


@pytest.mark.parametrize("signed", [True, False])
def test_bitsandbytes_decodes_our_states(implementation, signed):
    values = decades(4096, signed).to(use(implementation))
    moment = quantized(values, signed)
    code = bitsandbytes.functional.create_dynamic_map(signed)
    theirs = bitsandbytes.functional.dequantize_blockwise(
        moment.codes.cpu(), absmax=moment.scales.cpu(), code=code, blocksize=256
    )
    torch.testing.assert_close(decoded(moment, signed).cpu(), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 255, 257, 20_000])
def test_nearest_code_of_the_ideal_format(implementation, numel, signed):
    """No code is nearer (in fp64) than the chosen one, but for ties to 1e-4 of a gap."""
    values = decades(numel, signed).to(use(implementation))
    moment = quantized(values, signed)
    scales = moment.scales.double().repeat_interleave(256)[:numel].cpu()
    book = torch.tensor(state8.code_book(signed).values, dtype=torch.float64)[:255]
    x = values.cpu().double() / scales
    distances = (x[:, None] - book).abs()
    chosen = distances.gather(1, moment.codes.cpu().long()[:, None])[:, 0]
    nearest, index = distances.min(1)
    allowed = nearest + 1e-4 * x.abs() + 1e-12
    wrong = chosen > allowed
    if not signed:
        wrong &= index > 0  # a value above zero never gets the code of zero
    assert not wrong.any()
    for block in range(math.ceil(numel / 256)):
        largest = values[block * 256 : (block + 1) * 256].abs().max().item()
        assert decoded(moment, signed)[block * 256 : (block + 1) * 256].abs().max().item() == pytest.approx(
            largest, rel=2e-7
        )


def test_encoding_what_was_decoded_changes_nothing(implementation):
    """So a checkpoint of decoded moments resumes with the same bits."""
    state = State(Case(50_000, bits=8), use(implementation), steps=3)
    for moment, signed in ((state.m, True), (state.v, False)):
        finite = moment.scales.isfinite()
        again = quantized(decoded(moment, signed), signed)
        inside = finite.repeat_interleave(256)[:50_000]
        assert inside.sum() > 40_000
        assert torch.equal(again.codes[inside], moment.codes[inside])
        torch.testing.assert_close(again.scales[finite], moment.scales[finite], rtol=1.2e-7, atol=0)


def test_noise_is_unbiased_and_differs_by_key_and_step(implementation):
    device, draws = use(implementation), 400
    gradient = decades(1024, True).to(device)
    gradient[::256], gradient[1::256] = 1.0, -1.0
    sums = torch.zeros(2, 1024, dtype=torch.float64, device=device)
    for key in range(draws):
        m, v = stored(gradient, key)
        sums += torch.stack([decoded(m, True), decoded(v, False)])
    for total, exact, signed in ((sums[0], gradient, True), (sums[1], gradient * gradient, False)):
        error = (total / draws - exact).cpu()
        scaled = exact.double().cpu().abs() / state8.code_book(signed).extreme
        book = torch.tensor(state8.code_book(signed).values, dtype=torch.float64)[127 if signed else 0 : 255]
        above = torch.searchsorted(book, scaled, right=True).clamp(max=len(book) - 1)
        gap = (book[above] - book[above - 1]) * state8.code_book(signed).extreme
        rounded = scaled > book[1] if not signed else scaled > 0  # below, a second moment is rounded up on purpose
        z = (error / gap)[rounded] * 2 * math.sqrt(draws)  # a coin's deviation is at most 1/2
        assert z.abs().max() < 5
        assert abs(z.sum().item()) / math.sqrt(rounded.sum().item()) < 4
    first, other_key = stored(gradient, 0)[0].codes, stored(gradient, 1)[0].codes
    assert 0.1 < (first != other_key).double().mean() < 0.9
    assert torch.equal(first, stored(gradient, 0)[0].codes)
    seeds = {state8.noise_seeds(key, step) for key in range(50) for step in range(50)}
    assert len(seeds) == 2500


def test_beta2_of_999_moves_every_second_moment(implementation):
    """v decays to a tenth in 2302 steps of zero gradients; with nearest rounding it would stay where it is."""
    device = use(implementation)
    m, v = stored(torch.full((512,), 1.0, device=device), 0)
    weight, zero = torch.zeros(512, device=device), torch.zeros(512, device=device)
    keep = torch.zeros(512, device=device)
    keep[::256] = 1.0  # one element per block keeps the scale
    for step in range(2, 302):
        step_scalars = AdamWStep(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=step)
        adamw_8bit(weight, None, keep if step % 2 else zero + keep, m, v, step_scalars, noise_key=3)
    others = decoded(v, False)[keep == 0]
    assert others.mean().item() == pytest.approx(0.999**300, rel=0.02)


def test_a_second_moment_above_zero_never_decodes_to_zero(implementation):
    device = use(implementation)
    gradient = torch.full((512,), 1e-9, device=device)
    gradient[::256], gradient[5] = 1.0, 0.0
    for key in range(20):
        m, v = stored(gradient, key)
        values = decoded(v, False)
        assert values[5] == 0 and decoded(m, True)[5] == 0
        assert (values[gradient != 0] > 0).all()
    state = State(Case(512, split=False, gradient=torch.float32, bits=8), device)
    before = state.weight.clone()
    for step in range(1, 30):  # m fades faster than v: no update may be larger than a few lr
        state.update(gradient if step < 3 else torch.zeros_like(gradient), step, weight_decay=0.0)
        assert (state.weight - before).abs().max() < 0.05
        before = state.weight.clone()


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_that_are_not_finite_decode_to_nan_and_only_they(implementation, signed):
    values = decades(1024, signed).to(use(implementation))
    values[10], values[300] = torch.nan, torch.inf
    result = decoded(quantized(values, signed), signed)
    assert result[:512].isnan().all() and result[512:].isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-20, 1e20, 3.3e38])
@pytest.mark.parametrize("signed", [True, False])
def test_scales_at_the_ends_of_fp32(implementation, signed, magnitude):
    values = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64).mul(magnitude).float().to(use(implementation))
    result = decoded(quantized(values, signed), signed)
    assert result[0] == 0
    half_gap = 0.45 / 64 * max(magnitude / 0.99, 1.2e-38)  # of the highest decade; a denormal scale is raised to normal
    torch.testing.assert_close(result, values, rtol=0, atol=half_gap)


def train(update, steps=300):
    """Linear regression with badly scaled features; returns the mean loss of the last 50 steps / the targets' power."""
    torch.manual_seed(0)
    features, rows = 512, 128
    truth = torch.randn(features)
    inputs = torch.randn(4 * rows, features) * torch.logspace(-1, 0, features)
    targets = inputs @ truth
    weight = torch.zeros(features)
    losses = []
    for step in range(1, steps + 1):
        batch = torch.arange(rows) + rows * (step % 4)
        error = inputs[batch] @ weight - targets[batch]
        losses.append(error.square().mean().item())
        update(weight, inputs[batch].T @ error * (2 / rows), step)
    return sum(losses[-50:]) / 50 / targets.square().mean().item()


def test_regression_converges_as_with_fp32_states_and_as_with_bitsandbytes(implementation):
    use(implementation)
    hyper = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    m, v = torch.zeros(512), torch.zeros(512)
    fp32 = train(lambda w, g, step: adamw_fp32(w, None, g, m, v, AdamWStep(**hyper, step=step)))
    m8, v8 = (Moment8.zeros(512, signed=signed) for signed in (True, False))
    ours = train(lambda w, g, step: adamw_8bit(w, None, g, m8, v8, AdamWStep(**hyper, step=step), noise_key=1))

    parameter = torch.nn.Parameter(torch.zeros(512))
    optimizer = bitsandbytes.optim.AdamW8bit(
        [parameter], lr=0.02, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, min_8bit_size=1
    )

    def bitsandbytes_update(weight, gradient, step):
        parameter.grad = gradient.clone()
        optimizer.step()
        weight.copy_(parameter.detach())

    theirs = train(bitsandbytes_update)
    assert fp32 < 0.05  # the problem is being solved
    assert ours < 1.15 * fp32 + 1e-3
    assert ours < 1.15 * theirs + 1e-3


def test_wrong_tensors_are_refused():
    moment = Moment8.zeros(300, signed=True)
    with pytest.raises(KernelError, match="codes"):
        quantize_moment(torch.zeros(301), moment, signed=True)
    with pytest.raises(KernelError, match="scales"):
        dequantize_moment(Moment8(moment.codes, moment.scales[:1]), torch.zeros(300), signed=True)
    assert native.PLAIN_TORCH in native.available_isas()
