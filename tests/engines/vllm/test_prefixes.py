"""Prompts in a real engine with a private service: tokens are as without a cache, and every computable hit is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
from conftest import prompt_of
from vllm_engine import PAGE, Engine

Expected = Callable[..., list[int]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine({"host": "64MiB"}, tmp_path_factory.mktemp("prefixes") / "engine.log") as engine:
        yield engine


class Hits:
    """Tokens that came from the engine's own cache, and from ours, in a block of code."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.local = self.external = 0

    def __enter__(self) -> Hits:
        self._before = self._engine.metrics()
        return self

    def __exit__(self, *exception: object) -> None:
        after = self._engine.metrics()
        self.local, self.external = (
            int(after[name] - self._before.get(name, 0))
            for name in ("vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits")
        )


def test_cold_local_external(engine: Engine, expected: Expected) -> None:
    """300 tokens are 4 pages of 64; the engine's own blocks of 32 hold 288 of them."""
    prompt = prompt_of(1, 300)
    for kind, local, external in (("cold", 0, 0), ("local", 288, 0), ("external", 0, 256)):
        if kind == "external":
            assert engine.reset()
        with Hits(engine) as hits:
            (answer,) = engine.generate(prompt)
        assert answer.new == expected(prompt), kind
        assert (hits.local, hits.external, answer.cached) == (local, external, local + external), kind


@pytest.mark.parametrize(("tokens", "usable"), [(128, 64), (129, 128), (96, 64), (64, 0), (65, 64), (31, 0), (1, 0)])
def test_lengths_at_edges(engine: Engine, expected: Expected, tokens: int, usable: int) -> None:
    """The last token is always computed, so an exact multiple gives one page less; below a page there is none."""
    prompt = prompt_of(100 + tokens, tokens)
    engine.generate(prompt)
    assert engine.reset()
    with Hits(engine) as hits:
        (answer,) = engine.generate(prompt)
    assert answer.new == expected(prompt)
    assert (hits.local, hits.external) == (0, usable)


def test_answers_of_the_turn_before_are_found(engine: Engine, expected: Expected) -> None:
    """Generated tokens are stored too: 100 + 60 tokens, of which the last is not computed, are 2 pages."""
    prompt = prompt_of(2, 100)
    (first,) = engine.generate(prompt, tokens=60)
    assert engine.reset()
    turn = prompt + first.new + prompt_of(3, 20)
    with Hits(engine) as hits:
        (answer,) = engine.generate(turn)
    assert answer.new == expected(turn)
    assert hits.external == 2 * PAGE


def test_partly_local_partly_external(engine: Engine, expected: Expected) -> None:
    """The engine has 3 blocks, which end inside our second page; the rest of that page and two more come from us."""
    prompt = prompt_of(4, 280)
    engine.generate(prompt)
    assert engine.reset()
    engine.generate(prompt[:100])
    with Hits(engine) as hits:
        (answer,) = engine.generate(prompt)
    assert answer.new == expected(prompt)
    assert (hits.local, hits.external) == (96, 256 - 96)


def test_batch_that_shares_a_prefix(engine: Engine, expected: Expected) -> None:
    """Two prompts of one batch with 3 common pages: those come once."""
    common = prompt_of(5, 3 * PAGE)
    prompts = [common + prompt_of(6, 30), common + prompt_of(7, 90)]
    engine.generate(*prompts)
    assert engine.reset()
    with Hits(engine) as hits:
        answers = engine.generate(*prompts)
    assert [answer.new for answer in answers] == [expected(prompt) for prompt in prompts]
    assert hits.external == 3 * PAGE + PAGE  # the second prompt has a page of its own besides
    assert hits.local == 3 * PAGE


def test_three_identical_at_once_load_once(engine: Engine, expected: Expected) -> None:
    prompt = prompt_of(8, 200)
    engine.generate(prompt)
    assert engine.reset()
    with Hits(engine) as hits:
        answers = engine.generate(prompt, prompt, prompt)
    assert [answer.new for answer in answers] == 3 * [expected(prompt)]
    assert hits.external == 3 * PAGE
    assert hits.local == 2 * 3 * PAGE


def test_salts_separate(engine: Engine, expected: Expected) -> None:
    prompt = prompt_of(9, 200)
    engine.generate(prompt, salts=["one"])
    for salt, external in (("two", 0), ("one", 3 * PAGE)):
        assert engine.reset()
        with Hits(engine) as hits:
            (answer,) = engine.generate(prompt, salts=[salt])
        assert answer.new == expected(prompt)
        assert hits.external == external, salt


def test_many_prompts_one_after_another_and_at_once(engine: Engine, expected: Expected) -> None:
    prompts = [prompt_of(20 + number, 70 + 40 * number) for number in range(8)]
    engine.generate(*prompts)
    assert engine.reset()
    with Hits(engine) as hits:
        answers = engine.generate(*prompts)
    assert [answer.new for answer in answers] == [expected(prompt) for prompt in prompts]
    assert hits.external == sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)


def test_every_token_is_told(engine: Engine) -> None:
    """Of all that this module's engine was asked: local and hit are what vLLM counts, and the rest has reasons."""
    end = time.monotonic() + 30.0
    while True:
        engine.generate(prompt_of(9000, 5), tokens=1)  # a step, with which counts are told
        found = engine.metrics()
        parts = {name: told(found, name) for name in ("asked", "local", "hit", "missed")}
        if parts["asked"] == parts["local"] + parts["hit"] + parts["missed"]:
            break
        assert time.monotonic() < end, found
    assert parts["local"] == found["vllm:prefix_cache_hits"]
    assert parts["hit"] == found["vllm:external_prefix_cache_hits"] > 0
    assert set(found) & {f"vllm:hicache_missed_tokens/{reason}" for reason in ("cold", "unaligned_tail")}


def told(metrics: dict[str, float], name: str) -> float:
    """Sum of a counter of the connector's over its label."""
    return sum(value for key, value in metrics.items() if key.partition("/")[0] == f"vllm:hicache_{name}_tokens")


def test_fresh_process_finds_pages_in_storage(engines: Callable[..., Engine], storage: str, expected: Expected) -> None:
    """The first engine ends, and its service with it; another finds all pages in the folder, and says whence."""
    prompts = [prompt_of(50 + number, 300) for number in range(3)]
    extra = {"host": "64MiB", "storage": storage}
    with engines(extra) as first:
        first.generate(*prompts)
    with engines(extra) as second:
        answers = second.generate(*prompts)
        assert [answer.new for answer in answers] == [expected(prompt) for prompt in prompts]
        assert [answer.cached for answer in answers] == 3 * [4 * PAGE]
        metrics = second.metrics()
        assert metrics["vllm:hicache_hit_tokens/disk"] == 3 * 4 * PAGE
        if find_spec("vllm.v1.metrics.cache_hit_source"):  # since 0.32
            assert metrics["vllm:prompt_tokens_cached_by_source/disk"] == 3 * 4 * PAGE
