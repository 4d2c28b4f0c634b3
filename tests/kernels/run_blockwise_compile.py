"""Run by test_triton_blockwise.py: compiles the block kernels for an H100/H200 (sm_90) without a GPU."""

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.triton import blockwise as kernels
from tests.kernels.run_triton_compile import compile_kernel

if __name__ == "__main__":
    quantized = {"codes_ptr": "u8", "scales_ptr": "i16", "table_ptr": "fp32"}
    for form in map(blockwise.block_format, blockwise.LOW_BIT_FORMATS):
        constants = kernels.format_constants(form)
        for stochastic, accumulate in ((False, False), (form.is_integer, True)):
            compile_kernel(
                kernels.quantize_kernel,
                {"x_ptr": "bf16", **quantized},
                ["numel", "seed0", "seed1"],
                ["largest_level", "largest_scale"],
                STOCHASTIC=stochastic,
                ACCUMULATE=accumulate,
                BLOCKS=kernels.BLOCKS_PER_PROGRAM,
                **constants,
            )
        for dtype in ("bf16", "fp16"):
            compile_kernel(
                kernels.dequantize_kernel,
                {"out_ptr": dtype, **quantized},
                ["numel"],
                BLOCKS=kernels.BLOCKS_PER_PROGRAM,
                **constants,
            )
    print("all kernels compile")
