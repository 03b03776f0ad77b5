"""Models by name: the values of their published `config.json` that decide about their state, and their weights.

Sources are the files and cards that the models' makers publish under these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hicache.analytics.plan.configs import shape_of
from hicache.analytics.plan.shapes import ModelShape
from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model.

    Attributes:
        model: its name where it is published.
        parameters: as its card says.
        weight_bits: of a parameter, as it is published.
        config: of its config.json, what decides.
    """

    model: str
    parameters: int
    weight_bits: int
    config: dict[str, Any]

    def shape(self, name: str) -> ModelShape:
        """Its shape."""
        return shape_of(
            self.config,
            name=name,
            source=f"config.json and model card of {self.model}",
            parameters=self.parameters,
            weight_bytes=self.parameters * self.weight_bits // 8,
        )


PRESETS: Final = {
    "llama-3.1-8b": Preset(
        "meta-llama/Llama-3.1-8B",
        8_030_000_000,
        16,
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "torch_dtype": "bfloat16",
        },
    ),
    "llama-3.1-70b": Preset(
        "meta-llama/Llama-3.1-70B",
        70_600_000_000,
        16,
        {
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "torch_dtype": "bfloat16",
        },
    ),
    "qwen3-235b-a22b": Preset(
        "Qwen/Qwen3-235B-A22B",
        235_000_000_000,
        16,
        {
            "num_hidden_layers": 94,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
        },
    ),
    "deepseek-v3": Preset(
        "deepseek-ai/DeepSeek-V3",
        671_000_000_000,
        8,
        {
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "torch_dtype": "bfloat16",
        },
    ),
    "gemma-3-27b": Preset(
        "google/gemma-3-27b-it",
        27_400_000_000,
        16,
        {
            "text_config": {
                "num_hidden_layers": 62,
                "hidden_size": 5376,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "sliding_window": 1024,
                "sliding_window_pattern": 6,
            },
            "torch_dtype": "bfloat16",
        },
    ),
    "jamba-v0.1": Preset(
        "ai21labs/Jamba-v0.1",
        52_000_000_000,
        16,
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "torch_dtype": "bfloat16",
        },
    ),
    "qwen3-next-80b-a3b": Preset(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        80_000_000_000,
        16,
        {
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "torch_dtype": "bfloat16",
        },
    ),
}


def preset(name: str) -> ModelShape:
    """A model by its name here.

    Raises:
        ConfigError: no such name.
    """
    found = PRESETS.get(name.lower())
    if found is None:
        raise ConfigError(
            f"model {name:.80}: is no preset and no file or folder; presets are {', '.join(PRESETS)}: name one, or a "
            f"model's config.json, or give --layers, --kv-heads and --head-dim"
        )
    return found.shape(name.lower())
