"""Distributions in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hicache.analytics.result import rate

SHARES: Final = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution. Of nothing all is 0, the count too.

    Attributes:
        count: values.
        mean: of them.
        least, most: the smallest and the largest.
        percentiles: pairs of a percent and the smallest value that so many percent of all values are not above.
    """

    count: int
    mean: float
    least: float
    most: float
    percentiles: tuple[tuple[int, float], ...]

    def at(self, percent: int) -> float:
        """One of the percentiles."""
        return dict(self.percentiles)[percent]

    def document(self) -> dict[str, Any]:
        """Ready for JSON: `p50` and so on are names."""
        named = {f"p{percent}": value for percent, value in self.percentiles}
        return {"count": self.count, "mean": self.mean, "min": self.least, **named, "max": self.most}

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Spread:
        """Back from `document`."""
        shares = tuple((int(name[1:]), value) for name, value in document.items() if name[0] == "p")
        return cls(document["count"], document["mean"], document["min"], document["max"], shares)


def spread(values: Any, weights: Any = None) -> Spread:
    """The distribution of values, each counted as often as its weight says."""
    values = np.asarray(values, np.float64)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    order = np.argsort(values, kind="stable")
    values, sums = values[order], np.cumsum(weights[order])
    if not len(values) or sums[-1] <= 0:
        return Spread(0, 0.0, 0.0, 0.0, tuple((round(100 * share), 0.0) for share in SHARES))
    places = np.minimum(np.searchsorted(sums, np.array(SHARES) * sums[-1] * (1 - 1e-12)), len(values) - 1)
    found = tuple((round(100 * share), float(values[place])) for share, place in zip(SHARES, places, strict=True))
    mean = rate(float((values * weights[order]).sum()), float(sums[-1]))
    return Spread(round(float(sums[-1])), mean, float(values[0]), float(values[-1]), found)
