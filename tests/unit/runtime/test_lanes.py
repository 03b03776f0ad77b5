"""Storage calls that do not come back, with a clock and gates, never by sleeping."""

from __future__ import annotations

import threading

import pytest

from hicache.runtime.lanes import Lane
from hicache.runtime.port import Calls
from hicache.runtime.queues import Bound, Job
from hicache.testing.clock import ManualClock
from hicache.testing.gates import Gate
from hicache.testing.waits import eventually

THREADS = 2


class _Setup:
    """A lane of two threads, three replacements, five seconds a call, ten between probes."""

    def __init__(self, *, most_hung: int = 3) -> None:
        self.clock = ManualClock()
        self.calls = Calls(self.clock.now)
        self.lane = Lane(
            "read",
            Bound(bytes=100, requests=100),
            threads=THREADS,
            calls=self.calls,
            now=self.clock.now,
            call_timeout=5.0,
            most_hung=most_hung,
            probe_seconds=10.0,
        )
        self.stuck = Gate()
        self.failed: list[str] = []
        self.done = Gate(opened=True)

    def offer(self, gate: Gate | None = None, *, cost: int = 1, name: str = "") -> bool:
        def work() -> None:
            with self.calls.inside():
                if gate is not None:
                    gate.enter()
            self.done.enter()

        return self.lane.offer(Job(cost, work, lambda: self.failed.append(name)))

    def hang(self, count: int) -> None:
        """So many calls hang, one after the other."""
        for i in range(count):
            arrived = self.stuck.arrived + 1
            assert self.offer(self.stuck), i
            self.stuck.until_arrived(arrived)
        self.clock.advance(5.0)
        self.lane.look()

    def stop(self) -> None:
        """So many hang that the lane stops."""
        self.hang(THREADS)
        self.hang(1)
        assert self.lane.stopped

    def close(self) -> None:
        self.stuck.open()
        assert self.lane.close(lambda thread: thread.join(30)) == 0


@pytest.fixture
def setup():
    made = _Setup()
    yield made
    made.close()


@pytest.mark.case("FILE-8")
def test_a_call_that_hangs_loses_its_thread_and_others_go_on(setup: _Setup) -> None:
    setup.hang(THREADS)
    assert setup.offer()
    setup.done.until_passed(1)
    eventually(lambda: setup.lane.statistics().running == 0)
    statistics = setup.lane.statistics()
    assert (statistics.hung, statistics.abandoned, statistics.replaced) == (2, 2, 2)
    assert (statistics.running, statistics.bytes) == (0, 0)
    assert not statistics.stopped
    assert not setup.lane.idle
    setup.stuck.open()
    eventually(lambda: setup.lane.statistics().hung == 0)
    assert setup.lane.statistics().abandoned == 2
    assert setup.lane.idle
    assert setup.lane.statistics().bytes == 0


def test_a_call_that_takes_less_than_the_time_is_left_alone(setup: _Setup) -> None:
    setup.offer(setup.stuck)
    setup.stuck.until_arrived(1)
    assert setup.lane.look() == 5.0
    setup.clock.advance(4.0)
    assert setup.lane.look() == 1.0
    assert setup.lane.statistics().hung == 0
    setup.clock.advance(1.0)
    assert setup.lane.look() is None  # nothing is left to look after
    assert setup.lane.statistics().hung == 1


def test_a_job_of_many_short_calls_does_not_hang(setup: _Setup) -> None:
    first, second = Gate(), Gate()

    def work() -> None:
        for gate in (first, second):
            with setup.calls.inside():
                gate.enter()

    setup.lane.offer(Job(1, work, lambda: None))
    first.until_arrived(1)
    setup.clock.advance(4.0)
    first.open()
    second.until_arrived(1)
    setup.clock.advance(4.0)
    setup.lane.look()
    assert setup.lane.statistics().hung == 0
    second.open()


def test_a_thread_that_was_given_up_ends_with_its_call(setup: _Setup) -> None:
    before = threading.active_count()
    setup.hang(THREADS)
    assert threading.active_count() == before + THREADS
    setup.stuck.open()
    eventually(lambda: threading.active_count() == before)
    for _ in range(5):
        assert setup.offer()
    setup.done.until_passed(THREADS + 5)


@pytest.mark.case("FILE-8")
def test_with_too_many_hung_calls_nothing_more_is_begun_and_what_waits_fails(setup: _Setup) -> None:
    setup.hang(THREADS)
    for gate in (Gate(opened=True), setup.stuck):
        assert setup.offer(gate)
    setup.stuck.until_arrived(THREADS + 1)
    held = Gate()
    assert setup.offer(held)  # the second thread
    held.until_arrived(1)
    assert setup.offer(name="waiting")
    setup.clock.advance(4.9)
    setup.lane.look()
    assert setup.failed == []
    setup.clock.advance(0.1)
    setup.lane.look()
    statistics = setup.lane.statistics()
    assert statistics.stopped
    assert statistics.replaced == 3
    assert setup.failed == ["waiting"]
    assert not setup.offer()
    assert setup.lane.statistics().stopped_refused == 1
    held.open()


def test_a_probe_that_comes_back_opens_the_lane_although_others_are_stuck_for_ever(setup: _Setup) -> None:
    setup.stop()
    setup.clock.advance(9.99)
    assert not setup.offer()
    setup.clock.advance(0.01)
    probe = Gate()
    assert setup.offer(probe)
    assert not setup.offer()  # one at a time
    probe.open()
    eventually(lambda: not setup.lane.stopped)
    assert setup.lane.statistics().hung == 3
    assert setup.offer()
    setup.done.until_passed(2)


def test_a_probe_that_hangs_keeps_it_closed_and_spends_no_thread(setup: _Setup) -> None:
    setup.stop()
    threads = threading.active_count()
    for hung in (4, 5):
        setup.clock.advance(10.0)
        arrived = setup.stuck.arrived + 1
        assert setup.offer(setup.stuck)
        setup.stuck.until_arrived(arrived)
        setup.clock.advance(5.0)
        setup.lane.look()
        assert setup.lane.stopped
        assert setup.lane.statistics().hung == hung
    assert threading.active_count() == threads
    assert setup.lane.statistics().replaced == 3


@pytest.mark.case("FILE-8")
def test_it_goes_on_by_itself_when_calls_come_back(setup: _Setup) -> None:
    setup.stop()
    setup.stuck.open()
    eventually(lambda: setup.lane.statistics().hung == 0)
    assert not setup.lane.stopped
    assert setup.offer()
    setup.done.until_passed(4)


@pytest.mark.case("FILE-8")
def test_fifty_hung_calls_do_not_stop_others() -> None:
    setup = _Setup(most_hung=64)
    for _ in range(25):
        setup.hang(THREADS)
    assert setup.lane.statistics().hung == 50
    assert not setup.lane.stopped
    for i in range(20):
        assert setup.offer()
        setup.done.until_passed(i + 1)
    setup.close()
    assert setup.lane.statistics().bytes == 0


def test_the_share_of_a_hung_call_is_given_back_once(setup: _Setup) -> None:
    assert setup.offer(setup.stuck, cost=100)
    setup.stuck.until_arrived(1)
    assert not setup.offer()
    setup.clock.advance(5.0)
    setup.lane.look()
    assert setup.offer(cost=100)
    setup.done.until_passed(1)
    setup.stuck.open()
    eventually(lambda: setup.lane.statistics().hung == 0)
    assert setup.lane.statistics().bytes == 0


def test_dropping_fails_what_nobody_has_begun_and_keeps_the_lane(setup: _Setup) -> None:
    held = Gate()
    for _ in range(THREADS):
        setup.offer(held)
    held.until_arrived(THREADS)
    setup.offer(name="first")
    setup.offer(name="second")
    setup.lane.drop()
    assert setup.failed == ["first", "second"]
    held.open()
    assert setup.offer()
    setup.done.until_passed(THREADS + 1)
