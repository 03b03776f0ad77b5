"""Pages of vLLM in transformers, and the reverse, through one folder: where both were told that numerics agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import prompt_of
from vllm_engine import PAGE, TINY, Engine

from hicache_transformers import PrefixCache

AGREED = {"numerics": "fp32 on this kind of CPU"}
PROMPT = prompt_of(71, 300)
USABLE = 299 // PAGE * PAGE


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")


def ids() -> torch.Tensor:
    return torch.tensor([PROMPT])


def settings(tokens: int = 16) -> dict[str, Any]:
    # As vLLM is asked in these tests: greedy, and on where a text would end.
    return {
        "attention_mask": torch.ones_like(ids()),
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "do_sample": False,
    }


def test_transformers_reads_what_vllm_wrote(
    engines: Callable[..., Engine], storage: str, model: Any, record_property: Callable[[str, object], None]
) -> None:
    engine = engines({"host": "64MiB", "storage": storage} | AGREED)
    engine.generate(PROMPT)
    engine.close()
    expected = model.generate(ids(), **settings())
    with PrefixCache(model, storage=storage, page_size=PAGE, **AGREED) as cache:
        with torch.no_grad(), cache.prefix(ids()) as prefix:
            found = model(ids()[:, USABLE:], past_key_values=prefix.past_key_values).logits[0, -1].log_softmax(-1)
            cold = model(ids()).logits[0, -1].log_softmax(-1)
            assert prefix.cached_tokens == (USABLE,)
        assert torch.equal(cache.generate(ids(), **settings()), expected)
        assert cache.statistics().reused_tokens == 2 * USABLE
        assert not cache.statistics().failures
    difference = float((found - cold).abs().max())
    record_property("largest difference of a logprob", f"{difference:.1e}")
    assert 0 < difference < 1e-3

    # Whoever was not told misses, and computes the same.
    with PrefixCache(model, storage=storage, page_size=PAGE) as cache:
        assert torch.equal(cache.generate(ids(), **settings()), expected)
        assert cache.statistics().reused_tokens == 0


def test_vllm_reads_what_transformers_wrote(
    engines: Callable[..., Engine], expected: Callable[..., list[int]], storage: str, model: Any
) -> None:
    with PrefixCache(model, storage=storage, page_size=PAGE, **AGREED) as cache:
        cache.generate(ids(), **settings())
    engine = engines({"host": "64MiB", "storage": storage} | AGREED)
    (answer,) = engine.generate(PROMPT)
    assert answer.new == expected(PROMPT)
    assert answer.cached == USABLE
    engine.close()
    stranger = engines({"host": "64MiB", "storage": storage})
    (answer,) = stranger.generate(PROMPT)
    assert answer.new == expected(PROMPT)
    assert answer.cached == 0
