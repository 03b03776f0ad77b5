"""When ticks were, by the moments that were noted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache.core.ghosts import Ghosts
from hicache.records import MissReason
from hicache.runtime.moments import Moments


def test_a_tick_is_at_the_last_moment_before_it() -> None:
    """Before the first nothing is known; the idle time between two uses belongs to the first."""
    moments = Moments()
    assert moments.of(5) is None
    for tick, now in ((3, 100.0), (4, 100.5), (6, 500.0), (6, 502.0)):
        moments.note(tick, now)
    assert [moments.of(tick) for tick in (2, 3, 4, 5, 6, 99)] == [None, 100.0, 100.0, 100.0, 500.0, 500.0]


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 20)), min_size=1, max_size=200))
def test_what_is_said_is_never_later(steps: list[tuple[int, float]]) -> None:
    """Whatever the pace: a tick came at or after the moment that is told."""
    moments, tick, now = Moments(), 0, 0.0
    came: dict[int, float] = {}
    for uses, seconds in steps:
        now += seconds
        for _ in range(uses):
            tick += 1
            came[tick] = now
        moments.note(tick, now)
    for number, at in came.items():
        told = moments.of(number)
        if told is not None:
            assert told <= at


def test_memory_is_bounded() -> None:
    """However long it goes on; what was long ago gets coarser, and keeps its order."""
    moments = Moments()
    for tick in range(50_000):
        moments.note(tick, float(tick))
    assert len(moments._ticks) <= 4096
    for tick in range(0, 50_000, 97):
        told = moments.of(tick)
        assert told is not None
        assert tick - 64 <= told <= tick


def test_ghosts_know_when() -> None:
    """A page that went twice has its last reason and tick; the oldest are forgotten first."""
    ghosts = Ghosts(3)
    ghosts.add(b"n", [b"1", b"2"], MissReason.EVICTED, tick=7)
    ghosts.add(b"n", [b"1"], MissReason.FAILED, tick=2**40)
    assert ghosts.going(b"n", b"1") == (MissReason.FAILED, 2**40)
    assert ghosts.going(b"n", b"2") == (MissReason.EVICTED, 7)
    assert ghosts.going(b"m", b"2") is None
    ghosts.add(b"n", [b"3", b"4"], MissReason.EXPIRED, tick=9)
    assert ghosts.going(b"n", b"2") is None
    assert ghosts.reason(b"n", b"4") is MissReason.EXPIRED
