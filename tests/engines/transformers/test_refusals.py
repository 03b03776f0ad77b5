"""Models and calls that the cache would answer wrongly are refused, or go past it: never a wrong result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hicache.errors import ConfigError
from hicache_transformers import PrefixCache

NEW = {"max_new_tokens": 8, "do_sample": False}


def open_and_close(model: Any) -> None:
    PrefixCache(model, device=8, host=8).close()


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            "DeepseekV3",
            {
                "num_key_value_heads": 4,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
            "MLA",
        ),
        ("Mistral", {"sliding_window": 32}, "sliding window"),
        ("Gemma2", {"head_dim": 16, "sliding_window": 32}, "sliding window"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, "sliding window"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        (
            "Phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 64,
                }
            },
            "longrope",
        ),
    ],
)
def test_models(make: Any, kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_and_close(make(kind, **changes))


def test_encoder_decoder_models() -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(ConfigError, match="encoder-decoder"):
        open_and_close(transformers.T5ForConditionalGeneration(config).eval())


def test_recurrent_models() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)
    with pytest.raises(ConfigError):
        open_and_close(transformers.MambaForCausalLM(config).eval())


def test_hybrid_models() -> None:
    config = transformers.BambaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
    )
    with pytest.raises(ConfigError):
        open_and_close(transformers.BambaForCausalLM(config).eval())


def test_attention_in_both_directions(make: Any) -> None:
    model = make("Llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.model.config.is_causal = False
    with pytest.raises(ConfigError, match="later tokens"):
        open_and_close(model)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"num_beams": 4, "num_return_sequences": 2}, "num_beams"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"use_cache": False}, "use_cache"),
        ({"prefill_chunk_size": 16}, "prefill_chunk_size"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
    ],
)
def test_calls_go_past_the_cache(llama: Any, opened: Any, prompt: Any, settings: Any, reason: str) -> None:
    ids = prompt(60)
    cache = opened(llama)
    cache.generate(ids, **NEW)
    settings = NEW | settings
    assert torch.equal(cache.generate(ids, **settings), llama.generate(ids, **settings))
    assert cache.statistics().bypassed == {reason: 1}


def test_what_the_first_pass_returns_is_whole(llama: Any, opened: Any, prompt: Any) -> None:
    ids = prompt(60)
    cache = opened(llama)
    cache.generate(ids, **NEW)
    settings = NEW | {"return_dict_in_generate": True, "output_hidden_states": True}
    assert cache.generate(ids, **settings).hidden_states[0][0].shape[1] == 60


def test_settings_of_a_generation_config(llama: Any, opened: Any, prompt: Any) -> None:
    beams = transformers.GenerationConfig(num_beams=3, max_new_tokens=8)
    cache = opened(llama)
    ids = prompt(60)
    assert torch.equal(cache.generate(ids, beams), llama.generate(ids, beams))
    assert cache.statistics().bypassed == {"num_beams": 1}
    plain = transformers.GenerationConfig(max_new_tokens=8, do_sample=False)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, plain), llama.generate(ids, plain))
    assert cache.statistics().reused_tokens == 48


def test_padding_without_a_mask_and_on_the_right(llama: Any, opened: Any, prompt: Any) -> None:
    cache = opened(llama)
    padded = torch.cat([torch.full((1, 5), 2), prompt(50)], 1)
    assert torch.equal(cache.generate(padded, **NEW), llama.generate(padded, **NEW))
    right = torch.cat([prompt(50), torch.full((1, 5), 2)], 1)
    given = {"attention_mask": (right != 2).long()} | NEW
    assert torch.equal(cache.generate(right, **given), llama.generate(right, **given))
    assert cache.statistics().bypassed == {"mask": 2}


@pytest.mark.case("KEY-8")
def test_weights_that_change_after_opening(make: Any, opened: Any, prompt: Any) -> None:
    model = make("Llama")
    cache = opened(model)
    cache.generate(prompt(60), **NEW)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert torch.equal(cache.generate(prompt(60), **NEW), model.generate(prompt(60), **NEW))
    assert cache.statistics().bypassed == {"weights": 1}
    again = opened(model)
    again.generate(prompt(60), **NEW)
    assert again.namespace != cache.namespace
