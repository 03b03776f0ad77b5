"""Which pages the engine itself holds is told to the service, and what it evicts, advisory as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_services import service_config, small
from vllm_small_engine import BLOCK, SmallEngine

from hicache.testing.clients import until
from hicache.testing.serving import ServedApp

Engines = Callable[..., SmallEngine]


class Pool:
    """Stands for vLLM's block pool, which keeps all blocks, or none."""

    def __init__(self, block: int = BLOCK) -> None:
        self.hash_block_size = block
        self.keeps = True

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[Any] | None:
        assert (len(block_hash), kv_cache_group_ids) == (32, [0])
        return [object()] if self.keeps else None


def bound(engine: SmallEngine, pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_vllm.residency.TELL_SECONDS", 0.0)
    engine.scheduler.bind_gpu_block_pool(pool)


def told(service: ServedApp, engine: SmallEngine, pages: int) -> None:
    """Wait until the service knows of so many pages that engines hold."""
    until(lambda: engine.stepped() and sum(pool.mirror.pages for pool in service.app.service.pools) == pages)


def test_pages_come_and_go(engines: Engines, service: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed ones, those of an answer, and those of a salt of their own; evicted ones are told by looking again."""
    engine, pool = engines(), Pool()
    bound(engine, pool, monkeypatch)
    tokens = small(1, 40)
    engine.generate(tokens, new=10)
    told(service, engine, 6)
    engine.generate(tokens, cache_salt="own")
    told(service, engine, 11)
    pool.keeps = False
    told(service, engine, 0)


def test_loaded_pages_are_held_too(engines: Engines, service: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = small(2, 40)
    engines().generate(tokens)
    engine = engines()
    bound(engine, Pool(), monkeypatch)
    engine.generate(tokens, new=1)
    assert engine.external == 32
    told(service, engine, 5)


def test_service_that_comes_back_hears_it_again(
    engines: Engines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    bound(engine, Pool(), monkeypatch)
    for attempt in range(2):
        with ServedApp(service_config(folder)) as service:
            until(lambda: engine.scheduler._cache.connected)
            engine.generate(small(3 + attempt, 40))  # so it hears of the namespace
            told(service, engine, 5 * (attempt + 1))
        until(lambda: not engine.scheduler._cache.connected)
        engine.step()


def test_pool_that_is_not_understood_costs_the_news_alone(
    engines: Engines, service: ServedApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines()
    bound(engine, Pool(block=2 * BLOCK), monkeypatch)
    engine.generate(small(5, 40))
    assert engine.scheduler._scheduler._residency._pool is None, "names of other blocks"
    bound(engine, pool := Pool(), monkeypatch)
    pool.get_cached_block = lambda *_: 1 / 0  # type: ignore[method-assign]
    for _ in range(2):
        engine.generate(small(5, 40))
        engine.step()
    assert "which pages the engine holds is not told any more" in caplog.text
    assert engine.external == 64
