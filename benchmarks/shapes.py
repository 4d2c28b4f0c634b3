"""Shapes of public models, built with random weights on the device: no download, the work of the real ones."""

import torch
import transformers

# Qwen2.5's published configurations (1.5B, 3B, 7B, 14B, 32B); "tiny" and "small" are for trying a command
# out ("small" where systems leave tensors below some size alone).
SHAPES = {
    "small": {"hidden": 1024, "mlp": 2816, "layers": 2, "heads": 8, "kv_heads": 4, "vocab": 4096, "tied": True},
    "1.5b": {"hidden": 1536, "mlp": 8960, "layers": 28, "heads": 12, "kv_heads": 2, "vocab": 151936, "tied": True},
    "tiny": {"hidden": 256, "mlp": 704, "layers": 4, "heads": 8, "kv_heads": 4, "vocab": 32000, "tied": True},
    "3b": {"hidden": 2048, "mlp": 11008, "layers": 36, "heads": 16, "kv_heads": 2, "vocab": 151936, "tied": True},
    "7b": {"hidden": 3584, "mlp": 18944, "layers": 28, "heads": 28, "kv_heads": 4, "vocab": 152064, "tied": False},
    "14b": {"hidden": 5120, "mlp": 13824, "layers": 48, "heads": 40, "kv_heads": 8, "vocab": 152064, "tied": False},
    "32b": {"hidden": 5120, "mlp": 27648, "layers": 64, "heads": 40, "kv_heads": 8, "vocab": 152064, "tied": False},
}


def build_model(shape: str, device: torch.device | str, *, layers: int | None = None) -> transformers.PreTrainedModel:
    """A bf16 Qwen2 model of a named shape in training mode, initialised on `device`; `layers` overrides its depth."""
    sizes = SHAPES[shape]
    config = transformers.Qwen2Config(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["mlp"],
        num_hidden_layers=layers or sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        vocab_size=sizes["vocab"],
        tie_word_embeddings=sizes["tied"],
        max_position_embeddings=32768,
        use_cache=False,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.train()
