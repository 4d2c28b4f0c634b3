"""`LazyTrainPlugin`: the `"lazytrain"` block for people who configure Accelerate in Python."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lazytrain_plugin import _bootstrap
from lazytrain_plugin.config.deepspeed_conflicts import check_deepspeed_config
from lazytrain_plugin.config.schema import BLOCK, LazyTrainConfig

if TYPE_CHECKING:
    from accelerate import DeepSpeedPlugin

DEEPSPEED_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
"""What `configs/deepspeed/lazytrain.json` says beside the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTrainPlugin(LazyTrainConfig):
    """The fields of the block (each with `metadata["help"]`), and the Accelerate plugin that carries them.

        plugin = LazyTrainPlugin(gpu_memory_gib=20, fidelity="balanced")
        accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin.deepspeed(gradient_clipping=1.0))

    Raises ConfigError for a value that the block would refuse.
    """

    def block(self) -> dict[str, Any]:
        """The block as plain JSON data, every key written out."""
        return asdict(self)

    def deepspeed(self, config: dict | None = None, **plugin_arguments: Any) -> DeepSpeedPlugin:
        """Accelerate's DeepSpeedPlugin with this block in its config.

        Args:
            config: DeepSpeed config to put the block into, left unchanged; default: `DEEPSPEED_CONFIG`.
            plugin_arguments: further fields of `accelerate.DeepSpeedPlugin`, such as `gradient_accumulation_steps` and
                `gradient_clipping`, which fill in what the config leaves at "auto".

        Raises:
            ConfigError: `config` conflicts with the block.
        """
        from accelerate import DeepSpeedPlugin

        ds_config = copy.deepcopy(DEEPSPEED_CONFIG if config is None else config)
        ds_config[BLOCK] = self.block()
        if self.enabled:
            check_deepspeed_config(ds_config)
            _bootstrap.install()
            # zero.Init does nothing under the block, and Accelerate asks for transformers when this flag is set.
            plugin_arguments.setdefault("zero3_init_flag", False)
        return DeepSpeedPlugin(hf_ds_config=ds_config, **plugin_arguments)
