"""Run by test_gradient_codes.py with TRITON_INTERPRET=1: the Triton kernels on CPU tensors against plain torch."""

import torch

from lazytrain_plugin.kernels import gradient_codes as codes
from lazytrain_plugin.kernels.triton import gradient_codes as triton_codes
from tests.kernels.gradient_code_cases import awkward_values
from tests.kernels.run_triton_interpreted import interpreter  # noqa: F401  (patches it for numpy 2.4)

if __name__ == "__main__":
    for bits in (8, 10):
        for numel, rows, blocks in ((64 * 3 * 19, 3, 19), (1000, 2, 9), (65, 4, 1)):
            values = awkward_values(numel, seed=numel)
            theirs = torch.full((rows, codes.row_bytes(blocks, bits)), 99, dtype=torch.uint8)
            ours = theirs.clone()
            codes._encode_reference(values, bits, blocks, theirs)
            triton_codes.encode(values, bits, blocks, ours)
            assert torch.equal(ours, theirs), (bits, numel)

            expected, got = torch.empty(numel), torch.empty(numel)
            codes._decode_reference(theirs, bits, blocks, expected)
            triton_codes.decode(theirs, bits, blocks, got)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)

            expected, got = torch.empty(blocks * 64), torch.empty(blocks * 64)
            codes._decode_mean_reference(theirs, bits, blocks, 3.0, expected)
            triton_codes.decode_mean(theirs, bits, blocks, 3.0, got)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    print("all kernels agree")
