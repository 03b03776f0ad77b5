"""What a tier of another size would hit: a sampled memory of which pages were used, beside the cache itself.

The sample is SHARDS (C. Waldspurger and others, "Efficient MRC construction with SHARDS", FAST 2015): a page is in it
if a hash of it is below a threshold, so always or never, and sizes are scaled down by the same rate. Estimated are the
misses, each sampled one stands for 1 / rate pages, and hits are what is left of the pages asked, which are counted
exactly. So prefixes that all share, which hardly ever miss, do not make the sample one of their luck.

The tiers are taken as inclusive and LRU: a tier of n pages answers, together with those above it, what was used again
before n other pages were. Pages enter when a request has committed or used them, and the pages of one request at once,
the first one last, as the tree's own recency has it. What was there before the memory began is counted as missed once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log2, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["FACTORS", "SizeGhost", "WhatIf", "WhatIfPoint", "WhatIfStatistics"]

FACTORS: Final = (0.5, 1.0, 2.0, 4.0)
"""Sizes that are told, as multiples of the tier's own."""

SAMPLE: Final = 256
"""Sampled pages in a tier of its own size: the size of what is simulated is right to 6.3 %, one standard deviation."""

DEVIATIONS: Final = 4.0
"""Standard deviations that an error bound has."""

RARE: Final = 10.0
"""Sampled misses to be expected where none is seen: e^-10 is about what four standard deviations leave."""

_MARKS: Final = (FACTORS[0] / 2, *FACTORS)  # one more below, for the slope at the smallest
_NOWHERE: Final = len(_MARKS)
_BUCKETS: Final = 256
_WHOLE: Final = 2.0**64
_WAITING: Final = 1024
"""Sampled pages that wait to be worked out, beside those of the last request: about 2 ms."""

_Used = tuple[NDArray[np.intp], NDArray[np.uint64], int, int]
"""(places of the sampled pages, their keys, pages asked, pages kept)"""


@dataclass(frozen=True, slots=True)
class WhatIfPoint:
    """A tier of one size.

    Attributes:
        factor: multiple of the tier's own size.
        pages: the size.
        missed_pages: of the pages asked, those that it would have missed; an estimate that never falls.
        hit_rate: 1 - missed_pages / asked_pages: what this tier, or one above it, would have answered; None before
            anything was asked.
        error_bound: by how much `hit_rate` may be wrong: four standard deviations of the sample's misses, or `RARE` of
            them where that is more, as while little was asked and none may be in the sample; and as much
            as the size being wrong by four of its own would change, on a straight line over the logarithm of the size
            from one point to the next. 0 where every page is in the sample; None before anything was asked.
    """

    factor: float
    pages: int
    missed_pages: int
    hit_rate: float | None
    error_bound: float | None


@dataclass(frozen=True, slots=True)
class WhatIfStatistics:
    """What other sizes of one tier would do.

    Attributes:
        tier: its name.
        pages: its own size.
        sample_rate: share of all pages that is looked at.
        sampled_pages: pages remembered now; never more than four times `SAMPLE`, but for rounding.
        asked_pages: pages that requests asked for, exactly: the denominator.
        points: by size, smallest first.
    """

    tier: str
    pages: int
    sample_rate: float
    sampled_pages: int
    asked_pages: int
    points: tuple[WhatIfPoint, ...]


class SizeGhost:
    """One tier in several sizes. Not thread-safe. Costs 0.5 to 2.3 us a sampled page, and 250 KiB when full.

    Args:
        tier: its name.
        pages: its size, 1 or more.
        sample: pages of it that are in the sample, about.

    Attributes:
        threshold: pages whose key is below it are in the sample.
        asked: pages asked for.
    """

    __slots__ = (
        "_misses",
        "_pages",
        "_rate",
        "_rooms",
        "_segments",
        "_sketch",
        "_tier",
        "asked",
        "threshold",
    )

    def __init__(self, tier: str, pages: int, *, sample: int = SAMPLE) -> None:
        self._tier = tier
        self._pages = pages
        self._rate = min(1.0, sample / pages)
        self.threshold = int(self._rate * _WHOLE)
        self.asked = 0
        ends = [round(pages * mark * self._rate) for mark in _MARKS]
        self._rooms = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        # The pages between two sizes, least recently used first. Together, from the last to the first, one LRU list.
        self._segments: list[OrderedDict[int, None]] = [OrderedDict() for _ in ends]
        self._misses = [0] * (len(ends) + 1)  # pages asked for, by the segment they were in; the last: in none
        # How unevenly misses fall on pages decides how wrong a sample of them is: the sum over pages of the squares of
        # their misses, estimated by random signs (N. Alon and others, STOC 1996). A row a segment, as for `_misses`.
        self._sketch = [[0] * _BUCKETS for _ in self._misses]

    def use(self, keys: Sequence[int], *, asked: int, kept: int) -> None:
        """A request has used a prompt.

        Args:
            keys: of the prompt's sampled pages, in order.
            asked: how many of these it asked for.
            kept: how many of these it committed or used, so that the cache has them now.
        """
        first, second, third, fourth, fifth = self._segments
        places = [
            0 if k in first else 1 if k in second else 2 if k in third else 3 if k in fourth else 4 if k in fifth else 5
            for k in keys
        ]
        misses, sketch = self._misses, self._sketch
        for key, place in zip(keys[:asked], places, strict=False):
            if place:
                misses[place] += 1
                sketch[place][key % _BUCKETS] += 1 if key & _BUCKETS else -1
        for at in range(len(keys) - 1, -1, -1):
            key, place = keys[at], places[at]
            if key in first:
                first.move_to_end(key)
            elif place < _NOWHERE or at < kept:
                self._raise(key, place)

    def _raise(self, key: int, place: int) -> None:
        """Put a page in front; in each segment up to its own, what is coldest gives way to the next one."""
        segments, rooms = self._segments, self._rooms
        while place < _NOWHERE and key not in segments[place]:
            place += 1  # it gave way to a page of the same prompt
        if place < _NOWHERE:
            del segments[place][key]
        carried = key
        for at in range(place):
            segment = segments[at]
            segment[carried] = None
            if len(segment) <= rooms[at]:
                return
            carried, _ = segment.popitem(last=False)
        if place < _NOWHERE:
            segments[place][carried] = None

    def statistics(self) -> WhatIfStatistics:
        """A snapshot."""
        counts = list(accumulate(reversed(self._misses)))[:-1][::-1]  # missed by a size: found behind it, or nowhere
        missed = [min(self.asked, round(count / self._rate)) for count in counts]
        rates = [1 - count / self.asked for count in missed] if self.asked else []
        behind = np.array(self._sketch, np.float64)[::-1].cumsum(0)[::-1][1:]
        squares = (behind * behind).sum(1).tolist()
        points = tuple(
            WhatIfPoint(
                mark,
                max(1, round(self._pages * mark)),
                missed[at],
                rates[at] if rates else None,
                self._error(at, rates, max(squares[at], counts[at])) if rates else None,
            )
            for at, mark in enumerate(_MARKS)
            if at
        )
        held = sum(map(len, self._segments))
        return WhatIfStatistics(self._tier, self._pages, self._rate, held, self.asked, points)

    def _error(self, at: int, rates: list[float], squares: float) -> float:
        left = 1.0 - self._rate
        if not left:
            return 0.0
        noise = DEVIATIONS * sqrt(left * squares)
        unseen = RARE * left  # sampled misses that there may have been where hardly any was seen
        share = max(noise, unseen) / (self._rate * self.asked)
        wide = DEVIATIONS * sqrt(left / (self._pages * _MARKS[at] * self._rate))
        steps = [abs(rates[i + 1] - rates[i]) for i in (at - 1, at) if i + 1 < len(rates)]
        return min(1.0, share + max(steps) * min(1.0, log2(1.0 + wide)))


class WhatIf:
    """Several tiers of one cache. Not thread-safe.

    A request takes 2 to 3 us of CPU time, in which its sampled pages are found. What they mean is worked out later, by
    `settle`, or with the next request where more than `_WAITING` wait. Measured, both together, where every page misses
    every size: 5 us for a request of 128 pages in a tier of 65,536 pages, 15 us in one of 8,192, of which more are in
    the sample.

    Args:
        ghosts: of the tiers.
        size: bytes of a page hash, a multiple of 8, at least 16.
    """

    __slots__ = ("_ghosts", "_pages", "_threshold", "_waiting", "_words")

    def __init__(self, ghosts: Sequence[SizeGhost], *, size: int) -> None:
        self._ghosts = tuple(ghosts)
        self._words = size // 8
        self._threshold = max((ghost.threshold for ghost in ghosts), default=0)
        self._waiting: deque[_Used] = deque()
        self._pages = 0  # of these

    def use(self, page_hashes: bytes, *, asked: int, kept: int) -> None:
        """A request has used a prompt.

        Args:
            page_hashes: of its whole pages, glued together; evenly spread, as page hashes are.
            asked: leading pages that it might have taken from the cache.
            kept: leading pages that the cache has of it now.
        """
        # The second eight bytes of each hash: the first ones elect who writes a page.
        words = np.frombuffer(page_hashes, "<u8")[1 :: self._words]
        threshold = self._threshold
        sampled = (words < threshold).nonzero()[0] if threshold < _WHOLE else np.arange(len(words))
        for ghost in self._ghosts:
            ghost.asked += asked
        if len(sampled):
            self._waiting.append((sampled, words[sampled], asked, kept))
            self._pages += len(sampled)
            if self._pages > _WAITING:
                self.settle(self._pages - _WAITING)

    def settle(self, pages: int | None = None) -> bool:
        """Work out what at least so many sampled pages mean, the oldest first. Returns whether others are left."""
        waiting = self._waiting
        end = 0 if pages is None else self._pages - pages
        while waiting and self._pages > end:
            sampled, words, asked, kept = waiting.popleft()
            self._pages -= len(sampled)
            places, keys = sampled.tolist(), words.tolist()
            for ghost in self._ghosts:
                limit = ghost.threshold
                if limit == self._threshold:
                    ghost.use(keys, asked=bisect_left(places, asked), kept=bisect_left(places, kept))
                    continue
                own = [(place, key) for place, key in zip(places, keys, strict=True) if key < limit]
                at = [place for place, _ in own]
                ghost.use([key for _, key in own], asked=bisect_left(at, asked), kept=bisect_left(at, kept))
        return bool(waiting)

    def statistics(self) -> tuple[WhatIfStatistics, ...]:
        """A snapshot of each tier, of all requests so far."""
        self.settle()
        return tuple(ghost.statistics() for ghost in self._ghosts)
