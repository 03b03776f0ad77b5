"""Leaving a backend alone that is in trouble: a breaker for reads and one for writes, closed again by probes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from hicache.errors import ConfigError, HicacheError, StorageUnavailable
from hicache.storage.base import (
    BreakerState,
    BreakerStatistics,
    ObjectKey,
    ObjectResult,
    ObjectStatus,
    Resting,
    StorageBackend,
    StorageStatistics,
    StoredObject,
)
from hicache.storage.wrappers import WrapperBackend

__all__ = ["HARMLESS", "OPEN_REASON", "Breaker", "BreakerBackend", "BreakerPolicy"]

T = TypeVar("T")

OPEN_REASON: Final = "breaker_open"
"""Reason of results that a breaker gave instead of the backend."""

HARMLESS: Final = frozenset(
    {"size", "too_large", "no_room", "rebuilding", "cleared", "newer", "foreign_file", "busy", "evict", OPEN_REASON}
)
"""Reasons of FAILED results that tell about the object or the moment, not about the backend's health."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When a breaker opens, and when it lets a probe through.

    Attributes:
        failures: calls that fail one after the other until it opens.
        timeout: seconds after which a call that is still running, or that has just ended, counts as failed.
        interval: seconds between opening and the first probe, and between the beginnings of two probes, so that
            trouble that has ended costs no more than that.
    """

    failures: int = 5
    timeout: float = 5.0
    interval: float = 5.0

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise ConfigError(f"breaker: failures is {self.failures}, must be 1 or more")
        for name in ("timeout", "interval"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"breaker: {name} is {value} seconds, must be above 0 and finite")


class _Call:
    __slots__ = ("judged", "probe", "started")

    def __init__(self, started: float, *, probe: bool) -> None:
        self.started = started
        self.probe = probe
        self.judged = False  # a late end of a call that counted as timed out tells nothing new


class Breaker:
    """The state of one direction. Thread-safe, never waits, has no thread: calls that hang are seen by the next call.

    Args:
        policy: when it opens.
        now: a monotonic clock in seconds.
        resting: whether the backend would answer a call without trying; a probe then waits for it.
    """

    def __init__(
        self, policy: BreakerPolicy, *, now: Callable[[], float], resting: Callable[[], bool] = lambda: False
    ) -> None:
        self._policy: Final = policy
        self._now = now
        self._resting = resting
        self._lock = threading.Lock()
        self._running: dict[_Call, None] = {}  # in order of their start
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._answered = 0  # look-ups answered while half open
        self._probe_at = 0.0
        self._probe: _Call | None = None
        self._reason = ""
        self._opened = 0
        self._refused = 0
        self._timeouts = 0

    def begin(self, objects: int) -> _Call | None:
        """Whether a call may go to the backend: its ticket for `end`, or None.

        Args:
            objects: how many results a refusal is, for the counts.
        """
        now = self._now()
        with self._lock:
            self._expire(now)
            probe = False
            if self._state is not BreakerState.CLOSED:
                if self._probe is not None or now < self._probe_at or self._resting():
                    self._refused += objects
                    return None
                self._state = BreakerState.HALF_OPEN
                probe = True
            call = _Call(now, probe=probe)
            self._running[call] = None
            if probe:
                self._probe = call
            return call

    def end(self, call: _Call, reason: str, *, proof: bool) -> None:
        """A call has ended.

        Args:
            call: from `begin`.
            reason: why it counts as failed; empty if it does not.
            proof: whether a good end shows that transfers work. A look-up that was answered shows less: it takes as
                many of them in a row as failures that open.
        """
        now = self._now()
        with self._lock:
            self._running.pop(call, None)
            if call.judged:
                return
            if now - call.started >= self._policy.timeout:
                self._timeouts += 1
                reason = "timeout"
            self._judge(call, reason, now, proof=proof)

    def timed_out(self, count: int = 1) -> None:
        """Somebody has given up waiting for calls, sooner than this breaker would."""
        now = self._now()
        with self._lock:
            for call in list(self._running)[:count]:
                self._time_out(call, now)

    def statistics(self, name: str) -> BreakerStatistics:
        """A snapshot."""
        now = self._now()
        with self._lock:
            self._expire(now)
            return BreakerStatistics(
                name=name,
                state=self._state,
                reason=self._reason,
                failures=self._failures,
                opened=self._opened,
                refused=self._refused,
                timeouts=self._timeouts,
                running=len(self._running),
            )

    def _expire(self, now: float) -> None:
        for call in list(self._running):
            if now - call.started < self._policy.timeout:
                return
            if not call.judged:
                self._time_out(call, now)

    def _time_out(self, call: _Call, now: float) -> None:
        if not call.judged:
            self._timeouts += 1
            self._judge(call, "timeout", now, proof=False)

    def _judge(self, call: _Call, reason: str, now: float, *, proof: bool) -> None:
        call.judged = True
        if call.probe:
            self._probe = None
            self._judge_probe(reason, call.started, proof=proof)
        elif reason:
            self._failures += 1
            if self._state is BreakerState.CLOSED and self._failures >= self._policy.failures:
                self._open(reason, now)
        elif self._state is BreakerState.CLOSED:
            self._failures = 0  # a call from before the opening proves nothing while it is open

    def _judge_probe(self, reason: str, started: float, *, proof: bool) -> None:
        if reason:
            self._failures += 1
            self._open(reason, started)
            return
        self._answered += 1
        if proof or self._answered >= self._policy.failures:
            self._state = BreakerState.CLOSED
            self._failures = self._answered = 0
            self._reason = ""

    def _open(self, reason: str, since: float) -> None:
        self._opened += self._state is BreakerState.CLOSED
        self._state = BreakerState.OPEN
        self._reason = reason
        self._answered = 0
        self._probe_at = since + self._policy.interval


class BreakerBackend(WrapperBackend):
    """Answers for a backend that is in trouble, in microseconds, and tries it again now and then.

    Reads (`get_into`, `contains`) and writes (`put`, `touch`, `delete`) have a breaker each. It opens after so many
    calls in a row that raised, timed out, broke the contract, or failed every key for a reason that tells about the
    backend. While it is open, transfers are FAILED ("breaker_open"), `contains` and `touch` raise, `delete` is False.
    After an interval one call at a time is let through; one that works closes it. `generation`, `clear` and what has
    no keys always pass.

    Thread-safe, without threads or waits of its own.

    Args:
        inner: the backend; better bare than guarded, since a guard hides exceptions of look-ups.
        policy: when the breakers open.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self, inner: StorageBackend, policy: BreakerPolicy, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        resting = inner.resting if isinstance(inner, Resting) else _never
        self.reads: Final = Breaker(policy, now=now, resting=resting)
        self.writes: Final = Breaker(policy, now=now, resting=resting)

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        return self._transfer(self.reads, len(keys), lambda: self.inner.get_into(keys, buffers))

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        return self._transfer(self.writes, len(objects), lambda: self.inner.put(objects))

    def contains(self, keys: Sequence[ObjectKey], *, stop_at_first_miss: bool = False) -> list[bool]:
        """See `StorageBackend`."""
        return self._look_up(
            self.reads,
            len(keys),
            lambda: self.inner.contains(keys, stop_at_first_miss=stop_at_first_miss),
            refuse=_cannot_tell,
        )

    def touch(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self._look_up(self.writes, len(keys), lambda: self.inner.touch(keys), refuse=_cannot_tell)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """See `StorageBackend`."""
        return self._look_up(self.writes, len(keys), lambda: self.inner.delete(keys))

    def statistics(self) -> StorageStatistics:
        """See `StorageBackend`; adds both breakers and what they refused."""
        inner = self.inner.statistics()
        breakers = (self.reads.statistics("read"), self.writes.statistics("write"))
        reasons = dict(inner.by_reason)
        if refused := sum(breaker.refused for breaker in breakers):
            reasons[OPEN_REASON] = reasons.get(OPEN_REASON, 0) + refused
        return replace(inner, by_reason=reasons, breakers=(*inner.breakers, *breakers))

    def _transfer(self, breaker: Breaker, count: int, call: Callable[[], list[ObjectResult]]) -> list[ObjectResult]:
        if count == 0:
            return []
        return self._guarded(breaker, count, call, _refused, judge=_trouble, proof=True)

    def _look_up(
        self,
        breaker: Breaker,
        count: int,
        call: Callable[[], list[bool]],
        *,
        refuse: Callable[[int], list[bool]] = lambda count: [False] * count,
    ) -> list[bool]:
        if count == 0:
            return []
        return self._guarded(breaker, count, call, refuse, judge=_shape, proof=False)

    def _guarded(
        self,
        breaker: Breaker,
        count: int,
        call: Callable[[], list[T]],
        refuse: Callable[[int], list[T]],
        *,
        judge: Callable[[object, int], str],
        proof: bool,
    ) -> list[T]:
        ticket = breaker.begin(count)
        if ticket is None:
            return refuse(count)
        reason = "interrupted"
        try:
            answer = call()
            reason = judge(answer, count)
        except Exception as error:
            reason = str(error) if isinstance(error, HicacheError) else f"exception:{type(error).__name__}"
            raise
        finally:
            breaker.end(ticket, reason, proof=proof)
        return answer


def _never() -> bool:
    return False


def _refused(count: int) -> list[ObjectResult]:
    return [ObjectResult(ObjectStatus.FAILED, OPEN_REASON)] * count


def _cannot_tell(count: int) -> list[bool]:
    raise StorageUnavailable(f"storage was not asked about {count} objects: {OPEN_REASON}")


def _shape(answer: object, count: int) -> str:
    return "" if isinstance(answer, (list, tuple)) and len(answer) == count else "contract"


def _trouble(answer: object, count: int) -> str:
    """Why a transfer counts as failed: nothing of it was answered, and one key says that the backend is why."""
    if not isinstance(answer, (list, tuple)) or len(answer) != count:
        return "contract"
    trouble = ""
    for item in answer:
        if not isinstance(item, ObjectResult):
            trouble = trouble or "contract"
        elif item.status is not ObjectStatus.FAILED:
            return ""
        elif item.reason not in HARMLESS and not item.reason.startswith("header:"):
            trouble = trouble or item.reason or "failed"
    return trouble
