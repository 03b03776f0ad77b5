"""Whether a node is tried, and the words for what goes wrong."""

from __future__ import annotations

import pytest
from redis import exceptions as errors

from hicache.testing.clock import ManualClock
from hicache_redis.pool import FIRST_PAUSE, LONGEST_PAUSE, Gate
from hicache_redis.trouble import Trouble, reason_of_error, reason_of_reply


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=100.0)


def entered(gate: Gate) -> bool:
    try:
        gate.enter()
    except Trouble:
        return False
    return True


def test_pauses_grow_and_end_with_the_first_answer(clock: ManualClock) -> None:
    gate = Gate(now=clock.now, uniform=lambda: 1.0)
    assert entered(gate)
    pause = FIRST_PAUSE
    for _ in range(10):
        gate.failed("connection")
        clock.advance(pause * 0.99)
        assert not entered(gate)
        clock.advance(pause * 0.02)
        assert entered(gate)
        assert not entered(gate), "one caller tries, the others do not wait for it"
        pause = min(2 * pause, LONGEST_PAUSE)
    gate.worked()
    assert entered(gate)
    assert entered(gate)


def test_it_says_whether_a_call_would_be_let_through(clock: ManualClock) -> None:
    gate = Gate(now=clock.now, uniform=lambda: 1.0)
    assert not gate.resting()
    gate.failed("connection")
    assert gate.resting()
    clock.advance(FIRST_PAUSE)
    assert not gate.resting()
    gate.enter()
    assert gate.resting(), "one caller tries"
    gate.worked()
    assert not gate.resting()


def test_many_failures_at_once_are_one(clock: ManualClock) -> None:
    gate = Gate(now=clock.now, uniform=lambda: 1.0)
    for _ in range(20):
        gate.failed("connection")
    clock.advance(FIRST_PAUSE)
    assert entered(gate)


def test_a_pause_is_drawn_between_half_and_all_of_it(clock: ManualClock) -> None:
    gate = Gate(now=clock.now, uniform=lambda: 0.0)
    gate.failed("timeout")
    with pytest.raises(Trouble, match="timeout"):
        gate.enter()
    clock.advance(0.25)
    assert entered(gate)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"OOM command not allowed when used memory > 'maxmemory'.", "oom"),
        (b"READONLY You can't write against a read only replica.", "readonly"),
        (b"LOADING Redis is loading the dataset in memory", "loading"),
        (b"BUSY Redis is busy running a script.", "busy_script"),
        (b"NOPERM this user has no permissions", "acl"),
        (b"NOAUTH Authentication required.", "auth"),
        (b"MOVED 1 host:1", "moved"),
        (b"ASK 1 host:1", "ask"),
        (b"CLUSTERDOWN Hash slot not served", "clusterdown"),
        (b"ERR Protocol error: invalid bulk length", "too_large"),
        (b"ERR string exceeds maximum allowed size", "too_large"),
        (b"ERR anything", "refused"),
        (b"", "refused"),
    ],
)
def test_error_replies_have_a_word(line: bytes, word: str) -> None:
    assert reason_of_reply(line) == word


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (errors.TimeoutError("x"), "timeout"),
        (TimeoutError(), "timeout"),
        (errors.ConnectionError("x"), "connection"),
        (ConnectionResetError(), "connection"),
        (errors.AuthenticationError("x"), "auth"),
        (errors.BusyLoadingError("x"), "loading"),
        (errors.ReadOnlyError("x"), "readonly"),
        (errors.NoPermissionError("x"), "acl"),
        (errors.MovedError("1 host:1"), "moved"),
        (errors.AskError("1 host:1"), "ask"),
        (errors.ClusterDownError("x"), "clusterdown"),
        (errors.RedisClusterException("x"), "clusterdown"),
        (errors.InvalidResponse("x"), "protocol"),
        (errors.ResponseError("OOM command not allowed"), "oom"),
        (errors.ResponseError("WRONGTYPE Operation"), "wrongtype"),
        (Trouble("no_connection"), "no_connection"),
        (RuntimeError("x"), "refused"),
    ],
)
def test_exceptions_have_a_word(error: BaseException, word: str) -> None:
    assert reason_of_error(error) == word
