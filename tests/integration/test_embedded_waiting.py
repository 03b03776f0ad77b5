"""How long requests wait for storage: deadlines, prefetch modes, and who waits for whom."""

from __future__ import annotations

import threading
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.core.keys import ObjectKey
from hicache.records import MissReason
from hicache.storage.memory import MemoryBackend
from hicache.testing.clock import ManualClock
from hicache.testing.embedded import leave_in, open_small, settled
from hicache.testing.engine import FakeEngine, prompt, small_namespace
from hicache.testing.faults import (
    FaultyStorage,
    delay,
)
from hicache.testing.gates import Gate
from hicache.testing.waits import eventually

P = 4


def _keys(storage: MemoryBackend) -> list[ObjectKey]:
    return list(storage._entries)


def test_what_came_in_time_is_used_and_the_rest_is_late() -> None:
    inner = MemoryBackend()
    tokens = prompt(1, 41)
    leave_in(inner, tokens)
    storage, clock, gate = FaultyStorage(inner), ManualClock(), Gate()
    page = small_namespace().geometry.page_bytes(4)
    with open_small(storage, clock=clock, fetch_bytes=2 * page, read_threads=1) as cache:
        storage.script("get_into", None, None, delay(gate))
        request = cache.request(tokens, deadline=1.0)
        loaded: list[int] = []
        thread = threading.Thread(target=lambda: loaded.append(len(request.load())))
        thread.start()
        gate.until_arrived()
        eventually(lambda: request._lease.usable == 4)
        clock.advance(0.999)
        assert loaded == []
        clock.advance(0.001)
        thread.join(30)
        assert loaded == [4]
        FakeEngine(cache).check(tokens, request.load())
        gate.open()
        counts = request.close()
        assert (counts.storage, counts.missed) == (4, {MissReason.LATE: 6})
        eventually(lambda: cache.statistics().core.transfers == 0)
        statistics = settled(cache)
        assert statistics.core.host.resident == 4  # what came too late is not kept half
        assert FakeEngine(cache).run(tokens).device == 4


def test_an_answer_that_comes_after_the_deadline_starts_nothing() -> None:
    inner = MemoryBackend()
    tokens = prompt(1, 41)
    leave_in(inner, tokens)
    storage, gate = FaultyStorage(inner), Gate()
    with open_small(storage) as cache:
        storage.script("contains", delay(gate))
        with cache.request(tokens, deadline=0.0) as request:
            gate.until_arrived()
            assert len(request.load()) == 0
            gate.open()
            eventually(lambda: cache.statistics().reads.running == 0)  # type: ignore[union-attr]
            assert cache.statistics().core.transfers == 0
            assert request.match == hicache.Match()
        assert storage.count("get_into") == 0


@pytest.mark.parametrize(("mode", "usable"), [("best_effort", 0), ("timeout", 0), ("wait_complete", 10)])
def test_each_mode_waits_as_long_as_it_says(mode: str, usable: int) -> None:
    inner = MemoryBackend()
    tokens = prompt(1, 41)
    leave_in(inner, tokens)
    storage, clock, gate = FaultyStorage(inner), ManualClock(), Gate()
    options = {"prefetch": mode, "prefetch_timeout": 2.0, "longest_wait": 100.0}
    with open_small(storage, clock=clock, **options) as cache:
        storage.script("get_into", delay(gate))
        loaded: list[int] = []
        request = cache.request(tokens)
        gate.until_arrived()
        thread = threading.Thread(target=lambda: loaded.append(len(request.load())))
        thread.start()
        if mode == "best_effort":
            thread.join(30)  # it does not wait, although time stands still
            assert loaded == [0]
        else:
            clock.until_waiting()
            clock.advance(1.9)
            assert loaded == []
            clock.until_waiting()
            clock.advance(0.2)
        if mode == "timeout":
            thread.join(30)
        if mode == "wait_complete":
            clock.until_waiting()
            assert loaded == []
        gate.open()
        thread.join(30)
        assert loaded == [usable]
        request.close()
        settled(cache)


def test_best_effort_takes_what_came_before_load() -> None:
    storage = MemoryBackend()
    tokens = prompt(1, 41)
    leave_in(storage, tokens)
    with open_small(storage, prefetch="best_effort") as cache, cache.request(tokens) as request:
        eventually(lambda: cache.statistics().core.host.resident == 10)
        assert len(request.load()) == 10


def test_no_wait_is_without_end() -> None:
    inner = MemoryBackend()
    tokens = prompt(1, 41)
    leave_in(inner, tokens)
    storage, clock, gate = FaultyStorage(inner), ManualClock(), Gate()
    with open_small(storage, clock=clock, longest_wait=7.0) as cache:
        storage.always("contains", delay(gate))
        request = cache.request(tokens)
        loaded: list[int] = []
        thread = threading.Thread(target=lambda: loaded.append(len(request.load())))
        thread.start()
        clock.until_waiting()
        clock.advance(7.0)
        thread.join(30)
        assert loaded == [0]
        gate.open()
        request.close()


@pytest.mark.case("EVICT-4")
def test_the_upper_tiers_answer_while_storage_hangs() -> None:
    inner = MemoryBackend()
    stored, local = prompt(1, 41), prompt(2, 41)
    leave_in(inner, stored)
    storage, gate = FaultyStorage(inner), Gate()
    with open_small(storage, device=16, read_threads=1, write_threads=1) as cache:
        engine = FakeEngine(cache)
        engine.run(local)
        assert cache.flush()
        for verb in ("get_into", "put", "contains"):
            storage.always(verb, delay(gate))
        hanging = cache.request(stored)
        gate.until_arrived()
        assert engine.run(local).device == 10  # DEVICE
        engine.run(prompt(3, 25), deadline=0.0)  # pushes pages of it out, which HOST has
        with cache.request(local, deadline=30.0) as request:
            cached = request.match
            assert cached.host > 0
            assert len(request.load()) == 10
        hanging.close()
        gate.open()
        settled(cache)


@pytest.mark.case("EVICT-4")
def test_a_prefetch_without_room_says_so_and_does_not_hang() -> None:
    storage = MemoryBackend()
    tokens = prompt(1, 41)
    leave_in(storage, tokens, prompt(2, 33))
    with open_small(storage, device=64, host=8) as cache:
        engine = FakeEngine(cache)
        holder = cache.request(prompt(2, 33), logits=False)
        assert len(holder.load()) == 8  # pins all of HOST
        results: list[Any] = []
        threads = [threading.Thread(target=lambda: results.append(_counts(cache, tokens))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results == [(0, {MissReason.OVER_BUDGET: 10})] * 16
        holder.close()
        assert engine.run(tokens).storage == 8
        settled(cache)


def _counts(cache: hicache.EmbeddedCache, tokens: list[int]) -> Any:
    with cache.request(tokens) as request:
        request.load()
    return request.counts.storage, request.counts.missed


def test_slots_that_can_never_come_are_not_waited_for() -> None:
    """What a request itself has loaded and allocated leaves too few for the rest of its prompt."""
    clock = ManualClock()
    with open_small(MemoryBackend(), device=8, clock=clock) as cache:
        FakeEngine(cache).run(prompt(1, 16))
        settled(cache)
        with cache.request(prompt(1, 16) + prompt(2, 20)) as request:
            assert len(request.load()) == 4
            with pytest.raises(hicache.OutOfSlots, match="5 slots asked"):
                request.allocate(deadline=30.0)  # the clock stands still: a wait would fail
            assert len(request.allocate(2, deadline=30.0)) == 2
            with pytest.raises(hicache.OutOfSlots, match="3 slots asked"):
                request.allocate(deadline=30.0)
        settled(cache)


def test_little_is_left_in_storage() -> None:
    storage = FaultyStorage(MemoryBackend())
    tokens = prompt(1, 41)
    leave_in(storage, tokens)
    with open_small(storage, prefetch_threshold=41) as cache:
        storage.calls.clear()
        assert FakeEngine(cache).run(tokens).storage == 0
        assert storage.count("contains") == storage.count("get_into") == 0
    with open_small(storage, prefetch_threshold=40) as cache:
        assert FakeEngine(cache).run(tokens).storage == 10


@pytest.mark.case("RACE-6")
def test_loads_of_one_page_are_shared() -> None:
    inner = MemoryBackend()
    tokens = prompt(1, 41)
    leave_in(inner, tokens)
    storage, gate = FaultyStorage(inner), Gate()
    with open_small(storage) as cache:
        storage.script("get_into", delay(gate))
        requests = [cache.request(tokens) for _ in range(16)]
        results: list[int] = []
        threads = [threading.Thread(target=lambda r=r: results.append(len(r.load()))) for r in requests]
        for thread in threads:
            thread.start()
        gate.until_arrived()
        gate.open()
        for thread in threads:
            thread.join(30)
        assert results == [10] * 16
        assert sum(len(keys) for verb, keys in storage.calls if verb == "get_into") == 4 * 10
        for request in requests:
            request.close()
        settled(cache)


def test_many_pages_are_asked_for_in_growing_batches() -> None:
    storage = FaultyStorage(MemoryBackend())
    tokens = prompt(1, 400 * P + 1)
    leave_in(storage, tokens, device=500, host=500)
    storage.calls.clear()
    with open_small(storage, device=500, host=500) as cache:
        assert FakeEngine(cache).run(tokens).storage == 400
        sizes = [len(keys) for verb, keys in storage.calls if verb == "contains"]
        assert sizes == [8, 16, 32, 64, 128, 152]
        storage.calls.clear()
        FakeEngine(cache).run(prompt(2, 400 * P + 1))
        assert [len(keys) for verb, keys in storage.calls if verb == "contains"] == [8]


@pytest.mark.case("THR-3")
def test_writes_go_on_while_the_foreground_computes_and_nobody_is_busy_when_idle() -> None:
    storage = MemoryBackend()
    bound = hicache.Bound(bytes=2**28, requests=4096)
    with open_small(storage, device=2100, host=2100, write_bound=bound, write_threads=2) as cache:
        engine = FakeEngine(cache)
        for seed in range(100):
            engine.run(prompt(seed, 80))
        flushed: list[bool] = []
        thread = threading.Thread(target=lambda: flushed.append(cache.flush()))
        thread.start()
        tokens = np.arange(100_000, dtype=np.uint32)
        while thread.is_alive():  # the foreground hashes all the time, and the writes end nevertheless
            cache.match(tokens)
            sha256(tokens.tobytes()).digest()
        thread.join(60)
        assert flushed == [True]
        assert storage.statistics().objects == 8000
        # At rest nobody polls: the pump waits without a time-out, and the threads for a job.
        eventually(lambda: cache.statistics().idle)
        assert cache.parts.storage is not None
        assert cache.parts.storage.look() is None
        pump = cache._pump
        assert pump is not None
        eventually(lambda: not pump._watching)
