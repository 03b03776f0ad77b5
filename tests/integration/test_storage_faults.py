"""Storage that is frozen, full, failing or gone: what requests see, what the cache says, and how it comes back."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hicache
from hicache.records import MissReason
from hicache.storage.base import ObjectStatus, StorageBackend
from hicache.storage.breaker import BreakerPolicy
from hicache.storage.memory import MemoryBackend
from hicache.testing.clock import ManualClock
from hicache.testing.embedded import at_rest
from hicache.testing.engine import FakeEngine, prompt, small_namespace
from hicache.testing.faults import FaultyStorage, answer, delay, fail, refuse
from hicache.testing.gates import Gate
from hicache.testing.waits import eventually

VERBS = ("get_into", "put", "contains", "touch", "delete", "generation", "clear")


def _open(storage: StorageBackend | str | None, **options: Any) -> hicache.EmbeddedCache:
    defaults: dict[str, Any] = {"device": 64, "host": 64, "prefetch": "wait_complete", "retry": None, "canary": False}
    return hicache.open(small_namespace(), storage=storage, **(defaults | options))


def _fill(storage: StorageBackend, *prompts: list[int]) -> None:
    """Another life of the process, which left these prompts in storage."""
    with _open(storage, device=1000, host=1000) as cache:
        for tokens in prompts:
            FakeEngine(cache).run(tokens, logits=False)
        assert cache.flush()


class _Frozen:
    """A cache with pages in all three tiers over a storage that a test freezes, and time that a test moves.

    `hot` is in DEVICE, `warm` in HOST, `stored` prompts only in storage.
    """

    def __init__(self, *, stored: int = 8, **options: Any) -> None:
        self.stored = [prompt(100 + i, 17) for i in range(stored)]
        self.hot, self.warm = prompt(1, 17), prompt(2, 17)
        inner = MemoryBackend()
        _fill(inner, *self.stored)
        self.storage = FaultyStorage(inner)
        self.gate = Gate(patience=120.0)
        self.clock = ManualClock(patience=120.0)
        defaults: dict[str, Any] = {"generation_seconds": None, "device": 24, "host": 64}
        self.cache = _open(self.storage, clock=self.clock, **(defaults | options))
        self.engine = FakeEngine(self.cache)
        self.engine.run(self.warm)
        assert self.cache.flush()
        with self.cache.parts.reducer.lock:
            self.cache.parts.core.evict(0, 99)
            self.cache.parts.reducer.settle()
        self.engine.run(self.hot)
        assert self.cache.flush()

    def freeze(self) -> None:
        for verb in VERBS:
            self.storage.always(verb, delay(self.gate))

    def thaw(self) -> None:
        for verb in VERBS:
            self.storage.always(verb, None)
        self.gate.open()

    def upper_tiers_answer(self) -> None:
        """At once: the clock stands still, so any wait would never end."""
        hot = self.engine.run(self.hot)
        assert (hot.device, hot.missed) == (4, {})
        with self.cache.parts.reducer.lock:
            self.cache.parts.core.evict(0, 99)
            self.cache.parts.reducer.settle()
        warm = self.engine.run(self.warm)
        assert (warm.host, warm.missed) == (4, {})
        self.engine.run(self.hot)

    def ask(self, tokens: list[int], deadline: float) -> tuple[threading.Thread, list[float]]:
        """A request in a thread of its own; it notes the time at which `load` came back."""
        came_back: list[float] = []

        def run() -> None:
            with self.cache.request(tokens, deadline=deadline) as request:
                self.engine.check(tokens, request.load())
                came_back.append(self.clock.now())

        thread = threading.Thread(target=run)
        thread.start()
        return thread, came_back


@pytest.mark.case("FILE-8")
def test_a_storage_frozen_for_a_minute_costs_only_its_own_hits() -> None:
    setup = _Frozen()
    with setup.cache as cache:
        setup.freeze()
        start = setup.clock.now()
        for second in range(60):
            tokens = setup.stored[second % len(setup.stored)]
            thread, came_back = setup.ask(tokens, deadline=0.5)
            setup.clock.until_waiting()
            setup.upper_tiers_answer()
            setup.clock.advance(0.499)
            assert came_back == []
            setup.clock.advance(0.001)
            thread.join(60)
            assert came_back == [pytest.approx(start + second + 0.5)]  # its deadline, to the millisecond
            setup.clock.advance(0.5)
        statistics = cache.statistics()
        assert statistics.reads is not None
        assert statistics.reads.hung >= 8
        assert f"storage: {statistics.reads.hung} reads hung" in statistics.degraded
        cache.check()
        setup.thaw()
        eventually(lambda: cache.statistics().degraded == ())
        counts = setup.engine.run(setup.stored[0])
        assert (counts.storage, counts.missed) == (4, {})
        at_rest(cache)


@pytest.mark.case("FILE-8")
def test_late_completions_write_into_no_slot_that_is_in_use_again() -> None:
    setup = _Frozen(stored=4, host=24, device=64)
    # The gate opens before the cache closes, also when a check fails: else closing would wait for a clock that stands.
    with setup.cache as cache, contextlib.ExitStack() as finally_:
        finally_.callback(setup.thaw)
        for verb in ("get_into", "put"):
            setup.storage.always(verb, delay(setup.gate))
        for reads, tokens in enumerate(setup.stored[:3], 1):
            setup.storage.script("contains", None)
            thread, _ = setup.ask(tokens, deadline=1.0)
            setup.clock.until_waiting()
            setup.gate.until_arrived(reads)  # inside the storage: a read that had not begun would end at once
            eventually(lambda: cache.statistics().core.host.filling + cache.statistics().core.host.quarantined > 0)
            setup.clock.advance(1.0)
            thread.join(60)
        stuck = cache.statistics().core.host.quarantined
        assert stuck >= 4
        # HOST is used up and over again meanwhile.
        others = [prompt(200 + i, 17) for i in range(12)]
        for tokens in others:
            setup.engine.run(tokens)
        assert cache.statistics().core.host.quarantined == stuck
        setup.thaw()
        at_rest(cache)
        before = setup.engine.verified
        with cache.parts.reducer.lock:
            cache.parts.core.evict(0, 99)
            cache.parts.reducer.settle()
        for tokens in reversed(others):
            setup.engine.run(tokens)
        assert setup.engine.verified > before


@pytest.mark.case("FILE-8")
def test_fifty_hung_reads_do_not_stop_other_reads() -> None:
    setup = _Frozen(stored=52, host=400, read_threads=4)
    with setup.cache as cache:
        threads = []
        for i in range(50):
            setup.storage.script("get_into", delay(setup.gate))
            threads.append(setup.ask(setup.stored[i], deadline=1000.0))
            setup.gate.until_arrived(i + 1)
            if i % 4 == 3:
                setup.clock.advance(5.0)
                eventually(lambda i=i: cache.statistics().reads.hung == i + 1)  # type: ignore[misc, union-attr]
        setup.clock.advance(5.0)
        counts = setup.engine.run(setup.stored[50])
        assert (counts.storage, counts.missed) == (4, {})
        statistics = cache.statistics()
        assert statistics.reads is not None
        assert (statistics.reads.hung, statistics.reads.stopped) == (50, False)
        assert statistics.degraded == ("storage: 50 reads hung",)
        setup.thaw()
        for thread, _ in threads:
            thread.join(60)
        at_rest(cache)
        assert setup.engine.run(setup.stored[51]).storage == 4


@pytest.mark.case("FILE-8")
def test_who_waits_behind_a_hung_read_sees_to_it_that_its_thread_is_replaced() -> None:
    # The cache's own thread would look after 1,000 real seconds: only those who wait notice the manual clock.
    setup = _Frozen(stored=2, read_threads=1, call_timeout=1000.0)
    with setup.cache as cache:
        setup.storage.script("get_into", delay(setup.gate))
        first, _ = setup.ask(setup.stored[0], deadline=2000.0)
        setup.gate.until_arrived(1)
        behind, came_back = setup.ask(setup.stored[1], deadline=2000.0)
        setup.clock.until_waiting(2)
        start = setup.clock.now()
        setup.clock.advance(1000.0)
        behind.join(60)
        assert came_back == [start + 1000.0]
        setup.gate.open()
        first.join(60)
        at_rest(cache)


@pytest.mark.case("FILE-8")
def test_at_the_cap_reads_stop_and_come_back_with_a_probe_that_works() -> None:
    setup = _Frozen(stored=12, max_hung=4, probe_seconds=10.0)
    with setup.cache as cache:
        for verb in ("get_into", "contains"):
            setup.storage.always(verb, delay(setup.gate))
        for i in range(4):
            thread, _ = setup.ask(setup.stored[i], deadline=0.1)
            setup.gate.until_arrived(i + 1)
            setup.clock.until_waiting()
            setup.clock.advance(0.1)
            thread.join(60)
        setup.clock.advance(5.0)
        assert cache.statistics().degraded == ("storage: reads stopped, 4 hung",)
        counts = setup.engine.run(setup.stored[5])  # refused at once: the clock stands still
        assert counts.missed == {MissReason.FAILED: 4}
        assert cache.flush()  # writes are not reads
        setup.clock.advance(10.0)
        for verb in ("get_into", "contains"):
            setup.storage.always(verb, None)  # new calls work, those before hang for ever
        assert setup.engine.run(setup.stored[6]).storage == 4
        assert cache.statistics().degraded == ("storage: 4 reads hung",)
        setup.gate.open()
        eventually(lambda: cache.statistics().degraded == ())
        at_rest(cache)


@pytest.mark.case("FILE-8")
def test_in_real_time_a_request_is_back_soon_after_its_deadline() -> None:
    inner = MemoryBackend()
    tokens = prompt(1, 41)
    _fill(inner, tokens)
    storage, gate = FaultyStorage(inner), Gate()
    with _open(storage, call_timeout=0.05) as cache:
        for verb in VERBS:
            storage.always(verb, delay(gate))
        started = time.perf_counter()
        counts = FakeEngine(cache).run(tokens, deadline=0.2)
        took = time.perf_counter() - started
        assert counts.missed == {MissReason.LATE: 10}
        assert took < 5.0
        eventually(lambda: cache.statistics().reads.hung > 0)  # type: ignore[union-attr]  by the cache's own threads
        for verb in VERBS:
            storage.always(verb, None)
        gate.open()
        at_rest(cache)


def test_pages_that_storage_could_not_be_asked_for_were_not_cold() -> None:
    inner = MemoryBackend()
    stored, other = prompt(1, 65), prompt(2, 65)
    _fill(inner, stored, other)
    storage, clock = FaultyStorage(inner), ManualClock()
    breaker = BreakerPolicy(failures=3, timeout=1e9, interval=10.0)
    with _open(storage, device=64, clock=clock, breaker=breaker, generation_seconds=None) as cache:
        engine = FakeEngine(cache)
        storage.script("contains", None, fail(OSError("disk")))  # the second question, for page 8 and on
        counts = engine.run(stored)
        assert (counts.storage, counts.missed) == (8, {MissReason.FAILED: 8})
        storage.always("contains", fail(OSError("disk")))
        for seed in (10, 11, 12):
            assert engine.run(prompt(seed, 9)).missed == {MissReason.FAILED: 2}
        asked = storage.count("contains")
        assert engine.run(other).missed == {MissReason.FAILED: 16}, "the breaker is open"
        assert storage.count("contains") == asked
        storage.always("contains", None)
        clock.advance(10.0)
        assert engine.run(prompt(20, 9)).missed == {MissReason.COLD: 2}
        at_rest(cache)


@pytest.mark.case("FILE-6")
def test_a_full_storage_stops_writes_and_not_reads() -> None:
    inner = MemoryBackend()
    stored = [prompt(i, 17) for i in range(2)]
    _fill(inner, *stored)
    storage, clock = FaultyStorage(inner), ManualClock()
    breaker = BreakerPolicy(failures=3, timeout=1e9, interval=10.0)
    with _open(storage, clock=clock, breaker=breaker, generation_seconds=None) as cache:
        engine = FakeEngine(cache)
        storage.always("put", refuse("no_space"))
        for seed in range(10, 16):
            engine.run(prompt(seed, 5))
            eventually(lambda: cache.statistics().core.transfers == 0)
        statistics = cache.statistics()
        assert statistics.degraded == ("storage: write breaker open: no_space",)
        assert statistics.storage is not None
        assert statistics.storage.by_reason["breaker_open"] > 0
        assert storage.count("put") < 10
        assert engine.run(stored[0]).storage == 4
        storage.always("put", None)
        clock.advance(10.0)
        engine.run(prompt(20, 5))
        assert cache.flush()
        assert cache.statistics().degraded == ()
        assert inner.statistics().objects == 2 * 16 + 7 * 4
        at_rest(cache)


def test_a_storage_that_is_gone_leaves_the_tiers_above_alone() -> None:
    storage, clock = FaultyStorage(MemoryBackend()), ManualClock()
    with _open(storage, clock=clock, touch_seconds=1.0) as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 41))
        assert cache.flush()
        for verb in VERBS:
            storage.always(verb, fail(hicache.StorageUnavailable("gone")))
        for seed in range(10):
            clock.advance(1.0)
            assert engine.run(prompt(1, 41)).device == 10
            assert engine.run(prompt(100 + seed, 9)).storage == 0
        eventually(lambda: len(cache.statistics().degraded) == 2)  # both breakers
        eventually(lambda: cache.statistics().core.transfers == 0)
        tree = cache.parts.core.trees[0]
        believed = sum(node.believed for node in tree.root.children.values())
        assert believed >= 10  # that it cannot be asked takes nothing away of what is believed
        for verb in VERBS:
            storage.always(verb, None)
        clock.advance(10.0)
        engine.run(prompt(3, 41))
        assert cache.flush()
        at_rest(cache)


# ---- does it work at all?


@pytest.mark.case("FAIL-8")
def test_the_canary_sings_over_a_storage_that_works() -> None:
    storage = MemoryBackend()
    with _open(storage, canary=True) as cache:
        eventually(lambda: cache.statistics().canary == "ok")
        eventually(lambda: storage.statistics().objects == 0)
        assert cache.statistics().degraded == ()


@pytest.mark.case("FAIL-8")
@pytest.mark.parametrize("how", ["not stored", "not found", "not read", "full", "raises"])
def test_the_canary_shows_a_storage_that_does_not_work(how: str) -> None:
    storage = FaultyStorage(MemoryBackend())
    verb, fault, state = {
        "not stored": ("put", refuse("no_space"), "failed: a small object was not stored (no_space)"),
        "not found": ("contains", answer([False]), "failed: a small object was stored and can be read, but is not"),
        "not read": (
            "get_into",
            refuse("absent", ObjectStatus.MISSING),
            "failed: a small object was stored and did not come back (absent)",
        ),
        "full": ("put", refuse("no_room"), "undecided: a small object"),
        "raises": ("put", fail(OSError("x")), "failed: a small object was not stored (exception:OSError)"),
    }[how]
    storage.always(verb, fault)
    with _open(storage, canary=True) as cache:
        eventually(lambda: cache.statistics().canary != "running")
        assert cache.statistics().canary.startswith(state)
        degraded = cache.statistics().degraded
        assert [reason.startswith("storage: canary failed") for reason in degraded] == [True] * (how != "full")
        assert FakeEngine(cache).run(prompt(1, 41)).asked == 10  # opening did not wait for it


@pytest.mark.case("FAIL-8")
def test_much_stored_and_nothing_that_ever_came_back_is_an_alarm() -> None:
    storage = FaultyStorage(MemoryBackend())
    prompts = [prompt(seed, 81) for seed in range(60)]
    with _open(storage, device=40, host=60, breaker=None) as cache:
        engine = FakeEngine(cache)
        for tokens in prompts:
            engine.run(tokens)
            eventually(lambda: cache.statistics().core.transfers == 0)
        assert cache.statistics().degraded == ()
        storage.always("get_into", refuse("absent", ObjectStatus.MISSING))
        for tokens in prompts[:12]:
            engine.run(tokens)
            eventually(lambda: cache.statistics().core.transfers == 0)
        (reason,) = cache.statistics().degraded
        assert "none came back for 12 requests" in reason
        storage.always("get_into", None)
        assert engine.run(prompts[20]).storage > 0
        assert cache.statistics().degraded == ()


# ---- generations that others raise


def test_a_clear_by_another_process_is_seen_within_the_bound() -> None:
    storage, clock = MemoryBackend(), ManualClock()
    tokens = prompt(1, 41)
    with _open(storage, clock=clock, generation_seconds=2.0) as here, _open(storage) as there:
        engine = FakeEngine(here)
        engine.run(tokens)
        assert engine.run(tokens).device == 10
        assert here.flush()
        there.clear()
        clock.advance(0.9)
        assert engine.run(tokens).device == 10  # within the bound old pages may be met
        clock.advance(1.1)
        counts = engine.run(tokens)
        assert (counts.device, counts.host, counts.storage) == (0, 0, 0)
        assert engine.run(tokens).device == 10
        assert here.parts.core.trees[0].generation == 1
        assert here.flush()
        assert FakeEngine(there).run(tokens).storage == 10  # written under the new one
        at_rest(here)


@pytest.mark.parametrize("clears_too", [False, True])
def test_who_is_several_clears_behind_catches_up_within_the_bound(tmp_path: Path, clears_too: bool) -> None:
    url, clock = f"file://{tmp_path}?refresh=0.01", ManualClock()
    tokens, late = prompt(1, 41), prompt(2, 41)
    with _open(url, clock=clock, generation_seconds=2.0) as here, _open(url) as there:
        engine = FakeEngine(here)
        engine.run(tokens)
        assert here.flush()
        for _ in range(3):
            there.clear()
        if clears_too:
            here.clear()  # raises its own generation to the first, where storage has the third
        assert engine.run(late).storage == 0
        here.flush()  # what it writes now is of a generation that has ended
        assert FakeEngine(there).run(late).missed == {MissReason.COLD: 10}
        clock.advance(2.0)
        eventually(lambda: engine.run(tokens) and here.parts.core.trees[0].generation == 3)
        assert engine.run(tokens).device == 10
        assert here.flush()
        assert FakeEngine(there).run(tokens).storage == 10
        assert here.statistics().degraded == ()
        at_rest(here)


def test_between_half_of_the_bound_and_all_of_it_nobody_waits() -> None:
    storage, clock, gate = FaultyStorage(MemoryBackend()), ManualClock(), Gate()
    with _open(storage, clock=clock, generation_seconds=2.0, call_timeout=1e9) as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 41))
        storage.always("generation", delay(gate))
        clock.advance(1.5)
        assert engine.run(prompt(1, 41)).device == 10
        gate.until_arrived(1)
        clock.advance(10.0)
        for _ in range(3):
            assert engine.run(prompt(1, 41)).device == 10  # it is being asked already, by a thread that is stuck
        assert storage.count("generation") == 2
        storage.always("generation", None)
        gate.open()
        at_rest(cache)


def test_a_generation_that_cannot_be_asked_for_changes_nothing_and_is_not_asked_all_the_time() -> None:
    storage, clock = FaultyStorage(MemoryBackend()), ManualClock()
    with _open(storage, clock=clock, generation_seconds=2.0) as cache:
        engine = FakeEngine(cache)
        engine.run(prompt(1, 41))
        storage.always("generation", fail(OSError("no")))
        clock.advance(2.0)
        for _ in range(5):
            assert engine.run(prompt(1, 41)).device == 10
        assert storage.count("generation") == 2
        clock.advance(1.0)
        assert engine.run(prompt(1, 41)).device == 10
        eventually(lambda: storage.count("generation") == 3)
        at_rest(cache)


def test_requests_that_were_open_when_another_cleared_publish_nothing_any_more() -> None:
    storage, clock = MemoryBackend(), ManualClock()
    tokens = prompt(1, 41)
    with _open(storage, clock=clock) as here, _open(storage) as there:
        engine = FakeEngine(here)
        with here.request(tokens) as request:
            request.load()
            engine.compute(tokens, request.allocate(), first=0)
            there.clear()
            clock.advance(5.0)
            assert engine.run(prompt(2, 41)).device == 0
            request.commit()
        assert engine.run(tokens).device == 0
        at_rest(here)


def test_what_is_degraded_says_which_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons name the scheme of the store, so that an operator knows where to look."""

    def broken(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(MemoryBackend, "put", broken)
    with _open("memory://?capacity=1MiB", breaker=BreakerPolicy(failures=1)) as cache:
        FakeEngine(cache).run(prompt(1, 8))
        eventually(lambda: cache.statistics().degraded != ())
        assert cache.statistics().degraded[0].startswith("storage memory: write breaker open")
