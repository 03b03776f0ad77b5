"""The summary: what the hit rate is, what the ideal is, why there is a gap, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hicache.analytics.analysis.knee import WORTH_DOUBLING
from hicache.analytics.analysis.larger import by_estimates
from hicache.analytics.analysis.recorded import OF_PROMPTS
from hicache.analytics.report.content import Answer
from hicache.analytics.report.recorded import misses as recorded_misses
from hicache.analytics.report.recorded import tiers as recorded_tiers
from hicache.analytics.report.service import total
from hicache.analytics.report.service_documents import ServiceDocument
from hicache.analytics.report.service_state import pool_name
from hicache.analytics.report.shapes import labelled, letters
from hicache.analytics.report.simulation import NOT_A_GAP, page_misses, tier_hits
from hicache.analytics.report.simulation_documents import SimulationDocument, SweepDocument
from hicache.analytics.report.sweep import point_name
from hicache.analytics.report.trace_documents import AnalysisDocument, Recorded
from hicache.analytics.report.words import count, duration, percent, share, visible
from hicache.analytics.simulate.advice import choose, varied
from hicache.analytics.simulate.losses import Cause, cause_of_losses

__all__ = ["answers_of"]

_QUESTIONS: Final = ("What is the hit rate?", "What is the ideal?", "Why is there a gap?", "What would help?")
_MOST_HELP: Final = 5
_MOST_NEWS: Final = 1000
_REMEDIES: Final = {
    "evicted": "more memory",
    "expired": "a longer life",
    "failed": "better storage",
    "late": "faster loading",
    "other_instance": "better routing",
    "other_namespace": "one namespace",
    "over_budget": "more slots",
    "bypassed": "no bypass",
}

_CAUSES: Final = {
    Cause.DEVICE: "more device memory",
    Cause.HOST: "more host memory",
    Cause.STORAGE: "a larger storage",
    Cause.COPIES: "faster copies to host memory",
    Cause.WRITE_QUEUE: "a longer queue to storage",
    Cause.WRITE_RATE: "faster writes to storage",
    Cause.ADMISSION: "writing down at first use",
}


@dataclass(frozen=True, slots=True)
class _Told:
    """One answer about one source: in short, and with its reasons."""

    figure: str
    text: tuple[str, ...]


_Answers = tuple[_Told, _Told, _Told, _Told]


def answers_of(sources: Sequence[Mapping[str, Any]]) -> tuple[Answer, ...]:
    """The four answers; each source is its documents by their kinds, read."""
    told = [_source(source) for source in sources]
    names = letters(sources)
    return tuple(
        Answer(
            question,
            tuple(each[number].figure for each in told),
            tuple(_lines([(name, each[number].text) for name, each in zip(names, told, strict=True)])),
        )
        for number, question in enumerate(_QUESTIONS)
    )


def _lines(texts: Sequence[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    """Sentences with the letters of their sources; without them where all say the same."""
    same = len({text for _, text in texts}) == 1
    for name, text in texts[:1] if same else texts:
        yield from (labelled("" if same else name, visible(line, _MOST_NEWS)) for line in text)


def _source(documents: Mapping[str, Any]) -> _Answers:
    if "stats" in documents:
        return _of_service(documents["stats"])
    if "sweep" in documents:
        return _beside(_of_sweep(documents["sweep"]), documents.get("analyze"))
    if "simulate" in documents:
        return _beside(_of_simulation(documents["simulate"]), documents.get("analyze"))
    trace: AnalysisDocument = documents["analyze"]
    return _of_trace(trace) if trace.recorded is None else _of_log(trace, trace.recorded)


def _beside(told: _Answers, trace: AnalysisDocument | None) -> _Answers:
    """The answers, with the trace's own ideal where it is known."""
    if trace is None or not trace.pages_asked:
        return told
    hit, ideal, gap, help_ = told
    line = f"By the trace alone, where nothing takes time: {percent(trace.ideal_hit_rate_pages)}."
    return hit, _Told(ideal.figure, (*ideal.text, line)), gap, help_


# ---- a trace


def _of_trace(document: AnalysisDocument) -> _Answers:
    points = document.miss_ratio_curve.points
    if not document.pages_asked or not points:
        return (_NOTHING,) * 4
    low, high = points[0], points[-1]
    hit = _Told(
        f"{100 * low.hit_rate_pages:.1f} to {percent(high.hit_rate_pages, 1)}",
        (
            f"It depends on the memory: of the pages asked, one LRU cache of {count(low.pages)} pages hits "
            f"{percent(low.hit_rate_pages)}, one of {count(high.pages)} pages {percent(high.hit_rate_pages)}.",
        ),
    )
    ideal = _Told(
        percent(document.ideal_hit_rate_pages, 1),
        (
            f"An unlimited cache hits {count(document.ideal_pages_hit)} of {count(document.pages_asked)} pages asked, "
            f"and {percent(document.ideal_hit_rate_tokens)} of the prompt tokens. All other pages are new.",
        ),
    )
    return hit, ideal, _gap_of_trace(document), _help_of_trace(document)


def _gap_of_trace(document: AnalysisDocument) -> _Told:
    middle = document.reuse_distance_pages.p50
    lines = [
        f"Memory: half of the pages hit were used before at least {count(middle)} other pages, so a smaller cache "
        "misses those."
    ]
    if document.reuse_seconds.count:
        lines.append(
            f"Time: half of them were used at most {duration(document.reuse_seconds.p50)} before, nine of ten at most "
            f"{duration(document.reuse_seconds.p90)}."
        )
    lost = max(document.page_sizes, key=lambda each: each.lost_share, default=None)
    if lost is not None and lost.lost_share >= WORTH_DOUBLING:
        lines.append(
            f"Page size: pages of {count(lost.page_size)} tokens lose {percent(lost.lost_share, 1)} of what could be "
            "reused."
        )
    low = document.miss_ratio_curve.points[0]
    gap = max(0.0, document.ideal_hit_rate_pages - low.hit_rate_pages)
    return _Told(f"up to {100 * gap:.1f} points", tuple(lines))


def _help_of_trace(document: AnalysisDocument) -> _Told:
    if not document.ideal_pages_hit:
        return _Told("nothing", ("No page is asked for twice, so no cache helps.",))
    knee = document.knee_pages
    lines = ["No doubling of the memory adds a point."]
    if knee is not None:
        lines = [f"Memory for {count(knee)} pages{_hit_at(document, knee)}: beyond it no doubling adds a point."]
    hottest = document.tree.hottest[:3]
    lines.append(
        f"The {len(hottest)} hottest prefixes make {percent(sum(each.share_of_hits for each in hottest), 1)} of all "
        "hits: keep them (hicache pin), and send their requests to where they are."
    )
    lines.append("With sizes of tiers (--device, --host, --storage) this report says what they would hit.")
    return _Told(f"{count(knee)} pages" if knee is not None else "little", tuple(lines))


def _hit_at(document: AnalysisDocument, pages: int) -> str:
    """What the curve says of a size, where it has that size."""
    points = document.miss_ratio_curve.points
    low, at = points[0], next((point for point in points if point.pages == pages), None)
    if at is None:
        return ""
    bound = f" ± {100 * at.error_bound:.2f}" if at.error_bound else ""
    instead = f", {count(low.pages)} pages {percent(low.hit_rate_pages)}" if low.pages < pages else ""
    return f" hits {100 * at.hit_rate_pages:.2f}{bound} % of the pages asked{instead}"


def _of_log(document: AnalysisDocument, log: Recorded) -> _Answers:
    """Of an access log: what really happened."""
    asked, hits, missed = log.pages_asked, recorded_tiers(log), recorded_misses(log)
    if not asked:
        return (_NOTHING,) * 4
    hit = _Told(
        share(sum(hits.values()), asked),
        (f"Of {count(asked)} pages asked by {count(log.requests)} requests{_tiers(hits, asked)}.",),
    )
    ideal = _Told(
        share(log.pages_that_could_hit, asked),
        (
            "What a cache that forgets nothing would have hit of the pages asked.",
            f"The curve has another ideal, {OF_PROMPTS}: {share(document.ideal_pages_hit, document.pages_asked)}.",
        ),
    )
    if not any(size for reason, size in missed.items() if reason not in NOT_A_GAP):
        nothing = "It hit all that a cache can, so no other cache would hit more."
        return hit, ideal, _gap(missed, asked, "pages asked"), _Told("nothing", (nothing,))
    return hit, ideal, _gap(missed, asked, "pages asked"), _help_of_trace(document)


# ---- simulations


def _of_simulation(document: SimulationDocument) -> _Answers:
    asked = document.pages_asked
    if not asked:
        return (_NOTHING,) * 4
    hits, missed = tier_hits(document), page_misses(document)
    hit = _Told(
        share(sum(hits.values()), asked),
        (
            f"Of {count(asked)} pages asked{_tiers(hits, asked)}.",
            f"Of the prompt tokens {share(document.tokens_hit, document.tokens_asked)}.",
        ),
    )
    ideal = _Told(
        share(asked - sum(missed.get(reason, 0) for reason in NOT_A_GAP), asked),
        ("What an unlimited cache hits of the pages asked: all but those that nobody had asked for before.",),
    )
    return hit, ideal, _gap(missed, asked, "pages asked"), _help_of_simulation(document)


def _help_of_simulation(document: SimulationDocument) -> _Told:
    lines = [line for line in document.advice if "missed as cold" not in line][:_MOST_HELP]
    saved = document.gpu_seconds_saved
    worth = f" ({document.money_saved:,.2f} in money)" if document.money_saved is not None else ""
    lines.append(f"As it is, hits save {saved:,.0f} GPU seconds of prefill{worth}.")
    return _Told(_short(document), tuple(lines))


def _short(document: SimulationDocument) -> str:
    """In short what would help, by why pages were lost where the document tells."""
    missed = page_misses(document)
    cause = cause_of_losses(document)
    largest = max((pages for reason, pages in missed.items() if reason not in NOT_A_GAP), default=0)
    if cause is None or missed.get("evicted", 0) < max(largest, WORTH_DOUBLING * document.pages_asked):
        return _remedy(missed, document.pages_asked)
    return _CAUSES[cause]


def _of_sweep(document: SweepDocument) -> _Answers:
    found = choose(document.results)
    if found is None:
        return (_NOTHING,) * 4
    chosen, best, _ = found
    hit, ideal, gap, _ = _of_simulation(chosen)
    name = point_name(chosen, varied([result.settings for result in document.results]))
    hit = _Told(hit.figure, (f"At the recommended point, {name}.", *hit.text))
    lines = [*document.recommendation[:_MOST_HELP]] or [f"The point that hits most has {percent(best.hit_rate_pages)}."]
    return hit, ideal, gap, _Told(name, tuple(lines))


# ---- a service


def _of_service(document: ServiceDocument) -> _Answers:
    hits, missed = total(document)
    asked = sum(hits.values()) + sum(missed.values())
    if not asked:
        return (_NOTHING,) * 4
    hit = _Told(
        share(sum(hits.values()), asked),
        (
            f"Of {count(asked)} prompt tokens asked in {duration(document.service.uptime_seconds)} since the start"
            f"{_tiers(hits, asked)}.",
        ),
    )
    ideal = _Told(
        share(asked - sum(missed.get(reason, 0) for reason in NOT_A_GAP), asked),
        ("What an unlimited cache hits of the prompt tokens: all but new ones and those behind the last whole page.",),
    )
    return hit, ideal, _gap(missed, asked, "prompt tokens"), _help_of_service(document)


def _help_of_service(document: ServiceDocument) -> _Told:
    gains = sorted(_gains(document), key=lambda each: (-each[0], each[1]))
    lines = [line for gain, line in gains if gain >= WORTH_DOUBLING][:_MOST_HELP]
    if not lines:
        known = any(pool.what_if for pool in document.pools)
        lines = ["No other size of a tier that is known adds a point." if known else "Nothing is known of other sizes."]
    lines += [f"Degraded: {reason}" for reason in document.service.degraded]
    best = gains[0][0] if gains and gains[0][0] >= WORTH_DOUBLING else 0.0
    return _Told(f"{100 * best:+.1f} points" if best else "no other size", tuple(lines))


def _gains(document: ServiceDocument) -> Iterator[tuple[float, str]]:
    """The largest gain of each tier by its size, beyond what the estimate may be wrong."""
    for pool in document.pools:
        for ghost in pool.what_if:
            found = by_estimates(ghost.points)
            if found is not None:
                yield found.gain, f"{visible(ghost.tier, 20)} {found.told(pool.page_bytes)} ({pool_name(pool)})"


# ---- all


_NOTHING: Final = _Told("n/a", ("Nothing was asked, so nothing can be said.",))


def _gap(missed: Mapping[str, int], asked: int, what: str) -> _Told:
    causes = sorted(((size, reason) for reason, size in missed.items() if reason not in NOT_A_GAP), reverse=True)
    if not causes:
        return _Told("none", ("Everything that had been asked for before was hit.",))
    lines = [
        f"Of the {what}, {share(size, asked)} were missed as {visible(reason, 60)}."
        for size, reason in causes[:_MOST_HELP]
    ]
    return _Told(f"{100 * sum(size for size, _ in causes) / asked:.2f} points", tuple(lines))


def _tiers(hits: Mapping[str, int], asked: int) -> str:
    found = ", ".join(f"{tier} {share(size, asked)}" for tier, size in hits.items() if size)
    return f": {found}" if found else ", none hit"


def _remedy(missed: Mapping[str, int], asked: int) -> str:
    """In short what the largest cause of misses calls for."""
    causes = [(size, reason) for reason, size in missed.items() if reason not in NOT_A_GAP]
    size, reason = max(causes, default=(0, ""))
    return _REMEDIES.get(reason, visible(reason, 60)) if size >= WORTH_DOUBLING * asked else "little"
