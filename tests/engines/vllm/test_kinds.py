"""Other kinds of models and caches: adapters, latent attention, quantised caches, pipeline stages.

Each is compared with an engine of its kind without a connector, and every computable hit is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conftest import prompt_of, settled
from vllm_engine import MODELS, PAGE, Engine

Engines = Callable[..., Engine]
TOKENS = 300
LONGEST = 4 * PAGE
WARM = {"enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}
"""Stages on CPUs work only in an engine that warms up, which an eager one does not."""


def test_adapters_never_share(engines: Engines, storage: str) -> None:
    """Two adapters and the model itself: each finds its own pages, none another's, in a fresh engine too."""
    prompt, who = prompt_of(500, TOKENS), (None, "lora-1", "lora-2")
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with engines(None, enable_prefix_caching=False, **options) as plain:
        wanted = {name: plain.generate(prompt, lora=name)[0].new for name in who}
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3, "the adapters change nothing"
    extra = {"host": "64MiB", "storage": storage}
    with engines(extra, **options) as engine:
        for cached in (0, LONGEST):
            for name in who:
                (answer,) = engine.generate(prompt, lora=name)
                assert (answer.new, answer.cached) == (wanted[name], cached), name
            assert engine.reset()
    with engines(extra, **options) as engine:
        for name in who:
            (answer,) = engine.generate(prompt, lora=name)
            assert (answer.new, answer.cached) == (wanted[name], LONGEST), name


def test_images_never_share(engines: Engines, storage: str) -> None:
    """The same tokens behind two images: each image finds its own pages, in a fresh engine too."""
    text, images = prompt_of(505, 190), (1, 2)
    options: dict[str, Any] = {"model": str(MODELS / "vision"), "limit_mm_per_prompt": {"image": 1}}
    with engines(None, enable_prefix_caching=False, **options) as plain:
        wanted = {image: plain.generate(text, image=image)[0].new for image in images}
    assert wanted[1] != wanted[2], "the image changes nothing"
    extra = {"host": "64MiB", "storage": storage}
    for fresh in (False, True):
        with engines(extra, **options) as engine:
            for cached in (0, 3 * PAGE)[fresh:]:
                for image in images:
                    (answer,) = engine.generate(text, image=image)
                    assert (answer.new, answer.cached) == (wanted[image], cached), image
                assert engine.reset()


def test_latent_attention_that_cannot_go_on_behind_a_hit_is_no_cache(engines: Engines) -> None:
    """The CPU's kernels for latents compute prompts from their start only: a hit would change the answer."""
    prompt = prompt_of(510, TOKENS)
    options = {"model": str(MODELS / "mla"), "dtype": "bfloat16"}
    with engines(None, **options) as plain:
        (wanted,) = plain.generate(prompt)
    with engines({"host": "64MiB"}, **options) as engine:
        for _ in range(2):
            (answer,) = engine.generate(prompt)
            assert (answer.new, answer.cached) == (wanted.new, 0)
        assert engine.said("computes prompts from their start only")
        assert engine.metrics()["vllm:hicache_missed_tokens/off"] > 0


def test_quantised_cache(engines: Engines, storage: str) -> None:
    """Keys and values in fp8 are pages of their own kind: none of a plain cache's are taken for them."""
    prompt = prompt_of(520, TOKENS)
    plain: dict[str, Any] = {"dtype": "bfloat16"}
    packed = plain | {"kv_cache_dtype": "fp8_e4m3"}
    with engines(None, enable_prefix_caching=False, **packed) as engine:
        (wanted,) = engine.generate(prompt)
    extra = {"host": "64MiB", "storage": storage}
    with engines(extra, **plain) as engine:
        engine.generate(prompt)
    for cached in (0, LONGEST):
        with engines(extra, **packed) as engine:
            (answer,) = engine.generate(prompt)
            assert (answer.new, answer.cached) == (wanted.new, cached)


def test_stages_write_what_one_reads_and_the_other_way_round(
    engines: Engines, expected: Callable[..., list[int]], storage: str
) -> None:
    """Two pipeline stages of two layers each: with objects of two layers, PP=1 and PP=2 share storage."""
    first, second = prompt_of(530, TOKENS), prompt_of(531, TOKENS)
    extra = {"host": "64MiB", "storage": storage, "layer_partition": 2}
    two: dict[str, Any] = {"processes": True, "pipeline_parallel_size": 2} | WARM
    with engines(extra, **two) as engine:
        for cached in (0, LONGEST):
            (answer,) = engine.generate(first)
            assert (answer.new, answer.cached) == (expected(first), cached)
            settled(engine)
    with engines(extra) as engine:
        found = engine.generate(first, second)
        assert [answer.new for answer in found] == [expected(first), expected(second)]
        assert [answer.cached for answer in found] == [LONGEST, 0]
    with engines(extra, **two) as engine:
        (answer,) = engine.generate(second)
        assert (answer.new, answer.cached) == (expected(second), LONGEST)
