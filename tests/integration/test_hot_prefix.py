"""What is hot in memory is never read from storage, which would therefore evict just that: touches keep it there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hicache
from hicache.core.hashing import PageHasher
from hicache.core.keys import ObjectKey
from hicache.core.layout import KVGeometry
from hicache.core.transfers import TransferKind
from hicache.testing.clock import ManualClock
from hicache.testing.engine import FakeEngine, prompt, small_namespace
from hicache.testing.faults import FaultyStorage, delay, fail
from hicache.testing.gates import Gate
from hicache_file import FileBackend

NAMESPACE = small_namespace(geometry=KVGeometry.mha(layers=1, kv_heads=1, head_dim=4, dtype="float16"))
OBJECT = 8192  # bytes on disk of a page
CAPACITY = 60  # pages
SYSTEM = prompt(0, 40)  # the system prompt: ten pages
PAGES = 10
NewStore = Callable[[], FileBackend]


def _open(storage: Any, clock: ManualClock, **options: Any) -> hicache.EmbeddedCache:
    defaults: dict[str, Any] = {"device": 48, "host": 48, "prefetch": "wait_complete", "touch_seconds": 60.0}
    return hicache.open(NAMESPACE, storage=storage, clock=clock, **(defaults | {"canary": False} | options))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def new_store(tmp_path: Path, clock: ManualClock) -> Iterator[NewStore]:
    """Makes backends on one folder, as processes one after the other would; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make() -> FileBackend:
            store = FileBackend(
                str(tmp_path / "store"), capacity=CAPACITY * OBJECT, now=clock.now, wall=lambda: 1e9 + clock.now()
            )
            stack.callback(store.close)
            return store

        yield make


def _keys(tokens: list[int]) -> list[ObjectKey]:
    """The objects of a prompt's whole pages."""
    derived = NAMESPACE.derive()
    symbols = b"".join(token.to_bytes(4, "little") for token in tokens[: len(tokens) // 4 * 4])
    hasher: PageHasher = derived.hasher()
    glued = hasher.extend(None, symbols, len(symbols) // 16)
    hashes = [glued[at : at + hasher.size] for at in range(0, len(glued), hasher.size)]
    return [ObjectKey(derived.digest, 0, page_hash, NAMESPACE.geometry.anchor(4)) for page_hash in hashes]


def _work(cache: hicache.EmbeddedCache, clock: ManualClock, *, requests: int, first: int) -> None:
    """Requests that all begin with the system prompt, and others that share nothing: much more than fits."""
    engine = FakeEngine(cache)
    for number in range(first, first + requests):
        counts = engine.run([*SYSTEM, *prompt(1000 + number, 17)])
        assert counts.device >= PAGES or number == first, "the system prompt is hot in DEVICE all along"
        engine.run(prompt(2000 + number, 9))
        assert cache.flush()
        clock.advance(20.0)


@pytest.mark.parametrize("touched", [True, False])
def test_a_prompt_that_is_hot_above_survives_in_storage(touched: bool, clock: ManualClock, new_store: NewStore) -> None:
    store = new_store()
    with _open(store, clock, touch_seconds=60.0 if touched else None) as cache:
        _work(cache, clock, requests=30, first=0)  # 30 x 6 pages: three times the capacity
        statistics = cache.statistics()
        assert statistics.storage is not None
        assert statistics.storage.evicted > 2 * CAPACITY
        if not touched:
            assert store.contains(_keys(SYSTEM)) == [False] * PAGES  # why there are touches
            return
        assert store.contains(_keys(SYSTEM)) == [True] * PAGES
    store.close()
    fresh = new_store()
    with _open(fresh, clock) as cache:
        assert fresh.wait_ready(30.0)
        counts = FakeEngine(cache).run([*SYSTEM, 1])
        assert (counts.storage, counts.missed) == (PAGES, {})


@pytest.mark.case("FAIL-3")
def test_what_was_deleted_behind_the_cache_s_back_is_healed_by_next_commits(
    clock: ManualClock, new_store: NewStore
) -> None:
    store = new_store()
    with _open(store, clock) as cache:
        _work(cache, clock, requests=5, first=0)
        keys = _keys(SYSTEM)
        lost = [keys[0], keys[4], keys[5], keys[9]]
        assert store.delete(lost) == [True] * 4
        clock.advance(60.0)
        _work(cache, clock, requests=1, first=100)
        assert store.contains(keys) == [True] * PAGES
        healed = cache.statistics()
        assert healed.core.failed[TransferKind.TOUCH] == 4
        cache.check()
    store.close()
    fresh = new_store()
    with _open(fresh, clock) as cache:
        counts = FakeEngine(cache).run([*SYSTEM, 1])
        assert (counts.storage, counts.missed) == (PAGES, {})


def test_touches_go_leaf_to_root_at_commit_and_close_and_not_too_often(clock: ManualClock, new_store: NewStore) -> None:
    inner = new_store()
    store = FaultyStorage(inner)
    with _open(store, clock, generation_seconds=None) as cache:
        engine = FakeEngine(cache)
        for _ in range(6):  # every 20 seconds
            engine.run([*SYSTEM, 1])
            assert cache.flush()
            clock.advance(20.0)
        touched = [keys for verb, keys in store.calls if verb == "touch"]
        assert touched == [tuple(reversed(_keys(SYSTEM)))]
        # A request that lives long touches too.
        with cache.request([*SYSTEM, 1]) as request:
            request.load()
            request.allocate()
            clock.advance(60.0)
            request.extend(prompt(5, 4))
            request.allocate(1)
            engine.compute([*SYSTEM, 1, *prompt(5, 3)], request.allocate(0), first=PAGES)
            request.commit(44)
            assert cache.flush()
            assert store.count("touch") == 2
        assert store.count("touch") == 2


def test_a_touch_that_fails_takes_nothing_away(clock: ManualClock, new_store: NewStore) -> None:
    inner = new_store()
    store = FaultyStorage(inner)
    with _open(store, clock) as cache:
        engine = FakeEngine(cache)
        engine.run([*SYSTEM, 1])
        assert cache.flush()
        engine.run([*SYSTEM, 1])
        store.always("touch", fail(OSError("frozen")))
        clock.advance(60.0)
        puts = store.count("put")
        engine.run([*SYSTEM, 1])
        assert cache.flush()
        assert cache.statistics().failed_pages == {"touch": PAGES}
        assert store.count("put") == puts
        cache.check()


@pytest.mark.case("EVICT-6")
def test_touches_are_shed_where_the_queue_is_full(clock: ManualClock, new_store: NewStore) -> None:
    gate = Gate()
    inner = new_store()
    store = FaultyStorage(inner)
    bound = hicache.Bound(bytes=2**20, requests=1)
    with _open(store, clock, write_bound=bound, write_threads=1, generation_seconds=None) as cache:
        engine = FakeEngine(cache)
        engine.run([*SYSTEM, 1])
        assert cache.flush()
        engine.run([*SYSTEM, 1])
        store.always("put", delay(gate))
        engine.run(prompt(7, 9))
        gate.until_arrived(1)
        clock.advance(60.0)
        engine.run([*SYSTEM, 1])
        assert cache.statistics().shed_by_reason["queue_full"] >= PAGES
        store.always("put", None)
        gate.open()
        assert cache.flush()
        cache.check()
