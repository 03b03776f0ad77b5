"""What is read of the documents of `hicache stats`."""

from __future__ import annotations

import msgspec

from hicache.analytics.report.figures import Amount, Count, Share, Text, same

__all__ = ["Counts", "Ghost", "Pool", "ServiceDocument"]


class Counts(msgspec.Struct, frozen=True):
    """Where what was asked came from."""

    asked: Count
    device: Count
    host: Count
    storage: Count
    missed: dict[Text, Count]

    def __post_init__(self) -> None:
        told = self.device + self.host + self.storage + sum(self.missed.values())
        same(self.asked, told, "asked", "hits by tier and misses by reason")


class HostCounts(msgspec.Struct, frozen=True):
    """Pages of HOST."""

    capacity: Count
    resident: Count
    filling: Count
    pinned: Count
    evicted: Count


class CoreCounts(msgspec.Struct, frozen=True):
    """Of the core."""

    host: HostCounts


class StoreCounts(msgspec.Struct, frozen=True):
    """Of a store."""

    objects: Count
    bytes_used: Count
    capacity: Count | None
    gets: Count
    hits: Count
    puts: Count
    bytes_written: Count
    bytes_read: Count
    evicted: Count
    by_reason: dict[Text, Count]


class QueueCounts(msgspec.Struct, frozen=True):
    """Of a queue to storage."""

    waiting: Count
    running: Count
    bytes: Count
    refused: Count
    failed: Count
    hung: Count


class PoolStatistics(msgspec.Struct, frozen=True):
    """What one cache counts."""

    requests: Count
    open_requests: Count
    pages: Counts
    tokens: Counts
    bytes_device_to_host: Count
    bytes_host_to_device: Count
    bytes_to_storage: Count
    bytes_from_storage: Count
    failed_pages: dict[Text, Count]
    shed_by_reason: dict[Text, Count]
    core: CoreCounts
    storage: StoreCounts | None
    reads: QueueCounts | None
    writes: QueueCounts | None


class GhostPoint(msgspec.Struct, frozen=True):
    """What another size would hit."""

    factor: Amount
    pages: Count
    missed_pages: Count
    hit_rate: Share | None
    error_bound: Amount | None


class Ghost(msgspec.Struct, frozen=True):
    """Other sizes of one tier."""

    tier: Text
    pages: Count
    sample_rate: Share
    asked_pages: Count
    points: list[GhostPoint]


class LivePrefix(msgspec.Struct, frozen=True):
    """A hot prefix of a service."""

    page_hash: Text
    requests: Count
    uncertain: Count
    asked_pages: Count
    hit_pages: Count
    pages: Count
    host_pages: Count
    stored_pages: Count


class Pool(msgspec.Struct, frozen=True):
    """One pool."""

    model: Text
    namespace: Text
    tenant: Text | None
    ranks: Count
    page_bytes: Count
    bytes: Count
    sessions: Count
    device_pages: Count
    statistics: PoolStatistics
    what_if: list[Ghost] = []
    prefixes: list[LivePrefix] = []


class Verb(msgspec.Struct, frozen=True):
    """Calls of one kind."""

    verb: Text
    answered: Count
    failed: Count
    seconds: Amount


class Quota(msgspec.Struct, frozen=True):
    """What a tenant holds."""

    tenant: Text | None
    tier: Text
    bytes: Count
    quota: Count | None


class Service(msgspec.Struct, frozen=True):
    """The service's own part."""

    uptime_seconds: Amount
    degraded: list[Text]
    quotas: list[Quota] = []
    verbs: list[Verb] = []
    sessions: Count = 0


class ServiceDocument(msgspec.Struct, frozen=True):
    """What `hicache stats` prints."""

    service: Service
    pools: list[Pool]
