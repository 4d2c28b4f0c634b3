"""Run by test_triton_adamw.py: compiles the update and norm kernels for an H100/H200 and looks for fused operations."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lazytrain_plugin.kernels.reference import LANES, PARTS
from lazytrain_plugin.kernels.triton import adamw, norm

FLOATS = {
    "gradient_scale", "l2", "decay", "lerp_weight", "beta2", "one_minus_beta2", "inv_sqrt_bias2", "eps",
    "minus_step_size", "signed_top", "signed_extreme", "unsigned_top", "unsigned_extreme",
}  # fmt: skip


def compile_kernel(kernel, pointers, **constants):
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name in FLOATS else "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    ptx = compiled.asm["ptx"]
    for forbidden in (r"fma\.rn\.f32", r"\.ftz", r"div\.full", r"div\.approx", r"sqrt\.approx"):
        assert not re.search(forbidden, ptx), (kernel.__name__, forbidden)
    assert len(compiled.asm["cubin"]) > 0
    return ptx


if __name__ == "__main__":
    for split, gradient in ((True, "*bf16"), (False, "*fp32"), (True, "*i8"), (False, "*i16")):
        weight = "*i16" if split else "*fp32"
        coded = gradient.startswith("*i")
        gradient_parts = {"gradient_ptr": gradient, "steps_ptr": "*i16" if coded else gradient}
        pointers = {"weight_ptr": weight, "remainder_ptr": weight, **gradient_parts}
        switches = {"USE_L2": not split, "LERP_FROM_GRADIENT": not split, "SPLIT": split, "CODED": coded}
        states = {"exp_avg_ptr": "*fp32", "exp_avg_sq_ptr": "*fp32"}
        ptx = compile_kernel(adamw.adamw_fp32_kernel, pointers | states, **switches, BLOCK=adamw.FP32_BLOCK)
        assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
        states = {"m_codes_ptr": "*u8", "m_scales_ptr": "*fp32", "v_codes_ptr": "*u8", "v_scales_ptr": "*fp32"}
        books = dict.fromkeys(
            ("signed_values_ptr", "signed_lines_ptr", "unsigned_values_ptr", "unsigned_lines_ptr"), "*fp32"
        )
        pointers |= states | books
        compile_kernel(adamw.adamw_8bit_kernel, pointers, **switches, BLOCKS=adamw.BLOCKS_PER_PROGRAM)
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
