"""What a replay found, and what its numbers mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from hicache.analytics.prefill import PrefillTimes
from hicache.records import MissReason

DEFINITIONS: Final = {
    "hit_rate_pages": "pages from any tier / pages asked, over all requests",
    "hit_rate_tokens": "prompt tokens that pages from any tier stand for / all prompt tokens, over all requests",
    "hit_rate_requests": "mean over requests with pages of each one's own page rate",
    "misses_by_reason": "pages; the sum is pages_missed",
}


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Counts of one replay. Rates are 0 where nothing was asked, never NaN; `DEFINITIONS` says what is divided.

    Attributes:
        requests: replayed to their end.
        pages_asked: sum of pages_device, pages_host, pages_storage (where pages came from) and pages_missed.
        tokens_asked, tokens_hit: prompt tokens, tails included; those that pages from the cache stand for.
        misses_by_reason: every reason, also those with 0.
        pages_verified: returned pages whose bytes were compared with what they must be.
        pages_wrong: those of them that differed.
        bytes_device_to_host, bytes_host_to_device, bytes_to_storage, bytes_from_storage: payload bytes moved.
        shed_by_reason: pages whose transfer was not even tried.
        storage_trouble_by_reason: objects that storage found damaged or foreign, or failed to read or write.
        requests_refused: requests too large for what was free on the device; their pages beyond hits were not kept,
            and are missed as over_budget.
        entries_skipped: broken entries of the trace passed over.
        interrupted: whether somebody stopped it before the trace's end.
        bad_input: what ended it early: a broken entry of the trace, or storage that took nothing at all; else "".
        seconds: wall time from the first request to the last write that was waited for.
        requests_per_second: requests over the seconds of the requests themselves, final writes not included.
        prefill: modelled times of an engine whose prefill rate was stated.
        problems: what must not be: a wrong page's place, a broken invariant.
        warnings: what a user should know about the run, for example pages that storage refused.
    """

    requests: int = 0
    pages_asked: int = 0
    pages_device: int = 0
    pages_host: int = 0
    pages_storage: int = 0
    pages_missed: int = 0
    hit_rate_pages: float = 0.0
    hit_rate_tokens: float = 0.0
    hit_rate_requests: float = 0.0
    tokens_asked: int = 0
    tokens_hit: int = 0
    misses_by_reason: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    pages_verified: int = 0
    pages_wrong: int = 0
    bytes_device_to_host: int = 0
    bytes_host_to_device: int = 0
    bytes_to_storage: int = 0
    bytes_from_storage: int = 0
    shed_by_reason: dict[str, int] = field(default_factory=dict)
    storage_trouble_by_reason: dict[str, int] = field(default_factory=dict)
    requests_refused: int = 0
    entries_skipped: int = 0
    interrupted: bool = False
    bad_input: str = ""
    seconds: float = 0.0
    requests_per_second: float = 0.0
    prefill: PrefillTimes | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Everything, with the definitions, ready for JSON."""
        return {**asdict(self), "definitions": DEFINITIONS}


def rate(part: float, whole: float) -> float:
    """`part / whole`, and 0 of nothing."""
    return part / whole if whole else 0.0
