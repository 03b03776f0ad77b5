"""Which larger size of a tier is worth it, and what it would hit: by stack distances, or by a service's estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hicache.analytics.analysis.knee import NEAR_IDEAL, UNTOLD, WORTH_DOUBLING, knee
from hicache.units import format_size

__all__ = ["Estimate", "Larger", "by_distances", "by_estimates"]

_STEPS: Final = 4
"""Sizes that are looked at on the way to twice the memory."""


@dataclass(frozen=True, slots=True)
class Larger:
    """A size of a tier that is worth it.

    Attributes:
        pages_now, pages: how many it has, and should have.
        hit_rate_now, hit_rate: what is hit with either, of the pages asked.
        error_bound: by how much `hit_rate` may be wrong, where it is an estimate from a sample.
    """

    pages_now: int
    pages: int
    hit_rate_now: float
    hit_rate: float
    error_bound: float = 0.0

    @property
    def gain(self) -> float:
        """What it is sure to hit more, of the pages asked."""
        return self.hit_rate - self.hit_rate_now - self.error_bound

    def told(self, page_bytes: int | None) -> str:
        """In words; sizes are in bytes too where those of a page are known."""
        sizes = f"from {self.pages_now:,} to {self.pages:,} pages"
        if page_bytes:
            now, then = (format_size(pages * page_bytes) for pages in (self.pages_now, self.pages))
            sizes = f"from {now} to {then} ({self.pages:,} pages)"
        error = f" ± {100 * self.error_bound:.1f}" if self.error_bound else ""
        return f"{sizes}: {100 * self.hit_rate_now:.1f} % -> {100 * self.hit_rate:.1f}{error} % of the pages asked"


def by_distances(distances: npt.NDArray[np.int64], asked: int, pages: int) -> tuple[int, float] | None:
    """The smallest larger LRU pool that is worth it, and what it hits more of the pages asked; None where none is.

    It is the smallest that hits as much as the one up to which twice the memory still adds a point.

    Args:
        distances: of the pages asked that were used before, ascending; see `stack_distances`.
        asked: how many were asked.
        pages: of the pool as it is, 1 or more.
    """
    most = int(distances[-1]) + 1 if len(distances) else 0
    if most <= pages:
        return None
    first = max(1, pages // 2)  # so that what twice the memory adds is known from the pool's own size on
    count = ceil(_STEPS * log2(most / first)) + 1
    sizes = np.unique(np.geomspace(first, most, count).round().astype(np.int64))
    hits = np.searchsorted(distances, sizes)
    found = knee(sizes.tolist(), (hits / asked).tolist())
    if found is None:
        return None
    size = int(distances[max(1, ceil(hits[found] - NEAR_IDEAL * asked)) - 1]) + 1
    more = np.searchsorted(distances, size) - np.searchsorted(distances, pages)
    gain = float(more) / asked
    return (size, gain) if gain >= WORTH_DOUBLING else None


class Estimate(Protocol):
    """What a service estimates of a tier in another size: `WhatIfPoint`, or the same of a document."""

    @property
    def factor(self) -> float:
        """Multiple of the tier's own size."""
        ...

    @property
    def pages(self) -> int:
        """The size."""
        ...

    @property
    def hit_rate(self) -> float | None:
        """Of the pages asked; None before any was."""
        ...

    @property
    def error_bound(self) -> float | None:
        """By how much it may be wrong."""
        ...


def by_estimates(points: Sequence[Estimate]) -> Larger | None:
    """The smallest larger size that is about as good as the largest, whatever it adds; None where nothing is told."""
    told = [point for point in points if point.hit_rate is not None and (point.error_bound or 0.0) < UNTOLD]
    own = next((point for point in told if point.factor == 1), None)
    if own is None:
        return None
    found = [
        Larger(own.pages, point.pages, own.hit_rate or 0.0, point.hit_rate or 0.0, point.error_bound or 0.0)
        for point in told
        if point.factor > 1
    ]
    most = max((each.gain for each in found), default=0.0)
    return next((each for each in found if most - each.gain < WORTH_DOUBLING), None)
