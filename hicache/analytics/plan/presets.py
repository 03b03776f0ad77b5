"""Models by name: the values of their published `config.json` that decide about their state and their weights.

Parameters are counted from these values, see `weights`; `published` is what the makers say, for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hicache.analytics.plan.configs import shape_of
from hicache.analytics.plan.shapes import ModelShape
from hicache.analytics.plan.weights import count_parameters
from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model.

    Attributes:
        model: its name where it is published.
        published: parameters, as its makers say.
        source: where they say so.
        weight_bits: of a parameter, as it is published.
        config: of its config.json, what decides.
        beside: parameters that the config's decoder has not, as of an encoder of pictures.
    """

    model: str
    published: int
    source: str
    weight_bits: int
    config: dict[str, Any]
    beside: int = 0

    @property
    def parameters(self) -> int:
        """All of them, counted."""
        fields = {**self.config, **self.config.get("text_config", {})}
        return count_parameters(fields, shape_of(self.config, name=self.model, source=self.model)) + self.beside

    def shape(self, name: str) -> ModelShape:
        """Its shape."""
        parameters = self.parameters
        return shape_of(
            self.config,
            name=name,
            source=f"config.json of {self.model}; parameters counted from it, {self.source} has {self.published:,}",
            parameters=parameters,
            weight_bytes=parameters * self.weight_bits // 8,
        )


PRESETS: Final = {
    "llama-3.1-8b": Preset(
        "meta-llama/Llama-3.1-8B",
        8_030_000_000,
        "the size of its safetensors where it is published",
        16,
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "torch_dtype": "bfloat16",
        },
    ),
    "llama-3.1-70b": Preset(
        "meta-llama/Llama-3.1-70B",
        70_600_000_000,
        "the size of its safetensors where it is published",
        16,
        {
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "torch_dtype": "bfloat16",
        },
    ),
    "qwen3-235b-a22b": Preset(
        "Qwen/Qwen3-235B-A22B",
        235_000_000_000,
        "its model card",
        16,
        {
            "num_hidden_layers": 94,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "qk_norm": True,  # what its layers have, in no field of the file
            "num_experts": 128,
            "moe_intermediate_size": 1536,
            "vocab_size": 151936,
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
        },
    ),
    "deepseek-v3": Preset(
        "deepseek-ai/DeepSeek-V3",
        671_000_000_000,
        "README_WEIGHTS.md of deepseek-ai/DeepSeek-V3, of the main model",
        8,
        {
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "topk_method": "noaux_tc",
            "vocab_size": 129280,
            "torch_dtype": "bfloat16",
        },
    ),
    "gemma-3-27b": Preset(
        "google/gemma-3-27b-it",
        27_433_000_000,
        "table 1 of arXiv:2503.19786",
        16,
        {
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "qk_norm": True,  # what its layers have, in no field of the file
                "vocab_size": 262208,
                "tie_word_embeddings": True,
                "sliding_window": 1024,
                "sliding_window_pattern": 6,
            },
            "torch_dtype": "bfloat16",
        },
        beside=417_000_000,  # of the encoder of pictures, from the same table
    ),
    "jamba-v0.1": Preset(
        "ai21labs/Jamba-v0.1",
        52_000_000_000,
        "its model card",
        16,
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "vocab_size": 65536,
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
        "its model card",
        16,
        {
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "qk_norm": True,  # what its layers have, in no field of the file, and the gate too
            "attn_output_gate": True,
            "num_experts": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 151936,
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
