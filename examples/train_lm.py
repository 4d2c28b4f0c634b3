"""Trains a small byte-level language model on English text with the Hugging Face Trainer.

    python examples/train_lm.py
    accelerate launch --config_file FILE examples/train_lm.py --output_dir outputs/lm --max_steps 400
    python examples/train_lm.py --resume_from_checkpoint outputs/lm/checkpoint-100

Every option of TrainingArguments works. The text is the reference manual that every Python carries for `help()`,
466 kB; one kilobyte in ten is held out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pydoc_data.topics import topics

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, Qwen2Config, Trainer, TrainingArguments, set_seed

NUM_BYTE_VALUES = 256
PAGE_BYTES = 1024
HELD_OUT_EVERY = 10  # pages

TRAINING_DEFAULTS = {
    "output_dir": "outputs/lm",
    "max_steps": 200,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 16,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "weight_decay": 0.1,
    "logging_steps": 20,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "save_steps": 100,
    "save_total_limit": 2,
    "report_to": "none",
}


@dataclass
class ModelArguments:
    """The model, a small Qwen2 made from its config."""

    hidden_size: int = field(default=128, metadata={"help": "width of the hidden states"})
    num_hidden_layers: int = field(default=4, metadata={"help": "number of decoder layers"})
    num_attention_heads: int = field(default=4, metadata={"help": "number of attention heads"})
    sequence_length: int = field(default=128, metadata={"help": "bytes of one training example"})


class ByteWindows(Dataset):
    """Consecutive windows of `length` bytes: input_ids and labels, int64 [length]."""

    def __init__(self, text: np.ndarray, length: int) -> None:
        self.windows = torch.from_numpy(text[: len(text) // length * length].reshape(-1, length).astype(np.int64))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """The text as uint8 arrays, split by pages: (training, held out)."""
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)
    pages = text[: len(text) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
    is_held_out = np.arange(len(pages)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return pages[~is_held_out].reshape(-1), pages[is_held_out].reshape(-1)


def unigram_entropy(text: np.ndarray) -> float:
    """Entropy of the byte frequencies, in nat per byte: no model that ignores context has a lower loss on `text`."""
    frequency = np.bincount(text, minlength=NUM_BYTE_VALUES) / len(text)
    frequency = frequency[frequency > 0]
    return float(-(frequency * np.log(frequency)).sum())


def build_model(arguments: ModelArguments) -> torch.nn.Module:
    config = Qwen2Config(
        vocab_size=NUM_BYTE_VALUES,
        hidden_size=arguments.hidden_size,
        intermediate_size=4 * arguments.hidden_size,
        num_hidden_layers=arguments.num_hidden_layers,
        num_attention_heads=arguments.num_attention_heads,
        num_key_value_heads=arguments.num_attention_heads,
        max_position_embeddings=max(1024, arguments.sequence_length),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def write_on(model: torch.nn.Module, beginning: str, num_bytes: int) -> str:
    """A continuation of `beginning`, sampled from the model."""
    prompt = torch.tensor([list(beginning.encode())], device=model.device)
    output = model.generate(prompt, max_new_tokens=num_bytes, do_sample=True, temperature=0.7, pad_token_id=0)
    return bytes(output[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(**TRAINING_DEFAULTS)
    model_arguments, training_arguments = parser.parse_args_into_dataclasses()
    set_seed(training_arguments.seed)

    training_text, held_out_text = load_text()
    trainer = Trainer(
        model=build_model(model_arguments),
        args=training_arguments,
        train_dataset=ByteWindows(training_text, model_arguments.sequence_length),
        eval_dataset=ByteWindows(held_out_text, model_arguments.sequence_length),
    )
    result = trainer.train(resume_from_checkpoint=training_arguments.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    metrics["eval_unigram_entropy"] = unigram_entropy(held_out_text)
    trainer.save_metrics("eval", metrics)

    if trainer.is_world_process_zero():
        loss, entropy = metrics["eval_loss"], metrics["eval_unigram_entropy"]
        print(f"\nThe model writes: {write_on(trainer.model, 'The statement ', 200)!r}")
        print(f"Held-out loss {loss:.4f} nat per byte; unigram entropy {entropy:.4f}; gain {entropy - loss:.4f}")


if __name__ == "__main__":
    main()
