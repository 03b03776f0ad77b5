"""With a stated prefill rate a slow storage never costs a request time, in simulated time, exactly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hicache
from hicache.records import MissReason
from hicache.runtime.planner import EXPLORE_PAGES, EXPLORE_SECONDS
from hicache.storage.memory import MemoryBackend
from hicache.testing.engine import FakeEngine, prompt, small_namespace
from hicache.testing.faults import LatencyStorage
from hicache.testing.simulation import Simulation

NAMESPACE = small_namespace()
P = NAMESPACE.page_size
SHARDS = 4
PER_OBJECT = 0.020
BREAK_EVEN = P / (SHARDS * PER_OBJECT)
"""Tokens a second at which one reader brings a page in the time in which the engine computes it."""


def stored(prompts: list[list[int]]) -> MemoryBackend:
    """A storage that has all of these prompts."""
    backend = MemoryBackend()
    with hicache.open(NAMESPACE, device=512, host=512, storage=backend) as cache:
        engine = FakeEngine(cache)
        for tokens in prompts:
            engine.run(tokens, logits=False)
        assert cache.flush()
    return backend


class Served:
    """A new process that serves prompts, with the engine's prefill taking its time.

    Attributes:
        total: modelled seconds of all requests: waiting for the cache, then computing what did not come.
    """

    def __init__(self, storage: MemoryBackend, rate: float, *, threads: int = 1, per_call: float = 0.0) -> None:
        self.rate = rate
        self.per_object = PER_OBJECT
        self.time = Simulation(threads=threads)
        slow = LatencyStorage(storage, per_call=per_call, per_object=0.0, sleep=self.time.sleep)
        self.storage = slow
        slow._per_object = PER_OBJECT
        self.cache = self.time.open(
            NAMESPACE,
            device=128,
            host=64,
            storage=slow,
            prefetch="wait_complete",
            prefill_tokens_per_second=rate,
            generation_seconds=None,  # asking for it again costs a moment of its own, whatever is loaded
        )
        self.engine = FakeEngine(self.cache)
        self.total = self.without = 0.0

    def serve(self, tokens: list[int]) -> tuple[float, hicache.RequestCounts]:
        """Modelled seconds of one request."""
        start = self.time.now()
        with self.cache.request(tokens) as request:
            loaded = request.load()
            self.engine.check(tokens, loaded)
            waited = self.time.now() - start
            fresh = request.allocate()
            computing = (len(tokens) - len(loaded) * P) / self.rate
            self.engine.compute(tokens, fresh, first=len(loaded))
            self.time.run(computing)
            request.commit(ready=hicache.READY)
        self.time.run(0.0)
        self.total += waited + computing
        self.without += len(tokens) / self.rate
        return waited + computing, request.counts


@pytest.mark.slow
@settings(max_examples=60)
@given(
    factor=st.floats(0.1, 10.0),
    lengths=st.lists(st.integers(1, 160), min_size=1, max_size=8),
    repeats=st.integers(1, 3),
    threads=st.sampled_from([1, 4]),
    per_call=st.sampled_from([0.0, 0.02]),
    there=st.sampled_from([True, True, False]),
)
def test_a_slow_storage_never_costs_a_request_time(
    factor: float, lengths: list[int], repeats: int, threads: int, per_call: float, there: bool
) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate(lengths)]
    served = Served(stored(prompts if there else []), factor * BREAK_EVEN, threads=threads, per_call=per_call)
    with served.cache:
        for tokens in prompts * repeats:  # device and host forget them meanwhile, and know that storage has them
            seconds, counts = served.serve(tokens)
            assert seconds <= len(tokens) / served.rate * (1 + 1e-9)
            assert counts.asked == counts.device + counts.host + counts.storage + sum(counts.missed.values())
        served.time.run(100.0)
        served.cache.check()
    planning = served.cache.statistics().planning
    assert planning.seconds_saved >= 0
    assert served.cache.statistics().internal_errors == 0


@pytest.mark.parametrize("factor", [0.1, 0.5, 0.8])
def test_what_pays_is_loaded(factor: float) -> None:
    prompts = [prompt(seed, 81) for seed in range(8)]
    served = Served(stored(prompts), factor * BREAK_EVEN)
    with served.cache:
        first, *others = [served.serve(tokens) for tokens in prompts]
        assert first[1].storage == 0  # nothing was known of the storage yet: nobody waited for it
        assert first[1].missed == {MissReason.OVER_BUDGET: 20}
        waited = [counts.storage for _, counts in others]
        assert waited[1:] == [20] * 6
        assert served.total < served.without * (1 - 0.6 * (1 - factor))
        planning = served.cache.statistics().planning
        assert planning.planned >= 20 * 6
        assert planning.seconds_saved == pytest.approx(served.without - served.total, rel=0.2)


@pytest.mark.parametrize("factor", [1.5, 3, 10])
def test_what_does_not_pay_is_computed_and_counted_so(factor: float) -> None:
    prompts = [prompt(seed, 81) for seed in range(10)]
    served = Served(stored(prompts), factor * BREAK_EVEN)
    with served.cache:
        first = [served.serve(tokens)[1] for tokens in prompts]
        again = [served.serve(tokens)[1] for tokens in prompts]  # storage is known to have them, host and device forgot
        assert sum(counts.storage for counts in (*first, *again)) == 0
        assert sum(counts.missed.get(MissReason.OVER_BUDGET, 0) for counts in again) > 100
        assert served.total <= served.without
        fetched = served.cache.statistics().bytes_from_storage // served.cache.device.page_bytes
        assert 0 < fetched <= EXPLORE_PAGES * (1 + served.time.now() // EXPLORE_SECONDS)


def test_a_store_that_recovers_is_noticed_and_one_that_slows_down_is_left() -> None:
    prompts = [prompt(seed, 81) for seed in range(80)]
    served = Served(stored(prompts), BREAK_EVEN / 4)
    with served.cache:
        for tokens in prompts[:20]:
            served.serve(tokens)
        assert served.serve(prompts[20])[1].storage == 20
        served.storage._per_object = 10 * PER_OBJECT
        slow = [served.serve(tokens) for tokens in prompts[21:50]]
        # The first may be surprised, but waits no longer than it would have computed.
        assert max(seconds for seconds, _ in slow) <= 2 * 81 / served.rate
        assert sum(counts.storage for _, counts in slow[-10:]) == 0
        served.storage._per_object = PER_OBJECT
        recovered = [served.serve(tokens)[1].storage for tokens in prompts[50:]]
        assert recovered[-1] == 20


def test_a_decision_is_there_to_be_read() -> None:
    prompts = [prompt(seed, 81) for seed in range(4)]
    served = Served(stored(prompts), BREAK_EVEN / 4)
    with served.cache:
        for tokens in prompts[:3]:
            served.serve(tokens)
        with served.cache.request(prompts[3]) as request:
            assert request.decision is None
            request.load()
            decision = request.decision
            assert decision is not None
            assert (decision.storage, decision.planned_storage, decision.declined) == (20, 20, 0)
            assert decision.saved > 0
    assert served.cache.statistics().planning.prefill_tokens_per_second == pytest.approx(BREAK_EVEN / 4)
