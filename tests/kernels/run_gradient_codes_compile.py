"""Run by test_gradient_codes.py: compiles the gradient code kernels for an H100/H200 (sm_90) without a GPU."""

from lazytrain_plugin.kernels.triton import gradient_codes
from tests.kernels.run_triton_compile import compile_kernel

if __name__ == "__main__":
    shared = {"NUM": gradient_codes.BLOCKS, "num_warps": gradient_codes.NUM_WARPS}
    for bits in (8, 10):
        for dtype in ("fp32", "bf16", "fp16"):
            pointers = {"values_ptr": dtype, "rows_ptr": "u8", "steps_ptr": "i16"}
            sizes, floats = ["numel", "blocks", "row_bytes"], ["inverse_of_largest", "largest_code"]
            compile_kernel(gradient_codes.encode_kernel, pointers, sizes, floats, BITS=bits, **shared)
            compile_kernel(gradient_codes.decode_kernel, pointers, sizes, BITS=bits, **shared)
        pointers = {"values_ptr": "fp32", "rows_ptr": "u8", "steps_ptr": "i16"}
        sizes = ["num_rows", "blocks", "row_bytes"]
        compile_kernel(gradient_codes.decode_mean_kernel, pointers, sizes, ["divisor"], BITS=bits, **shared)
    print("all kernels compile")
