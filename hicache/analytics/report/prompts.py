"""Sections on the prompts of traces: their prefixes, sessions and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache.analytics.report.content import Axis, Bar, BarPlot, LinePlot, Part, Section, Series, Table
from hicache.analytics.report.shapes import cumulative, labelled, letters, side_by_side
from hicache.analytics.report.trace_documents import AnalysisDocument
from hicache.analytics.report.words import count, duration, percent

__all__ = ["prefixes", "requests", "sessions"]

Documents = Sequence[AnalysisDocument]


def prefixes(documents: Documents) -> Section:
    """The tree of all prompts."""
    names = letters(documents)
    bars, rows = [], []
    for name, document in zip(names, documents, strict=True):
        for number, prefix in enumerate(document.tree.hottest, start=1):
            label = labelled(name, f"{number}. first in request {count(prefix.request)}, {count(prefix.pages)} pages")
            bars.append(Bar(label, (Part("share of all hits", "hit", prefix.share_of_hits),)))
            rows.append(
                (
                    labelled(name, f"{number}"), count(prefix.request), count(prefix.first_page), count(prefix.pages),
                    count(prefix.tokens), count(prefix.sharers), count(prefix.pages_reused),
                    percent(prefix.share_of_hits), f"{duration(prefix.first_seen)} to {duration(prefix.last_seen)}",
                )
            )  # fmt: skip
    columns = (
        "prefix", "first in request", "pages before", "pages", "tokens to its end", "sharers", "pages reused",
        "of all hits", "seen",
    )  # fmt: skip
    title = "Hottest prefixes"
    plots: list[LinePlot | BarPlot] = []
    if bars:
        plots.append(
            BarPlot(
                "hottest",
                title,
                "Pages of each prefix that an unlimited cache hits / all pages that it hits. A prefix is a run of "
                "pages without a branch.",
                Axis("share", "% of pages hit", "percent", least=0),
                tuple(bars),
                Table(f"{title}, by pages reused", columns, tuple(rows)),
            )
        )
    plots += _sharers(documents)
    tree = side_by_side(
        "The tree of all prompts",
        names,
        documents,
        [
            ("different pages", lambda each: count(each.tree.pages)),
            ("different first pages", lambda each: count(each.tree.roots)),
            ("ends: pages behind which nothing goes on", lambda each: count(each.tree.leaves)),
            ("branches: pages behind which prompts differ", lambda each: count(each.tree.branches)),
            ("runs of pages without a branch", lambda each: count(each.tree.runs)),
            ("pages of the longest prompt", lambda each: count(each.tree.deepest)),
            ("pages asked for once", lambda each: count(each.tree.one_hit_pages)),
            ("those / different pages", lambda each: percent(each.tree.one_hit_share)),
            ("those / pages asked", lambda each: percent(each.tree.one_hit_share_of_asked)),
        ],
    )
    return Section("prefixes", "Which prefixes matter", (), tuple(plots), (tree,))


def _sharers(documents: Documents) -> Iterator[LinePlot]:
    named = list(enumerate(zip(letters(documents), documents, strict=True)))
    series = tuple(
        Series(
            labelled(name, "pages"),
            str(place),
            tuple((float(least), float(size)) for least, size in document.tree.pages_by_sharers),
            dashed=place > 0,
        )
        for place, (name, document) in named
    )
    if not any(each.points for each in series):
        return
    rows = tuple(
        (labelled(name, count(least)), count(size))
        for _, (name, document) in named
        for least, size in document.tree.pages_by_sharers
    )
    yield LinePlot(
        "sharers",
        "Pages by how many requests share them",
        "Different pages that at least so many requests asked for.",
        Axis("sharers, at least", "requests, log scale", "count", log=True),
        Axis("pages", "different ones, log scale", "count", log=True),
        series,
        Table("Pages that at least so many requests asked for", ("requests", "pages"), rows),
    )


def sessions(documents: Documents) -> Section:
    """Prompts that go on from earlier ones."""
    names = letters(documents)
    named = list(enumerate(zip(names, documents, strict=True)))
    pauses = cumulative(
        "pauses",
        "Pauses between two turns of a session",
        "Share of the later turns that come not longer after the turn before.",
        Axis("pause", "time, log scale", "seconds", log=True),
        "later turns",
        [(labelled(name, "pause"), str(at), at > 0, each.sessions.pauses) for at, (name, each) in named],
    )
    turns = cumulative(
        "turns",
        "Turns of a session",
        "Share of the sessions with not more turns.",
        Axis("turns", "requests, log scale", "count", log=True, each=True),
        "sessions",
        [(labelled(name, "turns"), str(at), at > 0, each.sessions.turns) for at, (name, each) in named],
    )
    table = side_by_side(
        "Sessions, derived from prompts that go on from earlier ones",
        names,
        documents,
        [
            ("sessions", lambda each: count(each.sessions.sessions)),
            ("turns of a session, mean", lambda each: f"{each.sessions.turns.mean:.2f}"),
            ("requests in later turns", lambda each: count(each.sessions.requests_in_later_turns)),
            ("those / requests", lambda each: percent(each.sessions.share_of_requests)),
            ("new tokens of a later turn, median", lambda each: count(each.sessions.new_tokens.p50)),
            ("prompts that too many others go on from", lambda each: count(each.sessions.branching)),
        ],
    )
    plots = tuple(plot for plot in (turns, pauses) if plot.series)
    return Section("sessions", "Sessions and turns", (), plots, (table,))


def requests(documents: Documents) -> Section:
    """How long they are, and when they come."""
    names = letters(documents)
    found = []
    for at, (name, each) in enumerate(zip(names, documents, strict=True)):
        found.append((labelled(name, "prompt"), str(at), at > 0, each.prompt_tokens))
        found.append((labelled(name, "generated"), str(at + 2), at > 0, each.generated_tokens))
    lengths = cumulative(
        "lengths",
        "Lengths of prompts and outputs",
        "Share of the requests with not more tokens.",
        Axis("length", "tokens, log scale", "count", log=True),
        "requests",
        found,
    )
    gaps = cumulative(
        "gaps",
        "Time between two requests",
        "Share of the arrivals that come not longer after the one before.",
        Axis("gap", "time, log scale", "seconds", log=True),
        "arrivals",
        [
            (labelled(name, "gap"), str(at), at > 0, each.gaps)
            for at, (name, each) in enumerate(zip(names, documents, strict=True))
        ],
    )
    table = side_by_side(
        "What was read",
        names,
        documents,
        [
            ("requests", lambda each: count(each.requests)),
            ("prompt tokens", lambda each: count(each.input_tokens)),
            ("generated tokens", lambda each: count(each.output_tokens)),
            ("pages asked", lambda each: count(each.pages_asked)),
            ("different pages", lambda each: count(each.pages_different)),
            ("time from the first to the last request", lambda each: duration(each.end - each.begin)),
            ("requests in the fullest second", lambda each: count(each.busiest_second)),
            ("requests in the fullest minute", lambda each: count(each.busiest_minute)),
            ("requests out of order", lambda each: count(each.out_of_order)),
            ("broken entries skipped", lambda each: count(each.entries_skipped)),
        ],
    )
    plots = tuple(plot for plot in (lengths, gaps) if plot.series)
    return Section("requests", "The requests", (), plots, (table,))
