"""What a simulation found, and what its numbers mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from hicache.analytics.analysis.spread import Spread
from hicache.analytics.simulate.settings import SimulationSettings

DEFINITIONS: Final = {
    "hit_rate_pages": "pages from any tier / pages asked, over all requests",
    "hit_rate_pages_device": "pages that were in device memory / pages asked; likewise for host and storage: the three "
    "add up to hit_rate_pages",
    "hit_rate_tokens": "prompt tokens that pages from any tier stand for / all prompt tokens, over all requests",
    "tokens_unaligned_tail": "prompt tokens behind the last whole page, which no cache has; with tokens_hit and "
    "tokens_missed the sum is tokens_asked",
    "hit_rate_requests": "mean over requests with pages of each one's own page rate",
    "misses_by_reason": "pages; the sum is pages_missed; other_instance: another instance held the page in device or "
    "host when the request came",
    "write_amplification": "bytes written into a tier / bytes of pages computed, which are those missed",
    "pages_evicted": "pages that made room for others in each tier, which may have them again later",
    "pages_lost": "of pages_evicted, those that no tier below had: the last copy, but for other instances'",
    "simulated_seconds": "of the simulated clock, from the first request to the end of all",
    "pages_put_never_read": "of pages_put, those that no request read back up to the end",
    "first_token_seconds": "of each request, what it waited for pages and slots, and the prefill of the rest at "
    "prefill_rate; waiting for the engine itself is not counted",
    "first_token_seconds_without": "prefill of all its tokens",
    "gpu_seconds_saved": "tokens_hit / prefill_rate",
}


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Bytes that went into a tier and out of it.

    Attributes:
        tier: its name.
        bytes_written, bytes_read: by all instances; computed pages are written to the device.
        write_amplification: see `DEFINITIONS`.
    """

    tier: str
    bytes_written: int
    bytes_read: int
    write_amplification: float


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """One instance: its number, requests, pages asked, and hit rate over those."""

    instance: int
    requests: int
    pages_asked: int
    hit_rate_pages: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Counts of one simulation. Rates are 0 where nothing was asked, never NaN; `DEFINITIONS` says what is divided.

    Attributes:
        settings: what was simulated.
        page_tokens, page_bytes: of a page.
        shed_by_reason: pages whose transfer was not even tried, as its queue was full.
        pages_evicted, pages_lost: by tier; see `DEFINITIONS`.
        requests_refused: requests that had no slots; their pages beyond hits were not kept, and are missed as
            over_budget.
        money_saved: at the price given.
        seconds: wall time of the simulation.
        problems: what must not be.
    """

    settings: SimulationSettings
    requests: int
    page_tokens: int
    page_bytes: int
    pages_asked: int
    pages_device: int
    pages_host: int
    pages_storage: int
    pages_missed: int
    tokens_asked: int
    tokens_hit: int
    tokens_missed: int
    tokens_unaligned_tail: int
    hit_rate_pages: float
    hit_rate_pages_device: float
    hit_rate_pages_host: float
    hit_rate_pages_storage: float
    hit_rate_tokens: float
    hit_rate_requests: float
    misses_by_reason: dict[str, int]
    requests_refused: int
    shed_by_reason: dict[str, int]
    traffic: tuple[TierTraffic, ...]
    pages_put: int
    pages_put_never_read: int
    pages_evicted: dict[str, int]
    pages_lost: dict[str, int]
    simulated_seconds: float
    first_token_seconds: Spread
    first_token_seconds_without: Spread
    gpu_seconds: float
    gpu_seconds_saved: float
    money_saved: float | None
    instances: tuple[InstanceResult, ...]
    interrupted: bool
    seconds: float
    requests_per_second: float
    problems: tuple[str, ...]

    def document(self, *, definitions: bool = True) -> dict[str, Any]:
        """Everything, ready for JSON."""
        plain: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Spread | SimulationSettings):
                value = value.document()
            elif isinstance(value, tuple):
                value = [asdict(item) if hasattr(item, "__dataclass_fields__") else item for item in value]
            plain[entry.name] = value
        return plain | ({"definitions": DEFINITIONS} if definitions else {})
