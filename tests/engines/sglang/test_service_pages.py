"""SGLang's own controller and host pools over a real service: bit-exact, apart from others, through trouble."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, HiCacheStorageFailureInjector
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str
from sglang_pools import HEADS, PAGE, Engine, bytes_at, fill, make_mha, make_mla

from hicache.testing.sidecars import ServiceProcess

PAGES = 3
KEYS = get_hash_str(list(range(100, 100 + PAGES * PAGE)), None, page_size=PAGE)
SOURCE, TARGET = torch.arange(0, PAGES * PAGE), torch.arange(8 * PAGE, (8 + PAGES) * PAGE)
ROOT = HiCacheStorageExtraInfo(prefix_keys=[])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """One service for all of these tests, which tell their pages apart by revisions."""
    with tempfile.TemporaryDirectory(prefix="hc") as name:
        options = ("--set", "host.pool_bytes=4MiB", "--log-level", "error")
        with ServiceProcess(Path(name), *options, host="256MiB") as service:
            yield service.address


@pytest.fixture
def engine(address: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Makes engines that share the pages of one test."""
    made: list[Engine] = []

    def make(pool: Any, **config: Any) -> Engine:
        made.append(Engine(pool, {"address": address, "revision": request.node.name}, **config))
        return made[-1]

    yield make
    for one in made:
        one.backend.close()


def store(one: Engine) -> bool:
    return one.store(KEYS, SOURCE, zero_copy=True, extra_info=ROOT)


def load(one: Engine) -> int:
    return one.load(KEYS, TARGET, zero_copy=True, extra_info=ROOT)


def come_back(written: Any, read: Any, pages: int = PAGES) -> bool:
    """Whether pages are the same bit for bit in two pools of one layout."""
    return all(torch.equal(bytes_at(written, page * PAGE), bytes_at(read, (8 + page) * PAGE)) for page in range(pages))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_mha_pages_come_back_bit_exact(layout: str, engine: Callable[..., Engine]) -> None:
    pool, other = make_mha(layout), make_mha(layout)
    first, second = engine(pool), engine(other)
    assert (first.backend.batch_exists(KEYS, ROOT), load(first)) == (0, 0)
    assert store(first)
    other.kv_buffer.zero_()
    assert second.backend.batch_exists(KEYS, ROOT) == PAGES
    assert load(second) == PAGES
    assert come_back(pool, other)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_mla_pages_come_back_bit_exact(layout: str, engine: Callable[..., Engine]) -> None:
    pool, other = make_mla(layout), make_mla(layout)
    assert store(engine(pool, tp_rank=1, tp_size=2))
    other.kv_buffer.zero_()
    assert load(engine(other, tp_rank=0, tp_size=4)) == PAGES
    assert come_back(pool, other)


def test_layouts_share_pages_and_other_shapes_and_ranks_do_not(engine: Callable[..., Engine]) -> None:
    assert store(engine(make_mha("layer_first")))
    assert all(load(engine(make_mha(layout))) == PAGES for layout in ("page_first", "page_first_direct", "page_head"))
    assert load(engine(make_mha(dtype=torch.float16))) == 0
    assert load(engine(make_mha(layers=2))) == 0
    assert load(engine(make_mha(first_layer=1))) == 0
    assert load(engine(make_mha(), tp_size=2)) == load(engine(make_mha(), tp_rank=1, tp_size=2)) == 0
    assert load(engine(make_mha(heads=HEADS // 2), tp_size=2)) == 0
    assert load(engine(make_mha(), model_name="example/other")) == 0


def test_the_controllers_own_loops_agree(engine: Callable[..., Engine]) -> None:
    """Write-back, look-up and prefetch in several batches, as the controller's threads do them."""
    pages = 150  # the controller takes 128 at a time
    tokens = list(range(pages * PAGE))
    pool = make_mha(tokens=2 * pages * PAGE)
    first, slots = engine(pool), torch.arange(pages * PAGE)
    keys = get_hash_str(tokens, None, page_size=PAGE)
    backup = StorageOperation(slots, tokens, hash_value=keys, prefix_keys=[])
    first.controller._page_backup(backup)
    assert backup.completed_tokens == len(tokens)
    prefetch = PrefetchOperation("r", RadixKey(array("q", [*tokens, *range(7, 7 + PAGE)])), None, prefix_keys=[])
    assert first.controller._storage_hit_query(prefetch) == (keys, len(tokens))
    prefetch.hash_value, prefetch.host_indices = keys, slots + pages * PAGE
    assert first.controller._page_transfer(prefetch) == pages
    for page in (0, 127, 128, 149):
        assert torch.equal(bytes_at(pool, page * PAGE), bytes_at(pool, (pages + page) * PAGE))


def test_injected_delays_and_failures_cost_hits_only(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under SGLang's own injector every page that is said to be loaded is right, and some are."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    pool = make_mha()
    tried = engine(pool)
    assert isinstance(tried.backend, HiCacheStorageFailureInjector)
    stored = [store(tried) for _ in range(20)]
    outcomes = []
    for _ in range(40):
        fill(pool)
        pool.kv_buffer[:, 8 * PAGE :].zero_()
        outcomes.append(load(tried))
        assert come_back(pool, pool, outcomes[-1])
    assert {True, False} == set(stored)
    assert {0, PAGES} == set(outcomes)
