"""What really happened, as an access log has it: hits by tier and misses by reason, beside what could have been hit."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from hicache.analytics.analysis.spread import Spread, spread
from hicache.analytics.formats.accesslog import RecordedDetails
from hicache.analytics.result import rate
from hicache.records import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.analytics.formats.accesslog import Outcome
    from hicache.analytics.trace import Ids, TraceRequest
    from hicache.runtime.accesslog.format import Head

__all__ = ["DEFINITIONS", "OF_PROMPTS", "Recorded", "Tally", "between_ideals", "signed"]

DEFINITIONS: Final = {
    "recorded_hit_rate_pages": "pages that requests really got from a tier / pages that they might have taken, over "
    "all requests of the log; a prompt's last token is computed in any case, so a page that ends with it is not asked",
    "recorded_hit_rate_tokens": "tokens of the pages that they got / all prompt tokens",
    "recorded_hit_rate_requests": "mean over requests that asked for pages of each one's own page rate",
    "recorded_ideal_hit_rate_pages": "pages that a cache that forgets nothing could have given / the same pages asked: "
    "those that an earlier request of the log has left in the cache, answers too, and those that were really got; "
    "ideal_hit_rate_pages is of prompts alone, over all their whole pages: pages_asked - recorded.pages_asked = "
    "pages_not_asked, and pages_that_could_hit = ideal_pages_hit - pages_not_asked_known + pages_of_answers - "
    "pages_not_kept + pages_hit_unknown",
}

OF_PROMPTS: Final = "of prompts alone, over all their whole pages"
"""What the ideal of `analyze` is of, and with it the curve."""


class Ideals(Protocol):
    """What `Recorded` has, or a document of it."""

    @property
    def pages_asked(self) -> int:
        """See `Recorded`, as for all."""
        ...

    @property
    def pages_that_could_hit(self) -> int:
        """Of these."""
        ...

    @property
    def pages_not_asked(self) -> int:
        """Whole pages of the prompts."""
        ...

    @property
    def pages_not_asked_known(self) -> int:
        """Of these."""
        ...

    @property
    def pages_of_answers(self) -> int:
        """Known by answers only."""
        ...

    @property
    def pages_not_kept(self) -> int:
        """Known by prompts only."""
        ...

    @property
    def pages_hit_unknown(self) -> int:
        """Known by neither."""
        ...


def between_ideals(recorded: Ideals, *, asked: int, hit: int) -> tuple[tuple[str, int, int], ...]:
    """From the ideal of prompts alone to that of the log: what, pages asked, pages hit; the last row is the sum.

    Args:
        recorded: of the log.
        asked: whole pages of the prompts.
        hit: of these, those that an earlier prompt had.

    Returns:
        No rows where that is of other requests too, or where an older document does not tell.
    """
    steps = (
        ("not asked, as a prompt's last token is computed in any case", -recorded.pages_not_asked,
         -recorded.pages_not_asked_known),
        ("left by answers", 0, recorded.pages_of_answers),
        ("of earlier prompts whose requests did not leave them", 0, -recorded.pages_not_kept),
        ("got, though no request of the log had left them", 0, recorded.pages_hit_unknown),
    )  # fmt: skip
    all_asked, could = recorded.pages_asked, recorded.pages_that_could_hit
    if asked + sum(more for _, more, _ in steps) != all_asked or hit + sum(more for *_, more in steps) != could:
        return ()
    told = (step for step in steps if step[1] or step[2])
    return (OF_PROMPTS, asked, hit), *told, ("of the log's requests, had nothing been forgotten", all_asked, could)


def signed(pages: int) -> str:
    """What a step adds; nothing where that is none."""
    return f"{pages:+,}" if pages else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Counts of all requests of a log. `pages_asked == pages_device + pages_host + pages_storage + pages_missed`.

    Attributes:
        requests, aborted: that ended, and those of them without success.
        pages_asked, pages_device, pages_host, pages_storage, pages_missed: see above.
        misses_by_reason: pages, all reasons; the sum is `pages_missed`.
        tokens_asked, tokens_hit: of the prompts; of the pages got.
        recorded_hit_rate_pages, recorded_hit_rate_tokens, recorded_hit_rate_requests: see `DEFINITIONS`.
        recorded_ideal_hit_rate_pages: see there.
        pages_that_could_hit: its numerator.
        pages_not_asked, pages_not_asked_known: whole pages of the prompts that are not asked, as the prompt's last
            token is computed in any case; of these, those that an earlier prompt of the log had.
        pages_of_answers: pages that could be hit as an earlier request's answer has left them, and no prompt.
        pages_not_kept: pages of those asked that an earlier prompt had, and that its request has not left in the cache.
        pages_hit_unknown: pages that were got although no request of the log has left them: they are from before it, of
            other writers of a shared store, or of requests that are not in it.
        load_seconds, request_seconds: distributions, from a request's begin to the end of its load, and of itself.
        processes: that wrote it.
        requests_ended, requests_left_out, requests_dropped: of those processes, up to the last block that was read:
            all, those that are not in the sample, those that were lost before they were written.
        requests_gone: that were written, in files or blocks that are not there any more or cannot be read.
        sample, sample_by: of the last of them.
    """

    requests: int
    aborted: int
    pages_asked: int
    pages_device: int
    pages_host: int
    pages_storage: int
    pages_missed: int
    misses_by_reason: dict[str, int]
    tokens_asked: int
    tokens_hit: int
    recorded_hit_rate_pages: float
    recorded_hit_rate_tokens: float
    recorded_hit_rate_requests: float
    recorded_ideal_hit_rate_pages: float
    pages_that_could_hit: int
    pages_not_asked: int
    pages_not_asked_known: int
    pages_of_answers: int
    pages_not_kept: int
    pages_hit_unknown: int
    load_seconds: Spread
    request_seconds: Spread
    processes: int
    requests_ended: int
    requests_left_out: int
    requests_dropped: int
    requests_gone: int
    sample: float
    sample_by: str

    def document(self) -> dict[str, Any]:
        """Ready for JSON."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value.document() if isinstance(value, Spread) else value for name, value in found.items()}


class _Seen:
    """Pages that were there before, by their ids."""

    def __init__(self) -> None:
        self._pages = np.zeros(1024, np.bool_)

    def leading(self, ids: Ids) -> int:
        """How many of the first ones are known."""
        self._reach(ids)
        known = self._pages[ids]
        return len(known) if known.all() else int(known.argmin())

    def add(self, ids: Ids) -> None:
        """They are known from now on."""
        self._reach(ids)
        self._pages[ids] = True

    def _reach(self, ids: Ids) -> None:
        top = int(ids.max(initial=0))
        if top >= len(self._pages):
            more = np.zeros(max(top + 1, 2 * len(self._pages)), np.bool_)
            more[: len(self._pages)] = self._pages
            self._pages = more


class Tally:
    """Counts what passes by."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._rates = self._asking = 0.0
        self._loads, self._seconds = array("d"), array("d")
        self._heads: dict[str, Head] = {}
        self._left, self._prompts = _Seen(), _Seen()

    def watch(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """The same requests; those of which is known what became of them are counted."""
        for request in requests:
            if isinstance(request.details, RecordedDetails):
                self._add(request, request.details.outcome)
            yield request

    def _add(self, request: TraceRequest, outcome: Outcome) -> None:
        sums, hits = self._sums, outcome.hits
        sums["requests"] += 1
        sums["aborted"] += outcome.aborted
        sums["asked"] += outcome.asked
        sums["device"] += outcome.device
        sums["host"] += outcome.host
        sums["storage"] += outcome.storage
        sums["tokens"] += request.input_tokens
        sums["tokens_hit"] += min(hits * request.unit, request.input_tokens)
        self._missed.update(outcome.missed)
        if outcome.asked:
            self._rates += hits / outcome.asked
            self._asking += 1
        self._add_ideals(request, outcome)
        self._seconds.append(outcome.seconds)
        if outcome.load is not None:
            self._loads.append(outcome.load)
        head = self._heads.get(outcome.head.boot)
        if head is None or head.requests <= outcome.head.requests:
            self._heads[outcome.head.boot] = outcome.head

    def _add_ideals(self, request: TraceRequest, outcome: Outcome) -> None:
        """What could have been hit: of what requests have left, and of prompts alone, where the two differ."""
        sums, hits, asked = self._sums, outcome.hits, outcome.asked
        known = self._left.leading(outcome.ids[:asked])
        alone = self._prompts.leading(request.ids)
        self._left.add(outcome.ids[: outcome.kept])
        self._prompts.add(request.ids)
        sums["could"] += max(known, hits)
        sums["not_asked"] += len(request.ids) - asked
        sums["not_asked_known"] += max(0, alone - asked)
        sums["answers"] += max(0, known - alone)
        sums["not_kept"] += max(0, min(alone, asked) - known)
        sums["unknown"] += max(0, hits - known)

    def result(self, *, gone: int = 0) -> Recorded | None:
        """What was counted; None where nothing was. `gone` is what the files lack."""
        sums = self._sums
        if not sums["requests"]:
            return None
        hits = sums["device"] + sums["host"] + sums["storage"]
        heads = list(self._heads.values())
        return Recorded(
            requests=sums["requests"],
            aborted=sums["aborted"],
            pages_asked=sums["asked"],
            pages_device=sums["device"],
            pages_host=sums["host"],
            pages_storage=sums["storage"],
            pages_missed=sum(self._missed.values()),
            misses_by_reason={reason.value: self._missed[reason.value] for reason in MissReason},
            tokens_asked=sums["tokens"],
            tokens_hit=sums["tokens_hit"],
            recorded_hit_rate_pages=rate(hits, sums["asked"]),
            recorded_hit_rate_tokens=rate(sums["tokens_hit"], sums["tokens"]),
            recorded_hit_rate_requests=rate(self._rates, self._asking),
            recorded_ideal_hit_rate_pages=rate(sums["could"], sums["asked"]),
            pages_that_could_hit=sums["could"],
            pages_not_asked=sums["not_asked"],
            pages_not_asked_known=sums["not_asked_known"],
            pages_of_answers=sums["answers"],
            pages_not_kept=sums["not_kept"],
            pages_hit_unknown=sums["unknown"],
            load_seconds=spread(self._loads),
            request_seconds=spread(self._seconds),
            processes=len(heads),
            requests_ended=sum(head.requests for head in heads),
            requests_left_out=sum(head.left_out for head in heads),
            requests_dropped=sum(head.dropped for head in heads),
            requests_gone=gone,
            sample=heads[-1].sample,
            sample_by=heads[-1].sample_by,
        )
