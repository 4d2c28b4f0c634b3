"""Run by test_triton_adamw.py with TRITON_INTERPRET=1: the Triton kernels on CPU tensors give the CPU kernels' bits."""

import torch
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor, scope):
    """Triton 3.6 turns one-element arrays into loop bounds with int(array), which numpy 2.4 no longer does."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_for_numpy

from lazytrain_plugin.kernels import adamw, native, norm  # noqa: E402
from lazytrain_plugin.kernels.triton import adamw as triton_adamw  # noqa: E402
from lazytrain_plugin.kernels.triton import norm as triton_norm  # noqa: E402
from lazytrain_plugin.kernels.triton import tables  # noqa: E402
from tests.kernels.adamw_cases import Case, State, assert_same_bits, gradients  # noqa: E402

CASES = [
    Case(1),
    Case(1025),
    Case(700, split=False, gradient=torch.float32, decoupled=False, maximize=True, beta1=0.3),
    Case(1, bits=8),
    Case(2500, bits=8),
    Case(700, split=False, gradient=torch.float32, decoupled=False, beta1=0.3, bits=8, first_index=2**32 - 256),
]


if __name__ == "__main__":
    for case in CASES:
        adamw._implementation = lambda device: native
        expected = State(case, torch.device("cpu"), steps=3)
        adamw._implementation = lambda device: triton_adamw
        assert_same_bits(State(case, torch.device("cpu"), steps=3), expected)
    batch, cases = adamw.Batch(), [*CASES, *[Case(1 + index, bits=8) for index in range(triton_adamw.MAX_ROWS + 2)]]
    together = [State(case, torch.device("cpu")) for case in cases]
    made = [gradients(case.numel, 1, case.gradient)[0] for case in cases]
    for state, gradient in zip(together, made, strict=True):
        state.update(gradient, 1, batch)
    batch.run()
    adamw._implementation = lambda device: native
    for case, state in zip(cases, together, strict=True):
        assert_same_bits(state, State(case, torch.device("cpu"), steps=1))
    # More than a launch takes, of two kinds, one of them empty.
    sizes = [5000, 300_007, 0, 16 * 1024, *range(1, 2 * triton_norm.MAX_ROWS)]
    made = [torch.randn(numel).to((torch.bfloat16, torch.float32)[numel % 3 == 0]) for numel in sizes]
    expected, ours = torch.full((2, len(made), norm.LANES), torch.nan, dtype=torch.float64)
    batch = adamw.Batch()
    for values, lanes, ours_lanes in zip(made, expected, ours, strict=True):
        norm.sum_squares_lanes(values, lanes)
        triton_norm.sum_squares(values, ours_lanes, batch)
    batch.run()
    assert torch.equal(ours, expected)
    squares = torch.empty(len(made), dtype=torch.float64)
    triton_norm.combine_lanes(expected, squares)
    assert torch.equal(squares, norm.combine_lanes(expected))
    host, arrived = torch.arange(tables.TABLE_NUMEL) + 2**40, torch.zeros(tables.TABLE_NUMEL, dtype=torch.int64)
    tables.copy_table_kernel[(1,)](host, arrived, 700, BLOCK=tables.TABLE_NUMEL)
    assert torch.equal(arrived[:700], host[:700]) and not arrived[700:].any()
    print("same bits")
