"""Run by test_coded_elementwise.py: compiles the kernels for an H100/H200 (sm_90) without a GPU."""

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels.triton import coded_elementwise as kernels
from lazytrain_plugin.kernels.triton.blockwise import BLOCKS_PER_PROGRAM, format_constants
from lazytrain_plugin.kernels.triton.elementwise import _tile
from tests.kernels.run_triton_compile import compile_kernel

if __name__ == "__main__":
    scales = ["largest_level", "largest_scale"]
    parts = (("codes", "u8"), ("scales", "i16"))
    pairs = {f"{name}_{part}_ptr": kind for name in ("gate", "up") for part, kind in parts}
    pairs["table_ptr"] = "fp32"
    values = lambda *names: dict.fromkeys([f"{name}_ptr" for name in names], "bf16")  # noqa: E731
    for form in map(blockwise.block_format, blockwise.LOW_BIT_FORMATS):
        constants = {**format_constants(form), "BLOCKS": BLOCKS_PER_PROGRAM}
        forward = values("gate", "up", "y") | pairs
        compile_kernel(kernels.swiglu_quantize_kernel, forward, ["numel"], scales, **constants)
        compile_kernel(kernels.swiglu_decoded_kernel, values("y") | pairs, ["numel"], **constants)
        backward = values("dy", "dgate", "dup") | pairs
        compile_kernel(kernels.swiglu_backward_decoded_kernel, backward, ["numel"], **constants)
    for columns in (128, 3584, 8192):
        rows, padded, num_warps = _tile(columns)
        pointers = values("x", "weight", "y") | {"rstd_ptr": "fp32", "codes_ptr": "u8", "scales_ptr": "i16"}
        compile_kernel(
            kernels.rms_norm_quantize_kernel,
            pointers | {"table_ptr": "fp32"},
            ["num_rows", "num_columns"],
            ["eps", *scales],
            num_warps=num_warps,
            CAST_BEFORE_WEIGHT=True,
            UNIT_OFFSET=False,
            ROWS=rows,
            COLUMNS=padded,
            **format_constants(blockwise.block_format("fp4")),
        )
    print("all kernels compile")
