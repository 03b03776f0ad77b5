"""The section on what really happened, where a trace is the access log of a service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache.analytics.analysis.recorded import between_ideals, signed
from hicache.analytics.report.content import Axis, Section, Table
from hicache.analytics.report.shapes import asked_as_sum, cumulative, labelled, letters, side_by_side
from hicache.analytics.report.simulation import gap_plot
from hicache.analytics.report.trace_documents import AnalysisDocument, Recorded
from hicache.analytics.report.words import count, percent, share

__all__ = ["misses", "recorded_sections", "tiers"]


def tiers(recorded: Recorded) -> dict[str, int]:
    """Pages got, by tier."""
    return {"device": recorded.pages_device, "host": recorded.pages_host, "storage": recorded.pages_storage}


def misses(recorded: Recorded) -> dict[str, int]:
    """Pages missed by reason, those that were."""
    return {reason: pages for reason, pages in recorded.misses_by_reason.items() if pages}


def recorded_sections(documents: Sequence[AnalysisDocument]) -> Iterator[Section]:
    """What really happened, of the sources that tell it."""
    logs = [
        (name, each, each.recorded)
        for name, each in zip(letters(documents), documents, strict=True)
        if each.recorded is not None
    ]
    known = [(name, each) for name, _, each in logs]
    if not known:
        return
    named = [(name, tiers(each), misses(each)) for name, each in known]
    found = [
        (labelled(name, what), str(2 * at + number), at > 0, spread)
        for at, (name, each) in enumerate(known)
        for number, (what, spread) in enumerate((("loaded", each.load_seconds), ("ended", each.request_seconds)))
    ]
    times = cumulative(
        "recorded-seconds",
        "How long requests took",
        "Share of the requests that took not longer: up to the end of their load, and up to their own end.",
        Axis("since its begin", "time, log scale", "seconds", log=True),
        "requests",
        found,
    )
    table = side_by_side(
        "Rates as they really were",
        [name for name, _ in known],
        [each for _, each in known],
        [
            ("requests, of them aborted", lambda each: f"{count(each.requests)}, {count(each.aborted)}"),
            ("pages got / pages asked", lambda each: share(each.pages_asked - each.pages_missed, each.pages_asked)),
            (
                "had nothing been forgotten / pages asked",
                lambda each: share(each.pages_that_could_hit, each.pages_asked),
            ),
            ("tokens got / prompt tokens", lambda each: share(each.tokens_hit, each.tokens_asked)),
            ("mean over requests of their own page rates", lambda each: percent(each.recorded_hit_rate_requests)),
            ("share of the requests that the log has", lambda each: percent(each.sample)),
            ("requests lost when the log was written", lambda each: count(each.requests_dropped)),
            ("requests in files or blocks that are gone", lambda each: count(each.requests_gone)),
        ],
    )
    plots = (
        asked_as_sum("recorded-sum", "Where pages really came from", "pages asked", named),
        gap_plot("recorded-gap", "pages asked", named),
        *((times,) if times.series else ()),
    )
    ideals = (_ideals(name, document, each) for name, document, each in logs)
    yield Section("recorded", "What really happened", (), plots, (table, *(each for each in ideals if each.rows)))


def _ideals(name: str, document: AnalysisDocument, log: Recorded) -> Table:
    """Why the ideal of the log is another one than that of prompts alone."""
    rows = between_ideals(log, asked=document.pages_asked, hit=document.ideal_pages_hit)
    return Table(
        labelled(name, "The two ideals, and what is between them; the curve is of the first"),
        ("pages", "asked", "hit", "hit / asked"),
        tuple(
            (what, count(asked), count(hit), share(hit, asked))
            if at in (0, len(rows) - 1)
            else (what, signed(asked), signed(hit), "")
            for at, (what, asked, hit) in enumerate(rows)
        ),
        total=True,
    )
