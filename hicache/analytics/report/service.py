"""Sections on running services: what hit since the start, what other sizes would hit, and how it fares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from hicache.analytics.analysis.knee import UNTOLD
from hicache.analytics.report.content import Axis, Bar, BarPlot, LinePlot, Mark, Part, Plot, Section, Series, Table
from hicache.analytics.report.service_documents import Counts, Ghost, Pool, ServiceDocument
from hicache.analytics.report.service_state import MOST_POOLS, pools_of, tiers, work
from hicache.analytics.report.shapes import asked_as_sum, letters
from hicache.analytics.report.simulation import gap_plot
from hicache.analytics.report.words import count, percent, share, visible
from hicache.units import format_size

__all__ = ["service_sections", "total"]

Documents = Sequence[ServiceDocument]

_MOST_PREFIXES: Final = 15


def service_sections(documents: Documents) -> Iterator[Section]:
    """What services tell."""
    yield _asked(documents)
    yield _gap(documents)
    if any(pool.what_if for document in documents for pool in document.pools):
        yield _what_if(documents)
    yield tiers(documents)
    if any(pool.prefixes for document in documents for pool in document.pools):
        yield _prefixes(documents)
    yield work(documents)


def total(document: ServiceDocument, of: str = "tokens") -> tuple[dict[str, int], dict[str, int]]:
    """Hits by tier, and misses by reason, of all pools of a service; `of` tokens or pages."""
    hits, missed = dict.fromkeys(("device", "host", "storage"), 0), Counter[str]()
    for pool in document.pools:
        counts: Counts = getattr(pool.statistics, of)
        for tier in hits:
            hits[tier] += getattr(counts, tier)
        missed.update(counts.missed)
    return hits, {reason: size for reason, size in sorted(missed.items()) if size}


def _asked(documents: Documents) -> Section:
    names = letters(documents)
    whole = [(name, *total(each)) for name, each in zip(names, documents, strict=True)]
    plots: list[Plot] = [
        asked_as_sum("tokens-sum", "Where prompt tokens came from, since the start", "prompt tokens", whole)
    ]
    pools = pools_of(documents)
    if len(pools) > len(documents):
        by_pool = [(name, *total(ServiceDocument(documents[0].service, [pool]))) for name, pool in pools[:MOST_POOLS]]
        more = f", the first {MOST_POOLS} of {len(pools)}" if len(pools) > MOST_POOLS else ""
        plots.append(asked_as_sum("pools-sum", f"The same by pool{more}", "prompt tokens", by_pool))
    pages = [(name, *total(each, "pages")) for name, each in zip(names, documents, strict=True)]
    plots.append(asked_as_sum("pages-sum", "Where whole pages came from, since the start", "pages asked", pages))
    return Section("hits", "What hit, by tier, and what was missed", (), tuple(plots))


def _gap(documents: Documents) -> Section:
    text = (
        "The ideal misses only what nobody had asked for before (cold), and tokens behind the last whole page "
        "(unaligned_tail). All other misses are the gap to it: hit rate + gap = ideal.",
    )
    named = [(name, *total(each)) for name, each in zip(letters(documents), documents, strict=True)]
    return Section("gap", "Why it is not the ideal", text, (gap_plot("gap", "prompt tokens", named),))


def _what_if(documents: Documents) -> Section:
    plots = []
    for number, (tier, ghosts) in enumerate(_ghosts(documents).items()):
        series, marks, rows = [], [], []
        for place, (name, pool, ghost) in enumerate(ghosts[:MOST_POOLS]):
            told = [
                (point, point.hit_rate, min(1.0, point.error_bound or 0.0))
                for point in ghost.points
                if point.hit_rate is not None and (point.error_bound or 0.0) < UNTOLD
            ]
            if told:
                series.append(
                    Series(
                        name,
                        str(place % 8),
                        tuple((point.factor, rate) for point, rate, _ in told),
                        tuple((max(0.0, rate - bound), min(1.0, rate + bound)) for _, rate, bound in told),
                    )
                )
            counts = pool.statistics.pages
            ideal = 1 - counts.missed.get("cold", 0) / counts.asked if counts.asked else None
            if ideal is not None and len(ghosts) == 1:
                marks.append(Mark("y", ideal, "ideal"))
            elif ideal is not None and ghost.points:
                ends = tuple((point.factor, ideal) for point in (ghost.points[0], ghost.points[-1]))
                series.append(Series(f"ideal, {name}", str(place % 8), ends, dashed=True))
            rows += [
                (
                    name, f"{point.factor:g}x", count(point.pages), format_size(point.pages * pool.page_bytes),
                    "n/a" if point.hit_rate is None else percent(point.hit_rate),
                    _error(point.error_bound or 0.0), "n/a" if ideal is None else percent(ideal),
                    count(point.missed_pages), count(ghost.asked_pages),
                )
                for point in ghost.points
            ]  # fmt: skip
        title = f"What other sizes of {visible(tier, 20)} would hit"
        columns = (
            "pool",
            "size",
            "pages",
            "memory",
            "hit rate, of pages",
            "error",
            "ideal",
            "pages missed",
            "pages asked",
        )
        plots.append(
            LinePlot(
                f"what-if-{number}",
                title,
                "Pages hit / pages asked since the start, had the tier another size, together with those above it and "
                "as LRU: an estimate from a sample. The ideal misses only what was never asked before.",
                Axis("size", "times its own, log scale", "number", log=True, each=True),
                Axis("hit rate", "% of pages asked", "percent", least=0),
                tuple(series),
                Table(title, columns, tuple(rows)),
                tuple(marks),
            )
        )
    return Section("what-if", "What other sizes would hit", (), tuple(plots))


def _error(bound: float) -> str:
    return "too few to tell" if bound >= UNTOLD else f"±{100 * bound:.2f}"


def _ghosts(documents: Documents) -> dict[str, list[tuple[str, Pool, Ghost]]]:
    found: dict[str, list[tuple[str, Pool, Ghost]]] = {}
    for name, pool in pools_of(documents):
        for ghost in pool.what_if:
            found.setdefault(ghost.tier, []).append((name, pool, ghost))
    return found


def _prefixes(documents: Documents) -> Section:
    found = [(name, prefix) for name, pool in pools_of(documents) for prefix in pool.prefixes]
    found.sort(key=lambda pair: (-pair[1].requests, pair[0], pair[1].page_hash))
    drawn = found[:_MOST_PREFIXES]
    bars = tuple(
        Bar(f"{visible(prefix.page_hash[:12])}, {name}", (Part("requests", "hit", float(prefix.requests)),))
        for name, prefix in drawn
    )
    rows = tuple(
        (
            visible(prefix.page_hash[:12]), name, count(prefix.requests), count(prefix.uncertain), count(prefix.pages),
            share(prefix.hit_pages, prefix.asked_pages), count(prefix.host_pages), count(prefix.stored_pages),
        )
        for name, prefix in found
    )  # fmt: skip
    columns = (
        "first page",
        "pool",
        "requests",
        "or so many more",
        "pages",
        "hit, of its pages asked",
        "in host",
        "stored",
    )
    title = "Hottest prefixes"
    plot = BarPlot(
        "prefixes",
        title,
        "Requests that asked for the prefix, since the start or since it was noticed.",
        Axis("requests", "since the start", "count", least=0),
        bars,
        Table(f"{title}, by requests", columns, rows, texts=2),
    )
    return Section("prefixes", "Which prefixes matter", (), (plot,))
