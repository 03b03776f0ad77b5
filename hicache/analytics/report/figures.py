"""Types of figures in documents, with the bounds within which they can be drawn."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

__all__ = ["LONGEST", "MOST", "Amount", "Count", "Distribution", "Moment", "Share", "Text", "same"]

MOST: Final = 2**62
LONGEST: Final = 10_000
"""Rows of a list: more than any command writes, unless it was told sizes one by one."""
_FURTHEST: Final = 1e18

Count = Annotated[int, Meta(ge=0, le=MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Amount = Annotated[float, Meta(ge=0, le=_FURTHEST)]
Moment = Annotated[float, Meta(ge=-_FURTHEST, le=_FURTHEST)]
Text = Annotated[str, Meta(max_length=100_000)]


class Distribution(msgspec.Struct, frozen=True):
    """See `hicache.analytics.analysis.spread.Spread`."""

    count: Count
    mean: Moment
    min: Moment
    p1: Moment
    p10: Moment
    p25: Moment
    p50: Moment
    p75: Moment
    p90: Moment
    p99: Moment
    max: Moment

    @property
    def percentiles(self) -> tuple[tuple[int, float], ...]:
        """Pairs of a percent and its value."""
        return (
            (0, self.min), (1, self.p1), (10, self.p10), (25, self.p25), (50, self.p50),
            (75, self.p75), (90, self.p90), (99, self.p99), (100, self.max),
        )  # fmt: skip


def same(whole: int, parts: int, name: str, what: str) -> None:
    """See that parts make a whole; raises ValueError, which a reader of documents turns into words."""
    if whole != parts:
        raise ValueError(f"{name} is {whole:,}, but {what} add up to {parts:,}")
