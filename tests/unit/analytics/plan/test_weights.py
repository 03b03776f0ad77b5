"""Parameters counted from published configs are those of the models."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.analytics.plan.configs import shape_of
from hicache.analytics.plan.presets import PRESETS, preset
from hicache.analytics.plan.weights import count_parameters

COUNTED = {  # of the same configs in transformers 5.19, whose models were made without memory and counted
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352 + 58 * 256,  # and a bias of its router, which is no parameter there
    "gemma-3-27b": 27_009_346_304 + 417_000_000,  # and the encoder of pictures
    "jamba-v0.1": 51_570_323_328,
    "qwen3-next-80b-a3b": 79_674_391_296,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_are_published(name: str) -> None:
    """Within 1 %, since cards round; and exactly those of the reference implementation."""
    found = PRESETS[name]
    assert found.parameters == pytest.approx(found.published, rel=0.01)
    assert found.parameters == COUNTED[name]
    shape = preset(name)
    assert shape.parameters == found.parameters
    assert shape.weight_bytes == found.parameters * found.weight_bits // 8
    assert found.source in shape.source


def test_a_small_model_by_hand() -> None:
    """Two layers, embeddings that are also the head: every matrix by itself."""
    config: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 20,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 20 + 2 * 8
    assert count_parameters(config, shape_of(config, name="m", source="m")) == 100 * 8 + 2 * layer + 8


def test_what_is_missing_is_named() -> None:
    config: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9}
    with pytest.raises(KeyError, match="num_key_value_heads"):
        count_parameters(config, shape_of(config, name="m", source="m"))
