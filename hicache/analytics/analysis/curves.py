"""What a cache of a size would hit: exactly, or from a sample of the pages where a trace is very large.

The sample is SHARDS (C. Waldspurger and others, "Efficient MRC construction with SHARDS", FAST 2015): a page is in it
if a hash of it is below a threshold, and distances among its pages are scaled up. As prefixes that all share would make
a sample of their luck, pages used more than 1 / rate times are always in it, as sampling in proportion to size would
have them; the scale of the others is corrected by how often they are known to be used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.analytics.analysis.columns import Columns, Floats, Ints
from hicache.analytics.analysis.distances import Uses, stack_distances
from hicache.analytics.result import rate

DEVIATIONS: Final = 4.0
"""Standard deviations that a bound of an error has: it is passed about once in 16,000 times."""

EXACT_REFERENCES: Final = 20_000_000
"""Pages asked up to which a curve is exact unless told otherwise: about a minute's work."""

LEAST_SAMPLE: Final = 50
"""Sampled pages with reuse below which nothing is claimed of those that are not in the sample."""

_MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What an LRU cache of a size hits.

    Attributes:
        pages: its size.
        hit_rate_pages: pages hit / pages asked.
        hit_rate_tokens: prompt tokens of pages hit / all prompt tokens.
        miss_ratio_pages: 1 - hit_rate_pages.
        error_bound: by how much `hit_rate_pages` may be wrong; 0 where it is exact.
    """

    pages: int
    hit_rate_pages: float
    hit_rate_tokens: float
    miss_ratio_pages: float
    error_bound: float = 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """The miss-ratio curve of one trace.

    Attributes:
        method: "exact" or "sampled".
        sample_rate: share of the pages that were looked at, but for the most used, which all were.
        sampled_references: pages asked that were looked at.
        points: by size.
        distances: of the references looked at that were used before, in pages, ascending; an estimate where sampled.
        weights: how many references each of those stands for.
    """

    method: str
    sample_rate: float
    sampled_references: int
    points: tuple[CurvePoint, ...]
    distances: Floats
    weights: Floats

    def document(self) -> dict[str, Any]:
        """The curve, ready for JSON."""
        return {
            "method": self.method,
            "sample_rate": self.sample_rate,
            "sampled_references": self.sampled_references,
            "error_bound_standard_deviations": 0.0 if self.method == "exact" else DEVIATIONS,
            "points": [
                {name: getattr(point, name) for name in CurvePoint.__dataclass_fields__} for point in self.points
            ],
        }


def sizes_of_interest(columns: Columns, most: int = 20) -> list[int]:
    """Cache sizes on a logarithmic scale, from half of the longest prompt to all different pages of a trace."""
    if not columns.pages:
        return []
    least = max(int(columns.length.max()) // 2, 1)
    return sorted({int(size) for size in np.geomspace(least, columns.pages, most).round()})


def exact_curve(columns: Columns, uses: Uses, sizes: list[int]) -> Curve:
    """The curve from all references."""
    again = uses.last >= 0
    distances = _all_distances(columns, uses)
    order = np.argsort(distances, kind="stable")
    distances = distances[order]
    tokens = np.concatenate(([0], np.cumsum(columns.tokens[again][order])))
    hits = np.searchsorted(distances, sizes, side="left")
    asked, all_tokens = columns.references, int(columns.input_tokens.sum())
    points = [
        _point(size, int(hit), asked, int(tokens[hit]), all_tokens) for size, hit in zip(sizes, hits, strict=True)
    ]
    return Curve("exact", 1.0, columns.references, tuple(points), distances.astype(np.float64), np.ones(len(distances)))


def exact_distances(columns: Columns) -> Ints:
    """Distances of all references that were used before, in pages, ascending."""
    return np.sort(_all_distances(columns, Uses(columns)))


def _all_distances(columns: Columns, uses: Uses) -> Ints:
    return stack_distances(uses, uses.last >= 0, np.ones(columns.references, np.bool_))


def sampled_curve(columns: Columns, uses: Uses, sizes: list[int], *, share: float, seed: int = 0) -> Curve:
    """The curve from a sample.

    Args:
        columns: the trace.
        uses: of the same trace.
        sizes: in pages.
        share: of the pages, above 0 and at most 1.
        seed: another seed is another sample.
    """
    sample = _Sample(columns, uses, share, seed)
    points = []
    for size in sizes:
        hits, bound = sample.hits(size), sample.bound(size)
        tokens = sample.tokens(size)
        points.append(_point(size, hits, columns.references, tokens, int(columns.input_tokens.sum()), error=bound))
    order = np.argsort(sample.distances, kind="stable")
    return Curve("sampled", share, sample.references, tuple(points), sample.distances[order], sample.weights[order])


class _Sample:
    """Sampled references and what is estimated from them."""

    def __init__(self, columns: Columns, uses: Uses, share: float, seed: int) -> None:
        self.share = share
        self.asked = columns.references
        reuses = np.bincount(columns.page, minlength=columns.pages) - 1
        often = reuses + 1 > 1 / share
        light = (_hash(columns.pages, seed) < share) & ~often
        is_often, is_light = often[columns.page], light[columns.page]
        again = uses.last >= 0
        wanted = again & (is_often | is_light)
        self.references = int((is_often | is_light).sum())
        self.distances: Floats = (
            stack_distances(uses, wanted, is_often) + stack_distances(uses, wanted, is_light) / share
        )
        self.light = is_light[wanted]
        # Reuses of the pages that are not used often are known exactly, and so is what the sample has of them.
        self.light_reuses = int(reuses[~often].sum())
        sampled = int(reuses[light].sum())
        self.scale = rate(self.light_reuses, sampled)
        self.weights: Floats = np.where(self.light, self.scale, 1.0)
        self._tokens = columns.tokens[wanted] * self.weights
        self._page, self._reuses = columns.page[wanted], reuses
        self._pages = np.flatnonzero(light & (reuses > 0))
        self._sampled = sampled

    def hits(self, size: float) -> float:
        """References that a cache of this size hits."""
        return float(self.weights[self.distances < size].sum())

    def tokens(self, size: float) -> float:
        """Tokens that those stand for."""
        return float(self._tokens[self.distances < size].sum())

    def bound(self, size: int) -> float:
        """By how much the hit rate at a size may be wrong: the sample's luck, and distances that are estimates."""
        if self.share == 1.0 or not self.light_reuses:
            chance = 0.0
        elif len(self._pages) < LEAST_SAMPLE:
            chance = float(self.light_reuses)
        else:
            chance = DEVIATIONS * self._deviation(size)
        smear = DEVIATIONS * sqrt(size * (1 - self.share) / self.share)
        hits = self.hits(size)
        shift = max(self.hits(size + smear) - hits, hits - self.hits(size - smear))
        return min(1.0, rate(chance + shift, self.asked))

    def _deviation(self, size: int) -> float:
        """Standard deviation of the hits of pages that are not used often: that of a ratio estimator."""
        hit = self.light & (self.distances < size)
        hits = np.bincount(self._page[hit], minlength=len(self._reuses))[self._pages]
        reuses = self._reuses[self._pages]
        residuals = hits - rate(float(hits.sum()), self._sampled) * reuses
        return self.scale * sqrt((1 - self.share) * float((residuals**2).sum()))


def _hash(pages: int, seed: int) -> npt.NDArray[np.float64]:
    """A number of 0 to 1 for each page, the same at every run."""
    mixed = (np.arange(1, pages + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, multiplier in zip((30, 27), _MIX, strict=True):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(multiplier)
    mixed ^= mixed >> np.uint64(31)
    return mixed.astype(np.float64) / 2.0**64


def _point(size: int, hits: float, asked: int, tokens: float, all_tokens: int, *, error: float = 0.0) -> CurvePoint:
    hit_rate = min(1.0, rate(hits, asked))
    return CurvePoint(size, hit_rate, min(1.0, rate(tokens, all_tokens)), 1.0 - hit_rate, error)
