"""Bounds of queues, draining, closing, forking: the embedded cache when it cannot keep up, and at its end."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

import hicache
from hicache.records import MissReason
from hicache.storage.memory import MemoryBackend
from hicache.testing.clock import ManualClock
from hicache.testing.engine import FakeEngine, prompt, small_namespace, small_pool
from hicache.testing.faults import FaultyStorage, delay, fail
from hicache.testing.gates import Gate
from hicache.testing.memory import FaultyDevicePool
from hicache.testing.waits import eventually

PAGE = small_namespace().geometry.page_bytes(4)


def _open(**options: Any) -> hicache.EmbeddedCache:
    plain = {"retry": None, "breaker": None, "canary": False}  # these tests say which call goes wrong
    return hicache.open(small_namespace(), **({"device": 64, "host": 64} | plain | options))


# ---- bounds


@pytest.mark.case("EVICT-6")
def test_writes_that_storage_cannot_take_are_shed_and_counted() -> None:
    storage, gate = FaultyStorage(MemoryBackend()), Gate()
    bound = hicache.Bound(bytes=20 * PAGE, requests=100)
    with _open(device=400, host=400, storage=storage, write_bound=bound, write_threads=1) as cache:
        engine = FakeEngine(cache)
        storage.always("put", delay(gate))
        for seed in range(30):
            engine.run(prompt(seed, 41))
            assert engine.run(prompt(seed, 41)).device == 10  # the foreground does not notice
        eventually(lambda: cache.statistics().shed_by_reason.get("queue_full", 0) > 0)
        eventually(lambda: cache.statistics().core.host.resident == 300)
        statistics = cache.statistics()
        assert statistics.writes is not None
        assert statistics.writes.bytes <= 20 * PAGE
        assert statistics.shed_by_reason["queue_full"] >= 250
        assert statistics.core.host.pinned <= 20  # the pins of what was shed are gone
        gate.open()
        assert cache.flush()  # and it can be written later
        cache.check()
    with _open(device=400, host=400, storage=storage.inner, prefetch="wait_complete") as cache:
        engine = FakeEngine(cache)
        assert sum(engine.run(prompt(seed, 41)).storage for seed in range(30)) == 300


@pytest.mark.case("EVICT-6")
def test_a_write_above_the_bound_goes_when_it_is_alone() -> None:
    bound = hicache.Bound(bytes=1, requests=1)
    with _open(storage=MemoryBackend(), write_bound=bound) as cache:
        FakeEngine(cache).run(prompt(1, 41))
        eventually(lambda: cache.statistics().core.transfers == 0)
        assert cache.statistics().bytes_to_storage == 10 * PAGE


@pytest.mark.case("EVICT-6")
def test_copies_beyond_their_bound_are_shed() -> None:
    gate = Gate()
    pool = FaultyDevicePool(small_pool(small_namespace(), 64), gate=gate)
    with _open(device=pool, copy_bound=hicache.Bound(bytes=10 * PAGE, requests=10)) as cache:
        engine = FakeEngine(cache)
        for seed in range(3):
            engine.run(prompt(seed, 17))
        assert cache.statistics().shed_by_reason == {"copy_queue_full": 4}
        assert cache.statistics().core.host.free == 64 - 8
        gate.open()
        assert cache.flush()
        assert cache.statistics().core.host.resident == 12


@pytest.mark.case("EVICT-6")
def test_a_prefetch_that_finds_the_queue_full_is_refused_and_counted() -> None:
    inner = MemoryBackend()
    prompts = [prompt(seed, 41) for seed in range(6)]
    with _open(storage=inner) as cache:
        for tokens in prompts:
            FakeEngine(cache).run(tokens)
        assert cache.flush()
    storage, gate = FaultyStorage(inner), Gate()
    bound = hicache.Bound(bytes=2**20, requests=2)
    with _open(storage=storage, read_bound=bound, read_threads=1, prefetch="wait_complete") as cache:
        storage.always("get_into", delay(gate))
        first = cache.request(prompts[0])
        gate.until_arrived()
        others = [cache.request(tokens) for tokens in prompts[1:]]
        assert [len(request.load()) for request in others[2:]] == [0, 0, 0]
        statistics = cache.statistics()
        assert statistics.probes_refused + statistics.shed_by_reason.get("prefetch_queue_full", 0) > 0
        gate.open()
        assert len(first.load()) > 0
        for request in (first, *others):
            request.close()
        eventually(lambda: cache.statistics().core.transfers == 0)
        cache.check()


@pytest.mark.case("EVICT-1")
def test_a_page_is_dropped_from_device_only_when_host_has_it_or_it_is_gone_altogether() -> None:
    with _open(device=16, host=8, write_policy="write_back") as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 33))
        assert cache.flush()
        with cache.request(prompt(1, 33)) as holder:  # pins all of HOST, once its pages are there
            assert holder.match.device == 8
            for seed in range(2, 12):
                tokens = prompt(seed, 17)
                engine.run(tokens)
                eventually(lambda: cache.statistics().core.transfers == 0)
                cache.check()
                matched = cache.match(tokens)
                with cache.request(tokens) as request:
                    assert len(request.load()) == matched.pages  # whatever is matched can be had
        for seed in range(1, 12):
            engine.run(prompt(seed, 33))
        cache.check()


def test_allocate_with_a_deadline_waits_for_what_others_hold() -> None:
    clock = ManualClock()
    with _open(device=12, host=0, clock=clock) as cache:
        holder = cache.request(prompt(1, 40))
        holder.allocate()
        waiting = cache.request(prompt(2, 40))
        got: list[Any] = []

        def wait() -> None:
            try:
                got.append(len(waiting.allocate(deadline=5.0)))
            except hicache.OutOfSlots as error:
                got.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        clock.until_waiting()
        holder.close()
        thread.join(30)
        assert got == [10]
        late = cache.request(prompt(3, 40))
        waiting, held = late, waiting
        thread = threading.Thread(target=wait)
        thread.start()
        clock.until_waiting()
        clock.advance(5.0)
        thread.join(30)
        assert isinstance(got[1], hicache.OutOfSlots)
        held.close()
        late.close()


def test_without_a_deadline_allocate_never_waits() -> None:
    gate = Gate()
    pool = FaultyDevicePool(small_pool(small_namespace(), 10), gate=gate)
    with _open(device=pool) as cache:
        engine = FakeEngine(cache, patience=None)
        engine.run(prompt(1, 40))
        with cache.request(prompt(2, 40)) as request, pytest.raises(hicache.OutOfSlots):
            request.allocate()  # the copies down, which hang, hold the pages
        gate.open()
        engine.patience = 30.0
        engine.run(prompt(2, 40))


# ---- flush and close


def test_flush_gives_up_at_its_deadline() -> None:
    storage, gate, clock = FaultyStorage(MemoryBackend()), Gate(), ManualClock()
    with _open(storage=storage, clock=clock) as cache:
        storage.always("put", delay(gate))
        FakeEngine(cache).run(prompt(1, 41))
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(cache.flush(deadline=3.0)))
        thread.start()
        gate.until_arrived()
        clock.until_waiting()
        clock.advance(3.0)
        thread.join(30)
        assert answers == [False]
        gate.open()
        assert cache.flush()


def test_flush_goes_over_all_again_until_nothing_is_left() -> None:
    storage = MemoryBackend()
    bound = hicache.Bound(bytes=2**20, requests=10)  # so that few pages are begun in one step
    with _open(storage=storage, write_policy="write_back", write_bound=bound) as cache:
        engine = FakeEngine(cache)
        for seed in range(4):
            engine.run(prompt(seed, 41))
            assert cache.flush()
            assert storage.statistics().objects == (seed + 1) * 40


def test_flush_does_not_try_for_ever_where_storage_takes_nothing() -> None:
    storage = FaultyStorage(MemoryBackend())
    storage.always("put", fail(OSError("full")))
    with _open(storage=storage) as cache:
        FakeEngine(cache).run(prompt(1, 41))
        assert not cache.flush()
        assert storage.count("put") < 10


@pytest.mark.case("THR-2")
def test_close_writes_everything_down_and_is_idempotent() -> None:
    storage = MemoryBackend()
    cache = _open(device=300, host=300, storage=storage, write_policy="write_back")
    engine = FakeEngine(cache)
    for seed in range(20):
        engine.run(prompt(seed, 41))
    report = cache.close(deadline=60.0)
    assert report == hicache.CloseReport(complete=True)
    assert cache.close() is report
    assert len(storage._entries) == 20 * 10 * 4
    for verb in (
        cache.flush,
        cache.clear,
        cache.events,
        lambda: cache.request([1]),
        lambda: cache.match([1]),
        cache.check,
    ):
        with pytest.raises(hicache.CacheClosed):
            verb()
    assert cache.statistics().requests == 20
    assert cache.host is not None
    with pytest.raises(hicache.CacheClosed):
        cache.host.page(0)


@pytest.mark.case("THR-2")
def test_close_reports_what_it_had_to_leave() -> None:
    storage, gate = FaultyStorage(MemoryBackend()), Gate()
    cache = _open(storage=storage, write_threads=1)
    storage.always("put", delay(gate))
    engine = FakeEngine(cache)
    for seed in range(3):
        engine.run(prompt(seed, 41))
    gate.until_arrived()
    report = cache.close(deadline=0.0)
    assert not report.complete
    assert report.stuck_threads == 1
    assert report.abandoned_pages == 10
    assert cache.host is not None
    assert cache.host.page(0).any()  # the thread may still read it
    gate.open()  # the thread that was inside ends by itself
    for thread in threading.enumerate():
        if thread.name.startswith("hicache-write"):
            thread.join(30)
    assert storage.inner.statistics().objects <= 40


def test_close_releases_requests_that_are_open_and_wakes_who_waits() -> None:
    inner = MemoryBackend()
    tokens = prompt(1, 41)
    with _open(storage=inner) as cache:
        FakeEngine(cache).run(tokens)
        assert cache.flush()
    storage, gate = FaultyStorage(inner), Gate()
    cache = _open(storage=storage, prefetch="wait_complete")
    storage.always("get_into", delay(gate))
    loading, idle = cache.request(tokens), cache.request(prompt(2, 41))
    idle.allocate()
    outcome: list[Any] = []

    def load() -> None:
        try:
            outcome.append(loading.load())
        except hicache.CacheClosed as error:
            outcome.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    gate.until_arrived()
    reports: list[hicache.CloseReport] = []
    closer = threading.Thread(target=lambda: reports.append(cache.close(deadline=30.0)))
    closer.start()
    thread.join(30)
    assert isinstance(outcome[0], hicache.CacheClosed)
    gate.open()
    closer.join(60)
    assert reports[0].aborted_requests == 2
    for request in (loading, idle):
        assert request.closed
        assert request.close().aborted
        with pytest.raises(hicache.CacheClosed):
            request.load()
    statistics = cache.statistics()
    assert statistics.core.device.private == statistics.core.device.pinned == statistics.open_requests == 0


def test_two_threads_may_close() -> None:
    cache = _open(storage=MemoryBackend())
    FakeEngine(cache).run(prompt(1, 41))
    reports: list[hicache.CloseReport] = []
    threads = [threading.Thread(target=lambda: reports.append(cache.close())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({id(report) for report in reports}) == 1


def test_a_backend_that_was_given_stays_open_and_one_that_was_opened_does_not(tmp_path: Any) -> None:
    storage = MemoryBackend()
    with _open(storage=storage) as cache:
        FakeEngine(cache).run(prompt(1, 41))
    assert storage.statistics().objects == 40
    storage.contains([])
    before = threading.active_count()
    with _open(storage=f"file://{tmp_path}/store") as cache:
        FakeEngine(cache).run(prompt(1, 41))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": 0}, "at least one page"),
        ({"device": None}, "bytes=False"),
        ({"device": -1}, "device=-1"),
        ({"device": "4 pages"}, "4 pages"),
        ({"host": "10000 TiB"}, "available"),
        ({"host": "1 B"}, "less than one page"),
        ({"storage": "memory://", "host": 0}, "host is 0"),
        ({"storage": "memory://", "bytes": False}, "bytes=False"),
        ({"storage": "nowhere://x"}, "nowhere"),
        ({"storage": 5}, "URL"),
        ({"eviction": "random"}, "random"),
        ({"write_policy": "write_around"}, "write_around"),
        ({"prefetch": "never"}, "never"),
        ({"colour": 1}, "colour"),
        ({"bytes": False, "device": "1GiB", "host": 0}, "number of pages"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_and_leaves_nothing(options: dict[str, Any], text: str) -> None:
    before = threading.active_count()
    with pytest.raises(hicache.InvalidInput, match=text) as caught:
        _open(**options)
    assert "\n" not in str(caught.value)
    assert threading.active_count() == before


def test_a_namespace_must_be_one() -> None:
    with pytest.raises(hicache.NamespaceError, match="str"):
        hicache.open("model", device=1)  # type: ignore[arg-type]


def test_a_cache_that_is_forgotten_says_so() -> None:
    def forget() -> None:
        hicache.open(small_namespace(), device=4, bytes=False)
        gc.collect()

    with pytest.warns(ResourceWarning, match="never closed"):
        forget()


def test_what_will_cost_is_said_in_words() -> None:
    with _open(storage=MemoryBackend()) as cache:
        assert any("small" in warning for warning in cache.warnings)
    with _open() as cache:
        assert cache.warnings == ()


# ---- forks


@pytest.mark.case("THR-2")
def test_a_forked_child_is_refused_and_cannot_hurt_the_parent() -> None:
    cache = _open(storage=MemoryBackend())
    engine = FakeEngine(cache)
    engine.run(prompt(1, 41))
    request = cache.request(prompt(1, 41))
    read, write = os.pipe()
    with cache._reducer.lock:  # the worst moment: the lock is held, and nobody in the child will release it
        child = os.fork()
        if child == 0:
            os.write(write, _in_the_child(cache, request).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        told = answers.read()
    assert os.waitpid(child, 0)[1] == 0
    assert told == "request load allocate match flush statistics closed"
    assert len(request.load()) == 10
    request.close()
    assert engine.run(prompt(1, 41)).device == 10
    assert cache.close().complete


def _in_the_child(cache: hicache.EmbeddedCache, request: hicache.Request) -> str:
    told = []
    calls: dict[str, Callable[[], object]] = {
        "request": lambda: cache.request([1]),
        "load": request.load,
        "allocate": request.allocate,
        "match": lambda: cache.match([1]),
        "flush": cache.flush,
        "statistics": cache.statistics,
    }
    for name, call in calls.items():
        try:
            call()
        except hicache.CacheClosed as error:
            if "fork" in str(error):
                told.append(name)
    request.close()
    cache.close()
    del request
    gc.collect()
    return " ".join([*told, "closed"])


def test_a_bypassed_request_is_counted_when_the_cache_closes() -> None:
    cache = _open()
    cache.request(prompt(1, 41), adapter=hicache.Adapter("x"))
    gc.collect()
    cache.close()
    assert cache.statistics().pages.missed == {MissReason.BYPASSED: 10}
