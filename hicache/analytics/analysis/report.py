"""From a trace to everything that `hicache analyze` tells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from hicache.analytics.analysis.columns import Columns, read_columns
from hicache.analytics.analysis.curves import EXACT_REFERENCES, Curve, exact_curve, sampled_curve, sizes_of_interest
from hicache.analytics.analysis.distances import Uses
from hicache.analytics.analysis.ideal import (
    PAGE_SIZES,
    Keeping,
    PageSizeEffect,
    Span,
    keeping,
    page_sizes,
    reuse_seconds,
    spans,
    time_range,
)
from hicache.analytics.analysis.knee import enough, knee
from hicache.analytics.analysis.prefixes import TreeSummary, summarise
from hicache.analytics.analysis.recorded import DEFINITIONS as RECORDED_DEFINITIONS
from hicache.analytics.analysis.recorded import Recorded, Tally
from hicache.analytics.analysis.spread import Spread, spread
from hicache.analytics.analysis.turns import SessionSummary, sessions_of
from hicache.analytics.result import rate
from hicache.analytics.traces import Trace

SAMPLED_REFERENCES: Final = 5_000_000
"""About how many pages asked a sample has where the rate is chosen here."""

DEFINITIONS: Final = {
    "ideal_hit_rate_pages": "pages that an unlimited cache hits / pages asked, over all requests; a page is one id of "
    "the trace, a partial last one too",
    "ideal_hit_rate_tokens": "prompt tokens that those pages stand for / all prompt tokens, over all requests",
    "ideal_hit_rate_requests": "mean over requests with pages of each one's own page rate",
    "ideal_hit_rate_requests_tokens": "mean over requests with tokens of each one's own token rate",
    "requests_with_hits_share": "requests of which at least one page hits / requests",
    "reuse_seconds": "of each page hit by an unlimited cache, the seconds since the page was used before",
    "reuse_distance_pages": "of each page hit by an unlimited cache, the different pages used since: an LRU cache of "
    "more pages hits it; an estimate where the curve is sampled",
    "keeping": "a cache that keeps pages for so many seconds after their last use: hit rate over pages asked, and the "
    "pages that it holds on average over the trace's time",
    "miss_ratio_curve": "one LRU pool, leaves first: hit rates at a size over pages asked and over all prompt tokens; "
    "requests larger than the pool are counted as if they fitted",
    "sessions": "derived: a request goes on from the latest earlier one whose whole pages its prompt begins with, "
    "unless prompts go on from there in more than 8 ways, as behind a system prompt",
    "page_sizes": "tokens of whole pages in the longest known prefix of each prompt / all prompt tokens; lost_share is "
    "of what pages of one token would reuse",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeOptions:
    """What to tell.

    Attributes:
        requests: how many to read, or None for all.
        sample: share of the pages for the curve; None chooses it by the trace's size.
        sizes: of the curve, in pages; empty for a logarithmic scale.
        page_sizes: tokens a page whose effect is told.
        top: hottest prefixes.
        spans: parts of the trace's time.
    """

    requests: int | None = None
    sample: float | None = None
    sizes: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = PAGE_SIZES
    top: int = 10
    spans: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What was found in one trace, or in several as one. Rates are 0 where nothing was asked, never NaN.

    Attributes:
        name: of what was read.
        formats: of its files.
        page_tokens: tokens of a page: one number, or those of all files, ascending.
        requests, input_tokens, output_tokens: in all.
        pages_asked, pages_different: in all.
        begin, end: seconds of the first and the last request.
        out_of_order: requests with a time before that of the one in front of them.
        entries_skipped: broken entries passed over.
        interrupted: whether somebody stopped it before the trace's end.
        prompt_tokens, generated_tokens, prompt_pages, gaps: distributions over requests; gaps in seconds.
        busiest_second, busiest_minute: requests in the fullest second and minute.
        recorded: what really happened, where the trace is an access log; else None.
        (rates): see `DEFINITIONS`.
    """

    name: str
    formats: tuple[str, ...]
    page_tokens: tuple[int, ...]
    requests: int
    input_tokens: int
    output_tokens: int
    pages_asked: int
    pages_different: int
    begin: float
    end: float
    out_of_order: int
    entries_skipped: int
    interrupted: bool
    prompt_tokens: Spread
    generated_tokens: Spread
    prompt_pages: Spread
    gaps: Spread
    busiest_second: int
    busiest_minute: int
    ideal_pages_hit: int
    ideal_tokens_hit: int
    ideal_hit_rate_pages: float
    ideal_hit_rate_tokens: float
    ideal_hit_rate_requests: float
    ideal_hit_rate_requests_tokens: float
    requests_with_hits_share: float
    reuse_seconds: Spread
    reuse_distance_pages: Spread
    curve: Curve
    knee_pages: int | None
    keeping: list[Keeping] = field(default_factory=list)
    working_set: list[Span] = field(default_factory=list)
    page_sizes: list[PageSizeEffect] = field(default_factory=list)
    sessions: SessionSummary
    tree: TreeSummary
    recorded: Recorded | None = None

    def document(self) -> dict[str, Any]:
        """Everything, with the definitions, ready for JSON."""
        plain = {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__ if name != "curve"}
        plain["sessions"] = {name: _plain(getattr(self.sessions, name)) for name in SessionSummary.__slots__}
        definitions = DEFINITIONS if self.recorded is None else DEFINITIONS | RECORDED_DEFINITIONS
        return {**plain, "miss_ratio_curve": self.curve.document(), "definitions": definitions}


def _plain(value: Any) -> Any:
    if isinstance(value, Spread | Recorded):
        return value.document()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def analyze(
    trace: Trace,
    options: AnalyzeOptions,
    *,
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Analysis:
    """Read a trace and tell what it holds.

    Args:
        trace: an open trace; it is read to its end or as far as `options` say.
        options: what to tell.
        name: what to call it; by default its files.
        progress: called now and then with (bytes read, bytes).
        stopped: whether to end the reading now.

    Raises:
        TraceError: a broken entry, or a trace that does not fit into the memory.
    """
    interrupted = False
    seen = 0

    def before() -> bool:
        nonlocal interrupted, seen
        if progress is not None and seen % 256 == 0:
            progress(trace.bytes_read, trace.size)
        seen += 1
        interrupted = stopped is not None and stopped()
        return not interrupted

    tally = Tally()
    columns = read_columns(tally.watch(itertools.islice(trace, options.requests)), before=before)
    return _analysis(
        columns,
        options,
        name=name or ", ".join(map(str, trace.paths)),
        formats=trace.formats,
        entries_skipped=trace.skipped,
        interrupted=interrupted,
        recorded=tally.result(gone=trace.requests_gone),
    )


def _analysis(columns: Columns, options: AnalyzeOptions, **more: Any) -> Analysis:
    uses = Uses(columns)
    hit = uses.last >= 0
    hits = np.bincount(columns.owner[hit], minlength=columns.requests)
    covered = columns.covered(hits)
    seconds = reuse_seconds(columns, uses)
    curve = _curve(columns, uses, options)
    sessions, _ = sessions_of(columns, covered)
    begin, end = time_range(columns)
    asking, talking = columns.length > 0, columns.input_tokens > 0
    return Analysis(
        page_tokens=tuple(np.unique(columns.unit).tolist()),
        requests=columns.requests,
        input_tokens=int(columns.input_tokens.sum()),
        output_tokens=int(columns.output_tokens.sum()),
        pages_asked=columns.references,
        pages_different=columns.pages,
        begin=begin,
        end=end,
        out_of_order=int((np.diff(columns.time) < 0).sum()),
        prompt_tokens=spread(columns.input_tokens),
        generated_tokens=spread(columns.output_tokens),
        prompt_pages=spread(columns.length),
        gaps=spread(np.diff(np.sort(columns.time))),
        busiest_second=_busiest(columns, 1.0),
        busiest_minute=_busiest(columns, 60.0),
        ideal_pages_hit=int(hit.sum()),
        ideal_tokens_hit=int(covered.sum()),
        ideal_hit_rate_pages=rate(int(hit.sum()), columns.references),
        ideal_hit_rate_tokens=rate(int(covered.sum()), int(columns.input_tokens.sum())),
        ideal_hit_rate_requests=_mean(hits[asking] / columns.length[asking]),
        ideal_hit_rate_requests_tokens=_mean(covered[talking] / columns.input_tokens[talking]),
        requests_with_hits_share=rate(int((hits > 0).sum()), columns.requests),
        reuse_seconds=spread(seconds),
        reuse_distance_pages=spread(curve.distances, curve.weights),
        curve=curve,
        knee_pages=_knee(curve, rate(int(hit.sum()), columns.references)),
        keeping=keeping(columns, seconds),
        working_set=spans(columns, hit, options.spans),
        page_sizes=page_sizes(columns, covered, options.page_sizes),
        sessions=sessions,
        tree=summarise(columns, hit, top=options.top),
        **more,
    )


def _curve(columns: Columns, uses: Uses, options: AnalyzeOptions) -> Curve:
    sizes = sorted(set(options.sizes)) or sizes_of_interest(columns)
    share = options.sample
    if share is None:
        share = 1.0 if columns.references <= EXACT_REFERENCES else SAMPLED_REFERENCES / columns.references
    if share >= 1.0:
        return exact_curve(columns, uses, sizes)
    return sampled_curve(columns, uses, sizes, share=share)


def _knee(curve: Curve, ideal: float) -> int | None:
    """The knee, but no more than reaches the ideal: the doubling that the knee ends may go beyond that."""
    rates = [point.hit_rate_pages for point in curve.points]
    found, most = knee([point.pages for point in curve.points], rates), enough(rates, ideal)
    if found is None:
        return None
    return curve.points[found if most is None else min(found, most)].pages


def _busiest(columns: Columns, seconds: float) -> int:
    if not columns.requests:
        return 0
    part = np.sort(((columns.time - columns.time.min()) / seconds).astype(np.int64))
    begins = np.flatnonzero(np.diff(part, prepend=-1))
    return int(np.diff(begins, append=len(part)).max())


def _mean(values: Any) -> float:
    return float(values.mean()) if len(values) else 0.0
