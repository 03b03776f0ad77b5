"""How long requests take, by verb: what /metrics, the CLI and tests read."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

BOUNDS: Final = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds of the histogram's buckets in seconds; one more bucket has no bound."""


@dataclass(frozen=True, slots=True)
class VerbStatistics:
    """Requests of one verb that were answered.

    Attributes:
        verb: its name, as in session.proto or admin.proto.
        answered: all of them; `failed`: those answered by an error.
        seconds: that all of them took together, from their arrival to their reply.
        buckets: requests by what they took, one number for each of `BOUNDS` and one for those above; not cumulative.
    """

    verb: str
    answered: int
    failed: int
    seconds: float
    buckets: tuple[int, ...]


class _Series:
    __slots__ = ("buckets", "failed", "seconds")

    def __init__(self) -> None:
        self.failed = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS) + 1)


class LatencyMeter:
    """Counts answers by verb. Used on one thread."""

    __slots__ = ("_series",)

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def answered(self, verb: str, seconds: float, *, failed: bool) -> None:
        """A request was answered."""
        series = self._series.get(verb)
        if series is None:
            series = self._series[verb] = _Series()
        series.seconds += seconds
        series.failed += failed
        series.buckets[bisect_left(BOUNDS, seconds)] += 1

    def statistics(self) -> tuple[VerbStatistics, ...]:
        """What was counted, by the verbs' names."""
        return tuple(
            VerbStatistics(verb, sum(series.buckets), series.failed, series.seconds, tuple(series.buckets))
            for verb, series in sorted(self._series.items())
        )
