"""Run by test_triton_adamw.py: compiles the update and norm kernels for an H100/H200 and looks for fused operations."""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lazytrain_plugin.kernels.reference import LANES, PARTS
from lazytrain_plugin.kernels.triton import adamw, norm

FLOATS = {
    "gradient_scale", "l2", "decay", "lerp_weight", "beta2", "one_minus_beta2", "inv_sqrt_bias2", "eps",
    "minus_step_size", "signed_top", "signed_extreme", "unsigned_top", "unsigned_extreme",
}  # fmt: skip


def compile_kernel(kernel, pointers, num_warps=4, **constants):
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name in FLOATS else "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False, "num_warps": num_warps}
    )
    ptx = compiled.asm["ptx"]
    for forbidden in (r"fma\.rn\.f32", r"\.ftz", r"div\.full", r"div\.approx", r"sqrt\.approx"):
        assert not re.search(forbidden, ptx), (kernel.__name__, forbidden)
    assert len(compiled.asm["cubin"]) > 0
    return ptx


if __name__ == "__main__":
    for split, gradient in ((True, "bfloat16"), (False, "float32"), (True, "int8"), (False, "int16")):
        switches = {"WEIGHT": tl.int16 if split else tl.float32, "GRADIENT": getattr(tl, gradient)}
        switches |= {"USE_L2": not split, "LERP_FROM_GRADIENT": not split, "SPLIT": split}
        switches |= {"CODED": gradient.startswith("int"), "ALIGNED": True, "MAX_ROWS": adamw.MAX_ROWS}
        ptx = compile_kernel(adamw.adamw_fp32_kernel, {"table_ptr": "*i64"}, **switches, BLOCK=adamw.FP32_BLOCK)
        assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx and re.search(r"ld\.global\S*\.v4", ptx)
        books = ("signed_values_ptr", "signed_lines_ptr", "unsigned_values_ptr", "unsigned_lines_ptr")
        pointers = {"table_ptr": "*i64"} | dict.fromkeys(books, "*fp32")
        blocks = {"BLOCKS": adamw.BLOCKS_PER_PROGRAM, "num_warps": adamw.WARPS}
        ptx = compile_kernel(adamw.adamw_8bit_kernel, pointers, **switches, **blocks)
        assert re.search(r"ld\.global\S*\.v", ptx), "neighbours are read together"
    for kind, coded in (("*bf16", False), ("*fp32", False), ("*i8", True), ("*i16", True)):
        compile_kernel(
            norm.sum_squares_parts_kernel,
            {"values_ptr": kind, "steps_ptr": "*i16" if coded else kind, "parts_ptr": "*fp64"},
            CODED=coded,
            NUM_LANES=LANES,
            NUM_PARTS=PARTS,
            BLOCK=norm.LANES_PER_PROGRAM,
            ROWS=norm.ROWS_IN_FLIGHT,
        )
    pointers = {"parts_ptr": "*fp64", "lanes_ptr": "*fp64"}
    compile_kernel(norm.add_parts_kernel, pointers, NUM_LANES=LANES, BLOCK=norm.FOLD_LANES)
    print("all kernels compile")
