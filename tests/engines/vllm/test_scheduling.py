"""What the engine does with blocks while pages come and go: preemption, chunks, loads that a step waits for, audits."""

from __future__ import annotations

from collections.abc import Callable

from conftest import prompt_of
from vllm_engine import BLOCK, PAGE, Engine

Engines = Callable[..., Engine]
Expected = Callable[..., list[int]]


def test_preempted_requests_go_on_right(engines: Engines, expected: Expected) -> None:
    """Eight requests that grow to 272 tokens each in 40 blocks: some lose their blocks, and find their pages again."""
    prompts = [prompt_of(200 + number, 200) for number in range(8)]
    engine = engines({"host": "64MiB"}, num_gpu_blocks_override=40)
    for attempt in range(2):
        answers = engine.generate(*prompts, tokens=72)
        assert [answer.new for answer in answers] == [expected(prompt, 72) for prompt in prompts], attempt
        if attempt:
            assert all(answer.cached >= 3 * PAGE for answer in answers)
        assert engine.reset()
    metrics = engine.metrics()
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:hicache_hit_tokens/host"] > 0


def test_prompts_in_chunks(engines: Engines, expected: Expected) -> None:
    """At most 96 tokens a step: pages are stored as chunks make them whole, and found again beside other chunks."""
    prompts = [prompt_of(220 + number, 500 + 30 * number) for number in range(4)]
    engine = engines({"host": "64MiB"}, max_num_batched_tokens=96, enable_chunked_prefill=True)
    for hit in (False, True):
        answers = engine.generate(*prompts)
        assert [answer.new for answer in answers] == [expected(prompt) for prompt in prompts]
        assert [answer.cached for answer in answers] == [hit * ((len(prompt) - 1) // PAGE * PAGE) for prompt in prompts]
        assert engine.reset()


def test_loads_that_a_step_waits_for(engines: Engines, expected: Expected) -> None:
    """ "load": "sync": layers wait for their pages, and blocks of a hit are shared by requests of the same step."""
    prompts = [prompt_of(240 + number, 300) for number in range(3)]
    engine = engines({"host": "64MiB", "load": "sync"})
    engine.generate(*prompts)
    assert engine.reset()
    answers = engine.generate(*prompts, prompts[0])
    assert [answer.new for answer in answers] == [expected(prompt) for prompt in (*prompts, prompts[0])]
    # Of the two that are the same, the second in turn also finds the block behind the last whole page in the engine.
    first, *others, same = (answer.cached for answer in answers)
    assert others == [4 * PAGE, 4 * PAGE]
    assert min(first, same) == 4 * PAGE
    assert max(first, same) in (4 * PAGE, 4 * PAGE + BLOCK)
    assert engine.metrics()["vllm:external_prefix_cache_hits"] == 3 * 4 * PAGE


def test_audited_pages_are_equal(engines: Engines, expected: Expected) -> None:
    """With probability 1 each hit is a page shorter, which is computed again and found to be the same."""
    prompt = prompt_of(260, 300)
    engine = engines({"host": "64MiB", "audit_probability": 1.0})
    engine.generate(prompt)
    for _ in range(2):
        assert engine.reset()
        (answer,) = engine.generate(prompt)
        assert answer.new == expected(prompt)
        assert answer.cached == 3 * PAGE
    metrics = engine.metrics()
    assert metrics.get("vllm:hicache_audited_pages/equal", 0) + metrics.get("vllm:hicache_audited_pages/close", 0) == 2


def test_cleared_pages_are_not_found(engines: Engines, expected: Expected, storage: str) -> None:
    """`reset_connector`, as after a change of weights: neither this engine nor the next one finds the old pages."""
    prompt = prompt_of(270, 300)
    extra = {"host": "64MiB", "storage": storage}
    with engines(extra) as engine:
        engine.generate(prompt, salts=["a salt"])
        engine.generate(prompt)
        assert engine.reset(connector=True)
        for salts in (None, ["a salt"]):
            (answer,) = engine.generate(prompt, salts=salts)
            assert answer.new == expected(prompt)
            assert answer.cached == 0
        assert engine.reset(connector=True)
    with engines(extra) as engine:
        assert engine.generate(prompt)[0].cached == 0
