"""Bytes that a layer's activations hold between forward and backward, in units of U = batch x sequence x hidden x 2.

    python benchmarks/activation_memory.py
    python benchmarks/activation_memory.py --shapes qwen2.5-7b --out benchmarks/results/activation_memory.json

Each shape is one layer with the proportions of a public one, run on the CPU in bf16 on a few tokens: bytes per token
are the same on any device and at any length. `eager` is what plain PyTorch saves; `matmuls` is what the engine's
strategy of that name holds, the layer's input included, in so many bits outside of attention. AGoQ (arXiv 2605.00539)
reports 28 U for Megatron, 16.5 U for COAT and 7.75 U for itself, for a layer like `paper` (no grouped queries, a gated
MLP of 4 x hidden).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lazytrain_plugin.install  # noqa: F401

SHAPES = {
    "paper": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8},
    "llama-2-7b": {"hidden_size": 1024, "intermediate_size": 2752, "num_attention_heads": 8, "num_key_value_heads": 8},
    "qwen2.5-7b": {"hidden_size": 896, "intermediate_size": 4736, "num_attention_heads": 7, "num_key_value_heads": 1},
}
"""A quarter of the public width: all that is saved shrinks alike, heads keep 128 columns."""
BITS = (8, 4)
PAPER = {"megatron": 28.0, "coat": 16.5, "agoq": 7.75}


def build(shape: str, tokens: int):
    config = Qwen2Config(vocab_size=256, num_hidden_layers=1, max_position_embeddings=max(tokens, 64), **SHAPES[shape])
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def eager_bytes(model, ids: torch.Tensor) -> int:
    """What autograd saves in the layer: each storage once, without weights, with the layer's input."""
    held: dict[int, torch.UntypedStorage] = {}
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in weights:
            held[storage._cdata] = storage
        return tensor

    inside = []
    layer = model.model.layers[0]
    before = layer.register_forward_pre_hook(lambda module, args: inside.append(True))
    after = layer.register_forward_hook(lambda module, args, output: inside.clear())
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    before.remove(), after.remove()
    del loss
    return sum(storage.nbytes() for storage in held.values())


def coded_bytes(model, ids: torch.Tensor, bits: int) -> tuple[int, int]:
    """What the engine holds of the layer, its input included: in 16 bits, and in `bits`."""
    import deepspeed

    from lazytrain_plugin.plan.result import PlacementPlan, UnitPlan
    from lazytrain_plugin.runtime import node
    from lazytrain_plugin.runtime.discovery import discover
    from lazytrain_plugin.vocab import Activations, Fidelity, Tier, Updater

    model.requires_grad_(False)  # no gradients and states of the matrices: what is saved is the same
    model.get_input_embeddings().requires_grad_(True)
    found = discover(model)
    home = {"weights": Tier.CPU, "states": Tier.CPU, "updater": Updater.CPU}
    saving = {"activations": Activations.MATMULS, "saved_bits": bits, "boundary_bits": bits}
    plan = PlacementPlan(
        units=tuple(UnitPlan(name=unit.name, **home, **saving) for unit in found.units),
        stem=tuple(UnitPlan(name=part.name, **home) for part in found.stem),
        fidelity=Fidelity.COMPACT,
    )
    reports = []
    node.log_once = lambda name, bits, report, said: reports.append(report)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        config = {
            "train_micro_batch_size_per_gpu": len(ids),
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "lazytrain": {"plan": {"path": str(Path(folder) / "plan.json")}},
        }
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
        engine.train()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.destroy()
    (report,) = reports
    left = sum(report.left.values())
    return report.exact_bytes + left, report.coded_bytes + left


def rows_of(shape: str, tokens: int) -> dict[str, float]:
    """What is held, in U, by how it is saved."""
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1, tokens))
    unit_bytes = tokens * SHAPES[shape]["hidden_size"] * 2
    rows = {"eager": eager_bytes(build(shape, tokens), ids) / unit_bytes}
    for bits in BITS:
        exact, coded = coded_bytes(build(shape, tokens), ids, bits)
        rows["matmuls, 16 bits"] = exact / unit_bytes
        rows[f"matmuls, {bits} bits"] = coded / unit_bytes
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    table = {shape: rows_of(shape, arguments.tokens) for shape in arguments.shapes}
    names = list(next(iter(table.values())))
    print(f"{'in U':18}" + "".join(f"{shape:>13}" for shape in table))
    for name in names:
        print(f"{name:18}" + "".join(f"{rows[name]:13.2f}" for rows in table.values()))
    print("AGoQ's table, for `paper`: " + ", ".join(f"{name} {units} U" for name, units in PAPER.items()))
    result = {"benchmark": "activation_memory", "tokens": arguments.tokens, "in_u": table, "paper": PAPER}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
