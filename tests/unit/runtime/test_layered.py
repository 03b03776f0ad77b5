"""Loads whose copies into DEVICE are not waited for: their slots are known at once, what came of them at the end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import hicache
from hicache.errors import CacheClosed
from hicache.memory.base import CopyEngine, HostPool
from hicache.memory.device import TensorDevicePool
from hicache.memory.layout import PageLayout
from hicache.records import PageResult
from hicache.storage.memory import MemoryBackend
from hicache.testing.memory import ManualCopyEngine

PAGE = 4
GEOMETRY = hicache.KVGeometry.mha(layers=2, kv_heads=1, head_dim=4, dtype="float16")
NAMESPACE = hicache.Namespace("m", revision="r", geometry=GEOMETRY, page_size=PAGE, hash="sha256")
FIRST = np.arange(14, dtype=np.uint32)
OTHER = FIRST + 100


class HandPool(TensorDevicePool):
    """Four pages, whose copies are ended by hand."""

    copies: ManualCopyEngine

    def __init__(self) -> None:
        super().__init__(
            np.zeros((2, 2, 4, PAGE, 1, 8), np.uint8), page=PageLayout.of(GEOMETRY, PAGE), layout="layer_first"
        )

    def copy_engine(self, host: HostPool | None) -> CopyEngine:
        """By hand."""
        self.copies = ManualCopyEngine(self, host)
        return self.copies


@pytest.fixture
def pool() -> HandPool:
    return HandPool()


@pytest.fixture
def cache(pool: HandPool) -> Iterator[hicache.EmbeddedCache]:
    """FIRST is in HOST only: OTHER took its place in DEVICE."""
    with hicache.open(NAMESPACE, device=pool, host=16, storage=MemoryBackend(), canary=False) as made:
        for number, tokens in enumerate((FIRST, OTHER)):
            compute(made, pool, tokens, number)
        yield made


def compute(cache: hicache.EmbeddedCache, pool: HandPool, tokens: np.ndarray, number: int) -> None:
    with cache.request(tokens) as request:
        for at, slot in enumerate(request.allocate(3).tolist()):
            pool.write_page(slot, bytes([16 * number + at + 1]) * pool.page_bytes)
        request.commit(upto=12, ready=hicache.READY)
    pool.copies.end_all()
    cache.flush()


def test_slots_are_known_before_their_pages_have_come(cache: hicache.EmbeddedCache, pool: HandPool) -> None:
    with cache.request(FIRST) as request, cache.request(FIRST[:12]) as shorter:
        under_way = request.load_by_layer()
        assert len(under_way.slots) == 3
        (copy,) = under_way.copies
        assert copy.results is None
        joined = shorter.load_by_layer()  # waits for the same copy, of which its prompt may take less
        assert joined.copies == (copy,)
        assert joined.slots.tolist() == under_way.slots[:2].tolist()
        pool.copies.end()
        assert under_way.finish().tolist() == under_way.slots.tolist()
        assert joined.finish().tolist() == joined.slots.tolist()
        assert under_way.finish().tolist() == under_way.slots.tolist()
        for at, slot in enumerate(under_way.slots.tolist()):
            assert set(pool.read_page(slot).tolist()) == {at + 1}
        assert request.load().tolist() == under_way.slots.tolist()
        assert len(request.allocate(1)) == 1
    assert request.counts.device + request.counts.host == 3


def test_pages_that_failed_are_not_there_at_the_end(cache: hicache.EmbeddedCache, pool: HandPool) -> None:
    with cache.request(FIRST) as request:
        under_way = request.load_by_layer()
        pool.copies.end(results=[PageResult.OK, PageResult.FAILED])  # of pages 1 and 2: page 0 had stayed
        assert under_way.finish().tolist() == under_way.slots[:2].tolist()


def test_without_anything_to_copy_it_is_load(cache: hicache.EmbeddedCache) -> None:
    for tokens, pages in ((OTHER, 3), (FIRST + 500, 0)):
        with cache.request(tokens) as request:
            under_way = request.load_by_layer()
            assert under_way.copies == ()
            assert len(under_way.slots) == pages
            assert under_way.finish().tolist() == under_way.slots.tolist() == request.load().tolist()
            request.allocate(1)
            assert request.load_by_layer().slots.tolist() == under_way.slots.tolist()
    with pytest.raises(CacheClosed):
        request.load_by_layer()


def test_a_request_that_ends_meanwhile_leaves_nothing(cache: hicache.EmbeddedCache, pool: HandPool) -> None:
    with cache.request(FIRST) as request:
        under_way = request.load_by_layer()
    with pool.copies._changed:
        assert len(pool.copies.pending) == 1
    pool.copies.end_all()
    with pytest.raises(CacheClosed):
        under_way.finish()
    cache.flush()
    compute(cache, pool, FIRST + 300, 2)  # its slots can be had again
    assert cache.statistics().open_requests == 0


def test_what_was_decided_is_known_at_the_end(pool: HandPool) -> None:
    with hicache.open(NAMESPACE, device=pool, host=16, canary=False, prefill_tokens_per_second=1.0) as cache:
        for number, tokens in enumerate((FIRST, OTHER)):
            compute(cache, pool, tokens, number)
        with cache.request(FIRST) as request:
            under_way = request.load_by_layer()
            assert request.decision is None
            pool.copies.end_all()
            assert len(under_way.finish()) == len(under_way.slots)
            assert request.decision is not None
            assert request.decision.planned_host == 2
