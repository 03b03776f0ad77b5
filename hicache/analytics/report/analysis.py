"""Sections on traces: what could hit, with how much memory, and because of what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from hicache.analytics.analysis.recorded import OF_PROMPTS
from hicache.analytics.report.content import Axis, LinePlot, Mark, Section, Series, Table
from hicache.analytics.report.prompts import prefixes, requests, sessions
from hicache.analytics.report.recorded import recorded_sections
from hicache.analytics.report.shapes import asked_as_sum, cumulative, labelled, letters, side_by_side
from hicache.analytics.report.trace_documents import AnalysisDocument
from hicache.analytics.report.words import count, duration, ending, percent
from hicache.units import format_size

__all__ = ["analysis_sections"]

Documents = Sequence[AnalysisDocument]

_MOST_FILES: Final = 30
_PAGES: Final = "% of pages asked"
_TOKENS: Final = "% of prompt tokens"


def analysis_sections(documents: Documents, *, token_bytes: int | None = None) -> Iterator[Section]:
    """What traces tell; `token_bytes` turns pages into memory where it is known."""
    yield from recorded_sections(documents)
    yield _asked(documents)
    if not any(document.requests for document in documents):
        return
    yield _memory(documents, token_bytes)
    yield _reuse(documents)
    yield _time(documents)
    yield _page_sizes(documents)
    yield prefixes(documents)
    yield sessions(documents)
    yield requests(documents)


def _asked(documents: Documents) -> Section:
    names = letters(documents)
    counts = [
        (name, {"hit": each.ideal_pages_hit}, {"cold": each.pages_asked - each.ideal_pages_hit})
        for name, each in zip(names, documents, strict=True)
    ]
    rates = side_by_side(
        "Ideal hit rates: what an unlimited cache hits, each with what it divides by",
        names,
        documents,
        [
            ("pages hit / pages asked", lambda each: percent(each.ideal_hit_rate_pages)),
            ("prompt tokens hit / prompt tokens", lambda each: percent(each.ideal_hit_rate_tokens)),
            ("mean over requests of their own page rates", lambda each: percent(each.ideal_hit_rate_requests)),
            ("mean over requests of their own token rates", lambda each: percent(each.ideal_hit_rate_requests_tokens)),
            ("requests with any hit / requests", lambda each: percent(each.requests_with_hits_share)),
        ],
    )
    plot = asked_as_sum("ideal-sum", "Pages asked: seen before, or new", "pages asked", counts)
    text = (
        "The ideal is an unlimited cache: it misses only pages that nobody had asked for before (cold). No size and no "
        "policy hits more." + (f" It is {OF_PROMPTS}." if any(each.recorded is not None for each in documents) else ""),
    )
    return Section("ideal", "What could hit", text, (plot,), (rates, *_each(documents)))


def _each(documents: Documents) -> Iterator[Table]:
    for name, document in zip(letters(documents), documents, strict=True):
        if document.each:
            rows = tuple(
                (
                    ending(file.name, 60), count(file.requests), count(file.pages_asked),
                    percent(file.ideal_hit_rate_pages), percent(file.ideal_hit_rate_tokens), _pages(file.knee_pages),
                )
                for file in document.each[:_MOST_FILES]
            )  # fmt: skip
            left = len(document.each) - len(rows)
            more = f", the first {len(rows)} of {len(document.each):,}" if left else ""
            columns = ("trace", "requests", "pages asked", "ideal, of pages", "ideal, of tokens", "knee, pages")
            yield Table(labelled(name, f"Trace by trace{more}"), columns, rows)


def _memory(documents: Documents, token_bytes: int | None) -> Section:
    names = letters(documents)
    series, marks, rows = [], [], []
    for place, (name, document) in enumerate(zip(names, documents, strict=True)):
        points = document.miss_ratio_curve.points
        pages = tuple((float(point.pages), point.hit_rate_pages) for point in points)
        bounds = tuple(
            (max(0.0, point.hit_rate_pages - point.error_bound), min(1.0, point.hit_rate_pages + point.error_bound))
            for point in points
        )
        series.append(Series(labelled(name, "pages"), str(place), pages, bounds, dashed=place > 0))
        tokens = tuple((float(point.pages), point.hit_rate_tokens) for point in points)
        series.append(Series(labelled(name, "tokens"), str(place + 2), tokens, dashed=place > 0))
        marks.append(Mark("y", document.ideal_hit_rate_pages, labelled(name, "ideal, of pages")))
        if document.knee_pages:
            marks.append(
                Mark("x", float(document.knee_pages), labelled(name, f"knee, {count(document.knee_pages)} pages"))
            )
        unit = _page_tokens(document)
        for point in points:
            size = (format_size(round(point.pages * unit * token_bytes)),) if token_bytes else ()
            rows.append(
                (
                    labelled(name, count(point.pages)), *size, percent(point.hit_rate_pages),
                    percent(point.miss_ratio_pages), _bound(point.error_bound), percent(point.hit_rate_tokens),
                )
            )  # fmt: skip
    memory = ("memory",) if token_bytes else ()
    columns = ("pages", *memory, "hit rate, of pages", "miss ratio, of pages", "error", "hit rate, of tokens")
    title = "Hit rate by the size of one LRU cache"
    plot = LinePlot(
        "miss-ratio-curve",
        title,
        "Pages hit / pages asked and tokens hit / prompt tokens; the miss ratio is what is missing to 100 %. A band is "
        "how far off a sampled curve may be.",
        Axis("size", "pages, log scale", "count", log=True),
        Axis("hit rate", "% of pages or tokens asked", "percent", least=0),
        tuple(series),
        Table(f"{title}; miss ratio = 1 - hit rate", columns, tuple(rows)),
        tuple(marks),
    )
    return Section("memory", "How much memory buys what", tuple(_knee_words(documents)), (plot, *_keeping(documents)))


def _knee_words(documents: Documents) -> Iterator[str]:
    for name, document in zip(letters(documents), documents, strict=True):
        curve = document.miss_ratio_curve
        if document.knee_pages is None:
            yield labelled(name, "No doubling of the memory adds a point of hit rate: there is no knee.")
        elif document.knee_pages >= curve.points[-1].pages:
            yield labelled(
                name,
                f"Up to the largest size of the curve, {count(curve.points[-1].pages)} pages, the last doubling still "
                f"adds a point of hit rate: all of it pays, up to {percent(curve.points[-1].hit_rate_pages)} of pages "
                "asked.",
            )
        else:
            at = next(point for point in curve.points if point.pages >= (document.knee_pages or 0))
            yield labelled(
                name,
                f"The knee is at {count(document.knee_pages)} pages, which hit {percent(at.hit_rate_pages)} of pages "
                "asked: the last doubling up to it still added a point, those beyond it do not.",
            )
        worst = max((point.error_bound for point in curve.points), default=0.0)
        if curve.method == "sampled":
            yield labelled(
                name,
                f"The curve is from a sample of {percent(curve.sample_rate)} of the pages, and is off by at most "
                f"{100 * worst:.2f} points at {curve.error_bound_standard_deviations:g} standard deviations.",
            )
        else:
            yield labelled(name, "The curve is exact.")


def _keeping(documents: Documents) -> Iterator[LinePlot]:
    names = letters(documents)
    if not any(document.keeping for document in documents):
        return
    series = tuple(
        Series(
            labelled(name, "pages"),
            str(place),
            tuple((each.seconds, each.hit_rate_pages) for each in document.keeping),
            dashed=place > 0,
        )
        for place, (name, document) in enumerate(zip(names, documents, strict=True))
    )
    rows = tuple(
        (labelled(name, duration(each.seconds)), percent(each.hit_rate_pages), count(each.mean_pages))
        for name, document in zip(names, documents, strict=True)
        for each in document.keeping
    )
    title = "Hit rate by how long pages are kept"
    yield LinePlot(
        "keeping",
        title,
        "Pages hit / pages asked, of a cache that keeps each page so long after its last use.",
        Axis("kept for", "time, log scale", "seconds", log=True, each=True),
        Axis("hit rate", _PAGES, "percent", least=0),
        series,
        Table(title, ("kept for", "hit rate, of pages", "pages held, mean"), rows),
        tuple(
            Mark("y", each.ideal_hit_rate_pages, labelled(name, "ideal"))
            for name, each in zip(names, documents, strict=True)
        ),
    )


def _reuse(documents: Documents) -> Section:
    named = list(enumerate(zip(letters(documents), documents, strict=True)))
    plots = (
        cumulative(
            "reuse-time",
            "Time between two uses of a page",
            "Of the pages that an unlimited cache hits, the share whose use before is not longer ago; through the "
            "percentiles of the table.",
            Axis("since the use before", "time, log scale", "seconds", log=True),
            "pages hit",
            [(labelled(name, "time"), str(at), at > 0, each.reuse_seconds) for at, (name, each) in named],
        ),
        cumulative(
            "reuse-distance",
            "Pages between two uses of a page",
            "Of the pages that an unlimited cache hits, the share with not more different pages since its use before "
            "(stack distance): an LRU cache of more pages hits it.",
            Axis("distance", "different pages, log scale", "count", log=True),
            "pages hit",
            [(labelled(name, "distance"), str(at), at > 0, each.reuse_distance_pages) for at, (name, each) in named],
        ),
    )
    return Section("reuse", "When pages are used again", (), plots)


def _time(documents: Documents) -> Section:
    names = letters(documents)
    series, rates, rows = [], [], []
    for place, (name, document) in enumerate(zip(names, documents, strict=True)):
        for number, what in enumerate(("asked", "different", "new")):
            values = [float(getattr(span, f"pages_{what}")) for span in document.working_set]
            series.append(
                Series(
                    labelled(name, what), str(number + 3 * place), _steps(document, values), dashed=place > 0, step=True
                )
            )
        ideal = [span.ideal_hit_rate_pages for span in document.working_set]
        rates.append(Series(labelled(name, "ideal"), str(place), _steps(document, ideal), dashed=place > 0, step=True))
        rows += [
            (
                labelled(name, f"{duration(span.begin)} to {duration(span.end)}"), count(span.requests),
                count(span.pages_asked), count(span.pages_different), count(span.pages_new),
                percent(span.ideal_hit_rate_pages),
            )
            for span in document.working_set
        ]  # fmt: skip
    seconds = Axis("since the trace's begin", "time", "seconds")
    title = "Working set over time"
    sizes = Table(
        f"{title}: pages of each part of the time",
        ("part", "requests", "asked", "different", "new"),
        tuple(row[:5] for row in rows),
    )
    hits = Table(
        "Ideal hit rate of each part: pages seen before / pages asked in it",
        ("part", "ideal, of pages"),
        tuple((row[0], row[5]) for row in rows),
    )
    plots = (
        LinePlot(
            "working-set",
            title,
            "Pages asked in each part of the time, different ones among them, and those never asked before.",
            seconds,
            Axis("pages", "in each part", "count", least=0),
            tuple(series),
            sizes,
        ),
        LinePlot(
            "ideal-over-time",
            "Ideal hit rate over time",
            "Pages seen before, at any earlier time / pages asked, in each part of the time.",
            seconds,
            Axis("ideal", "% of pages asked in the part", "percent", least=0),
            tuple(rates),
            hits,
        ),
    )
    return Section("time", "How it changes over time", (), plots)


def _steps(document: AnalysisDocument, values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Values over the begins of the parts, and the last one up to its end; from the trace's own begin on."""
    spans = document.working_set
    if not spans:
        return ()
    zero = spans[0].begin
    points = [(span.begin - zero, value) for span, value in zip(spans, values, strict=True)]
    return (*points, (spans[-1].end - zero, values[-1]))


def _page_sizes(documents: Documents) -> Section:
    names = letters(documents)
    series = tuple(
        Series(
            labelled(name, "tokens in whole pages"),
            str(place),
            tuple((float(each.page_size), each.hit_rate_tokens) for each in document.page_sizes),
            dashed=place > 0,
        )
        for place, (name, document) in enumerate(zip(names, documents, strict=True))
    )
    rows = tuple(
        (
            labelled(name, count(each.page_size)), percent(each.hit_rate_tokens), percent(each.lost_share),
            count(each.tokens_reused), count(each.tokens_reused_before_last),
        )
        for name, document in zip(names, documents, strict=True)
        for each in document.page_sizes
    )  # fmt: skip
    title = "Reusable tokens by page size"
    columns = ("tokens a page", "reusable, of tokens", "lost, of reusable", "tokens reused", "before the last token")
    plot = LinePlot(
        "page-size",
        title,
        "Tokens of whole pages in the longest known prefix / prompt tokens: a prefix is reused up to its last whole "
        "page.",
        Axis("page size", "tokens, log scale", "count", log=True, each=True),
        Axis("reusable", _TOKENS, "percent", least=0),
        series,
        Table(f"{title}; lost: of what pages of one token would reuse", columns, rows),
    )
    return Section("page-sizes", "What the page size costs", (), (plot,))


def _page_tokens(document: AnalysisDocument) -> float:
    """Tokens of a page, about: a partial last one counts as one."""
    return document.input_tokens / document.pages_asked if document.pages_asked else 0.0


def _bound(bound: float) -> str:
    return f"±{100 * bound:.2f}" if bound else "exact"


def _pages(pages: int | None) -> str:
    return "n/a" if pages is None else count(pages)
