"""Waiting through an injected clock, so that tests own time-outs too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from hicache.clock import Clock

Wait = Callable[[threading.Condition, float | None], None]
"""Waits on a held condition for at most so many seconds, or for ever; may return early, never late."""


@runtime_checkable
class WaitingClock(Clock, Protocol):
    """A clock that also decides how long a wait lasts, such as a test's."""

    def wait(self, condition: threading.Condition, timeout: float | None) -> None:
        """Wait for a notification of the held condition, or until `timeout` seconds of this clock have passed."""
        ...


def waiter(clock: Clock) -> Wait:
    """How to wait with this clock: its own way if it has one, else in real time."""
    if isinstance(clock, WaitingClock):
        return clock.wait
    return _wait


def _wait(condition: threading.Condition, timeout: float | None) -> None:
    condition.wait(timeout)
