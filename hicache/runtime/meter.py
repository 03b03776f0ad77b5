"""How long it takes to bring pages up from a tier, learnt from transfers that have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

MEMORY = 0.9
"""What an observation still counts after the next one: about the last ten decide."""


@dataclass(frozen=True, slots=True)
class MeterStatistics:
    """What is known of one tier; None before anything was seen.

    Attributes:
        seconds: of a transfer beside its pages.
        seconds_per_page: that each page of a transfer adds.
        gap_per_page: seconds a page between the ends of transfers that overlap; less where they run side by side.
        waiting: pages asked for that have not come.
        seen: transfers seen to end.
    """

    seconds: float | None = None
    seconds_per_page: float | None = None
    gap_per_page: float | None = None
    waiting: int = 0
    seen: int = 0


class Meter:
    """Watches the transfers of one tier. Not thread-safe; times are of one monotonic clock.

    A transfer during which no other one ended shows what one takes by itself, as `seconds + pages * seconds_per_page`,
    by a weighted line through the last ones. The time between the ends of transfers that overlap shows what a further
    one adds; until that was seen, they are taken to come one after the other. A transfer that brings nothing took its
    time all the same, so a tier that fails becomes an expensive one.
    """

    __slots__ = ("_gap", "_gap_pages", "_last_end", "_outstanding", "_seen", "_sums")

    def __init__(self) -> None:
        self._outstanding: dict[int, tuple[int, float]] = {}
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # weight, pages, seconds, pages squared, pages times seconds
        self._gap = self._gap_pages = 0.0
        self._last_end = -inf
        self._seen = 0

    def begin(self, number: int, pages: int, now: float) -> None:
        """A transfer was asked for."""
        self._outstanding[number] = (pages, now)

    def end(self, number: int, good: int, now: float, *, learn: bool = True) -> None:
        """It has ended, with so many good pages. Without `learn` nothing is concluded from it."""
        begun = self._outstanding.pop(number, None)
        if begun is None:
            return
        _, began = begun
        last, self._last_end = self._last_end, now
        if not learn:
            return
        self._seen += 1
        if last > began:
            self._gap = self._gap * MEMORY + now - last
            self._gap_pages = self._gap_pages * MEMORY + good
            return
        took = now - began
        seen = (1.0, good, took, good * good, good * took)
        weight, pages, seconds, squares, products = (
            old * MEMORY + new for old, new in zip(self._sums, seen, strict=True)
        )
        self._sums = (weight, pages, seconds, squares, products)

    @property
    def known(self) -> bool:
        """Whether anything can be said."""
        return self._sums[0] > 0

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self._outstanding)

    def line(self) -> tuple[float, float]:
        """Seconds of a transfer, and of each page of it; infinite where none has ever brought a page."""
        weight, pages, seconds, squares, products = self._sums
        if not pages:
            return (inf, inf)
        spread = weight * squares - pages * pages
        slope = (weight * products - pages * seconds) / spread if spread > 1e-6 * weight * squares else seconds / pages
        slope = max(slope, 0.0)
        start = (seconds - slope * pages) / weight
        if start < 0.0:
            start, slope = 0.0, seconds / pages
        return max(start, 0.0), slope

    def delay(self, now: float, *, queued: int = 0) -> float:
        """Seconds until what was asked for before has come, and `queued` pages that are about to be, as it seems."""
        if not self._outstanding and not queued:
            return 0.0
        start, slope = self.line()
        waiting = queued + sum(pages for pages, _ in self._outstanding.values())
        expected = start + waiting * self._further(slope)
        if not self._outstanding:
            return expected
        # Nothing has come for longer than that: whatever it hangs on may take as long again.
        silent = now - max(self._last_end, min(began for _, began in self._outstanding.values()))
        return max(expected, silent)

    def arrivals(self, sizes: Sequence[int], now: float, *, queued: int = 0) -> Iterator[float]:
        """Seconds from now at which each of some transfers, asked for together, will have come; `queued` as above."""
        start, slope = self.line()
        at = self.delay(now, queued=queued)
        for number, pages in enumerate(sizes):
            alone = start + pages * slope
            at += alone if not number else min(alone, pages * self._further(slope) if self._gap_pages else alone)
            yield at

    def statistics(self) -> MeterStatistics:
        """A snapshot."""
        waiting = sum(pages for pages, _ in self._outstanding.values())
        start, slope = self.line()
        if not self.known or slope == inf:
            return MeterStatistics(waiting=waiting, seen=self._seen)
        gap = self._gap / self._gap_pages if self._gap_pages else None
        return MeterStatistics(start, slope, gap, waiting, self._seen)

    def _further(self, slope: float) -> float:
        return self._gap / self._gap_pages if self._gap_pages else slope
