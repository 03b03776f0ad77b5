"""Time as an interface, so that tests own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds. Durations and deadlines use it; wall time is only ever printed."""

    def now(self) -> float:
        """Seconds since some fixed point, never going back. Any thread may call it."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of `time.monotonic()`."""
        return time.monotonic()
