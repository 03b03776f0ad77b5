"""A storage that is taken away from a cache in use, and given to it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

import hicache
from hicache.records import MissReason
from hicache.runtime.queues import Job
from hicache.storage.memory import MemoryBackend
from hicache.testing.clock import ManualClock
from hicache.testing.embedded import at_rest, empty, open_small
from hicache.testing.engine import FakeEngine, prompt, small_namespace, small_pool
from hicache.testing.faults import FaultyStorage, delay
from hicache.testing.gates import Gate
from hicache.testing.memory import FaultyDevicePool
from hicache.testing.waits import eventually

pytestmark = pytest.mark.case("THR-5")


def test_without_its_storage_a_cache_goes_on_with_what_is_above() -> None:
    storage = FaultyStorage(MemoryBackend())
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        for seed in range(3):
            engine.run(prompt(seed, 41))
        assert cache.flush()
        assert cache.detach_storage().failed_pages == 0
        assert cache.statistics().degraded == ("storage: detached",)
        assert cache.statistics().storage is None
        calls = len(storage.calls)
        assert engine.run(prompt(0, 41)).device == 10
        eventually(lambda: not cache.parts.reducer.forgetting)
        empty(cache)
        assert cache.match(prompt(0, 41)) == hicache.Match()
        counts = engine.run(prompt(0, 41))
        assert counts.missed == {MissReason.EVICTED: 10}
        cache.clear()
        engine.run(prompt(7, 41), tenant="new")
        assert cache.flush()
        assert len(storage.calls) == calls
        at_rest(cache)
        with pytest.raises(hicache.ConfigError, match="no storage is attached"):
            cache.detach_storage()
    assert cache.close().complete


def test_the_same_storage_comes_back_and_what_it_has_is_found_again() -> None:
    storage = MemoryBackend()
    with open_small(storage) as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 41))
        assert cache.flush()
        cache.detach_storage()
        engine.run(prompt(2, 41))
        with pytest.raises(hicache.ConfigError, match="URL"):
            cache.attach_storage(5)  # type: ignore[arg-type]
        cache.attach_storage(storage)
        with pytest.raises(hicache.ConfigError, match="already"):
            cache.attach_storage(MemoryBackend())
        assert cache.statistics().degraded == ()
        assert cache.flush()  # what was computed meanwhile is written, too
        assert storage.statistics().objects == 80
        empty(cache)
        assert engine.run(prompt(1, 41)).storage == 10
        assert engine.run(prompt(2, 41)).storage == 10
        at_rest(cache)


def test_another_storage_gets_what_is_above_and_nothing_is_expected_of_it() -> None:
    first, second = MemoryBackend(), MemoryBackend()
    with open_small(first, events=True) as cache:
        engine = FakeEngine(cache)
        for seed in range(3):
            engine.run(prompt(seed, 41))
        assert cache.flush()
        with cache.parts.reducer.lock:
            cache.parts.core.evict(0, 99)
            cache.parts.core.evict(1, 10)  # one prompt is in storage only
        cache.detach_storage()
        cache.attach_storage(second)
        asked = [engine.run(prompt(seed, 41)) for seed in range(3)]
        assert sum(counts.storage for counts in asked) == 0
        assert sum(sum(counts.missed.values()) for counts in asked) == 10
        assert cache.flush()
        assert second.statistics().objects == 120
        at_rest(cache)


def test_a_cache_may_be_opened_without_storage_and_get_one_later(tmp_path: Any) -> None:
    with open_small(None, attachable=True) as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 41))
        assert cache.statistics().degraded == ()
        cache.attach_storage(f"file://{tmp_path}/store?capacity=1GiB")
        assert cache.flush()
        empty(cache)
        assert engine.run(prompt(1, 41)).storage == 10
        cache.detach_storage()
        at_rest(cache)
    with open_small(f"file://{tmp_path}/store") as cache:
        assert FakeEngine(cache).run(prompt(1, 41)).storage == 10
    with open_small(None) as cache, pytest.raises(hicache.ConfigError, match="attachable=True"):
        cache.attach_storage(MemoryBackend())
    with pytest.raises(hicache.ConfigError, match="host is 0"):
        open_small(None, attachable=True, host=0)


def _busy(read: bool) -> tuple[hicache.EmbeddedCache, FaultyStorage, Gate, Callable[[], None]]:
    """A cache with a read or a write inside storage, and how to end what waits for it."""
    inner = MemoryBackend()
    with open_small(inner) as cache:
        FakeEngine(cache).run(prompt(1, 41))
        assert cache.flush()
    storage, gate = FaultyStorage(inner), Gate()
    cache = open_small(storage, clock=ManualClock(), fetch_bytes=2 * small_namespace().geometry.page_bytes(4))
    storage.always("get_into" if read else "put", delay(gate))
    if read:
        request = cache.request(prompt(1, 41))
        gate.until_arrived(1)
        return cache, storage, gate, request.close
    FakeEngine(cache).run(prompt(2, 41))
    gate.until_arrived(1)
    return cache, storage, gate, lambda: None


@pytest.mark.parametrize("read", [True, False])
def test_with_work_under_way_it_is_refused_at_the_deadline_and_stays_attached(read: bool) -> None:
    cache, storage, gate, end = _busy(read)
    with cache:
        with pytest.raises(hicache.StorageError, match="pages are still on their way"):
            cache.detach_storage(deadline=0.0)
        clock = cache.parts.clock
        assert isinstance(clock, ManualClock)
        refused: list[BaseException] = []

        def detach() -> None:
            try:
                cache.detach_storage(deadline=3.0)
            except hicache.StorageError as error:
                refused.append(error)

        thread = threading.Thread(target=detach)
        thread.start()
        clock.until_waiting()
        clock.advance(3.0)
        thread.join(60)
        assert len(refused) == 1
        storage.always("get_into" if read else "put", None)
        gate.open()
        end()
        assert cache.flush()
        empty(cache)
        assert FakeEngine(cache).run(prompt(1, 41)).storage == 10  # nothing was lost
        at_rest(cache)


@pytest.mark.parametrize("read", [True, False])
def test_it_waits_for_what_is_under_way_within_its_deadline(read: bool) -> None:
    cache, storage, gate, end = _busy(read)
    with cache:
        clock = cache.parts.clock
        assert isinstance(clock, ManualClock)
        reports: list[hicache.DetachReport] = []
        thread = threading.Thread(target=lambda: reports.append(cache.detach_storage(deadline=60.0)))
        thread.start()
        clock.until_waiting()
        gate.open()
        thread.join(60)
        assert reports == [hicache.DetachReport()]
        end()
        at_rest(cache)
        assert storage.inner.statistics().objects == (40 if read else 80)


@pytest.mark.parametrize("read", [True, False])
def test_by_force_everything_is_settled_and_another_storage_can_be_attached(read: bool) -> None:
    cache, _, gate, end = _busy(read)
    with cache:
        engine = FakeEngine(cache)
        report = cache.detach_storage(deadline=0.0, force=True)
        assert report.stuck_calls > 0
        assert report.stuck_pages > 0
        end()
        # What is inside the old backend keeps its slots, and nothing else does.
        statistics = cache.statistics()
        assert statistics.core.host.pinned + statistics.core.host.quarantined <= report.stuck_pages
        second = MemoryBackend()
        cache.attach_storage(second)
        engine.run(prompt(3, 41))
        assert engine.run(prompt(3, 41)).device == 10
        gate.open()
        eventually(lambda: cache.statistics().core.transfers == 0)
        assert cache.flush()
        at_rest(cache)
        empty(cache)
        assert engine.run(prompt(1, 41)).storage == 0  # what the old one answered at last counts for nothing
        assert engine.run(prompt(3, 41)).storage == 10
        at_rest(cache)


def test_by_force_with_a_deadline_what_comes_back_in_time_leaves_nothing_behind() -> None:
    cache, _, gate, end = _busy(read=True)
    with cache:
        clock = cache.parts.clock
        assert isinstance(clock, ManualClock)
        reports: list[hicache.DetachReport] = []
        thread = threading.Thread(target=lambda: reports.append(cache.detach_storage(deadline=60.0, force=True)))
        thread.start()
        clock.until_waiting()
        gate.open()
        thread.join(60)
        (report,) = reports
        assert (report.stuck_pages, report.stuck_calls) == (0, 0)
        assert report.failed_pages > 0
        end()
        at_rest(cache)


def test_copies_on_their_way_down_still_reach_the_storage_or_it_is_refused() -> None:
    namespace, storage, clock, gate = small_namespace(), MemoryBackend(), ManualClock(), Gate()
    pool = FaultyDevicePool(small_pool(namespace, 64), gate=gate)
    with open_small(storage, device=pool, clock=clock) as cache:
        FakeEngine(cache).run(prompt(1, 41))
        assert not cache.statistics().idle
        with pytest.raises(hicache.StorageError, match="on their way down"):
            cache.detach_storage(deadline=0.0)
        thread = threading.Thread(target=cache.detach_storage, args=(60.0,))
        thread.start()
        clock.until_waiting()
        gate.open()
        thread.join(60)
        eventually(lambda: cache.statistics().idle)
        assert cache.statistics().degraded == ("storage: detached",)
        assert storage.statistics().objects == 40
        at_rest(cache)


def test_jobs_that_have_told_their_results_and_not_ended_are_waited_for_until_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else wakes who waits for them: the clock stands still."""
    clock, gate = ManualClock(), Gate()
    with open_small(MemoryBackend(), clock=clock) as cache:
        storage, reducer = cache.parts.storage, cache.parts.reducer
        assert storage is not None
        ended = storage.writes.ended

        def late(job: Job, *, failed: bool = False) -> None:
            gate.enter()
            ended(job, failed=failed)

        monkeypatch.setattr(storage.writes, "ended", late)
        FakeEngine(cache).run(prompt(1, 5))
        gate.until_arrived(1)
        eventually(lambda: not cache.statistics().core.transfers)
        thread = threading.Thread(target=cache.detach_storage, args=(60.0,))
        thread.start()
        clock.until_waiting()
        with reducer.lock:  # which he gives back only once he sleeps
            gate.open()
        thread.join(20)
        assert not thread.is_alive()
        assert cache.statistics().degraded == ("storage: detached",)
        at_rest(cache)


def test_a_request_that_waits_for_storage_goes_on_without_it() -> None:
    cache, _, gate, end = _busy(read=True)
    with cache:
        end()
        loaded: list[int] = []

        def load() -> None:
            with cache.request(prompt(1, 41)) as request:
                loaded.append(len(request.load()))

        thread = threading.Thread(target=load)
        thread.start()
        clock = cache.parts.clock
        assert isinstance(clock, ManualClock)
        clock.until_waiting()
        cache.detach_storage(deadline=0.0, force=True)
        thread.join(60)  # it does not wait for a storage that is not there
        assert loaded == [0]
        gate.open()
        at_rest(cache)


def test_generations_are_agreed_on_when_a_storage_is_attached() -> None:
    ahead, behind = MemoryBackend(), MemoryBackend()
    digest = small_namespace().derive().digest
    ahead.clear(digest, 7)
    with open_small(None, attachable=True) as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 41))
        cache.attach_storage(ahead)
        assert engine.run(prompt(1, 41)).device == 0  # of a life that has ended elsewhere
        assert cache.flush()
        assert {key.generation for key in ahead._entries} == {7}
        cache.detach_storage()
        cache.attach_storage(behind)
        assert behind.generation(digest) == 7
        assert engine.run(prompt(1, 41)).device == 10
        at_rest(cache)


def test_under_load_it_may_come_and_go_all_the_time() -> None:
    stores = [MemoryBackend(), MemoryBackend()]
    heads = [prompt(seed, 24) for seed in range(4)]
    with open_small(stores[0], device=160, host=120, fetch_bytes=512, generation_seconds=0.01) as cache:
        errors: list[BaseException] = []
        over = threading.Event()

        def work(number: int) -> None:
            engine = FakeEngine(cache)
            try:
                for i in itertools.count():
                    if over.is_set():
                        break
                    engine.run([*heads[i % 4], *prompt(number * 1000 + i % 7, 16)], tenant=str(i % 2))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for i in range(20):
                requests = cache.statistics().requests
                eventually(lambda requests=requests: cache.statistics().requests > requests + 10)  # type: ignore[misc]
                cache.detach_storage(deadline=30.0, force=i % 2 == 0)
                cache.attach_storage(stores[(i + 1) % 2])
                cache.check()
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert errors == []
        at_rest(cache)
    for store in stores:
        with open_small(store, device=400, host=400) as cache:
            engine = FakeEngine(cache)
            for number in range(3):
                for i in range(7):
                    engine.run([*heads[i % 4], *prompt(number * 1000 + i, 16)], tenant=str(i % 2))
