"""How wrong gradients get when one class of saved activations waits for backward in fewer bits; on a trained model.

    python benchmarks/gradient_error.py --out benchmarks/results/gradient_error.json
    python benchmarks/gradient_error.py --device cpu --steps 150 --hidden 128 --layers 4

A small decoder is trained on real text first: activations of a random one have no outliers, and attention no peaks.
Then, for a batch that it has not seen, every operator's own backward is computed twice from the same gradient of its
output, in fp32: from what it saves, and from the same after a round trip through a format of kernels/blockwise.py. The
error of a class is |g' - g| / |g| (L2) over all gradients of its operators in all layers:

    norm        gradient of RMSNorm's input, its statistics computed again from the coded input
    GEMM        gradient of a linear layer's weight, from its coded input
    SwiGLU      gradients of gate and up, from both coded (what the paper calls SiLU)
    Q, K, V     gradients of queries and keys together, from one of the three coded

The last column is what AGoQ (arXiv 2605.00539) reports for 4 bits after 10 billion tokens of another model. Prints the
table and, as its last line, JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from convergence_activations import load_text

from examples.train_lm import ByteWindows, ModelArguments, build_model
from lazytrain_plugin.kernels import blockwise

FORMATS = ("fp4", "nf4", "int5", "int6", "int8")
PAPER = {"norm": 0.003, "GEMM": 0.026, "SwiGLU": 0.051, "Q": 0.14, "K": 0.15, "V": 0.059}


class Errors:
    """Sums of squares of gradients and of their errors, per class and format."""

    def __init__(self) -> None:
        self._exact: dict[str, float] = defaultdict(float)
        self._off: dict[tuple[str, str], float] = defaultdict(float)

    def measure(self, name: str, gradients, saved: tuple[Tensor, ...], coded: tuple[int, ...]) -> None:
        """`gradients`: of fp32 copies of what is `saved`; the positions `coded` go through the formats."""
        exact = gradients(*(tensor.float() for tensor in saved))
        self._exact[name] += sum(float(g.square().sum()) for g in exact)
        for form in FORMATS:
            rounded = [round_trip(t, form) if i in coded else t for i, t in enumerate(saved)]
            found = gradients(*(tensor.float() for tensor in rounded))
            self._off[name, form] += sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))

    def table(self) -> dict[str, dict[str, float]]:
        """Class -> format -> error."""
        return {
            name: {form: (self._off[name, form] / self._exact[name]) ** 0.5 for form in FORMATS}
            for name in PAPER
            if self._exact[name]
        }


def round_trip(tensor: Tensor, form: str) -> Tensor:
    return blockwise.dequantize(blockwise.quantize(tensor.contiguous(), form))


def gradients_of(function, output_gradient: Tensor):
    """A function from saved tensors to their gradients."""

    def gradients(*saved: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in saved]
            return torch.autograd.grad(function(*leaves), leaves, output_gradient.float())

    return gradients


def watch(model: nn.Module, errors: Errors) -> None:
    """From now on every backward of `model` measures. Norms, products and gated MLPs are found by what they are."""

    def when_differentiated(output: Tensor, measure) -> None:
        output.register_hook(lambda gradient: measure(gradient.detach()))

    def watch_norm(norm: nn.Module, inputs, output) -> None:
        x, weight, epsilon = inputs[0].detach(), norm.weight.detach().float(), norm.variance_epsilon
        function = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight  # noqa: E731
        when_differentiated(output, lambda g: errors.measure("norm", gradients_of(function, g), (x,), (0,)))

    def watch_linear(linear: nn.Module, inputs, output) -> None:
        x = inputs[0].detach().flatten(0, -2)

        def measure(gradient: Tensor) -> None:
            flat = gradient.flatten(0, -2).float()
            errors.measure("GEMM", lambda x: (flat.T @ x,), (x,), (0,))

        when_differentiated(output, measure)

    def watch_gated(mlp: nn.Module) -> None:
        kept = {}
        mlp.gate_proj.register_forward_hook(lambda m, i, output: kept.update(gate=output.detach()))
        mlp.up_proj.register_forward_hook(lambda m, i, output: kept.update(up=output.detach()))

        def before_down(down: nn.Module, inputs) -> None:
            gate, up = kept.pop("gate"), kept.pop("up")
            function = lambda gate, up: functional.silu(gate) * up  # noqa: E731
            when_differentiated(
                inputs[0], lambda g: errors.measure("SwiGLU", gradients_of(function, g), (gate, up), (0, 1))
            )

        mlp.down_proj.register_forward_pre_hook(before_down)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(watch_norm)
        elif isinstance(module, nn.Linear) and module.weight is not model.get_input_embeddings().weight:
            module.register_forward_hook(watch_linear)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            watch_gated(module)
    watch_attention(errors)


def watch_attention(errors: Errors) -> None:
    """For the rest of the process."""
    attention = functional.scaled_dot_product_attention

    def watching(query, key, value, *args, **kwargs):
        output = attention(query, key, value, *args, **kwargs)
        saved = tuple(tensor.detach() for tensor in (query, key, value))

        def measure(gradient: Tensor) -> None:
            whole = gradients_of(lambda *qkv: attention(*qkv, *args, **kwargs), gradient.detach())
            own = lambda *qkv: whole(*qkv)[:2]  # noqa: E731
            for position, name in enumerate("QKV"):
                errors.measure(name, own, saved, (position,))

        if output.requires_grad:
            output.register_hook(measure)
        return output

    functional.scaled_dot_product_attention = watching


def train(model: nn.Module, windows: Tensor, arguments: argparse.Namespace) -> float:
    """Returns the mean loss of the last 20 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, arguments.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(arguments.steps):
        rows = torch.randint(0, len(windows), (arguments.batch,), generator=generator)
        batch = windows[rows].to(arguments.device)
        with torch.autocast(arguments.device, dtype=torch.bfloat16, enabled=arguments.device == "cuda"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return float(torch.stack(losses[-20:]).mean())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=600, help="training steps before the measurement")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--text", help="train on the bytes of this file")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    shape = ModelArguments(
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.hidden // 64),
        sequence_length=arguments.sequence,
    )
    model = build_model(shape).to(arguments.device).train()
    training_text, held_out_text = load_text(arguments.text)
    loss = train(model, ByteWindows(training_text, arguments.sequence).windows, arguments)

    model.zero_grad()
    errors = Errors()
    watch(model, errors)
    batch = ByteWindows(held_out_text, arguments.sequence).windows[: arguments.batch].to(arguments.device)
    model(input_ids=batch, labels=batch).loss.backward()
    table = errors.table()
    print(f"after {arguments.steps} steps, training loss {loss:.3f} nat per byte")
    print(f"{'class':8}" + "".join(f"{form:>9}" for form in FORMATS) + f"{'paper':>9}")
    for name, row in table.items():
        print(f"{name:8}" + "".join(f"{row[form]:9.4f}" for form in FORMATS) + f"{PAPER[name]:9.3f}")
    setup = {k: v for k, v in vars(arguments).items() if k != "out"}
    result = {
        "benchmark": "gradient_error",
        "setup": setup,
        "machine": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine(),
        "training_loss": loss,
        "errors": table,
        "paper": PAPER,
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
