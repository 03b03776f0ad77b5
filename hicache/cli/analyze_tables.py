"""The tables of `hicache analyze`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hicache.analytics.analysis.knee import enough
from hicache.analytics.analysis.recorded import OF_PROMPTS, between_ideals, signed
from hicache.cli.output import Table
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.analytics.analysis.recorded import Recorded
    from hicache.analytics.analysis.report import Analysis
    from hicache.analytics.analysis.spread import Spread

_SHOWN = (10, 50, 90, 99)
_CDF = (1, 10, 25, 50, 75, 90, 99)


def tables(analysis: Analysis, *, token_bytes: int | None) -> Iterator[Table]:
    """An analysis for people; `token_bytes` turns pages into memory where it is known."""
    yield _requests(analysis)
    if analysis.recorded is not None:
        yield from recorded_tables(analysis.recorded)
    yield _rates(analysis)
    if analysis.recorded is not None:
        yield from _ideals(analysis, analysis.recorded)
    if not analysis.requests:
        return
    yield _curve(analysis, token_bytes)
    yield _reuse(analysis)
    if analysis.keeping:
        yield _keeping(analysis, token_bytes)
    yield _spans(analysis)
    yield _page_sizes(analysis)
    yield _tree(analysis)
    if analysis.tree.hottest:
        yield _hottest(analysis)
    yield _sessions(analysis)


def each_table(found: Sequence[Analysis]) -> Table:
    """Several analyses under each other, the first one being of all together."""
    rows = [
        (
            "all as one" if not place else analysis.name,
            f"{analysis.requests:,}",
            f"{analysis.pages_asked:,}",
            f"{analysis.ideal_hit_rate_pages:.4f}",
            f"{analysis.ideal_hit_rate_tokens:.4f}",
            f"{analysis.ideal_hit_rate_requests:.4f}",
            pages(analysis.knee_pages),
        )
        for place, analysis in enumerate(found)
    ]
    columns = ("trace", "requests", "pages asked", "ideal, of pages", "of tokens", "mean of requests", "knee, pages")
    return Table("one by one", columns, rows)


def recorded_tables(recorded: Recorded) -> Iterator[Table]:
    """What an access log says that really happened."""
    asked = recorded.pages_asked
    answered = [(tier, getattr(recorded, f"pages_{tier}")) for tier in ("device", "host", "storage")]
    missed = [(f"missed: {reason}", count) for reason, count in recorded.misses_by_reason.items() if count]
    rows = [*answered, *missed, ("asked", asked)]
    share = [(name, f"{count:,}", percent(count / asked) if asked else "n/a") for name, count in rows]
    yield Table(f"what {recorded.requests:,} requests really got", ("from", "pages", "of those asked"), share)
    tokens, requests = recorded.tokens_asked, recorded.requests
    hits, could = asked - recorded.pages_missed, recorded.pages_that_could_hit

    def shown(rate: float, of: int) -> str:
        return f"{rate:.4f}" if of else "n/a"

    ideal = shown(recorded.recorded_ideal_hit_rate_pages, asked)
    yield Table(
        "hit rates as they really were",
        ("of", "all", "hit", "rate"),
        [
            ("pages", f"{asked:,}", f"{hits:,}", shown(recorded.recorded_hit_rate_pages, asked)),
            ("pages, had nothing been forgotten", f"{asked:,}", f"{could:,}", ideal),
            ("tokens", f"{tokens:,}", f"{recorded.tokens_hit:,}", shown(recorded.recorded_hit_rate_tokens, tokens)),
            (
                "requests (mean of their page rates)",
                f"{requests:,}",
                "",
                shown(recorded.recorded_hit_rate_requests, asked),
            ),
        ],
    )
    yield Table(
        "how long requests took; only those that loaded have an end of it",
        ("seconds, and of how many requests", "mean", "least", *(f"p{share}" for share in _SHOWN), "most"),
        [
            _numbers(f"to the end of their load, {recorded.load_seconds.count:,}", recorded.load_seconds, 4),
            _numbers(f"to their end, {recorded.request_seconds.count:,}", recorded.request_seconds, 4),
        ],
    )


def pages(count: int | None) -> str:
    """A number of pages, or n/a."""
    return "n/a" if count is None else f"{count:,}"


def percent(share: float) -> str:
    """A share as percent."""
    return f"{100 * share:.2f} %"


def _numbers(name: str, found: Spread, decimals: int = 0) -> tuple[str, ...]:
    if not found.count:
        return (name, *("n/a",) * 7)
    values = (found.mean, found.least, *(found.at(share) for share in _SHOWN), found.most)
    return (name, *(f"{value:,.{decimals}f}" for value in values))


def _requests(analysis: Analysis) -> Table:
    length = analysis.end - analysis.begin
    rate = f", {analysis.requests / length:,.2f} a second" if length > 0 else ""
    title = f"{analysis.requests:,} requests of {analysis.name} over {length:,.0f} s of trace time{rate}"
    if analysis.interrupted:
        title += ", interrupted"
    return Table(
        title,
        ("of each request", "mean", "least", *(f"p{share}" for share in _SHOWN), "most"),
        [
            _numbers("prompt tokens", analysis.prompt_tokens),
            _numbers("generated tokens", analysis.generated_tokens),
            _numbers("prompt pages", analysis.prompt_pages),
            _numbers("seconds to the next", analysis.gaps, 3),
        ],
    )


def _rates(analysis: Analysis) -> Table:
    def shown(value: float, of: int) -> str:
        return f"{value:.4f}" if of else "n/a"

    requests, asked, tokens = analysis.requests, analysis.pages_asked, analysis.input_tokens
    return Table(
        "what an unlimited cache hits" + (f", {OF_PROMPTS}" if analysis.recorded is not None else ""),
        ("of", "all", "hit", "rate"),
        [
            ("pages", f"{asked:,}", f"{analysis.ideal_pages_hit:,}", shown(analysis.ideal_hit_rate_pages, asked)),
            ("tokens", f"{tokens:,}", f"{analysis.ideal_tokens_hit:,}", shown(analysis.ideal_hit_rate_tokens, tokens)),
            (
                "requests (mean of their page rates)",
                f"{requests:,}",
                "",
                shown(analysis.ideal_hit_rate_requests, asked),
            ),
            (
                "requests (mean of their token rates)",
                f"{requests:,}",
                "",
                shown(analysis.ideal_hit_rate_requests_tokens, tokens),
            ),
            ("requests with any hit", f"{requests:,}", "", shown(analysis.requests_with_hits_share, requests)),
        ],
    )


def _ideals(analysis: Analysis, recorded: Recorded) -> Iterator[Table]:
    """Why the ideal of the log is another one than that of prompts alone."""
    rows = between_ideals(recorded, asked=analysis.pages_asked, hit=analysis.ideal_pages_hit)
    if not rows:
        return
    (name, asked, hit), *steps, (log, log_asked, log_hit) = rows
    yield Table(
        "the two ideals, and what is between them; the curve is of the first",
        ("pages", "all", "hit", "rate"),
        [
            (name, f"{asked:,}", f"{hit:,}", f"{hit / asked:.4f}" if asked else "n/a"),
            *((what, signed(asked), signed(hit), "") for what, asked, hit in steps),
            (log, f"{log_asked:,}", f"{log_hit:,}", f"{log_hit / log_asked:.4f}" if log_asked else "n/a"),
        ],
    )


def _curve(analysis: Analysis, token_bytes: int | None) -> Table:
    curve = analysis.curve
    sampled = curve.method == "sampled"
    unit = analysis.input_tokens / max(analysis.pages_asked, 1)
    columns = ["pages", *(["memory"] if token_bytes else []), "of pages", "of tokens", "of the ideal"]
    most = enough([point.hit_rate_pages for point in curve.points], analysis.ideal_hit_rate_pages)
    rows: list[list[str]] = []
    above: tuple[str, ...] = ()
    for place, point in enumerate(curve.points):
        of_ideal = point.hit_rate_pages / (analysis.ideal_hit_rate_pages or 1.0)
        row = [f"{point.pages:,}"]
        if token_bytes:
            row.append(format_size(round(point.pages * unit * token_bytes)))
        row += [f"{point.hit_rate_pages:.4f}", f"{point.hit_rate_tokens:.4f}", percent(of_ideal)]
        if sampled:
            row.append(f"± {point.error_bound:.4f}")
        marks = ["knee"] if point.pages == analysis.knee_pages else []
        row.append(", ".join([*marks, *(["enough"] if place == most else [])]))
        told = tuple(row[2 if token_bytes else 1 : -1])
        if told != above or row[-1]:
            rows.append(row)
        above = told
    how = f", estimated from {100 * curve.sample_rate:.3g} % of the pages" if sampled else ""
    title = f"hit rate of one LRU pool of a size{how}"
    if most is not None:
        title += f"; of these, {curve.points[most].pages:,} pages are enough for the ideal"
    if len(rows) < len(curve.points):
        title += "; sizes that hit as much as the one above are left out"
    return Table(title, [*columns, *(["of pages, error"] if sampled else []), ""], rows, texts=0)


def _reuse(analysis: Analysis) -> Table:
    seconds, distance = analysis.reuse_seconds, analysis.reuse_distance_pages
    return Table(
        f"pages used again, {analysis.ideal_pages_hit:,} times: so many of those within",
        ("share", "seconds since", "different pages since"),
        [(f"{share} %", f"{seconds.at(share):,.1f}", f"{distance.at(share):,.0f}") for share in _CDF],
    )


def _keeping(analysis: Analysis, token_bytes: int | None) -> Table:
    unit = analysis.input_tokens / max(analysis.pages_asked, 1)
    columns = ("seconds", "hit rate of pages", "mean pages held", *(("memory",) if token_bytes else ()))
    rows = [
        (
            f"{row.seconds:,.0f}",
            f"{row.hit_rate_pages:.4f}",
            f"{row.mean_pages:,.0f}",
            *((format_size(round(row.mean_pages * unit * token_bytes)),) if token_bytes else ()),
        )
        for row in analysis.keeping
    ]
    return Table("keeping each page for some time after its last use", columns, rows, texts=0)


def _spans(analysis: Analysis) -> Table:
    columns = ("from, s", "to, s", "requests", "pages asked", "different", "new", "ideal hit rate of pages")
    rows = [
        (
            f"{span.begin:,.0f}",
            f"{span.end:,.0f}",
            f"{span.requests:,}",
            f"{span.pages_asked:,}",
            f"{span.pages_different:,}",
            f"{span.pages_new:,}",
            f"{span.ideal_hit_rate_pages:.4f}" if span.pages_asked else "n/a",
        )
        for span in analysis.working_set
    ]
    return Table("working set over time", columns, rows, texts=0)


def _page_sizes(analysis: Analysis) -> Table:
    rows = [
        (
            f"{effect.page_size:,}",
            f"{effect.tokens_reused:,}",
            f"{effect.hit_rate_tokens:.4f}" if analysis.input_tokens else "n/a",
            percent(effect.lost_share),
        )
        for effect in analysis.page_sizes
    ]
    return Table(
        "page size: tokens of whole pages that are known",
        ("tokens a page", "tokens reused", "of all tokens", "lost by the size"),
        rows,
        texts=0,
    )


def _tree(analysis: Analysis) -> Table:
    tree = analysis.tree
    rows = [
        ("different pages", f"{tree.pages:,}"),
        ("different first pages", f"{tree.roots:,}"),
        ("runs of pages without a branch", f"{tree.runs:,}"),
        ("pages behind which prompts part", f"{tree.branches:,}"),
        ("pages of the longest prompt", f"{tree.deepest:,}"),
        ("pages asked once", f"{tree.one_hit_pages:,} ({percent(tree.one_hit_share)})"),
    ]
    before = None
    for least, count in tree.pages_by_sharers:
        if count != before:  # of the same pages the least number says less than the next one, and takes a line
            rows.append((f"pages asked by {least:,} requests or more", f"{count:,}"))
        before = count
    return Table("the tree of all prompts", ("what", "count"), rows)


def _hottest(analysis: Analysis) -> Table:
    rows = [
        (
            f"{prefix.request:,}",
            f"{prefix.first_page:,}",
            f"{prefix.pages:,}",
            f"{prefix.tokens:,}",
            f"{prefix.sharers:,}",
            f"{prefix.pages_reused:,}",
            percent(prefix.share_of_hits),
            f"{prefix.first_seen:,.0f} to {prefix.last_seen:,.0f}",
        )
        for prefix in analysis.tree.hottest
    ]
    columns = (
        "first by request",
        "pages before",
        "pages",
        "tokens to its end",
        "requests",
        "pages reused",
        "of all hits",
        "seen, s",
    )
    return Table("prefixes that are reused most", columns, rows, texts=0)


def _sessions(analysis: Analysis) -> Table:
    found = analysis.sessions
    return Table(
        f"{found.sessions:,} sessions; {found.requests_in_later_turns:,} requests "
        f"({percent(found.share_of_requests)}) go on from an earlier one",
        ("of them", "mean", "least", *(f"p{share}" for share in _SHOWN), "most"),
        [
            _numbers("turns of a session", found.turns, 1),
            _numbers("seconds between turns", found.pauses, 1),
            _numbers("new tokens of a later turn", found.new_tokens),
        ],
    )
