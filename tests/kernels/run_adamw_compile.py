"""Run by test_triton_adamw.py: compiles the update and norm kernels for an H100/H200 and looks for fused operations."""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lazytrain_plugin.kernels.reference import LANES, PARTS
from lazytrain_plugin.kernels.triton import adamw, norm, tables

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
    for kind, coded in (("bfloat16", False), ("float32", False), ("int8", True), ("int16", True)):
        ptx = compile_kernel(
            norm.sum_squares_parts_kernel,
            {"table_ptr": "*i64", "parts_ptr": "*fp64"},
            GRADIENT=getattr(tl, kind),
            CODED=coded,
            ALIGNED=True,
            NUM_LANES=LANES,
            NUM_PARTS=PARTS,
            BLOCK=norm.LANES_PER_PROGRAM,
            ROWS=norm.ROWS_IN_FLIGHT,
            MAX_ROWS=norm.MAX_ROWS,
        )
        assert kind.startswith("int") or re.search(r"ld\.global\S*\.v", ptx), "neighbours are read together"
    compile_kernel(
        norm.add_parts_kernel,
        {"table_ptr": "*i64", "parts_ptr": "*fp64"},
        num_warps=norm.FOLD_WARPS,
        NUM_LANES=LANES,
        NUM_PARTS=PARTS,
        PROGRAMS_PER_PART=norm.PROGRAMS_PER_PART,
        BLOCK=norm.FOLD_LANES,
        IN_FLIGHT=norm.PARTS_IN_FLIGHT,
    )
    pointers = {"lanes_ptr": "*fp64", "squares_ptr": "*fp64"}
    compile_kernel(norm.combine_lanes_kernel, pointers, NUM_LANES=LANES, HALVINGS=LANES.bit_length() - 1)
    pointers = {"host_ptr": "*i64", "table_ptr": "*i64"}
    compile_kernel(tables.copy_table_kernel, pointers, BLOCK=tables.TABLE_NUMEL)
    print("all kernels compile")
