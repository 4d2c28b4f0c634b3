"""Run by test_triton_fused.py: compiles every kernel for an H100/H200 (sm_90) without a GPU."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lazytrain_plugin.kernels.triton import cross_entropy, elementwise

TARGET = GPUTarget("cuda", 90, 32)


def compile_kernel(kernel, pointers, integers, floats=(), num_warps=4, **constants):
    """`pointers`: argument name -> element type."""
    signature = dict.fromkeys(constants, "constexpr")
    signature |= {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(integers, "i32")
    signature |= dict.fromkeys(floats, "fp32")
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=TARGET, options={"num_warps": num_warps})
    assert len(compiled.asm["cubin"]) > 0
    print(kernel.__name__, constants, "shared bytes", compiled.metadata.shared)


if __name__ == "__main__":
    for dtype in ("bf16", "fp32"):
        for write in (False, True):
            compile_kernel(
                cross_entropy.cross_entropy_kernel,
                {"logits_ptr": dtype, "targets_ptr": "i64", "losses_ptr": "fp32", "scale_ptr": "fp32"},
                ["row_stride", "num_classes", "ignore_index"],
                num_warps=cross_entropy.NUM_WARPS,
                WRITE_GRADIENT=write,
                BLOCK=cross_entropy.BLOCK,
            )
        for columns in (128, 3584, 8192):
            rows, block, num_warps = elementwise._tile(columns)
            shared = {"num_warps": num_warps, "CAST_BEFORE_WEIGHT": True, "UNIT_OFFSET": False}
            shared |= {"ROWS": rows, "BLOCK": block}
            compile_kernel(
                elementwise.rms_norm_forward_kernel,
                {"x_ptr": dtype, "weight_ptr": dtype, "y_ptr": dtype, "rstd_ptr": "fp32"},
                ["num_rows", "num_columns"],
                ["eps"],
                **shared,
            )
            pointers = dict.fromkeys(["dy_ptr", "x_ptr", "weight_ptr", "dx_ptr"], dtype)
            compile_kernel(
                elementwise.rms_norm_backward_kernel,
                pointers | {"rstd_ptr": "fp32", "partial_ptr": "fp32"},
                ["num_rows", "num_columns"],
                WEIGHT_GRADIENT=True,
                **shared,
            )
        block = elementwise.SWIGLU_BLOCK
        forward = dict.fromkeys(["gate_ptr", "up_ptr", "y_ptr"], dtype)
        compile_kernel(elementwise.swiglu_forward_kernel, forward, ["numel"], BLOCK=block)
        backward = dict.fromkeys(["dy_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr"], dtype)
        compile_kernel(elementwise.swiglu_backward_kernel, backward, ["numel"], BLOCK=block)
        compile_kernel(
            elementwise.rope_kernel,
            dict.fromkeys(["x_ptr", "y_ptr", "cos_ptr", "sin_ptr"], dtype),
            ["num_tokens", "num_heads", "half", "x_batch_stride", "x_head_stride", "x_token_stride"]
            + ["cos_batch_stride", "cos_token_stride"],
            TRANSPOSED=True,
            HEADS=32,
            BLOCK=64,
        )
    print("all kernels compile")
