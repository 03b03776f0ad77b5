from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.prompt import Prompt
from hicache.core.transfers import TransferKind
from hicache.errors import CacheClosed
from hicache.memory.null import NullDevicePool, NullHostPool
from hicache.memory.writer import ThreadEvent
from hicache.records import PageResult
from hicache.runtime.executor import Executor
from hicache.runtime.queues import Bound
from hicache.runtime.reducer import Pump, Reducer
from hicache.runtime.waiting import waiter
from hicache.testing.choices import CountingHasher
from hicache.testing.clock import ManualClock
from hicache.testing.gates import Gate
from hicache.testing.memory import ManualCopyEngine

OK, FAILED = PageResult.OK, PageResult.FAILED


class _Setup:
    """A core with two tiers whose copies end by hand."""

    def __init__(self, *, engine: Any = None, bound: Bound = Bound(2**30, 100)) -> None:  # noqa: B008
        self.core = Core(CoreConfig(device_pages=16, host_pages=16))
        self.copies = engine or ManualCopyEngine(NullDevicePool(16), NullHostPool(16))
        self.events: list[Any] = []
        self.reducer = Reducer(self.core, wait=waiter(ManualClock()), publish=self.events.extend)
        self.executor = Executor(self.reducer, copies=self.copies, storage=None, page_bytes=1, copy_bound=bound)
        self.tree = self.core.tree(b"n" * 16, width=1, hasher=CountingHasher())

    def commit(self, symbols: bytes, *, event: ThreadEvent | None = None) -> None:
        with self.reducer.lock:
            lease = self.core.lease(self.tree, Prompt(symbols, 1, self.tree.hasher))
            self.core.allocate(lease, len(symbols) - lease.usable)
            transfer = self.core.commit(lease, len(symbols), ready=event is None)
            if transfer is not None:
                assert event is not None
                self.executor.written(transfer, event)
            self.core.release(lease)
            self.reducer.settle()

    def host_pages(self, symbols: bytes) -> int:
        with self.reducer.lock:
            self.reducer.settle()
            self.core.check()
            held, resident = self.tree.held(self.tree.walk(Prompt(symbols, 1, self.tree.hasher)), 1)
            del held
            return resident


def test_a_copy_is_completed_when_it_has_ended_and_not_before() -> None:
    setup = _Setup()
    setup.commit(b"abc")
    assert setup.host_pages(b"abc") == 0
    assert len(setup.executor.running) == 1
    setup.copies.end()
    assert setup.host_pages(b"abc") == 3
    assert setup.executor.running == {}


@pytest.mark.case("FAIL-4")
@pytest.mark.parametrize("results", [[], [OK], [OK] * 4, [FAILED] * 3])
def test_an_answer_for_another_number_of_pages_is_an_answer_for_none(results: list[PageResult]) -> None:
    setup = _Setup()
    setup.commit(b"abc")
    pending = setup.copies.pending.pop()
    pending.done(results)
    assert setup.host_pages(b"abc") == 0
    assert setup.reducer.internal_errors == 0
    with setup.reducer.lock:
        assert setup.core.available(0) == setup.core.available(1) == 16


def test_a_second_answer_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    setup = _Setup()
    setup.commit(b"abc")
    pending = setup.copies.pending.pop()
    pending.done([OK] * 3)
    pending.done([FAILED] * 3)
    with caplog.at_level(logging.CRITICAL):
        assert setup.host_pages(b"abc") == 3
    assert setup.reducer.internal_errors == 1


def test_a_copy_that_cannot_start_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    setup = _Setup()
    setup.copies.close(0.0)
    with caplog.at_level(logging.CRITICAL):
        setup.commit(b"abc")
        setup.commit(b"xyz", event=ThreadEvent())
    assert setup.host_pages(b"abc") == 0
    assert setup.executor.shed == {"error": 3}
    with setup.reducer.lock:
        assert setup.core.available(0) == 16
        assert setup.core.match(setup.tree, Prompt(b"xyz", 1, setup.tree.hasher)).pages == 0


@pytest.mark.case("RACE-5")
def test_committed_pages_wait_for_their_event() -> None:
    setup = _Setup()
    event = ThreadEvent()
    setup.commit(b"abc", event=event)
    assert setup.copies.pending == []
    event.set()
    setup.copies.pass_events()
    assert setup.host_pages(b"abc") == 0
    setup.copies.end()
    assert setup.host_pages(b"abc") == 3


@pytest.mark.case("EVICT-6")
def test_copies_down_are_bounded() -> None:
    setup = _Setup(bound=Bound(bytes=4, requests=2))
    for symbols in (b"abc", b"de", b"f", b"g"):
        setup.commit(symbols)
    assert [pending.copy.pages for pending in setup.copies.pending] == [3, 1]
    assert setup.executor.shed == {"copy_queue_full": 3}
    setup.copies.end_all()
    setup.commit(b"de")
    setup.copies.end_all()
    assert setup.host_pages(b"de") == 2


def test_the_pump_applies_what_nobody_comes_for() -> None:
    setup = _Setup()
    pump = Pump(setup.reducer)
    applied = Gate(opened=True)
    setup.reducer.post(applied.enter)
    applied.until_passed()
    assert pump.stop(lambda thread: thread.join(30))


def test_the_pump_survives_what_it_applies(caplog: pytest.LogCaptureFixture) -> None:
    setup = _Setup()
    pump = Pump(setup.reducer)
    applied = Gate(opened=True)
    with caplog.at_level(logging.CRITICAL):
        setup.reducer.post(int, "no number")
        setup.reducer.post(applied.enter)
        applied.until_passed()
    assert setup.reducer.internal_errors == 1
    assert pump.stop(lambda thread: thread.join(30))


@pytest.mark.parametrize("flushes", [True, False])
def test_the_clean_reserve_is_looked_after_whenever_something_has_ended(flushes: bool) -> None:
    class Counting(Core):
        flushed = 0

        def flush(self) -> int:
            self.flushed += 1
            return 0

    core = Counting(CoreConfig(device_pages=4))
    reducer = Reducer(core, wait=waiter(ManualClock()), publish=lambda events: None, flushes=flushes)
    with reducer.lock:
        reducer.settle()
        assert core.flushed == 0
        reducer.post(core.log.pages.update, {(TransferKind.WRITE_BACK, True): 1})
        reducer.post(lambda: None)
        reducer.settle()
        assert core.flushed == flushes
        reducer.post(core.log.pages.update, {(TransferKind.WRITE_BACK, False): 1})
        reducer.settle()
        assert core.flushed == flushes  # what only fails is no reason to try again
        reducer.flush()
        assert core.flushed == 2 * flushes


def test_cleared_pages_are_freed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    from hicache.runtime import reducer

    monkeypatch.setattr(reducer, "SWEEP_PAGES", 1)
    setup = _Setup()
    for symbols in (b"abc", b"de", b"f"):
        setup.commit(symbols)
        setup.copies.end_all()
    with setup.reducer.lock:
        setup.reducer.settle()
        setup.core.clear(setup.tree)
        setup.reducer.sweeping = True
        assert setup.core.statistics().device.free == 10
    slices = 0
    while setup.reducer.sweeping:
        setup.reducer.sweep()
        slices += 1
    assert slices >= 3
    assert setup.core.statistics().device.free == setup.core.statistics().host.free == 16


def test_who_waits_is_told_that_the_cache_was_closed() -> None:
    setup = _Setup()
    setup.reducer.closed = "the cache is closed"
    with setup.reducer.lock, pytest.raises(CacheClosed, match="closed"):
        setup.reducer.wait(0.0)
    assert setup.reducer.waiters == 0


def test_slots_are_what_the_core_chose() -> None:
    setup = _Setup()
    setup.commit(b"abc")
    pending = setup.copies.pending[0]
    assert len(np.unique(pending.device_slots)) == len(np.unique(pending.host_slots)) == 3
    assert pending.down
    setup.copies.close(0.0)
    assert setup.host_pages(b"abc") == 0
