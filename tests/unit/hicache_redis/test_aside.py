"""Work without a deadline of its own is waited for until the call's deadline, and does no harm when it ends later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from hicache.testing.gates import Gate
from hicache_redis.aside import Aside
from hicache_redis.channel import Deadline
from hicache_redis.trouble import Trouble

PATIENCE = 30.0


def soon(seconds: float = PATIENCE) -> Deadline:
    return Deadline(time.monotonic, seconds)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end
        threading.Event().wait(0.001)


def test_what_is_in_time_is_given_back_and_what_it_raises_is_raised() -> None:
    aside = Aside(1)
    assert aside.run(lambda: threading.current_thread() is threading.main_thread(), soon()) is False
    for _ in range(3):  # each leaves its place
        with pytest.raises(ZeroDivisionError):
            aside.run(lambda: 1 // 0, soon())


def test_nobody_waits_beyond_the_deadline_and_what_comes_late_is_taken_care_of() -> None:
    aside, gate = Aside(), Gate()
    late: list[str] = []

    def work() -> str:
        gate.enter()
        return "a connection"

    start = time.monotonic()
    with pytest.raises(Trouble, match="timeout"):
        aside.run(work, soon(0.05), late=late.append)
    assert 0.05 <= time.monotonic() - start < 0.05 + PATIENCE / 3
    assert late == []
    gate.open()
    until(lambda: late == ["a connection"])


def test_what_comes_in_time_is_not_late() -> None:
    late: list[str] = []
    assert Aside().run(lambda: "x", soon(), late=late.append) == "x"
    assert late == []


def test_threads_are_bounded_and_come_back() -> None:
    aside, gate = Aside(2), Gate()
    for _ in range(2):
        with pytest.raises(Trouble, match="timeout"):
            aside.run(gate.enter, soon(0.01))
    gate.until_arrived(2)
    ran: list[int] = []
    with pytest.raises(Trouble, match="timeout"):
        aside.run(lambda: ran.append(1), soon(0.01))
    assert ran == [], "there was no room for it"
    gate.open()
    aside.run(lambda: ran.append(2), soon())
    assert ran == [2]


def test_a_deadline_that_has_passed_starts_nothing() -> None:
    ran: list[int] = []
    with pytest.raises(Trouble, match="timeout"):
        Aside().run(lambda: ran.append(1), soon(-1.0))
    assert ran == []
