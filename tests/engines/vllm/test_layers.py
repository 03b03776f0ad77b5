"""Pages that are stored layer by layer, by the step that computes them, and steps that wait for loads so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import prompt_of, settled
from test_kinds import WARM
from vllm_engine import PAGE, Engine

Engines = Callable[..., Engine]
Expected = Callable[..., list[int]]

EARLY = {"host": "64MiB", "layerwise_stores": "on"}


def stored_early(engine: Engine) -> int:
    engine.generate(prompt_of(9000, 5), tokens=1)  # a step, with which counts are told
    return int(engine.metrics().get("vllm:hicache_early_pages", 0))


def hits(engine: Engine, prompts: list[list[int]], expected: Expected) -> None:
    """All is found again that is computable, and answers are those of an engine without a cache."""
    settled(engine)
    answers = engine.generate(*prompts)
    assert [answer.new for answer in answers] == [expected(prompt) for prompt in prompts]
    assert [answer.cached for answer in answers] == [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts]


def objects(folder: Path) -> dict[str, str]:
    """Digest of each stored object by its name, which begins with the page's hash."""
    files = [path for path in folder.rglob("*") if path.is_file() and "_hg" in path.name]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}],
    ids=["one step", "chunks"],
)
def test_pages_are_those_that_whole_stores_write(
    engines: Engines, expected: Expected, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The same prompts, two of which share a prefix, by both ways into two folders: the same objects, bit for bit."""
    common = prompt_of(700, 3 * PAGE)
    prompts = [common + prompt_of(701, 30), common + prompt_of(702, 150), prompt_of(703, 500)]
    found = []
    for way in ("off", "on"):
        folder = tmp_path / way
        extra = EARLY | {"layerwise_stores": way, "storage": f"file://{folder}?capacity=256MiB"}
        with engines(extra, **options) as engine:
            for prompt in prompts:  # one after another, so that both compute the same batches
                assert engine.generate(prompt)[0].new == expected(prompt)
            pages = stored_early(engine)
            assert pages == (0 if way == "off" else sum(len(prompt) // PAGE for prompt in prompts) - 3)
            hits(engine, prompts, expected)
        found.append(objects(folder))
    assert len(found[0]) >= sum(len(prompt) // PAGE for prompt in prompts) - 3
    assert found[0] == found[1]


def test_preempted_requests_go_on_right(engines: Engines, expected: Expected) -> None:
    prompts = [prompt_of(710 + number, 200) for number in range(8)]
    engine = engines(EARLY, num_gpu_blocks_override=40)
    for attempt in range(2):
        answers = engine.generate(*prompts, tokens=72)
        assert [answer.new for answer in answers] == [expected(prompt, 72) for prompt in prompts], attempt
        settled(engine)
    metrics = engine.metrics()
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:hicache_early_pages"] > 0
    assert metrics["vllm:hicache_hit_tokens/host"] > 0


def test_two_prompts_of_one_batch_that_share_a_prefix(engines: Engines, expected: Expected) -> None:
    common = prompt_of(720, 3 * PAGE)
    prompts = [common + prompt_of(721, 30), common + prompt_of(722, 90)]
    engine = engines(EARLY)
    assert [answer.new for answer in engine.generate(*prompts)] == [expected(prompt) for prompt in prompts]
    assert stored_early(engine) >= 4
    hits(engine, prompts, expected)


def test_ranks(engines: Engines, expected: Expected) -> None:
    """Each stores its part of a page; it is there when both have."""
    prompts = [prompt_of(730, 300), prompt_of(731, 500)]
    engine = engines(EARLY, processes=True, tensor_parallel_size=2, max_num_batched_tokens=128)
    assert [answer.new for answer in engine.generate(*prompts)] == [expected(prompt) for prompt in prompts]
    assert stored_early(engine) > 0
    hits(engine, prompts, expected)


def test_loads_and_stores_of_one_step(engines: Engines, expected: Expected) -> None:
    """A step waits for its pages layer by layer, and stores what it adds in the same way."""
    prompt = prompt_of(740, 600)
    engine = engines(EARLY | {"load": "sync"})
    engine.generate(prompt[:300])
    settled(engine)
    (answer,) = engine.generate(prompt)
    assert (answer.new, answer.cached) == (expected(prompt), 4 * PAGE)
    assert stored_early(engine) == 600 // PAGE
    hits(engine, [prompt], expected)
    assert not engine.said("runs without a cache")
    assert not engine.said("computed without waiting")


def test_stages_schedule_ahead(engines: Engines, expected: Expected) -> None:
    """Two pipeline stages, each with its layers; no step waits for a load, as the next one is scheduled already."""
    prompts = [prompt_of(750, 300), prompt_of(751, 500)]
    extra = EARLY | {"load": "sync", "layer_partition": 2}
    engine = engines(extra, processes=True, pipeline_parallel_size=2, max_num_batched_tokens=128, **WARM)
    assert [answer.new for answer in engine.generate(*prompts)] == [expected(prompt) for prompt in prompts]
    assert stored_early(engine) > 0
    hits(engine, prompts, expected)
    assert engine.said('"load": "sync" is "async" here')
