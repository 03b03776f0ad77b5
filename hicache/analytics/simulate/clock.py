"""Simulated time, and links whose transfers take it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf


class SimulatedTime:
    """A clock that goes from one thing that happens to the next. Not thread-safe."""

    __slots__ = ("_coming", "_now", "_number")

    def __init__(self) -> None:
        self._now = 0.0
        self._number = 0  # of things at the same time the first one asked for comes first
        self._coming: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        """Seconds."""
        return self._now

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have something happen at a time, now at the earliest."""
        self._number += 1
        heapq.heappush(self._coming, (max(when, self._now), self._number, call))

    def pass_to(self, until: float) -> None:
        """Let all happen that comes up to a time."""
        coming = self._coming
        while coming and coming[0][0] <= until:
            when, _, call = heapq.heappop(coming)
            self._now = when
            call()
        self._now = max(self._now, until)

    def pass_all(self) -> None:
        """Let all happen that comes, and that follows from it."""
        while self._coming:
            self.pass_to(self._coming[0][0])


class Link:
    """Bytes go through it one transfer after another, at its speed.

    Attributes:
        bytes: that went through it.
        busy: seconds in which anything did.
        takes_time: False where everything is through at once.
    """

    __slots__ = ("_free", "_seconds_per_byte", "_time", "busy", "bytes", "takes_time")

    def __init__(self, time: SimulatedTime, bytes_per_second: float) -> None:
        self._time = time
        self._seconds_per_byte = 0.0 if bytes_per_second == inf else 1.0 / bytes_per_second
        self._free = 0.0
        self.bytes = 0
        self.busy = 0.0
        self.takes_time = bytes_per_second != inf

    def send(self, size: int) -> float:
        """Begin a transfer; when it will be through."""
        self.bytes += size
        if not self.takes_time:
            return self._time.now()
        seconds = size * self._seconds_per_byte
        self.busy += seconds
        self._free = max(self._free, self._time.now()) + seconds
        return self._free
