"""What saving a layer's activations in codes costs: the fused kernels beside separate passes, and their error.

    python benchmarks/bench_activation_kernels.py                     # a Qwen2.5-7B layer at 32 x 1024 tokens
    python benchmarks/bench_activation_kernels.py --device cpu --tokens 64 --hidden 128 --mlp 384 --heads 2 --kv-heads 1

One JSON line per operation and number of bits: the seconds of the kernel, of the same work without codes and of
separate passes, and what it moves a second. Then one per number of bits for the layer: what coding adds to its forward
and backward, as a share of its compute (matrix products and attention, timed here); the target is 3 %. `error` is
|y - exact| / |exact| with the exact value in fp64 of what the kernel was given, `rounding` that of what was saved.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lazytrain_plugin.kernels import blockwise
from lazytrain_plugin.kernels import coded_elementwise as coded
from lazytrain_plugin.kernels.elementwise import NormRounding, rms_norm, swiglu
from lazytrain_plugin.units import GIB

FORMATS = {4: "fp4", 5: "int5", 6: "int6", 8: "int8"}
EPS = 1e-6


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.repeats = torch.device(options.device), options.repeats
        self.on_gpu = self.device.type == "cuda"
        self.machine = torch.cuda.get_device_name() if self.on_gpu else platform.processor() or platform.machine()

    def seconds(self, function: Callable[[], object]) -> float:
        """The best of some runs."""
        best = float("inf")
        for _ in range(self.repeats + 2):
            if self.on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                function()
                end.record()
                end.synchronize()
                best = min(best, start.elapsed_time(end) / 1e3)
            else:
                begin = time.perf_counter()
                function()
                best = min(best, time.perf_counter() - begin)
        return best

    def report(self, operation: str, bits: int, **figures: float) -> None:
        rounded = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()
        }
        print(json.dumps({"operation": operation, "bits": bits, **rounded, "machine": self.machine}), flush=True)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def exact_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate.double()) * up.double()


def compute_s(bench: Bench, options: argparse.Namespace) -> float:
    """Products and attention of a layer's forward and backward."""
    tokens, hidden, mlp = options.tokens, options.hidden, options.mlp
    width = hidden // options.heads
    shapes = {(hidden, hidden): 2, (hidden, width * options.kv_heads): 2, (hidden, mlp): 2, (mlp, hidden): 1}
    total = 0.0
    for (inner, outer), count in shapes.items():
        x = torch.randn(tokens, inner, dtype=torch.bfloat16, device=bench.device)
        weight = torch.randn(outer, inner, dtype=torch.bfloat16, device=bench.device)
        dy = torch.randn(tokens, outer, dtype=torch.bfloat16, device=bench.device)
        products = (lambda: x @ weight.t(), lambda: dy @ weight, lambda: dy.t() @ x)  # noqa: B023
        total += count * sum(map(bench.seconds, products))
    batch, sequence = max(1, tokens // options.sequence), min(options.sequence, tokens)
    q, k, v = (
        torch.randn(
            batch, options.heads, sequence, width, dtype=torch.bfloat16, device=bench.device, requires_grad=True
        )
        for _ in range(3)
    )
    attention = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    total += bench.seconds(lambda: attention().backward(q.detach()))
    return total


def one(
    bench: Bench,
    name: str,
    bits: int,
    fused: Callable,
    plain: Callable,
    separate: Callable,
    num_bytes: float,
    **errors: float,
) -> float:
    """Reports one kernel; returns what it takes more than the same work without codes, in seconds."""
    fused_s, plain_s, separate_s = (bench.seconds(run) for run in (fused, plain, separate))
    seconds = {"seconds": fused_s, "seconds_without_codes": plain_s, "seconds_separate_passes": separate_s}
    bench.report(name, bits, **seconds, gib_per_s=num_bytes / fused_s / GIB, **errors)
    return fused_s - plain_s


def swiglu_adds_s(bench: Bench, options: argparse.Namespace, bits: int) -> float:
    form = FORMATS[bits]
    byte = blockwise.block_format(form).storage_bytes(128) / 128
    gate, up, dy = (torch.randn(options.tokens, options.mlp, device=bench.device).bfloat16() for _ in range(3))
    numel = gate.numel()
    codes = [blockwise.quantize(x.view(-1), form) for x in (gate, up)]
    decoded = [blockwise.dequantize(part).view_as(gate) for part in codes]
    exact = exact_swiglu(gate[:1024], up[:1024])

    def decode() -> list[torch.Tensor]:
        return [blockwise.dequantize(part).view_as(gate) for part in codes]

    def quantize_both() -> None:
        for x, out in zip((gate, up), codes, strict=True):
            quantize(x, out)

    with torch.no_grad():
        added = one(
            bench,
            "swiglu, quantize",
            bits,
            lambda: coded.swiglu_quantized(gate, up, *codes),
            lambda: swiglu(gate, up),
            lambda: (swiglu(gate, up), quantize_both()),
            numel * (6 + 2 * byte),
            error=relative_error(coded.swiglu_quantized(gate, up, *codes)[:1024], exact),
        )
        y = coded.swiglu_decoded(*codes, gate.shape)[:1024]
        added += one(
            bench,
            "swiglu from codes",
            bits,
            lambda: coded.swiglu_decoded(*codes, gate.shape),
            lambda: swiglu(gate, up),
            lambda: swiglu(*decode()),
            numel * (2 + 2 * byte),
            error=relative_error(y, exact_swiglu(*(x[:1024] for x in decoded))),
            rounding=relative_error(y, exact),
        )
    leaves = [x.detach().requires_grad_() for x in (gate, up)]
    graph = swiglu(*leaves)
    gradients = [torch.empty_like(gate) for _ in range(2)]
    plain = lambda: torch.autograd.grad(graph, leaves, dy, retain_graph=True)  # noqa: E731
    wanted = [x[:1024].double().requires_grad_() for x in decoded]
    exact_gradients = torch.autograd.grad(exact_swiglu(*wanted), wanted, dy[:1024].double())
    coded.swiglu_backward_decoded(dy, *codes, *gradients)
    return added + one(
        bench,
        "swiglu backward from codes",
        bits,
        lambda: coded.swiglu_backward_decoded(dy, *codes, *gradients),
        plain,
        # Decoded once for both: the pass was counted with the forward.
        plain,
        numel * (6 + 2 * byte),
        error=max(relative_error(g[:1024], e) for g, e in zip(gradients, exact_gradients, strict=True)),
    )


def hidden_states_add_s(bench: Bench, options: argparse.Namespace, bits: int) -> float:
    """Of the unit's input, whose codes the norm makes, and of the attention's projection; both are decoded."""
    form = FORMATS[bits]
    byte = blockwise.block_format(form).storage_bytes(128) / 128
    x = torch.randn(options.tokens, options.hidden, device=bench.device).bfloat16()
    weight = torch.randn(options.hidden, device=bench.device).bfloat16()
    out = blockwise.empty((x.numel(),), x.dtype, form, bench.device)
    norm = lambda: rms_norm(x, weight, EPS, NormRounding.BEFORE_WEIGHT)  # noqa: E731
    separate = lambda: (norm(), quantize(x, out))  # noqa: E731
    with torch.no_grad():
        fused = (lambda: fused_norm(x, weight, out)) if bench.on_gpu else separate
        added = one(bench, "rms norm, quantize", bits, fused, norm, separate, x.numel() * (4 + byte))
        for name, run, num_bytes in (
            ("quantize", lambda: quantize(x, out), x.numel() * (2 + byte)),
            ("dequantize, twice", lambda: [blockwise.dequantize(out) for _ in range(2)], 2 * x.numel() * (2 + byte)),
        ):
            run_s = bench.seconds(run)
            added += run_s
            bench.report(name, bits, seconds=run_s, gib_per_s=num_bytes / run_s / GIB)
    return added


def quantize(x: torch.Tensor, out: blockwise.QuantizedTensor) -> None:
    blockwise.quantize(x.view(-1), out.format.name, out=out)


def fused_norm(x: torch.Tensor, weight: torch.Tensor, out: blockwise.QuantizedTensor) -> None:
    from lazytrain_plugin.kernels.triton.coded_elementwise import rms_norm_quantized

    rms_norm_quantized(x, weight, EPS, out, cast_before_weight=True, unit_offset=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=32 * 1024)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--mlp", type=int, default=18944)
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--bits", type=int, nargs="+", choices=FORMATS, default=[4, 8])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(options)
    whole_s = compute_s(bench, options)
    for bits in options.bits:
        added_s = swiglu_adds_s(bench, options, bits) + hidden_states_add_s(bench, options, bits)
        share = 100 * added_s / whole_s
        bench.report("layer", bits, compute_s=whole_s, coding_adds_s=added_s, coding_adds_percent=share)


if __name__ == "__main__":
    main()
