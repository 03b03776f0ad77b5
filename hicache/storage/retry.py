"""Trying again: for trouble that passes, a bounded number of times within a bounded time."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hicache.errors import ConfigError, StorageUnavailable
from hicache.storage.base import ObjectKey, ObjectResult, ObjectStatus, StorageBackend, StorageStatistics, StoredObject
from hicache.storage.wrappers import WrapperBackend

__all__ = ["TRANSIENT", "RetryPolicy", "RetryingBackend"]

TRANSIENT: Final = frozenset(
    {
        *("busy", "timeout", "unavailable", "connection", "no_connection", "loading", "tryagain", "clusterdown"),
        *("etimedout", "eagain", "eintr", "estale", "econnreset", "econnrefused", "epipe"),
    }
)
"""Reasons of FAILED results that may be gone a moment later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long a failed transfer is tried again.

    Attributes:
        attempts: tries in all, the first included.
        delay: seconds before the second try; doubled for each further one. What is waited is drawn evenly between
            half of it and all of it, so that many clients do not come back together.
        longest: most seconds between two tries.
        budget: seconds since the call began after which no further try begins.
        reasons: of FAILED results that are worth another try.
    """

    attempts: int = 3
    delay: float = 0.02
    longest: float = 0.5
    budget: float = 1.0
    reasons: frozenset[str] = TRANSIENT

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"retry: attempts is {self.attempts}, must be 1 or more")
        for name in ("delay", "longest", "budget"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"retry: {name} is {value} seconds, must be 0 or more and finite")


class RetryingBackend(WrapperBackend):
    """Repeats transfers that failed for a passing reason, only for the keys that failed.

    Reads and puts alone: a repeated put is harmless, and other verbs have no failed results. A call that raises
    `OSError` or `StorageUnavailable` failed for all its keys: "timeout", the system's name for the error, or
    "unavailable". Thread-safe; waits in the caller's thread and holds no lock meanwhile.

    Args:
        inner: the backend.
        policy: how often and how long.
        now: a monotonic clock in seconds.
        sleep: how time passes between tries.
        uniform: an even draw from [0, 1).
    """

    def __init__(
        self,
        inner: StorageBackend,
        policy: RetryPolicy,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        self.policy: Final = policy
        self._now = now
        self._sleep = sleep
        self._uniform = uniform
        self._lock = threading.Lock()
        self._retried = 0
        self._recovered = 0

    def get_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[ObjectResult]:
        """See `StorageBackend`."""

        def attempt(at: Sequence[int]) -> list[ObjectResult]:
            return self.inner.get_into([keys[i] for i in at], [buffers[i] for i in at])

        return self._repeat(len(keys), attempt)

    def put(self, objects: Sequence[StoredObject]) -> list[ObjectResult]:
        """See `StorageBackend`."""
        return self._repeat(len(objects), lambda at: self.inner.put([objects[i] for i in at]))

    def statistics(self) -> StorageStatistics:
        """See `StorageBackend`; adds what was tried again."""
        inner = self.inner.statistics()
        with self._lock:
            return replace(inner, retried=inner.retried + self._retried, recovered=inner.recovered + self._recovered)

    def _repeat(self, count: int, transfer: Callable[[Sequence[int]], object]) -> list[ObjectResult]:
        start = self._now()
        answer = self._attempt(transfer, range(count))
        for number in range(1, self.policy.attempts):
            failed = [i for i, result in enumerate(answer) if self._is_passing(result)]
            if not failed or not self._wait(number, start):
                break
            results = self._attempt(transfer, failed)
            self._count(results)
            for i, result in zip(failed, results, strict=True):
                answer[i] = result
        return answer

    def _attempt(self, transfer: Callable[[Sequence[int]], object], at: Sequence[int]) -> list[ObjectResult]:
        """One try, with as many results as keys whatever the backend did."""
        try:
            results = transfer(at)
        except TimeoutError:
            return [ObjectResult(ObjectStatus.FAILED, "timeout")] * len(at)
        except (OSError, StorageUnavailable) as error:
            code = errno.errorcode.get(getattr(error, "errno", None) or 0, "unavailable").lower()
            return [ObjectResult(ObjectStatus.FAILED, code)] * len(at)
        if not isinstance(results, (list, tuple)) or len(results) != len(at):
            return [ObjectResult(ObjectStatus.FAILED, "contract")] * len(at)
        return list(results)

    def _wait(self, number: int, start: float) -> bool:
        """Let time pass before try `number`; False if the budget does not allow it."""
        pause = min(self.policy.delay * 2 ** (number - 1), self.policy.longest) * (0.5 + 0.5 * self._uniform())
        if self._now() - start + pause >= self.policy.budget:
            return False
        self._sleep(pause)
        return True

    def _is_passing(self, result: object) -> bool:
        if not isinstance(result, ObjectResult) or result.status is not ObjectStatus.FAILED:
            return False
        return result.reason in self.policy.reasons

    def _count(self, results: Sequence[object]) -> None:
        good = sum(isinstance(result, ObjectResult) and result.status is ObjectStatus.OK for result in results)
        with self._lock:
            self._retried += len(results)
            self._recovered += good
