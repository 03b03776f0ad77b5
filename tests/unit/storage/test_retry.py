"""Trying again: what for, how often, how long, and only what failed."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from hicache.errors import ConfigError, StorageUnavailable
from hicache.storage.base import ObjectResult, ObjectStatus
from hicache.storage.memory import MemoryBackend
from hicache.storage.retry import RetryingBackend, RetryPolicy
from hicache.testing import faults
from hicache.testing.faults import FaultyStorage
from hicache.testing.storage import make_chain, read, status_of

SIZE = 4096
OK, FAILED = ObjectStatus.OK, ObjectStatus.FAILED
BUSY = ObjectResult(FAILED, "busy")


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def build(time: Time) -> Callable[..., tuple[RetryingBackend, FaultyStorage]]:
    def make(uniform: float = 1.0, **policy: Any) -> tuple[RetryingBackend, FaultyStorage]:
        faulty = FaultyStorage(MemoryBackend())
        retrying = RetryingBackend(
            faulty, RetryPolicy(**policy), now=time.now, sleep=time.sleep, uniform=lambda: uniform
        )
        return retrying, faulty

    return make


@pytest.mark.case("FAIL-1", "FAIL-7")
def test_only_the_keys_that_failed_are_tried_again(build: Any, time: Time) -> None:
    backend, faulty = build()
    chain = make_chain(4, SIZE)

    def third_is_busy(call: faults.Call) -> Any:
        results = call.apply()
        faulty.inner.delete([call.keys[2]])
        return [*results[:2], BUSY, *results[3:]]

    faulty.script("put", third_is_busy)
    assert status_of(backend.put(chain)) == [OK] * 4
    assert [len(keys) for verb, keys in faulty.calls if verb == "put"] == [4, 1]
    assert all(read(backend, stored.key, SIZE)[1] == bytes(stored.payload) for stored in chain)
    statistics = backend.statistics()
    assert (statistics.retried, statistics.recovered) == (1, 1)


def test_attempts_are_bounded_and_waits_grow(build: Any, time: Time) -> None:
    backend, faulty = build(attempts=5, delay=0.1, longest=0.3, budget=10.0)
    faulty.always("put", faults.answer([BUSY]))
    assert backend.put(make_chain(1, SIZE)) == [BUSY]
    assert faulty.count("put") == 5
    assert time.slept == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert backend.statistics().recovered == 0


def test_waits_are_jittered_down_to_half(build: Any, time: Time) -> None:
    backend, faulty = build(uniform=0.0, attempts=3, delay=0.1, longest=1.0, budget=10.0)
    faulty.always("put", faults.answer([BUSY]))
    backend.put(make_chain(1, SIZE))
    assert time.slept == pytest.approx([0.05, 0.1])


def test_no_try_begins_after_the_budget(build: Any, time: Time) -> None:
    backend, faulty = build(attempts=100, delay=0.1, longest=0.1, budget=0.35)
    faulty.always("put", faults.answer([BUSY]))
    backend.put(make_chain(1, SIZE))
    assert faulty.count("put") == 4
    assert time.seconds < 0.35


@pytest.mark.parametrize("reason", ["no_space", "too_large", "breaker_open", "size", "contract", "eacces"])
def test_what_does_not_pass_is_not_tried_again(build: Any, time: Time, reason: str) -> None:
    backend, faulty = build()
    faulty.script("get_into", faults.answer([ObjectResult(FAILED, reason)]))
    (stored,) = make_chain(1, SIZE)
    assert read(backend, stored.key, SIZE)[0].reason == reason
    assert faulty.count("get_into") == 1
    assert not time.slept


def test_a_miss_and_a_corrupt_object_are_answers(build: Any) -> None:
    backend, faulty = build()
    (stored,) = make_chain(1, SIZE)
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.MISSING
    faulty.script("get_into", faults.answer([ObjectResult(ObjectStatus.CORRUPT, "busy")]))
    assert read(backend, stored.key, SIZE)[0].status is ObjectStatus.CORRUPT
    assert faulty.count("get_into") == 2


@pytest.mark.parametrize(
    ("error", "reason", "tries"),
    [
        (TimeoutError(), "timeout", 3),
        (StorageUnavailable("gone"), "unavailable", 3),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "econnreset", 3),
        (OSError(errno.EACCES, "no"), "eacces", 1),
    ],
)
def test_exceptions_of_the_system_count_as_their_reason(build: Any, error: Exception, reason: str, tries: int) -> None:
    backend, faulty = build()
    faulty.always("put", faults.fail(error))
    assert backend.put(make_chain(2, SIZE)) == [ObjectResult(FAILED, reason)] * 2
    assert faulty.count("put") == tries
    faulty.always("put", None)
    faulty.script("put", faults.fail(error))
    assert status_of(backend.put(make_chain(2, SIZE))) == [OK if tries > 1 else FAILED] * 2


def test_an_exception_that_is_no_trouble_of_the_system_passes(build: Any) -> None:
    backend, faulty = build()
    faulty.script("put", faults.fail(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        backend.put(make_chain(1, SIZE))


@pytest.mark.case("FAIL-4")
@pytest.mark.parametrize(
    "fault", [faults.answer(None), faults.resize(1), faults.resize(-1)], ids=["none", "too many", "too few"]
)
def test_an_answer_of_the_wrong_form_fails_its_keys(build: Any, fault: faults.Fault) -> None:
    backend, faulty = build()
    faulty.script("put", fault)
    assert backend.put(make_chain(3, SIZE)) == [ObjectResult(FAILED, "contract")] * 3
    faulty.script("put", faults.answer([BUSY] * 3), fault)
    assert [result.reason for result in backend.put(make_chain(3, SIZE))] == ["contract"] * 3


def test_no_keys_ask_for_nothing(build: Any) -> None:
    backend, _ = build()
    assert backend.put([]) == []
    assert backend.get_into([], []) == []


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"delay": -1.0}, {"longest": float("inf")}, {"budget": -0.1}])
def test_a_policy_that_cannot_work_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RetryPolicy(**wrong)
