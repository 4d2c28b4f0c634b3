"""AdamW kernels: bits on every implementation, distance to fp64 and to torch.optim.AdamW, edges of memory, threads."""

import ctypes
import math
import mmap
import os
import signal
import threading

import pytest
import torch

from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels import native
from lazytrain_plugin.kernels.adamw import AdamWStep, Batch, Moment8, accumulate, adamw_8bit, adamw_fp32
from lazytrain_plugin.kernels.norm import LANES, sum_squares_lanes
from lazytrain_plugin.kernels.split import join_master, split_master
from tests.kernels.adamw_cases import Case, State, assert_same_bits, gradients
from tests.kernels.implementations import use

SIZES = [0, 1, 255, 257, 1000, 33_333]
VARIANTS = {
    "split_bf16": {},
    "fp32_weights": {"split": False, "gradient": torch.float32},
    "l2_maximize": {"decoupled": False, "maximize": True},
    "small_beta1": {"beta1": 0.3, "gradient": torch.float32},
    "fp32_weights_bf16_gradients_l2": {"split": False, "decoupled": False},
}


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("numel", SIZES)
def test_same_bits_as_plain_torch(kernel, numel, variant, bits):
    case = Case(numel, bits=bits, **VARIANTS[variant])
    ours = State(case, use(kernel), steps=4)
    assert_same_bits(ours, State(case, use(native.PLAIN_TORCH), steps=4))


def test_tensors_of_all_kinds_in_one_batch(kernel):
    """More than a launch takes, of every format, aligned and not, each with hyper-parameters of its own."""
    device = use(kernel)
    kinds = [Case(numel, bits=bits, **fields) for numel in SIZES for bits in (32, 8) for fields in VARIANTS.values()]
    cases = kinds + [Case(256 + 16 * index, bits=8) for index in range(70)]
    alone, together = ([State(case, device) for case in cases] for _ in range(2))
    made = [[gradient.to(device) for gradient in gradients(case.numel, 2, case.gradient)] for case in cases]
    for step in (1, 2):
        batch = Batch()
        for index, (one, other) in enumerate(zip(alone, together, strict=True)):
            own = {"lr": 1e-3 * (1 + index), "weight_decay": 0.1 * (index % 3)}
            one.update(made[index][step - 1], step, **own)
            other.update(made[index][step - 1], step, batch, **own)
        batch.run()
    for one, other in zip(alone, together, strict=True):
        assert_same_bits(other, one)


def test_same_bits_on_a_million_elements_with_any_thread_count(isa, threads):
    for bits in (32, 8):
        case = Case(1_000_003, bits=bits)
        threads(1)
        expected = State(case, use(isa), steps=2)
        for count in (2, 3, 4, 5):
            threads(count)
            assert_same_bits(State(case, use(isa), steps=2), expected)


def ulp(x: torch.Tensor) -> torch.Tensor:
    x = x.abs().to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    return (torch.nextafter(x, torch.full_like(x, math.inf)) - x).to(torch.float64)


HYPER = [
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    {"lr": 1e-1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.5},
    {"lr": 1e-3, "beta1": 0.4, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 1e-2, "beta1": 0.0, "beta2": 0.999, "eps": 1e-15, "weight_decay": 0.0},
]


@pytest.mark.parametrize("oracle", ["torch", "fp64"])
@pytest.mark.parametrize("hyper", HYPER, ids=range(len(HYPER)))
def test_every_step_is_within_a_few_ulp_of_torch_and_of_fp64(implementation, hyper, oracle):
    """From the same state each step: moments within 2 ulp (3 of fp64), weights within 6, of the largest operand."""
    device, numel = use(implementation), 50_001
    torch.manual_seed(2)
    parameter = torch.nn.Parameter(torch.randn(numel) * 10 ** (torch.rand(numel) * 4 - 3))
    lr, beta1, beta2, eps, decay = hyper.values()
    optimizer = torch.optim.AdamW(
        [parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, foreach=False, fused=False
    )
    m = v = torch.zeros(numel)
    for step in range(1, 5):
        gradient = torch.randn(numel) * 10 ** (torch.rand(numel) * 6 - 6)
        before = parameter.detach().clone()
        ours = [t.to(device, copy=True) for t in (before, m, v)]
        adamw_fp32(ours[0], None, gradient.to(device), ours[1], ours[2], AdamWStep(**hyper, step=step))
        ours = [t.cpu().double() for t in ours]

        g = gradient.double()
        exact_m = m.double() * beta1 + (1 - beta1) * g
        exact_v = v.double() * beta2 + (1 - beta2) * g * g
        denominator = exact_v.sqrt() / math.sqrt(1 - beta2**step) + eps
        step_size = lr / (1 - beta1**step)
        exact = [before.double() * (1 - lr * decay) - step_size * exact_m / denominator, exact_m, exact_v]
        largest_m = torch.maximum(m.abs(), gradient.abs())  # m may cancel, its operands do not
        units = [
            ulp(torch.maximum(before.abs().double(), step_size * largest_m / denominator)),
            ulp(largest_m),
            ulp(exact_v),
        ]
        parameter.grad = gradient
        optimizer.step()
        state = optimizer.state[parameter]
        m, v = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
        theirs = exact if oracle == "fp64" else [parameter.detach().double(), m.double(), v.double()]
        bounds = (6, 2, 3 if oracle == "fp64" else 2)
        for name, a, b, unit, bound in zip("pmv", ours, theirs, units, bounds, strict=True):
            assert ((a - b).abs() / unit).max() <= bound, name


def test_adam_with_l2_and_maximize_follow_torch(implementation):
    device, numel = use(implementation), 1001
    torch.manual_seed(3)
    parameter = torch.nn.Parameter(torch.randn(numel))
    optimizer = torch.optim.Adam([parameter], lr=1e-2, weight_decay=0.1, maximize=True, foreach=False)
    weight = parameter.detach().to(device, copy=True)
    m, v = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    for step in range(1, 6):
        parameter.grad = torch.randn(numel)
        scaled = (parameter.grad * 4).to(device)
        hyper = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": step}
        adamw_fp32(weight, None, scaled, m, v, AdamWStep(**hyper, decoupled=False, maximize=True, gradient_scale=0.25))
        optimizer.step()
    torch.testing.assert_close(weight.cpu(), parameter.detach(), rtol=1e-6, atol=1e-6)


def test_infinite_and_nan_gradients_reach_weight_and_moments(implementation):
    device = use(implementation)
    state = State(Case(300, gradient=torch.float32), device, steps=1)
    gradient = torch.ones(300, device=device)
    gradient[7], gradient[8] = torch.inf, torch.nan
    before = state.weight.clone()
    state.update(gradient, 2)
    assert state.weight[[7, 8]].isnan().all() and state.m[8].isnan() and state.v[7].isinf()
    others = torch.ones(300, dtype=torch.bool, device=device)
    others[[7, 8, 11, 12, 13]] = False  # 11 to 13 are the case's own
    assert state.weight[others].isfinite().all() and not torch.equal(state.weight[others], before[others])
    master = torch.empty(300, device=device)
    join_master(state.weight, state.remainder, master)
    assert master[[7, 8]].isnan().all()


def test_denormals_stay_when_the_process_flushes_them(isa):
    """torch.set_flush_denormal sets a mode of the calling thread; the update's bits must not depend on it."""
    case = Case(5000, split=False, gradient=torch.float32)
    expected = State(case, torch.device("cpu"))
    flushed = State(case, torch.device("cpu"))
    gradient = torch.full((5000,), 1e-41)
    expected.update(gradient, 1)
    assert torch.set_flush_denormal(True)
    try:
        flushed.update(gradient, 1)
        mode_kept = torch.tensor([1e-41]).add(0).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert mode_kept
    assert_same_bits(flushed, expected)
    assert (expected.m > 0).all()


def at_page_end(values: torch.Tensor, keep: list) -> torch.Tensor:
    """A copy of `values` that ends where an inaccessible page begins: one byte further is a segmentation fault."""
    num_bytes = values.numel() * values.element_size()
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    keep.append(memory)
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=size - num_bytes)
    return copy.copy_(values)


@pytest.mark.parametrize("numel", [1, 7, 255, 257, 4099])
def test_nothing_is_touched_behind_the_end(isa, numel):
    keep: list = []
    for case in (Case(numel), Case(numel, split=False, gradient=torch.float32), Case(numel, bits=8)):
        guarded, expected = State(case, torch.device("cpu")), State(case, torch.device("cpu"), steps=3)
        guarded.weight = at_page_end(guarded.weight, keep)
        if guarded.remainder is not None:
            guarded.remainder = at_page_end(guarded.remainder, keep)
        if case.bits == 32:
            guarded.m, guarded.v = at_page_end(guarded.m, keep), at_page_end(guarded.v, keep)
        else:
            guarded.m = Moment8(at_page_end(guarded.m.codes, keep), at_page_end(guarded.m.scales, keep))
            guarded.v = Moment8(at_page_end(guarded.v.codes, keep), at_page_end(guarded.v.scales, keep))
        for step, gradient in enumerate(gradients(numel, 3, case.gradient)):
            guarded.update(at_page_end(gradient, keep), step + 1)
        assert_same_bits(guarded, expected)

    values = torch.randn(numel)
    for dtype in (torch.bfloat16, torch.float32):
        gradient = at_page_end(values.to(dtype), keep)
        total = at_page_end(torch.ones(numel), keep)
        accumulate(total, gradient, first=False)
        assert torch.equal(total, 1 + values.to(dtype).float())
        sum_squares_lanes(gradient, at_page_end(torch.empty(LANES, dtype=torch.float64), keep))
    weight, remainder = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    weight, remainder = at_page_end(weight, keep), at_page_end(remainder, keep)
    split_master(at_page_end(values, keep), weight, remainder)
    joined = at_page_end(torch.empty(numel), keep)
    join_master(weight, remainder, joined)
    assert torch.equal(joined, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", SIZES)
def test_accumulate(implementation, numel, dtype):
    device = use(implementation)
    first, second = (g.to(device) for g in gradients(numel, 3, dtype)[:2])
    total = torch.full((numel,), torch.nan, device=device)
    accumulate(total, first, first=True)
    assert torch.equal(total, first.float())
    accumulate(total, second, first=False)
    assert torch.equal(total, first.float() + second.float())


def test_calls_from_several_threads_and_a_forked_child(isa, threads):
    threads(3)
    case = Case(200_001)
    expected = State(case, torch.device("cpu"), steps=3)
    states = [State(case, torch.device("cpu")) for _ in range(4)]
    made = gradients(case.numel, 3, case.gradient)

    def train(state):
        for step, gradient in enumerate(made):
            state.update(gradient, step + 1)

    workers = [threading.Thread(target=train, args=(state,)) for state in states]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for state in states:
        assert_same_bits(state, expected)

    state, gradient = State(case, torch.device("cpu")), torch.zeros(case.numel, dtype=case.gradient)
    child = os.fork()  # as a DataLoader does; the pool's threads don't exist there
    if child == 0:
        signal.alarm(60)
        try:
            state.update(gradient, 1)
            state.update(gradient, 2)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_slices_of_a_parameter_get_the_noise_of_the_whole(implementation):
    device = use(implementation)
    for first_index in (0, 2**32 - 512):  # the index of an element may pass 32 bits within a call
        case = Case(2000, bits=8, first_index=first_index)
        whole, parts = State(case, device), State(case, device)
        for step, gradient in enumerate(gradients(2000, 3, case.gradient)):
            gradient = gradient.to(device)
            whole.update(gradient, step + 1)
            for begin, end in ((0, 768), (768, 2000)):
                s, blocks = slice(begin, end), slice(begin // 256, -(-end // 256))
                adamw_8bit(
                    parts.weight[s],
                    parts.remainder[s],
                    gradient[s],
                    Moment8(parts.m.codes[s], parts.m.scales[blocks]),
                    Moment8(parts.v.codes[s], parts.v.scales[blocks]),
                    AdamWStep(
                        lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=step + 1, gradient_scale=0.7
                    ),
                    noise_key=17,
                    first_index=first_index + begin,
                )
        assert_same_bits(parts, whole)


def test_wrong_arguments_are_refused_with_a_remedy(device):
    case = Case(512, gradient=torch.float32)
    state = State(case, device)
    gradient = torch.ones(512, device=device)
    step = AdamWStep(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1)
    good = {"weight": state.weight, "remainder": state.remainder, "gradient": gradient}
    good |= {"exp_avg": state.m, "exp_avg_sq": state.v, "step": step}
    bad = {
        "gradient": [gradient.half(), gradient[:-1], torch.ones(1024, device=device)[::2], gradient.view(2, 256)],
        "remainder": [None, state.remainder.int()],
        "exp_avg": [state.m.double(), state.m.to("meta")],
        "step": [AdamWStep(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=0)],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(KernelError, match=r"\. [A-Z]"):
                adamw_fp32(**{**good, name: value})
    moments = Moment8.zeros(512, signed=True, device=device), Moment8.zeros(512, signed=False, device=device)
    with pytest.raises(KernelError, match="multiple of 256"):
        adamw_8bit(state.weight, state.remainder, gradient, *moments, step, noise_key=0, first_index=100)
    with pytest.raises(KernelError, match="scales"):
        adamw_8bit(
            state.weight, state.remainder, gradient, Moment8(moments[0].codes, moments[0].scales[:1]), moments[1], step,
            noise_key=0,
        )  # fmt: skip
