"""The chunked loss against torch's own on whole logits, with fp64 as the oracle."""

import pytest
import torch
from torch.nn import functional as F

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels import cross_entropy
from lazytrain_plugin.kernels.cross_entropy import CHUNK_TOKENS, linear_cross_entropy

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
IGNORED = -100


def make(device, dtype, *, tokens, hidden_size, classes, bias=False, seed=0, ignore_every=5):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    weight = torch.randn(classes, hidden_size, generator=generator) / hidden_size**0.5 * 3
    bias = torch.randn(classes, generator=generator) if bias else None
    targets = torch.randint(0, classes, (tokens,), generator=generator)
    if ignore_every:
        targets[::ignore_every] = IGNORED
    leaves = [None if t is None else t.to(device, dtype).requires_grad_() for t in (hidden, weight, bias)]
    return leaves, targets.to(device)


def plain(leaves, targets, divisor, *, double=False):
    """Hugging Face's ForCausalLMLoss after its shift; in fp64 throughout as the oracle."""
    leaves = [None if t is None else (t.detach().double() if double else t.detach()).requires_grad_() for t in leaves]
    logits = F.linear(*leaves)
    logits = logits if double else logits.float()
    if divisor is None:
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED)
    else:
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / divisor
    loss.backward()
    return loss.detach(), [None if t is None else t.grad for t in leaves]


def chunked(leaves, targets, divisor, upstream=1.0):
    leaves = [None if t is None else t.detach().requires_grad_() for t in leaves]
    loss = linear_cross_entropy(*leaves, targets, divisor=divisor)
    (loss * upstream).backward()
    return loss.detach(), [None if t is None else t.grad for t in leaves]


def error(value, oracle):
    return ((value.double() - oracle).norm() / oracle.norm().clamp_min(1e-300)).item()


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks, the last one short, from few tokens."""
    monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("divisor", [None, 321])
def test_error_is_at_most_twice_that_of_whole_logits(device, dtype, bias, divisor, small_chunks):
    leaves, targets = make(device, dtype, tokens=16 * 4 + 3, hidden_size=40, classes=1013, bias=bias)
    oracle_loss, oracle_grads = plain(leaves, targets, divisor, double=True)
    plain_loss, plain_grads = plain(leaves, targets, divisor)
    loss, grads = chunked(leaves, targets, divisor)
    assert loss.dtype == torch.float32
    assert error(loss, oracle_loss) <= max(2 * error(plain_loss, oracle_loss), 1e-6)
    for ours, theirs, exact, leaf in zip(grads, plain_grads, oracle_grads, leaves, strict=True):
        if leaf is not None:
            assert ours.dtype == dtype
            assert error(ours, exact) <= max(2 * error(theirs, exact), 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_low_precision_weight_gradient_is_summed_in_fp32(device, small_chunks):
    """With many chunks a bf16 sum would lose most of each chunk's contribution."""
    leaves, targets = make(device, torch.bfloat16, tokens=16 * 200, hidden_size=8, classes=11)
    _, (_, exact, _) = plain(leaves, targets, None, double=True)
    _, (_, ours, _) = chunked(leaves, targets, None)
    rounding_only = error(exact.bfloat16(), exact)
    assert error(ours, exact) < 4 * rounding_only


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1])
def test_sizes_around_the_chunk(device, tokens):
    leaves, targets = make(device, torch.float32, tokens=tokens, hidden_size=3, classes=7, ignore_every=None)
    expected_loss, expected = plain(leaves, targets, None, double=True)
    loss, grads = chunked(leaves, targets, None)
    assert error(loss, expected_loss) < 3e-6
    assert error(grads[0], expected[0]) < 1e-5
    assert error(grads[1], expected[1]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_counts_like_torch(device, small_chunks):
    """All targets ignored: the mean is NaN and gradients are 0, not NaN."""
    leaves, targets = make(device, torch.float32, tokens=20, hidden_size=4, classes=9)
    targets.fill_(IGNORED)
    expected_loss, expected = plain(leaves, targets, None)
    loss, grads = chunked(leaves, targets, None)
    assert torch.isnan(expected_loss) and torch.isnan(loss)
    for ours, theirs in zip(grads[:2], expected[:2], strict=True):
        assert torch.equal(ours, theirs) and not ours.any()


@pytest.mark.parametrize("device", DEVICES)
def test_incoming_gradient_scales_and_a_kept_graph_runs_twice(device, small_chunks):
    leaves, targets = make(device, torch.float32, tokens=37, hidden_size=6, classes=21)
    _, once = chunked(leaves, targets, None)
    _, scaled = chunked(leaves, targets, None, upstream=0.25)
    torch.testing.assert_close(scaled[1], once[1] * 0.25, rtol=0, atol=0)
    hidden, weight = (t.detach().requires_grad_() for t in leaves[:2])
    loss = linear_cross_entropy(hidden, weight, None, targets)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once[1], rtol=0, atol=0)
    torch.testing.assert_close(hidden.grad, 2 * once[0], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_operands_get_no_gradient_and_leave_the_others_alone(device, frozen, small_chunks):
    leaves, targets = make(device, torch.bfloat16, tokens=40, hidden_size=8, classes=33)
    _, full = chunked(leaves, targets, None)
    hidden, weight = (t.detach().requires_grad_(i != frozen) for i, t in enumerate(leaves[:2]))
    linear_cross_entropy(hidden, weight, None, targets).backward()
    assert (hidden, weight)[frozen].grad is None
    assert torch.equal((hidden, weight)[1 - frozen].grad, full[1 - frozen])
    with torch.no_grad():
        no_grad = linear_cross_entropy(hidden, weight, None, targets)
    assert torch.equal(no_grad, linear_cross_entropy(hidden, weight, None, targets).detach())


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_logits(device, small_chunks):
    """Large logits don't overflow; a class masked with -inf has probability and gradient 0."""
    leaves, targets = make(device, torch.float32, tokens=20, hidden_size=4, classes=9, bias=True)
    with torch.no_grad():
        leaves[0].mul_(1e4)
        leaves[2][0] = -float("inf")
    targets[targets == 0] = 1
    loss, grads = chunked(leaves, targets, None)
    _, expected = plain(leaves, targets, None, double=True)
    assert torch.isfinite(loss)
    assert grads[2][0] == 0
    assert error(grads[2], expected[2]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_divisor_may_be_a_tensor_of_any_kind(device, small_chunks):
    leaves, targets = make(device, torch.float32, tokens=20, hidden_size=4, classes=9)
    reference, _ = chunked(leaves, targets, 40)
    for divisor in (torch.tensor(40), torch.tensor([40.0]), torch.tensor(40, device=device)):
        assert torch.equal(chunked(leaves, targets, divisor)[0], reference)


def test_a_target_out_of_range_is_an_error_as_in_torch():
    leaves, targets = make("cpu", torch.float32, tokens=20, hidden_size=4, classes=9)
    for wrong in (9, -1):
        targets[3] = wrong
        with pytest.raises(RuntimeError, match="outside"):
            linear_cross_entropy(*leaves, targets)


def test_misfits_are_named():
    hidden, weight, targets = torch.ones(4, 3), torch.ones(5, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(KernelError, match="classes, hidden_size"):
        linear_cross_entropy(hidden, torch.ones(3, 5), None, targets)
    with pytest.raises(KernelError, match="4 rows of hidden but 3 targets"):
        linear_cross_entropy(hidden, weight, None, targets[:3])
    with pytest.raises(KernelError, match="cast"):
        linear_cross_entropy(hidden, weight.bfloat16(), None, targets)


def test_whole_logits_never_exist(monkeypatch):
    """The largest tensor made has a chunk's rows, however many tokens there are."""
    monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", 8)
    leaves, targets = make("cpu", torch.bfloat16, tokens=80, hidden_size=4, classes=503)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    with Watch():
        linear_cross_entropy(*leaves, targets).backward()
    assert largest == 8 * 503


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_on_cuda():
    """One chunk of logits, the fp32 weight gradient and its cast: less than half of the whole logits in bf16."""
    tokens, hidden_size, classes = 16 * CHUNK_TOKENS, 128, 32000
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, classes, (tokens,), device="cuda")
    linear_cross_entropy(hidden, weight, None, targets).backward()  # warm: kernels, workspaces
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, None, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before
    chunk, sums, outputs = CHUNK_TOKENS * classes * 2, weight.numel() * 6, (hidden.numel() + weight.numel()) * 2
    assert peak < chunk + sums + outputs + 64 * 2**20
