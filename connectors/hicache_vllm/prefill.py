"""How fast the engine computes prompts, measured on its own steps: the service loads nothing that takes longer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

__all__ = ["PrefillRate"]

LEAST_TOKENS: Final = 128
"""Tokens of prompts in a step, below which it tells little about them."""

MOST_PENDING: Final = 16
"""Steps that are planned and not over; more means that their ends are not told here."""


class PrefillRate:
    """Times steps from their plan to their end. Used on the scheduler's thread only.

    Args:
        now: a monotonic clock in seconds.
        report: gets tokens and seconds of each step that was all prompts.
    """

    def __init__(self, now: Callable[[], float], report: Callable[[int, float], None]) -> None:
        self._now = now
        self._report = report
        self._pending: deque[tuple[float, int]] = deque()
        self._ended = 0.0

    def begun(self, counts: Iterable[int]) -> None:
        """A step is planned, with so many tokens of each request."""
        given = list(counts)
        prompts = sum(count for count in given if count >= LEAST_TOKENS)
        whole = prompts >= 0.9 * sum(given) and prompts > 0
        if len(self._pending) >= MOST_PENDING:
            self._pending.clear()
        self._pending.append((self._now(), prompts if whole else 0))

    def ended(self) -> None:
        """The step that was planned first has ended."""
        if not self._pending:
            return
        begun, tokens = self._pending.popleft()
        now = self._now()
        seconds = now - max(begun, self._ended)
        self._ended = now
        if tokens and seconds > 0:
            self._report(tokens, seconds)
