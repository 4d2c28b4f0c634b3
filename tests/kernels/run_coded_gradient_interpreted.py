"""Run by test_coded_gradient.py with TRITON_INTERPRET=1: the Triton kernels give the CPU kernels' bits."""

import torch

from lazytrain_plugin.kernels import coded_gradient, native, norm
from lazytrain_plugin.kernels.triton import coded_gradient as triton_coded
from lazytrain_plugin.kernels.triton import norm as triton_norm
from tests.kernels.gradient_code_cases import awkward_values
from tests.kernels.run_triton_interpreted import interpreter  # noqa: F401  (patches it for numpy 2.4)
from tests.kernels.test_coded_gradient import added, assert_same_codes, encoded

if __name__ == "__main__":
    for numel in (1, 64, 65, 700, 64 * 19 + 3):
        values = awkward_values(max(numel, 700), seed=numel)[:numel]
        for bits in (8, 16):
            coded_gradient._implementation = lambda device: native
            expected = encoded(values, bits)
            decoded = torch.empty(numel)
            coded_gradient.decode_gradient(expected, decoded)
            coded_gradient._implementation = lambda device: triton_coded
            assert_same_codes(encoded(values, bits), expected)
            ours = torch.empty(numel)
            coded_gradient.decode_gradient(expected, ours)
            torch.testing.assert_close(ours, decoded, rtol=0, atol=0, equal_nan=True)
            lanes, ours = torch.empty(2, norm.LANES, dtype=torch.float64)
            finite = encoded(values.nan_to_num(0.0, 1.0, -1.0), bits)
            norm.sum_squares_lanes(finite, lanes)
            triton_norm.sum_squares(finite, ours)
            assert torch.equal(ours, lanes)
        arrivals = [values, values.roll(3) * 0.3, -values]
        coded_gradient._implementation = lambda device: native
        expected = added(arrivals)
        coded_gradient._implementation = lambda device: triton_coded
        assert_same_codes(added(arrivals), expected)
    print("same bits")
