"""Storage calls that the engine's threads wait for, at most so long: a call that hangs is given up, not the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from hicache.errors import DeadlineExceeded, StorageUnavailable

__all__ = ["Complaints", "TimedCalls"]

_log = logging.getLogger("hicache.sglang")

T = TypeVar("T")

MOST_HUNG: Final = 8
"""Threads that may hang inside the storage; with so many no further call is begun until one comes back."""


class _Outcome(Generic[T]):
    """What a call came to; written by its thread, read by the caller once `ended` is set."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.value: T | None = None
        self.error: BaseException | None = None


class TimedCalls:
    """Runs calls in threads of their own, since nothing can interrupt a thread inside a file system or a socket.

    Thread-safe. The threads are daemons: one that hangs does not keep the process alive.

    Args:
        timeout: seconds after which a caller waits no longer.
        most_hung: calls given up that have not come back, above which new ones are refused at once.
    """

    def __init__(self, timeout: float, *, most_hung: int = MOST_HUNG) -> None:
        self._timeout: Final = timeout
        self._most_hung: Final = most_hung
        self._lock = threading.Lock()
        self._hung = 0

    @property
    def hung(self) -> int:
        """Calls that were given up and have not come back."""
        return self._hung

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises.

        Raises:
            DeadlineExceeded: it did not end in time. It may still run, and touch what it was given.
            StorageUnavailable: too many calls hang.
        """
        if self._hung >= self._most_hung:
            raise StorageUnavailable(f"{self._hung} storage calls hang: none is begun until one comes back")
        outcome: _Outcome[T] = _Outcome()
        given_up = threading.Event()

        def body() -> None:
            try:
                outcome.value = work()
            except BaseException as error:  # handed to whoever waits
                outcome.error = error
            with self._lock:
                outcome.ended.set()
                if given_up.is_set():
                    self._hung -= 1

        threading.Thread(target=body, name="hicache-sglang-call", daemon=True).start()
        if not outcome.ended.wait(self._timeout):
            with self._lock:
                if not outcome.ended.is_set():
                    given_up.set()
                    self._hung += 1
                    raise DeadlineExceeded(f"a storage call did not end within {self._timeout:g} s")
        if outcome.error is not None:
            raise outcome.error
        return outcome.value  # type: ignore[return-value]


class Complaints:
    """Says in the log what is wrong, once in a while and not for every page. Thread-safe.

    Args:
        interval: seconds between two lines about the same thing.
        now: a monotonic clock in seconds.
    """

    def __init__(self, *, interval: float = 60.0, now: Callable[[], float] = time.monotonic) -> None:
        self._interval: Final = interval
        self._now = now
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def say(self, what: str, detail: object) -> None:
        """Log a warning, unless there was one about `what` a moment ago."""
        now = self._now()
        with self._lock:
            if now - self._said.get(what, -self._interval) < self._interval:
                self._unsaid[what] = self._unsaid.get(what, 0) + 1
                return
            self._said[what] = now
            unsaid = self._unsaid.pop(what, 0)
        more = f" ({unsaid} more since the last such line)" if unsaid else ""
        _log.warning("hicache: %s: %s%s", what, detail, more)
