"""Profiles of public models (Qwen2.5 shapes, bf16, fused kernels), written out so that no model need be built."""

from lazytrain_plugin.profile.model import ModelProfile, StrategyProfile, TensorProfile, UnitProfile, UnitRole
from lazytrain_plugin.vocab import Activations

SHAPES = {
    "7b": {"hidden": 3584, "mlp": 18944, "layers": 28, "kv": 512, "vocab": 152064},
    "14b": {"hidden": 5120, "mlp": 13824, "layers": 48, "kv": 1024, "vocab": 152064},
    "32b": {"hidden": 5120, "mlp": 27648, "layers": 64, "kv": 1024, "vocab": 152064},
    "70b": {"hidden": 8192, "mlp": 28672, "layers": 80, "kv": 1024, "vocab": 128256},
    # 128 experts of which 8 are visited (Qwen3-30B-A3B's sizes).
    "moe": {
        "hidden": 2048,
        "mlp": 768,
        "layers": 48,
        "kv": 512,
        "vocab": 151936,
        "query": 4096,
        "experts": 128,
        "top": 8,
    },
}


def profile(shape: str, *, sequence_length: int = 1024) -> ModelProfile:
    sizes = SHAPES[shape]
    hidden, mlp, kv, vocab = (sizes[key] for key in ("hidden", "mlp", "kv", "vocab"))
    query, experts, top = sizes.get("query", hidden), sizes.get("experts", 1), sizes.get("top", 1)

    def tensor(name: str, *shape: int) -> TensorProfile:
        return TensorProfile(name=name, shape=shape, dtype="bfloat16", trainable=True)

    attention = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
    # What autograd saves per token beside the input: two norms' outputs and the residual between them, q, k, v, the
    # attention's output (it is o's input too) with its statistic, gate, up and their product.
    norms, projections = 2 * (3 * hidden), 2 * (2 * query + 2 * kv)
    gated = 2 * 3 * mlp * top
    kept = norms + projections + gated + 4 * (query // 128) + 8

    def layer(index: int) -> UnitProfile:
        tensors = [tensor(f"layers.{index}.{name}", *size) for name, size in attention.items()]
        tensors += [
            tensor(f"layers.{index}.{name}", *((experts,) if experts > 1 else ()), *size)
            for name, size in {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}.items()
        ]
        tensors += [tensor(f"layers.{index}.norm{i}", hidden) for i in (1, 2)]
        matrices = 2.0 * (2 * query * hidden + 2 * kv * hidden + 3 * mlp * hidden * top)
        attended = 2.0 * (query + 2 * kv) * hidden + 2.0 * sequence_length * query
        flop = matrices + 2.0 * sequence_length * query
        return UnitProfile(
            name=f"layers.{index}",
            tensors=tuple(tensors),
            boundary_bytes_per_token=2 * hidden,
            fused_input=True,
            kept_bytes_per_token=kept,
            workspace_bytes_per_token=kept + 2 * mlp * top + 4 * hidden,
            flop_per_token=flop,
            strategies=(
                StrategyProfile(
                    activations=Activations.ATTENTION,
                    saved_bytes_per_token=2 * query + 4 * (query // 128),
                    recompute_frac=1 - (2.0 * sequence_length * query) / flop,
                ),
                StrategyProfile(
                    activations=Activations.MLP,
                    saved_bytes_per_token=2 * 2 * mlp * top + 2 * hidden,
                    recompute_frac=0.06 + attended / flop,
                    fused_bytes_per_token=2 * 2 * mlp if experts == 1 else 0,
                ),
                StrategyProfile(
                    activations=Activations.MATMULS,
                    saved_bytes_per_token=projections + 2 * 2 * mlp * top + 2 * hidden,
                    recompute_frac=0.06,
                    attention_bytes_per_token=projections - 2 * hidden,
                    fused_bytes_per_token=2 * 2 * mlp if experts == 1 else 0,
                ),
            ),
        )

    def stem(name: str, role: UnitRole, flop: float = 0.0) -> UnitProfile:
        return UnitProfile(name=f"stem.{name}", tensors=(tensor(name, vocab, hidden),), role=role, flop_per_token=flop)

    return ModelProfile(
        name=shape,
        units=tuple(layer(index) for index in range(sizes["layers"])),
        stem=(
            UnitProfile(name="stem.rest", tensors=(tensor("norm", hidden),), role=UnitRole.REST),
            stem("embed_tokens", UnitRole.EMBEDDING),
            stem("lm_head", UnitRole.HEAD, 2.0 * vocab * hidden),
        ),
        hidden_size=hidden,
        vocab_size=vocab,
        sequence_length=sequence_length,
        activation_bytes=2,
    )
