"""Tiny models from configs (nothing is downloaded), one for each way of being hard for a streaming engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

VOCAB = 97
SEQUENCE = 12
IMAGE_FEATURES = 10

_SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class TinyModel:
    """How to build a model, what an adapter attaches to, and what a sample holds."""

    build: Callable[[], nn.Module]
    lora_targets: tuple[str, ...]
    has_images: bool = False
    other_sum_order: str = "never"
    """When gradients are sums whose terms plain torch adds in another order, so that fp32 results differ by rounding:
    "accumulating" (a unit runs several times: torch adds up its calls before it adds micro-batches), "always" (a tensor
    feeds several units: torch adds every use to the sum, a unit adds up its own uses first)."""


def qwen2(tied: bool) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SMALL, **_HEADS, tie_word_embeddings=tied))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, **_HEADS, tie_word_embeddings=False))


def gpt2() -> nn.Module:
    """Learned positions, Conv1D (weights stored transposed), tied head."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    """Experts that may get no token, and router logits that leave a layer other than by return."""
    config = transformers.MixtralConfig(
        **_SMALL, **_HEADS, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def t5(attention: str = "eager") -> nn.Module:
    """Two stacks; decoder layers also take the encoder's output, a bias tensor is shared by all layers of a stack.

    Eager attention: torch's fused one takes another kernel where a bias needs a gradient (see test_matrix).
    """
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    model.set_attn_implementation(attention)
    return model


def albert() -> nn.Module:
    """One block that runs three times in a step."""
    config = transformers.AlbertConfig(
        **_SMALL, num_attention_heads=4, embedding_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.AlbertForMaskedLM(config)


class TwoTower(nn.Module):
    """Text layers and image layers; batches without images leave the image tower unused."""

    def __init__(self) -> None:
        super().__init__()
        self.text_embedding = nn.Embedding(VOCAB, 32)
        self.text_layers = nn.ModuleList(_residual(32) for _ in range(2))
        self.image_projection = nn.Linear(IMAGE_FEATURES, 32)
        self.image_layers = nn.ModuleList(_residual(32) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor, images: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.text_embedding(input_ids)
        for layer in self.text_layers:
            hidden = hidden + layer(hidden)
        if images is not None and images.isfinite().all():  # NaN marks "no image" in a collated batch
            image = self.image_projection(images.to(self.image_projection.weight.dtype))
            for layer in self.image_layers:
                image = image + layer(image)
            hidden = hidden + image[:, None]
        logits = self.head(hidden) * self.logit_scale.exp()
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def _residual(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


_ATTENTION = ("q_proj", "v_proj")
MODELS: dict[str, TinyModel] = {
    "qwen2_tied": TinyModel(lambda: qwen2(True), _ATTENTION),
    "qwen2_untied": TinyModel(lambda: qwen2(False), _ATTENTION),
    "llama": TinyModel(llama, (*_ATTENTION, "down_proj")),
    "gpt2": TinyModel(gpt2, ("c_attn",)),
    "mixtral": TinyModel(mixtral, _ATTENTION),
    "t5": TinyModel(t5, ("q", "v"), other_sum_order="always"),
    "albert": TinyModel(albert, ("query", "value"), other_sum_order="accumulating"),
    "two_tower": TinyModel(TwoTower, ("text_layers.0.1", "image_layers.1.3"), has_images=True),
}


def build_model(name: str, trained: str = "full") -> nn.Module:
    """The model with the same weights on every call; `trained` is "full", "half frozen" or "lora"."""
    torch.manual_seed(7)
    tiny = MODELS[name]
    model = tiny.build()
    if trained == "half frozen":
        parameters = list(model.parameters())
        for parameter in parameters[: len(parameters) // 2]:
            parameter.requires_grad_(False)
    elif trained == "lora":
        import peft

        config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=list(tiny.lora_targets))
        model = peft.get_peft_model(model, config)
    return model


def make_samples(name: str, count: int) -> list[dict[str, Tensor]]:
    """`count` samples; labels are masked at random, so that micro-batches differ in their number of tokens."""
    generator = torch.Generator().manual_seed(11)
    samples = []
    for index in range(count):
        input_ids = torch.randint(1, VOCAB, (SEQUENCE,), generator=generator)
        masked = torch.rand(SEQUENCE, generator=generator) < 0.3
        sample = {"input_ids": input_ids, "labels": input_ids.masked_fill(masked, -100)}
        if MODELS[name].has_images:
            image = torch.randn(IMAGE_FEATURES, generator=generator)
            sample["images"] = image if index % 8 < 5 else torch.full_like(image, torch.nan)
        samples.append(sample)
    return samples
