"""How many parameters a model has, from the fields of its published `config.json`.

Counted are all matrices and vectors of a decoder: embeddings, attention (full, latent, gated), recurrent layers (Mamba,
gated delta rule), dense and expert layers, norms. Not counted are layers that predict further tokens, and encoders of
pictures. The shapes are those of the reference implementations in transformers; the tests hold the sums to what the
makers publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hicache.analytics.plan.shapes import FULL, LATENT, RECURRENT, WINDOW, ModelShape

__all__ = ["count_parameters"]


def count_parameters(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Parameters of a model.

    Args:
        config: fields of its config.json, with those of `text_config` at the top.
        shape: of the same model; its layers say which layer is of which kind.

    Raises:
        KeyError: a field is missing.
    """
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    norms = 4 if config.get("model_type") == "gemma3_text" else 2
    made = {FULL: _attention, WINDOW: _attention, LATENT: _latent, RECURRENT: _recurrent}
    total = hidden * vocabulary * (1 if config.get("tie_word_embeddings") else 2) + hidden
    for number, layer in enumerate(shape.layers):
        total += made[layer.kind](config) + _feed_forward(config, number) + norms * hidden
    return int(total)


def _attention(config: Mapping[str, Any]) -> int:
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    queries = 2 if config.get("attn_output_gate") else 1
    norms = 2 * dim if config.get("qk_norm") else 0
    return int(hidden * dim * (heads * (queries + 1) + 2 * kv_heads) + norms)


def _latent(config: Mapping[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
    plain, rope, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    asks = hidden * queries + queries + queries * heads * (plain + rope)
    keeps = hidden * (latent + rope) + latent + latent * heads * (plain + values)
    return int(asks + keeps + heads * values * hidden)


def _recurrent(config: Mapping[str, Any]) -> int:
    hidden = config["hidden_size"]
    if "linear_num_value_heads" in config:
        heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
        keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * width
        into = hidden * (2 * keys + 2 * values) + hidden * 2 * heads
        return int(into + (2 * keys + values) * config["linear_conv_kernel_dim"] + 2 * heads + width + values * hidden)
    inner, state = config["mamba_expand"] * hidden, config["mamba_d_state"]
    rank = config.get("mamba_dt_rank") or -(-hidden // 16)
    convolution = inner * config["mamba_d_conv"] + inner
    steps = inner * (rank + 2 * state) + rank * inner + inner + (rank + 2 * state)
    return int(hidden * 2 * inner + convolution + steps + inner * state + inner + inner * hidden)


def _feed_forward(config: Mapping[str, Any], layer: int) -> int:
    hidden = config["hidden_size"]
    experts = config.get("n_routed_experts") or config.get("num_experts") or 0
    period, offset = config.get("expert_layer_period", 1), config.get("expert_layer_offset", 0)
    if not experts or layer < config.get("first_k_dense_replace", 0) or layer % period != offset:
        return int(3 * hidden * config["intermediate_size"])
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    router = hidden * experts + (experts if config.get("topk_method") == "noaux_tc" else 0)
    shared = 3 * hidden * width * config.get("n_shared_experts", 0)
    if wide := config.get("shared_expert_intermediate_size"):
        shared += 3 * hidden * wide + hidden
    return int(3 * hidden * width * experts + router + shared)
