"""Sections on simulations: where pages came from, why they were missed, what it cost, and what it is worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from hicache.analytics.report.content import Axis, Bar, BarPlot, Part, Section, Table
from hicache.analytics.report.shapes import (
    asked_as_sum,
    color_of,
    cumulative,
    labelled,
    letters,
    side_by_side,
    what_unit,
)
from hicache.analytics.report.simulation_documents import SimulationDocument
from hicache.analytics.report.words import count, duration, percent, share, visible
from hicache.units import format_size

__all__ = ["gap_plot", "page_misses", "simulation_sections", "tier_hits"]

Documents = Sequence[SimulationDocument]

NOT_A_GAP: Final = frozenset({"cold", "unaligned_tail"})
"""Reasons for which an unlimited cache misses too."""

_MOST_INSTANCES: Final = 32


def simulation_sections(documents: Documents) -> Iterator[Section]:
    """What simulations tell."""
    yield _asked(documents)
    if not any(document.pages_asked for document in documents):
        return
    yield _gap(documents)
    yield _traffic(documents)
    yield _times(documents)
    if any(len(document.instances) > 1 for document in documents):
        yield _instances(documents)
    yield _settings(documents)


def tier_hits(document: SimulationDocument) -> dict[str, int]:
    """Pages hit by tier."""
    return {"device": document.pages_device, "host": document.pages_host, "storage": document.pages_storage}


def page_misses(document: SimulationDocument) -> dict[str, int]:
    """Pages missed by reason, those that were."""
    return {reason: pages for reason, pages in document.misses_by_reason.items() if pages}


def _asked(documents: Documents) -> Section:
    names = letters(documents)
    pages = [(name, tier_hits(each), page_misses(each)) for name, each in zip(names, documents, strict=True)]
    tokens = [
        (name, {"hit": each.tokens_hit}, {"missed": each.tokens_missed, "unaligned_tail": each.tokens_unaligned_tail})
        for name, each in zip(names, documents, strict=True)
    ]
    rates = side_by_side(
        "Hit rates, each with what it divides by",
        names,
        documents,
        [
            (
                "pages from any tier / pages asked",
                lambda each: share(each.pages_asked - each.pages_missed, each.pages_asked),
            ),
            ("from device / pages asked", lambda each: share(each.pages_device, each.pages_asked)),
            ("from host / pages asked", lambda each: share(each.pages_host, each.pages_asked)),
            ("from storage / pages asked", lambda each: share(each.pages_storage, each.pages_asked)),
            ("prompt tokens hit / prompt tokens", lambda each: share(each.tokens_hit, each.tokens_asked)),
            ("mean over requests of their own page rates", lambda each: percent(each.hit_rate_requests)),
        ],
    )
    plots = (
        asked_as_sum("pages-sum", "Where pages came from, and why they were missed", "pages asked", pages),
        asked_as_sum(
            "tokens-sum", "Prompt tokens hit, missed, and behind the last whole page", "prompt tokens", tokens
        ),
    )
    return Section("hits", "What hit, by tier, and what was missed", (), plots, (rates,))


def _gap(documents: Documents) -> Section:
    named = [
        (name, tier_hits(each), page_misses(each)) for name, each in zip(letters(documents), documents, strict=True)
    ]
    plot = gap_plot("gap", "pages asked", named)
    text = (
        "The ideal misses only what nobody had asked for before, as far as is remembered (cold). All other misses are "
        "the gap to it, each for one reason: hit rate + gap = ideal.",
    )
    return Section("gap", "Why it is not the ideal", text, (plot,))


def gap_plot(key: str, what: str, named: Sequence[tuple[str, Mapping[str, int], Mapping[str, int]]]) -> BarPlot:
    """Ideal = hits + misses that an unlimited cache would not have.

    Args:
        key: of the plot.
        what: of what the counts are, such as "pages asked".
        named: name, hits and misses of each source.
    """
    causes = sorted(
        {reason for _, _, missed in named for reason in missed if reason not in NOT_A_GAP},
        key=lambda reason: (-sum(missed.get(reason, 0) for _, _, missed in named), reason),
    )
    bars, columns = [], []
    for name, hits, missed in named:
        whole, hit = sum(hits.values()) + sum(missed.values()), sum(hits.values())
        sizes = [hit, *(missed.get(cause, 0) for cause in causes)]
        parts = [Part("hit", "hit", hit / whole if whole else 0.0)]
        parts += [
            Part(f"missed: {cause}", color_of(cause), missed[cause] / whole) for cause in causes if missed.get(cause)
        ]
        bars.append(Bar(labelled(name, f"ideal {share(sum(sizes), whole)} of {what}"), tuple(parts)))
        columns.append([(count(size), share(size, whole)) for size in (*sizes, sum(sizes))])
    heads = tuple(labelled(name, head) for name, _, _ in named for head in (what_unit(what), "of asked"))
    rows = tuple(
        (label, *(cell for column in columns for cell in column[at]))
        for at, label in enumerate(("hit", *(f"missed: {cause}" for cause in causes), "ideal, the sum"))
    )
    title = "From the hit rate to the ideal"
    table = Table(f"{title}: hits + misses that an unlimited cache would not have", ("part", *heads), rows, total=True)
    note = f"Shares of {what}; behind the hits, what was missed although it had been asked for before."
    return BarPlot(key, title, note, Axis("share", f"% of {what}", "percent", least=0), tuple(bars), table)


def _traffic(documents: Documents) -> Section:
    bars, rows = [], []
    for name, document in zip(letters(documents), documents, strict=True):
        for part in document.traffic:
            tier = visible(part.tier, 40)
            parts = (Part("written", "0", float(part.bytes_written)), Part("read", "2", float(part.bytes_read)))
            bars.append(Bar(labelled(name, tier), tuple(each for each in parts if each.value)))
            rows.append(
                (
                    labelled(name, tier), format_size(part.bytes_written), format_size(part.bytes_read),
                    f"{part.write_amplification:.2f}",
                )
            )  # fmt: skip
    title = "Bytes written into tiers and read from them"
    plot = BarPlot(
        "traffic",
        title,
        "Of all instances. Write amplification: bytes written into a tier / bytes of the pages computed.",
        Axis("bytes", "written and read", "bytes", least=0),
        tuple(bars),
        Table(
            f"{title}; amplification: written / bytes of pages computed",
            ("tier", "written", "read", "amplification"),
            tuple(rows),
        ),
    )
    reasons = sorted({reason for document in documents for reason in document.shed_by_reason})
    table = side_by_side(
        "Besides",
        letters(documents),
        documents,
        [
            ("pages put to storage", lambda each: count(each.pages_put)),
            (
                "of those never read",
                lambda each: f"{count(each.pages_put_never_read)} ({share(each.pages_put_never_read, each.pages_put)})",
            ),
            ("requests refused: no slots", lambda each: count(each.requests_refused)),
            *(
                (
                    f"pages shed: {visible(reason, 60)}",
                    lambda each, reason=reason: count(each.shed_by_reason.get(reason, 0)),
                )
                for reason in reasons
            ),
        ],
    )
    return Section("traffic", "What was moved for it", (), (plot,), (table,))


def _times(documents: Documents) -> Section:
    found, bars, rows = [], [], []
    for at, (name, each) in enumerate(zip(letters(documents), documents, strict=True)):
        found.append((labelled(name, "with the cache"), str(at), at > 0, each.first_token_seconds))
        found.append((labelled(name, "without"), str(at + 6), at > 0, each.first_token_seconds_without))
        parts = (Part("spent on prefill", "1", each.gpu_seconds), Part("saved by hits", "2", each.gpu_seconds_saved))
        whole = each.gpu_seconds + each.gpu_seconds_saved
        bars.append(Bar(labelled(name, f"{count(whole)} GPU seconds without the cache"), parts))
        price = each.settings.costs.gpu_hour_price
        money = (
            "no --gpu-hour-price" if each.money_saved is None else f"{each.money_saved:,.2f} at {price:,.2f} an hour"
        )
        rows.append(
            (
                name or "all", f"{each.gpu_seconds:,.1f}", f"{each.gpu_seconds_saved:,.1f}",
                share(each.gpu_seconds_saved, whole), money,
            )
        )  # fmt: skip
    first = cumulative(
        "first-token",
        "Time to the first token",
        "Share of the requests that wait not longer: for pages, for slots and for the prefill of the rest, by the "
        "stated costs; waiting for the engine itself is not in it.",
        Axis("first token after", "time, log scale", "seconds", log=True),
        "requests",
        found,
    )
    title = "GPU seconds of prefill, spent and saved"
    worth = BarPlot(
        "gpu-seconds",
        title,
        "Prompt tokens computed and prompt tokens hit / the prefill rate; both together are what it takes without a "
        "cache.",
        Axis("GPU seconds", "seconds of prefill", "count", least=0),
        tuple(bars),
        Table(title, ("what", "spent, s", "saved, s", "saved, of all", "money saved"), tuple(rows)),
    )
    return Section("times", "What it is worth", (), (first, worth) if first.series else (worth,))


def _instances(documents: Documents) -> Section:
    bars, rows = [], []
    for name, document in zip(letters(documents), documents, strict=True):
        for part in document.instances[:_MOST_INSTANCES]:
            label = labelled(name, f"instance {part.instance}")
            bars.append(Bar(f"{label}: {count(part.pages_asked)} pages", (Part("hit", "hit", part.hit_rate_pages),)))
            rows.append((label, count(part.requests), count(part.pages_asked), percent(part.hit_rate_pages)))
    title = "Hit rate of each instance"
    plot = BarPlot(
        "instances",
        title,
        "Pages hit / pages asked of that instance.",
        Axis("hit rate", "% of pages asked of it", "percent", least=0),
        tuple(bars),
        Table(title, ("instance", "requests", "pages asked", "hit rate, of pages"), tuple(rows)),
    )
    return Section("instances", "Instances", (), (plot,))


def _settings(documents: Documents) -> Section:
    def pages(size: int | None, page_bytes: int) -> str:
        return "unlimited" if size is None else f"{count(size)} pages, {format_size(size * page_bytes)}"

    table = side_by_side(
        "Settings and costs",
        letters(documents),
        documents,
        [
            ("requests", lambda each: count(each.requests)),
            ("page", lambda each: f"{count(each.page_tokens)} tokens, {format_size(each.page_bytes)}"),
            ("device, each instance", lambda each: pages(each.settings.device, each.page_bytes)),
            ("host, each instance", lambda each: pages(each.settings.host, each.page_bytes)),
            ("storage, shared", lambda each: pages(each.settings.storage, each.page_bytes)),
            ("eviction", lambda each: each.settings.eviction),
            ("slru protects at most", lambda each: percent(each.settings.protected_share)),
            ("write policy", lambda each: each.settings.write_policy),
            (
                "written down from use",
                lambda each: "by policy" if each.settings.admission is None else count(each.settings.admission),
            ),
            ("prefetch", lambda each: each.settings.prefetch),
            ("loads only what pays", lambda each: "yes" if each.settings.decide else "no"),
            ("instances, routing", lambda each: f"{count(each.settings.instances)}, {each.settings.routing}"),
            ("speed of the trace", lambda each: f"{each.settings.speed:g}"),
            ("nothing takes time", lambda each: "yes" if each.settings.instant else "no"),
            ("bytes of a token", lambda each: format_size(each.settings.costs.token_bytes)),
            ("prefill, tokens a second", lambda each: count(each.settings.costs.prefill_rate)),
            ("device link, a second", lambda each: format_size(round(each.settings.costs.device_link))),
            ("storage read, a second", lambda each: format_size(round(each.settings.costs.storage_read))),
            ("storage write, a second", lambda each: format_size(round(each.settings.costs.storage_write))),
            ("storage latency", lambda each: duration(each.settings.costs.storage_latency)),
        ],
    )
    return Section("settings", "What was simulated", (), (), (table,))
