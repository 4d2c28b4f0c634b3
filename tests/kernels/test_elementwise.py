"""RMSNorm, SwiGLU and RoPE as single nodes against the eager formulas, with fp64 as the oracle."""

import pytest
import torch

from lazytrain_plugin.kernels.elementwise import NormRounding, rms_norm, rope, swiglu

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def eager_rms_norm(x, weight, rounding):
    x32 = x.double() if x.dtype == torch.float64 else x.float()
    normalised = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    if rounding is NormRounding.BEFORE_WEIGHT:
        return weight * normalised.to(x.dtype)
    if rounding is NormRounding.AFTER_WEIGHT:
        return (weight * normalised).to(x.dtype)
    return (normalised * (1.0 + weight.to(x32.dtype))).to(x.dtype)


def eager_swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


def eager_rope(q, k, cos, sin):
    def rotate_half(x):
        low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-high, low), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def run(function, leaves, upstream, dtype):
    """Outputs and gradients of `function` on copies of `leaves` in `dtype`."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in leaves]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [g.to(dtype) for g in upstream])
    return [o.detach() for o in outputs] + [t.grad for t in leaves]


def assert_within_twice_the_eager_error(fused, eager, leaves, upstream, dtype):
    leaves = [t.to(dtype) for t in leaves]  # the oracle starts from the same, already rounded numbers
    upstream = [g.to(dtype) for g in upstream]
    exact = run(eager, leaves, upstream, torch.float64)
    for ours, theirs, oracle in zip(
        run(fused, leaves, upstream, dtype), run(eager, leaves, upstream, dtype), exact, strict=True
    ):
        assert ours.dtype == dtype and ours.shape == oracle.shape
        scale = oracle.norm().item() + 1e-30
        error, allowed = (
            (ours.double() - oracle).norm().item() / scale,
            (theirs.double() - oracle).norm().item() / scale,
        )
        assert error <= max(2 * allowed, 5e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", NormRounding)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 48), (2, 7, 3, 8), (1100, 129)])
def test_rms_norm(device, dtype, rounding, shape):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    weight = (0.5 * torch.randn(shape[-1], generator=generator) + 1).to(device)
    assert_within_twice_the_eager_error(
        lambda x, w: rms_norm(x, w, EPS, rounding),
        lambda x, w: eager_rms_norm(x, w, rounding),
        [3 * x, weight],
        [dy],
        dtype,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (129, 257)])
def test_swiglu(device, dtype, shape):
    generator = torch.Generator().manual_seed(0)
    gate, up, dy = (2 * torch.randn(shape, generator=generator).to(device) for _ in range(3))
    assert_within_twice_the_eager_error(swiglu, eager_swiglu, [gate, up], [dy], dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_swiglu_at_the_ends_of_the_sigmoid(device):
    gate = torch.tensor([-200.0, -90.0, -1e-30, 0.0, 90.0, 200.0], device=device, requires_grad=True)
    y = swiglu(gate, torch.ones_like(gate))
    y.sum().backward()
    expected = gate.detach().double().requires_grad_()
    torch.nn.functional.silu(expected).sum().backward()
    torch.testing.assert_close(gate.grad.double(), expected.grad, rtol=1e-6, atol=1e-12)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "width", "table_rows"), [(4, 2, 8, 1), (3, 1, 10, 2), (7, 7, 2, 2)])
def test_rope(device, dtype, heads, key_heads, width, table_rows):
    """Rotations don't all share an angle in their two halves here: a formula that assumes it would show."""
    generator = torch.Generator().manual_seed(0)
    tokens, batch = 5, 2

    def projected(num_heads):  # as attention makes them: a transposed view of [batch, tokens, heads, width]
        return torch.randn(batch, tokens, num_heads, width, generator=generator).to(device).transpose(1, 2)

    cos, sin = (torch.randn(table_rows, tokens, width, generator=generator).to(device, dtype) for _ in range(2))

    def with_tables(function):
        return lambda q, k: function(q, k, cos.to(q.dtype), sin.to(q.dtype))

    leaves, upstream = [projected(heads), projected(key_heads)], [projected(heads), projected(key_heads)]
    assert_within_twice_the_eager_error(with_tables(rope), with_tables(eager_rope), leaves, upstream, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_rope_takes_any_strides_and_expanded_gradients(device):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 3, 5, 16, generator=generator).to(device)
    cos, sin = (torch.randn(1, 5, 8, generator=generator).to(device) for _ in range(2))
    q, k = wide[..., :8].requires_grad_(), wide[..., ::2].detach().requires_grad_()  # last stride 1 and 2
    ours, theirs = rope(q, k, cos, sin), eager_rope(q, k, cos, sin)
    torch.testing.assert_close(ours, theirs)
    ones = [torch.ones((), device=device).expand(t.shape) for t in ours]
    for a, b in zip(torch.autograd.grad(ours, (q, k), ones), torch.autograd.grad(theirs, (q, k), ones), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_gradients_and_saved_tensors_keep_their_values(device):
    """What Liger-style in-place backwards break: a second backward, or another user of the same gradient."""
    generator = torch.Generator().manual_seed(0)
    x, up, dy = (torch.randn(4, 6, generator=generator).to(device).requires_grad_() for _ in range(3))
    weight = torch.randn(6, generator=generator).to(device).requires_grad_()
    y = swiglu(rms_norm(x, weight, EPS, NormRounding.BEFORE_WEIGHT), up)
    copies = [t.detach().clone() for t in (x, up, dy, weight)]
    first = torch.autograd.grad(y, (x, up, weight), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, up, weight), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(t, c) for t, c in zip((x, up, dy, weight), copies, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_frozen_norm_weight_gets_no_gradient(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device)
    rms_norm(x, weight, EPS, NormRounding.BEFORE_WEIGHT).sum().backward()
    assert weight.grad is None and x.grad is not None
