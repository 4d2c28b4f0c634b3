"""Run by test_coded_gradient.py: compiles the kernels of stored gradient codes for an H100/H200 without a GPU."""

from lazytrain_plugin.kernels.triton import coded_gradient, gradient_codes
from tests.kernels.run_triton_compile import compile_kernel

if __name__ == "__main__":
    shared = {"NUM": gradient_codes.BLOCKS, "num_warps": gradient_codes.NUM_WARPS}
    floats = ["inverse_of_largest", "largest_code"]
    for codes in ("i8", "i16"):
        parts = {"codes_ptr": codes, "steps_ptr": "i16"}
        for dtype in ("fp32", "bf16"):
            pointers = {"values_ptr": dtype, **parts}
            compile_kernel(coded_gradient.encode_kernel, pointers, ["numel", "blocks"], floats, **shared)
        compile_kernel(coded_gradient.decode_kernel, {**parts, "values_ptr": "fp32"}, ["numel"], **shared)
    for first in (True, False):
        pointers = {**parts, "arrived_ptr": "i8", "arrived_steps_ptr": "i16"}
        compile_kernel(coded_gradient.add_codes_kernel, pointers, ["numel", "blocks"], floats, FIRST=first, **shared)
    print("all kernels compile")
