"""Orders of events that lose bytes in other caches, forced by gates."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

import hicache
from hicache.storage.memory import MemoryBackend
from hicache.testing.embedded import at_rest
from hicache.testing.engine import FakeEngine, prompt, small_namespace, small_pool
from hicache.testing.faults import FaultyStorage, delay
from hicache.testing.gates import Gate, Tripwire
from hicache.testing.memory import FaultyDevicePool
from hicache.testing.waits import eventually


class _Gates:
    """Gates for each direction of a device pool's copies, open at first."""

    def __init__(self) -> None:
        self.down, self.up = Gate(opened=True), Gate(opened=True)
        self.passed: list[str] = []

    def __call__(self, verb: str, slot: int) -> BaseException | None:
        del slot
        (self.down if verb == "gather" else self.up).enter()
        self.passed.append(verb)
        return None


def _open(
    gates: Callable[[str, int], BaseException | None], *, device: int = 32, **options: Any
) -> hicache.EmbeddedCache:
    namespace = small_namespace()
    pool = FaultyDevicePool(small_pool(namespace, device), fault=gates)
    return hicache.open(namespace, device=pool, **({"host": 32} | options))


@pytest.mark.case("RACE-1")
def test_the_source_of_a_running_load_is_not_reused() -> None:
    gates = _Gates()
    with _open(gates, device=12, host=12) as cache:
        engine = FakeEngine(cache)
        tokens = prompt(1, 41)
        engine.run(tokens)
        assert cache.flush()
        gates.up.close()
        with cache.request(prompt(2, 44)) as request:
            engine.compute(prompt(2, 44), request.allocate(), first=0)  # pushes the first one out of DEVICE
        loading = cache.request(tokens)
        loaded: list[Any] = []
        thread = threading.Thread(target=lambda: loaded.append(loading.load()))
        thread.start()
        gates.up.until_arrived()
        core = cache.parts.core
        with cache._reducer.lock:
            assert core.available(1) == 12 - 10
            assert core.evict(1, 12) == 0  # whatever pressure there is on HOST
        gates.up.open()
        thread.join(30)
        assert len(loaded[0]) == 10
        engine.check(tokens, loaded[0])
        loading.close()
        at_rest(cache)
        with cache._reducer.lock:
            assert core.available(1) == 12


@pytest.mark.case("RACE-2")
def test_a_put_on_its_way_is_neither_a_hit_nor_absent() -> None:
    storage, gate = FaultyStorage(MemoryBackend()), Gate()
    with hicache.open(small_namespace(), device=32, host=32, storage=storage, canary=False) as cache:
        engine = FakeEngine(cache)
        tokens = prompt(1, 41)
        storage.script("put", delay(gate))
        engine.run(tokens)
        gate.until_arrived()
        with cache._reducer.lock:
            for tier in (0, 1):
                cache.parts.core.evict(tier, 0)
        engine.run(tokens)
        engine.run(tokens)
        events = [key for verb, keys in storage.calls if verb == "put" for key in keys]
        assert len(events) == len(set(events))  # nobody puts it a second time
        gate.open()
        assert cache.flush()
        puts = [key for verb, keys in storage.calls if verb == "put" for key in keys]
        assert len(puts) == len(set(puts)) == 40
        at_rest(cache)


@pytest.mark.case("RACE-3")
def test_what_a_request_matched_stays_until_it_is_closed() -> None:
    with hicache.open(small_namespace(), device=16, host=16) as cache:
        engine = FakeEngine(cache)
        tokens = prompt(1, 49)
        engine.run(tokens)
        assert cache.flush()
        with cache.request(tokens) as request:
            assert request.match.device == 12
            with cache.request(prompt(2, 16)) as other:
                assert len(other.allocate()) == 4
                with cache.request(prompt(3, 4)) as third, pytest.raises(hicache.OutOfSlots):
                    third.allocate()
            slots = request.load()
            assert len(slots) == 12
            engine.check(tokens, slots)


@pytest.mark.case("RACE-3")
def test_a_load_reports_the_shorter_truth_when_pages_are_gone() -> None:
    storage = MemoryBackend()
    tokens = prompt(1, 49)
    with hicache.open(small_namespace(), device=16, host=16, storage=storage, canary=False) as cache:
        FakeEngine(cache).run(tokens)
        assert cache.flush()
    faulty, gate = FaultyStorage(storage), Gate()
    with hicache.open(
        small_namespace(), device=16, host=16, storage=faulty, canary=False, prefetch="wait_complete"
    ) as cache:
        faulty.always("get_into", delay(gate))
        with cache.request(tokens) as request:
            gate.until_arrived()
            for key in list(storage._entries):
                if storage._entries[key].depth >= 5:
                    storage.delete([key])
            gate.open()
            assert len(request.load()) == 5
        at_rest(cache)


@pytest.mark.case("RACE-4")
def test_a_clear_while_transfers_run_frees_each_slot_once_and_nothing_late_lands() -> None:
    inner = MemoryBackend()
    gates, gate = _Gates(), Gate()
    storage = FaultyStorage(inner)
    with _open(gates, device=300, host=300, storage=storage, canary=False) as cache:
        engine = FakeEngine(cache)
        storage.always("put", delay(gate))
        for seed in range(10):
            engine.run(prompt(seed, 41))
        eventually(lambda: cache.statistics().core.host.resident == 100)
        gates.down.close()
        for seed in range(10, 20):
            engine.run(prompt(seed, 41))
        before = cache.statistics()
        assert before.core.transfers > 10
        clearer = threading.Thread(target=cache.clear)
        clearer.start()
        clearer.join(30)
        for seed in range(20):
            assert cache.match(prompt(seed, 41)).pages == 0
        cache.check()
        # New pages of the new generation come into the slots that are free, while old transfers still run.
        for seed in range(10):
            engine.run(prompt(seed, 41))
        gate.open()
        gates.down.open()
        statistics = at_rest(cache)
        assert statistics.core.device.resident == 100
        assert cache.flush()
        for seed in range(10):
            assert engine.run(prompt(seed, 41)).device == 10
    with hicache.open(small_namespace(), device=300, host=300, storage=inner, prefetch="wait_complete") as cache:
        engine = FakeEngine(cache)
        for seed in range(20):
            assert engine.run(prompt(seed, 41)).storage == (10 if seed < 10 else 0)


@pytest.mark.case("RACE-5")
def test_a_copy_waits_for_the_event_of_the_pages_writer() -> None:
    gates = _Gates()
    with _open(gates) as cache:
        engine = FakeEngine(cache)
        tokens = prompt(1, 17)
        written = hicache.ThreadEvent()
        with cache.request(tokens) as request:
            slots = request.allocate()
            request.commit(ready=written)
            assert cache.match(tokens).pages == 0
            assert "gather" not in gates.passed
            engine.compute(tokens, slots, first=0)  # the kernel is slow
            written.set()
            eventually(lambda: cache.match(tokens).device == 4)
        assert cache.flush()
        with cache._reducer.lock:
            assert cache.parts.core.evict(0, 32) == 4
        with cache.request(tokens) as request:
            assert request.match.host == 4
            engine.check(tokens, request.load())
        assert engine.verified == 4
        at_rest(cache)


@pytest.mark.case("RACE-5")
def test_an_event_that_breaks_publishes_nothing() -> None:
    class Broken:
        def query(self) -> bool:
            return False

        def wait(self, timeout: float | None) -> bool:
            raise RuntimeError("the device is lost")

        def on_passed(self, callback: Callable[[], None]) -> None:
            raise RuntimeError("the device is lost")

    with hicache.open(small_namespace(), device=32, host=32) as cache:
        tokens = prompt(1, 17)
        with cache.request(tokens) as request:
            request.allocate()
            request.commit(ready=Broken())
        at_rest(cache)
        assert cache.match(tokens).pages == 0
        assert cache.statistics().core.device.free == 32


@pytest.mark.case("RACE-6")
def test_many_threads_committing_one_prompt_store_it_once() -> None:
    storage = FaultyStorage(MemoryBackend())
    with hicache.open(small_namespace(), device=400, host=64, storage=storage, canary=False, events=True) as cache:
        events = cache.events()
        for round_ in range(20):
            tokens = prompt(round_, 17)
            barrier = threading.Barrier(16)
            errors: list[BaseException] = []

            def one(tokens: list[int] = tokens, barrier: threading.Barrier = barrier, errors: Any = errors) -> None:
                try:
                    barrier.wait(30)
                    FakeEngine(cache).run(tokens)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=one) for _ in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert errors == []
        assert cache.flush()
        puts = [key for verb, keys in storage.calls if verb == "put" for key in keys]
        assert len(puts) == len(set(puts)) == 20 * 16
        stored = [
            event for event in events.drain() if isinstance(event, hicache.Stored) and event.tier == hicache.Tier.DEVICE
        ]
        hashes = [page_hash for event in stored for page_hash in event.page_hashes]
        assert len(hashes) == len(set(hashes)) == 80
        at_rest(cache)


@pytest.mark.case("RACE-7")
def test_host_pages_stay_until_the_write_that_reads_them_has_ended() -> None:
    storage, gate = FaultyStorage(MemoryBackend()), Gate()
    with hicache.open(small_namespace(), device=32, host=12, storage=storage, canary=False) as cache:
        engine = FakeEngine(cache)
        tokens = prompt(1, 41)
        storage.always("put", delay(gate))
        engine.run(tokens)
        gate.until_arrived()
        assert cache.statistics().core.host.resident == 10  # the first hop has ended
        engine.run(prompt(2, 41))  # pressure on HOST
        with cache._reducer.lock:
            assert cache.parts.core.evict(1, 12) == 0
        gate.open()
        at_rest(cache)
        assert cache.flush()
        with cache._reducer.lock:
            assert cache.parts.core.available(1) == 12
    with hicache.open(small_namespace(), device=32, host=32, storage=storage.inner, prefetch="wait_complete") as cache:
        assert FakeEngine(cache).run(tokens).storage == 10


@pytest.mark.case("LEAK-4")
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_an_error_at_any_call_boundary_leaves_no_pin_behind(write_policy: str) -> None:
    seen = _tripped(None, write_policy)
    assert seen.steps >= 20
    assert {"gather", "scatter", "put", "get_into", "contains"} <= set(seen.names)
    for step in range(1, seen.steps + 1):
        _tripped(step, write_policy)


def _tripped(step: int | None, write_policy: str) -> Tripwire:
    """One fixed history over all tiers, in which the n-th call into copies or storage raises."""
    wire = Tripwire(step)

    def copies(verb: str, slot: int) -> None:
        del slot
        wire.step(verb)

    def storage_call(verb: str) -> Callable[[Any], Any]:
        def fault(call: Any) -> Any:
            wire.step(verb)
            return call.apply()

        return fault

    storage = FaultyStorage(MemoryBackend())
    for verb in ("put", "get_into", "contains"):
        storage.always(verb, storage_call(verb))
    options = {"storage": storage, "write_policy": write_policy, "prefetch": "wait_complete", "absent_seconds": 0.0}
    with _open(copies, device=12, host=16, **options) as cache:  # type: ignore[arg-type]
        engine = FakeEngine(cache)
        for seed in (1, 2, 3, 1, 2):
            engine.run(prompt(seed, 29))
            cache.flush()
            eventually(lambda: cache.statistics().core.transfers == 0)
        at_rest(cache)
    return wire


@pytest.mark.case("LEAK-1")
def test_requests_aborted_at_any_stage_give_everything_back() -> None:
    inner = MemoryBackend()
    prompts = [prompt(seed, 41) for seed in range(8)]
    with hicache.open(small_namespace(), device=100, host=100, storage=inner) as cache:
        for tokens in prompts:
            FakeEngine(cache).run(tokens)
        assert cache.flush()
    storage = FaultyStorage(inner)
    rng = random.Random(5)
    with hicache.open(
        small_namespace(), device=24, host=24, storage=storage, canary=False, prefetch="wait_complete"
    ) as cache:
        engine = FakeEngine(cache)
        for _ in range(1000):
            stage = rng.randrange(5)
            request = cache.request(rng.choice(prompts), deadline=0.0 if stage == 1 else None)
            if stage >= 2:
                request.load()
            if stage >= 3:
                try:
                    request.allocate()
                except hicache.OutOfSlots:
                    stage = 0
            if stage == 4:
                engine.compute(prompts[0], request.allocate(0), first=0)
            request.close(aborted=True)
        statistics = at_rest(cache)
        assert statistics.core.leases == statistics.open_requests == 0
        assert statistics.reads is not None
        assert (statistics.reads.waiting, statistics.reads.running, statistics.reads.bytes) == (0, 0, 0)
        cache.clear()
        eventually(lambda: cache.statistics().core.host.free == 24)
        assert cache.statistics().core.device.free == 24
        assert engine.run(prompts[0]).storage == 0
        engine.run(prompts[0], deadline=10.0)


def test_many_threads_over_three_tiers_never_get_a_wrong_page() -> None:
    """Eight engines, small tiers, clears and aborts in between; every page that comes back is compared."""
    storage = MemoryBackend()
    heads = [prompt(seed, 24) for seed in range(4)]
    with hicache.open(
        small_namespace(), device=160, host=120, storage=storage, prefetch="wait_complete", fetch_bytes=512
    ) as cache:
        errors: list[BaseException] = []
        verified: list[int] = []

        def run(number: int) -> None:
            rng = random.Random(number)
            engine = FakeEngine(cache)
            try:
                for i in range(60):
                    tokens = [
                        *rng.choice(heads)[: rng.randrange(4, 24)],
                        *prompt(100 + rng.randrange(6), rng.randrange(30)),
                    ]
                    with cache.request(tokens, deadline=rng.choice([None, 0.0, 0.001, 1.0])) as request:
                        engine.prefill(request, tokens)
                        if i % 7 == 0:
                            tokens = [*tokens, *prompt(300, 9)]
                            request.extend(prompt(300, 9))
                            first = request._lease.start + len(request._lease.own)  # type: ignore[operator]
                            # The page that was a tail is whole now: write it again with what it holds.
                            engine.compute(tokens, request._lease.own[-1:], first=first - 1)
                            engine.compute(tokens, request.allocate(deadline=30), first=first)
                            request.commit()
                    if number == 0 and i % 20 == 19:
                        cache.clear()
            except BaseException as error:
                errors.append(error)
            verified.append(engine.verified)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert errors == []
        assert sum(verified) > 300
        cache.flush()
        at_rest(cache)
