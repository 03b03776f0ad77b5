"""What is read of the documents of `hicache simulate` and `hicache sweep`."""

from __future__ import annotations

import msgspec

from hicache.analytics.report.figures import Amount, Count, Distribution, Share, Text, same

__all__ = ["SimulationDocument", "SweepDocument"]


class Costs(msgspec.Struct, frozen=True):
    """What things cost."""

    token_bytes: Count
    prefill_rate: Amount
    device_link: Amount
    storage_read: Amount
    storage_write: Amount
    storage_latency: Amount
    gpu_hour_price: Amount | None


class Settings(msgspec.Struct, frozen=True):
    """What was simulated."""

    device: Count | None
    host: Count
    storage: Count | None
    page_size: Count | None
    eviction: Text
    protected_share: Share
    write_policy: Text
    admission: Count | None
    prefetch: Text
    decide: bool
    instances: Count
    routing: Text
    speed: Amount
    instant: bool
    costs: Costs
    read_bound: Count = 2**30
    write_bound: Count = 2**28


class Traffic(msgspec.Struct, frozen=True):
    """Of a tier."""

    tier: Text
    bytes_written: Count
    bytes_read: Count
    write_amplification: Amount


class Instance(msgspec.Struct, frozen=True):
    """Of several."""

    instance: Count
    requests: Count
    pages_asked: Count
    hit_rate_pages: Share


class SimulationDocument(msgspec.Struct, frozen=True):
    """What `hicache simulate` prints."""

    settings: Settings
    requests: Count
    page_tokens: Count
    page_bytes: Count
    pages_asked: Count
    pages_device: Count
    pages_host: Count
    pages_storage: Count
    pages_missed: Count
    tokens_asked: Count
    tokens_hit: Count
    tokens_missed: Count
    tokens_unaligned_tail: Count
    hit_rate_pages: Share
    hit_rate_tokens: Share
    hit_rate_requests: Share
    misses_by_reason: dict[Text, Count]
    requests_refused: Count
    shed_by_reason: dict[Text, Count]
    traffic: list[Traffic]
    pages_put: Count
    pages_put_never_read: Count
    first_token_seconds: Distribution
    first_token_seconds_without: Distribution
    gpu_seconds: Amount
    gpu_seconds_saved: Amount
    money_saved: Amount | None
    instances: list[Instance]
    interrupted: bool
    problems: list[Text]
    pages_lost: dict[Text, Count] = {}
    simulated_seconds: Amount = 0.0
    advice: list[Text] = []

    def __post_init__(self) -> None:
        missed = sum(self.misses_by_reason.values())
        same(self.pages_missed, missed, "pages_missed", "its misses by reason")
        hits = self.pages_device + self.pages_host + self.pages_storage
        same(self.pages_asked, hits + missed, "pages_asked", "hits by tier and misses by reason")
        tokens = self.tokens_hit + self.tokens_missed + self.tokens_unaligned_tail
        same(self.tokens_asked, tokens, "tokens_asked", "tokens hit, missed and behind the last page")


class SweepDocument(msgspec.Struct, frozen=True):
    """What `hicache sweep` prints."""

    points: Count
    results: list[SimulationDocument]
    recommendation: list[Text]
