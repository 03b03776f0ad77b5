"""Every decoder of the library that can be built small: its tokens are the same with the cache, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hicache.errors import ConfigError

LARGEST = 20_000_000  # parameters: larger ones do not take the sizes that are given here

# One value for each of the names that families have for the same size.
SIZES: dict[str, Any] = dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64)
SIZES |= dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 96)
SIZES |= dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2)
SIZES |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
SIZES |= dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2)
SIZES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
SIZES |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512)
SIZES |= dict.fromkeys(("initializer_range", "init_std"), 0.25)
SIZES |= {"vocab_size": 211, "head_dim": 16, "rotary_dim": 16, "rotary_pct": 1.0, "moe_intermediate_size": 32}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def small_model(family: str, kind: str) -> Any:
    try:
        configuration = getattr(transformers, CONFIG_MAPPING_NAMES[family])
        plain = configuration()
        config = configuration(**{name: size for name, size in SIZES.items() if hasattr(plain, name)})
        with torch.device("meta"):
            shape = getattr(transformers, kind)(config)
        if sum(tensor.numel() for tensor in shape.parameters()) > LARGEST:
            pytest.skip("does not take these sizes")
        torch.manual_seed(0)
        return getattr(transformers, kind)(config).eval()
    except Exception as error:  # the library's own code, for sizes that a family may not have: nothing of ours ran yet
        pytest.skip(f"cannot be built with these sizes: {type(error).__name__}")


@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_tokens_are_the_same_or_the_model_is_refused(family: str, opened: Any, prompt: Any, batch: Any) -> None:
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    model = small_model(family, kind if isinstance(kind, str) else kind[0])
    try:
        cache = opened(model)
    except ConfigError:
        return  # refused in words
    settings = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    for given in ({"input_ids": prompt(70)}, batch(prompt(70), prompt(41, seed=2))):
        expected = model.generate(**given, **settings)
        for _ in range(2):
            assert torch.equal(cache.generate(**given, **settings), expected)
    assert cache.statistics().reused_tokens >= 64
    assert not cache.statistics().failures
