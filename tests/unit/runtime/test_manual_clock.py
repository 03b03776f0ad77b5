from __future__ import annotations

import threading

import pytest

from hicache.clock import MonotonicClock
from hicache.runtime.waiting import waiter
from hicache.testing.clock import ManualClock
from hicache.testing.gates import Gate, Tripwire


def test_a_wait_ends_when_time_is_moved() -> None:
    clock = ManualClock()
    condition = threading.Condition()
    ended: list[float] = []

    def sleeper() -> None:
        wait = waiter(clock)
        with condition:
            while clock.now() < 5:
                wait(condition, 5 - clock.now())
        ended.append(clock.now())

    thread = threading.Thread(target=sleeper)
    thread.start()
    for _ in range(5):
        clock.until_waiting()
        assert not ended
        clock.advance(1)
    thread.join(10)
    assert ended == [5.0]


def test_time_never_goes_back() -> None:
    with pytest.raises(ValueError, match="back"):
        ManualClock().advance(-1)


def test_nobody_hangs_for_ever() -> None:
    clock = ManualClock(patience=0.01)
    condition = threading.Condition()
    with condition, pytest.raises(TimeoutError):
        clock.wait(condition, None)
    with pytest.raises(TimeoutError, match="0 of 1"):
        clock.until_waiting()
    with pytest.raises(TimeoutError, match="closed"):
        Gate(patience=0.01).enter()
    with pytest.raises(TimeoutError, match="arrivals"):
        Gate(patience=0.01).until_arrived()


def test_a_wait_of_no_time_does_not_wait() -> None:
    clock = ManualClock(patience=0.01)
    condition = threading.Condition()
    with condition:
        clock.wait(condition, 0)


def test_the_machines_clock_waits_in_real_time() -> None:
    condition = threading.Condition()
    with condition:
        waiter(MonotonicClock())(condition, 0.001)


def test_permits_let_through_one_by_one() -> None:
    gate = Gate()
    threads = [threading.Thread(target=gate.enter) for _ in range(3)]
    for thread in threads:
        thread.start()
    gate.until_arrived(3)
    gate.permit(2)
    gate.until_passed(2)
    assert gate.passed == 2
    gate.open()
    for thread in threads:
        thread.join(10)
    gate.close()
    assert gate.passed == 3


def test_a_tripwire_raises_once_at_its_step() -> None:
    wire = Tripwire(2, error=OSError)
    wire.step("a")
    with pytest.raises(OSError, match="step 2: b"):
        wire.step("b")
    wire.step("c")
    assert wire.steps == 3
