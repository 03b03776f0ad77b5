"""A clock that moves only when a test says so."""

from __future__ import annotations

import threading


class ManualClock:
    """Time as the test wants it, for everything that takes a clock.

    Waits on a condition through this clock end when the condition is notified or when `advance` has been called, never
    because real time passes: a wait that nothing ends within `patience` real seconds raises instead of hanging.

    Thread-safe. Owns nothing.
    """

    def __init__(self, *, start: float = 0.0, patience: float = 30.0) -> None:
        self._now = start
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: dict[int, threading.Condition] = {}
        self._serial = 0

    def now(self) -> float:
        """Seconds; moves only by `advance`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass, and wake everybody who waits through this clock so that they look at it.

        Must not be called while holding a condition that is being waited on.
        """
        if seconds < 0:
            raise ValueError("a monotonic clock never goes back")
        with self._changed:
            self._now += seconds
            waiting = list(self._waiting.values())
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, timeout: float | None) -> None:
        """Wait for a notification or for the next `advance`; the caller holds the condition.

        Args:
            condition: what is waited for.
            timeout: seconds of this clock; it is the caller's loop that compares them with `now`.

        Raises:
            TimeoutError: nothing happened for `patience` real seconds.
        """
        if timeout is not None and timeout <= 0:
            return
        with self._changed:
            self._serial += 1
            serial = self._serial
            self._waiting[serial] = condition
            self._changed.notify_all()
        try:
            if not condition.wait(self._patience):
                raise TimeoutError(f"nothing ended a wait within {self._patience} real seconds")
        finally:
            with self._changed:
                del self._waiting[serial]
                self._changed.notify_all()

    def until_waiting(self, count: int = 1) -> None:
        """Block until at least `count` threads wait through this clock: then `advance` cannot come too early.

        Raises:
            TimeoutError: they did not come within `patience` real seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) >= count, self._patience):
                raise TimeoutError(f"{len(self._waiting)} of {count} threads wait after {self._patience} real seconds")
