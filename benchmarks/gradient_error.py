"""How wrong gradients get when one class of saved activations waits for backward in fewer bits; on a trained model.

    python benchmarks/gradient_error.py --out benchmarks/results/gradient_error.json
    python benchmarks/gradient_error.py --device cpu --steps 150 --hidden 128 --layers 4

A small decoder is trained on real text first: activations of a random one have no outliers, and attention no peaks.
Then, for a batch that it has not seen, every operator's own backward is computed twice from the same gradient of its
output, in fp32: from what it saves, and from the same after a round trip through a format of kernels/blockwise.py. The
error of a class is |g' - g| / |g| (L2) over all gradients of its operators in all layers:

    norm        gradient of RMSNorm's input, its statistics computed again from the coded input
    gemm        gradient of a linear layer's weight, from its coded input
    swiglu      gradients of gate and up, from both coded (what the paper calls SiLU)
    Q, K, V     gradients of queries and keys together, from one of the three coded

(The first three are what a training job measures on a layer of its own, runtime/operator_errors.py.)

The last column is what AGoQ (arXiv 2605.00539) reports for 4 bits after 10 billion tokens of another model. Prints the
table and, as its last line, JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from convergence_activations import load_text

from examples.train_lm import ByteWindows, ModelArguments, build_model
from lazytrain_plugin.runtime.operator_errors import OperatorErrors, gradients_of, watch_operators

FORMATS = ("fp4", "nf4", "int5", "int6", "int8")
PAPER = {"norm": 0.003, "gemm": 0.026, "swiglu": 0.051, "Q": 0.14, "K": 0.15, "V": 0.059}


def watch_attention(errors: OperatorErrors) -> None:
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
    errors = OperatorErrors(FORMATS)
    watch_operators(model, errors, skipped=model.get_input_embeddings().weight)
    watch_attention(errors)
    batch = ByteWindows(held_out_text, arguments.sequence).windows[: arguments.batch].to(arguments.device)
    model(input_ids=batch, labels=batch).loss.backward()
    found = errors.table()
    table = {name: found[name] for name in PAPER if name in found}
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
