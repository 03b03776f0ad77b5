"""Two traces, or two parts of one trace's time, analysed alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, cast

import numpy as np

from hicache.analytics.analysis.columns import read_columns
from hicache.analytics.analysis.report import Analysis, AnalyzeOptions, analyze
from hicache.analytics.result import rate
from hicache.analytics.trace import TraceRequest
from hicache.analytics.traces import Opening, Trace

__all__ = ["Overlap", "Part", "analyze_parts", "overlap"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a trace.

    Attributes:
        paths: of the trace.
        begin, end: seconds of the trace's own time; requests from `begin` on and before `end`.
    """

    paths: tuple[Path, ...]
    begin: float = 0.0
    end: float = inf

    @property
    def name(self) -> str:
        """Its files, and its time where that is only a part."""
        files = ", ".join(map(str, self.paths))
        return files if self.is_whole else f"{files} {self.begin:g}..{'' if self.end == inf else f'{self.end:g}'}"

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole trace."""
        return (self.begin, self.end) == (0.0, inf)

    def open(self, opening: Opening) -> Trace:
        """The trace; of a part, its requests are left out that are not in it."""
        trace = opening.open(self.paths)
        return trace if self.is_whole else cast("Trace", _Within(trace, self))

    def holds(self, time: float) -> bool:
        """Whether a request of this time is in it."""
        return self.begin <= time < self.end


class _Within:
    """A trace of which only one part is read out; in everything else it is the trace."""

    def __init__(self, trace: Trace, part: Part) -> None:
        self._trace = trace
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trace, name)

    def __iter__(self) -> Iterator[TraceRequest]:
        return (request for request in self._trace if self._part.holds(request.time))


@dataclass(frozen=True, slots=True)
class Overlap:
    """What two parts of one trace have in common.

    Attributes:
        pages_a, pages_b: different pages asked.
        pages_both: in both.
        asked_b_known_share: of the pages that the second one asks, the share that the first has asked too: what a
            cache without limits would hit of them at first sight.
    """

    pages_a: int
    pages_b: int
    pages_both: int
    asked_b_known_share: float


def analyze_parts(
    parts: Sequence[Part],
    options: AnalyzeOptions,
    opening: Opening,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Analysis, Analysis]:
    """Analyse two parts; the curve of the second has the sizes of the first, so that they can be compared.

    Raises:
        TraceError: a trace that cannot be read.
    """
    first = _analysis(parts[0], options, opening, progress)
    sizes = options.sizes or tuple(point.pages for point in first.curve.points)
    return first, _analysis(parts[1], replace(options, sizes=sizes), opening, progress)


def _analysis(
    part: Part, options: AnalyzeOptions, opening: Opening, progress: Callable[[int, int], None] | None
) -> Analysis:
    return analyze(part.open(opening), options, name=part.name, progress=progress)


def overlap(parts: Sequence[Part], opening: Opening) -> Overlap:
    """What two parts of the same trace share. Pages of different traces have names of their own.

    Raises:
        TraceError: it cannot be read.
    """
    requests = [
        (number, request)
        for number, part in enumerate(parts)
        for request in opening.open(part.paths)
        if part.holds(request.time)
    ]
    columns = read_columns(request for _, request in requests)
    second = (
        np.array([number for number, _ in requests], np.bool_)[columns.owner] if requests else np.empty(0, np.bool_)
    )
    ours, theirs = np.unique(columns.page[~second]), columns.page[second]
    known = np.isin(theirs, ours)
    different = np.unique(theirs)
    return Overlap(len(ours), len(different), int(np.isin(different, ours).sum()), rate(int(known.sum()), len(theirs)))
