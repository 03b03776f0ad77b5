"""Breakers: when they open, what they answer, and how they close again."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from hicache.errors import ConfigError, StorageUnavailable
from hicache.storage.base import BreakerState, ObjectResult, ObjectStatus
from hicache.storage.breaker import Breaker, BreakerBackend, BreakerPolicy
from hicache.storage.memory import MemoryBackend
from hicache.storage.registry import configured, open_storage
from hicache.storage.retry import RetryPolicy
from hicache.testing import faults
from hicache.testing.clock import ManualClock
from hicache.testing.faults import FaultyStorage
from hicache.testing.gates import Gate
from hicache.testing.storage import NAMESPACE, make_chain, read, status_of

SIZE = 4096
OK, FAILED, MISSING = ObjectStatus.OK, ObjectStatus.FAILED, ObjectStatus.MISSING
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
REFUSED = ObjectResult(FAILED, "breaker_open")


class Setup:
    """A breaker of three failures, five seconds time-out, ten seconds interval, around a faulty store."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.faulty = FaultyStorage(MemoryBackend())
        policy = BreakerPolicy(failures=3, timeout=5.0, interval=10.0)
        self.backend = BreakerBackend(self.faulty, policy, now=self.clock.now)
        self.chain = make_chain(4, SIZE)

    def break_reads(self, reason: str = "eio") -> None:
        for _ in range(3):
            self.faulty.script("get_into", faults.answer([ObjectResult(FAILED, reason)]))
            assert self.get().status is FAILED

    def get(self, index: int = 0) -> ObjectResult:
        return read(self.backend, self.chain[index].key, SIZE)[0]

    def states(self) -> tuple[BreakerState, BreakerState]:
        reads, writes = self.backend.statistics().breakers
        return reads.state, writes.state


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_it_opens_after_so_many_failures_in_a_row_and_answers_without_the_backend(setup: Setup) -> None:
    setup.break_reads()
    asked = setup.faulty.count("get_into")
    assert [setup.get() for _ in range(100)] == [REFUSED] * 100
    with pytest.raises(StorageUnavailable, match="breaker_open"):
        setup.backend.contains([setup.chain[0].key] * 3)  # False would mean that they are absent
    assert setup.faulty.count("get_into") == asked
    assert setup.faulty.count("contains") == 0
    reads, writes = setup.backend.statistics().breakers
    assert (reads.name, reads.state, reads.reason, reads.opened, reads.refused) == ("read", OPEN, "eio", 1, 103)
    assert (writes.name, writes.state, writes.reason, writes.opened) == ("write", CLOSED, "", 0)
    assert setup.backend.statistics().by_reason["breaker_open"] == 103


def test_reads_and_writes_break_apart(setup: Setup) -> None:
    setup.backend.put(setup.chain[:1])
    setup.faulty.always("put", faults.answer([ObjectResult(FAILED, "no_space")]))
    for _ in range(3):
        assert setup.backend.put(setup.chain[1:2])[0].reason == "no_space"
    assert setup.states() == (CLOSED, OPEN)
    assert setup.backend.put(setup.chain) == [REFUSED] * 4
    with pytest.raises(StorageUnavailable, match="breaker_open"):
        setup.backend.touch([setup.chain[0].key])  # False would mean that it is absent
    assert setup.backend.delete([setup.chain[0].key]) == [False]
    assert setup.get().status is OK


def test_an_answer_in_between_starts_the_count_again(setup: Setup) -> None:
    for _ in range(5):
        setup.faulty.script("get_into", *[faults.answer([ObjectResult(FAILED, "eio")])] * 2, None)
        assert [setup.get().status for _ in range(3)] == [FAILED, FAILED, MISSING]
    assert setup.states() == (CLOSED, CLOSED)


def test_a_batch_that_was_answered_in_part_is_no_failure(setup: Setup) -> None:
    for _ in range(9):
        setup.faulty.script("put", faults.answer([ObjectResult(FAILED, "eio"), ObjectResult(OK)]))
        setup.backend.put(setup.chain[:2])
    assert setup.states() == (CLOSED, CLOSED)


@pytest.mark.parametrize("reason", ["too_large", "no_room", "cleared", "size", "header:identity", "busy"])
def test_what_tells_about_the_object_opens_nothing(setup: Setup, reason: str) -> None:
    for _ in range(9):
        setup.faulty.script("put", faults.answer([ObjectResult(FAILED, reason)]))
        setup.backend.put(setup.chain[:1])
    assert setup.states() == (CLOSED, CLOSED)


@pytest.mark.parametrize("verb", ["get_into", "put", "contains", "touch", "delete"])
@pytest.mark.parametrize(
    "fault",
    [faults.fail(OSError("disk")), faults.answer(None), faults.resize(3), faults.fail(StorageUnavailable("gone"))],
    ids=["raises", "none", "too many", "unavailable"],
)
def test_exceptions_and_broken_contracts_count(setup: Setup, verb: str, fault: faults.Fault) -> None:
    keys = [stored.key for stored in setup.chain]
    calls = {"put": lambda: setup.backend.put(setup.chain), "get_into": lambda: setup.backend.get_into(keys, buffers)}
    buffers = [memoryview(bytearray(SIZE)) for _ in keys]
    call: Any = calls.get(verb, lambda: getattr(setup.backend, verb)(keys))
    for _ in range(3):
        setup.faulty.script(verb, fault)
        with contextlib.suppress(OSError, StorageUnavailable):
            call()
    assert OPEN in setup.states()
    if verb in ("touch", "contains"):
        with pytest.raises(StorageUnavailable, match="breaker_open"):
            call()
    else:
        assert len(call()) == 4


def test_a_probe_after_the_interval_closes_it(setup: Setup) -> None:
    setup.backend.put(setup.chain)
    setup.break_reads()
    setup.clock.advance(9.99)
    assert setup.get() == REFUSED
    setup.clock.advance(0.01)
    assert setup.get().status is OK
    assert setup.states() == (CLOSED, CLOSED)
    assert setup.backend.statistics().breakers[0].reason == ""


def test_a_probe_that_fails_waits_for_another_interval(setup: Setup) -> None:
    setup.break_reads()
    for reason in ("eio", "estale"):
        setup.clock.advance(10)
        setup.faulty.script("get_into", faults.answer([ObjectResult(FAILED, reason)]))
        assert setup.get().reason == reason
        assert setup.get() == REFUSED
    reads = setup.backend.statistics().breakers[0]
    assert (reads.state, reads.reason, reads.opened) == (OPEN, "estale", 1)


def test_the_interval_is_counted_from_the_beginning_of_a_probe(setup: Setup) -> None:
    setup.break_reads()
    setup.clock.advance(10)

    def slow(call: faults.Call) -> list[ObjectResult]:
        setup.clock.advance(4)
        return [ObjectResult(FAILED, "timeout") for _ in call.keys]

    setup.faulty.script("get_into", slow)
    assert setup.get().reason == "timeout"
    setup.clock.advance(5.99)
    assert setup.get() == REFUSED
    setup.clock.advance(0.01)
    assert setup.get().status is MISSING
    assert setup.states()[0] is CLOSED


def test_a_probe_waits_while_the_backend_would_try_nothing() -> None:
    clock = ManualClock()
    resting = [False]
    breaker = Breaker(BreakerPolicy(failures=1, interval=10.0), now=clock.now, resting=lambda: resting[0])
    first = breaker.begin(1)
    assert first is not None
    breaker.end(first, "connection", proof=True)
    resting[0] = True
    clock.advance(12)
    assert breaker.begin(1) is None
    assert breaker.statistics("read").state is OPEN
    resting[0] = False
    probe = breaker.begin(1)
    assert probe is not None, "no further interval is waited for"
    breaker.end(probe, "", proof=True)
    assert breaker.statistics("read").state is CLOSED


def test_a_closed_breaker_does_not_care_whether_the_backend_rests() -> None:
    breaker = Breaker(BreakerPolicy(), now=ManualClock().now, resting=lambda: True)
    assert breaker.begin(1) is not None


def test_one_probe_at_a_time(setup: Setup) -> None:
    gate = Gate()
    setup.break_reads()
    setup.clock.advance(10)
    setup.faulty.script("get_into", faults.delay(gate))
    results: list[ObjectResult] = []
    probe = threading.Thread(target=lambda: results.append(setup.get()))
    probe.start()
    gate.until_arrived()
    assert setup.states()[0] is HALF_OPEN
    assert [setup.get() for _ in range(5)] == [REFUSED] * 5
    gate.open()
    probe.join(30)
    assert status_of(results) == [MISSING]
    assert setup.states()[0] is CLOSED


def test_look_ups_that_are_answered_do_not_prove_that_transfers_work(setup: Setup) -> None:
    setup.backend.put(setup.chain)
    setup.break_reads()
    setup.clock.advance(10)
    keys = [stored.key for stored in setup.chain]
    assert setup.backend.contains(keys) == [True] * 4
    assert setup.states()[0] is HALF_OPEN, "the way is open for a real probe"
    assert setup.get().status is OK
    assert setup.states()[0] is CLOSED


def test_many_look_ups_in_a_row_do(setup: Setup) -> None:
    setup.break_reads()
    setup.clock.advance(10)
    for _ in range(3):
        assert setup.states()[0] is not CLOSED
        assert setup.backend.contains([setup.chain[0].key]) == [False]
    assert setup.states()[0] is CLOSED


@pytest.mark.case("FILE-8")
def test_calls_that_hang_open_it_without_ever_coming_back(setup: Setup) -> None:
    gate = Gate()
    setup.backend.put(setup.chain)
    setup.faulty.script("get_into", *[faults.delay(gate)] * 3)
    results: list[ObjectResult] = []
    hung = [threading.Thread(target=lambda: results.append(setup.get())) for _ in range(3)]
    for thread in hung:
        thread.start()
    gate.until_arrived(3)
    setup.clock.advance(4.9)
    assert setup.get().status is OK
    setup.clock.advance(0.2)
    assert setup.get() == REFUSED
    reads = setup.backend.statistics().breakers[0]
    assert (reads.state, reads.reason, reads.timeouts, reads.running) == (OPEN, "timeout", 3, 3)
    gate.open()
    for thread in hung:
        thread.join(30)
    assert setup.get() == REFUSED, "a late end closes nothing"
    setup.clock.advance(10)
    assert setup.get().status is OK
    assert setup.backend.statistics().breakers[0].timeouts == 3


def test_a_probe_that_hangs_lets_the_next_one_through_after_an_interval(setup: Setup) -> None:
    gate = Gate()
    setup.break_reads()
    setup.clock.advance(10)
    setup.faulty.script("get_into", faults.delay(gate))
    hung = threading.Thread(target=setup.get)
    hung.start()
    gate.until_arrived()
    setup.clock.advance(5)
    assert setup.get() == REFUSED
    assert setup.states()[0] is OPEN
    setup.clock.advance(10)
    assert setup.get().status is MISSING
    assert setup.states()[0] is CLOSED
    gate.open()
    hung.join(30)
    assert setup.states()[0] is CLOSED


def test_a_slow_call_counts_as_timed_out_when_it_ends(setup: Setup) -> None:
    for _ in range(3):
        setup.faulty.script("get_into", lambda call: setup.clock.advance(6) or call.apply())
        assert setup.get().status is MISSING
    assert setup.states()[0] is OPEN


def test_who_gave_up_waiting_may_say_so(setup: Setup) -> None:
    gate = Gate()
    setup.faulty.script("get_into", *[faults.delay(gate)] * 3)
    hung = [threading.Thread(target=setup.get) for _ in range(3)]
    for thread in hung:
        thread.start()
    gate.until_arrived(3)
    setup.backend.reads.timed_out(3)
    assert setup.get() == REFUSED
    gate.open()
    for thread in hung:
        thread.join(30)


def test_what_must_be_known_passes_an_open_breaker(setup: Setup) -> None:
    setup.break_reads()
    for _ in range(3):
        setup.faulty.script("put", faults.answer([ObjectResult(FAILED, "eio")]))
        setup.backend.put(setup.chain[:1])
    assert setup.states() == (OPEN, OPEN)
    setup.backend.clear(NAMESPACE, 3)
    assert setup.backend.generation(NAMESPACE) == 3
    assert setup.backend.put([]) == []
    assert setup.backend.contains([]) == []


@pytest.mark.parametrize("wrong", [{"failures": 0}, {"timeout": 0.0}, {"interval": float("inf")}])
def test_a_policy_that_cannot_work_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BreakerPolicy(**wrong)


def test_the_registry_puts_them_around_a_backend() -> None:
    bare = FaultyStorage(MemoryBackend())
    slow = RetryPolicy(attempts=2, delay=0.0)
    backend = configured(bare, retry=slow, breaker=BreakerPolicy(failures=2))
    bare.always("get_into", faults.fail(TimeoutError()))
    key = make_chain(1, SIZE)[0].key
    assert read(backend, key, SIZE)[0].reason == "timeout"
    assert bare.count("get_into") == 2, "each try counts, so two tries open the breaker"
    assert read(backend, key, SIZE)[0] == REFUSED
    statistics = backend.statistics()
    assert [breaker.state for breaker in statistics.breakers] == [OPEN, CLOSED]
    assert statistics.retried == 1
    with pytest.raises(ConfigError, match="wrapped already"):
        configured(backend, retry=slow)
    opened = open_storage("memory://", breaker=BreakerPolicy(), retry=slow)
    assert [breaker.state for breaker in opened.statistics().breakers] == [CLOSED, CLOSED]
    opened.close()
