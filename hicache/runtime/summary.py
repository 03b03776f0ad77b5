"""Statistics of a cache as a few lines for people: what `print(cache.statistics())` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hicache.core.statistics import TierStatistics
from hicache.storage.base import StorageStatistics
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.runtime.statistics import CacheStatistics, Totals


def summary(statistics: CacheStatistics) -> str:
    """One line for each part of the cache; everything else is in the fields."""
    return "\n".join(f"{name:<9}{text}" for name, text in _lines(statistics))


def _lines(statistics: CacheStatistics) -> Iterator[tuple[str, str]]:
    ended = f"{statistics.aborted:,} aborted, {statistics.bypassed:,} bypassed, {statistics.dropped:,} dropped"
    yield "requests", f"{statistics.requests:,} closed ({ended}), {statistics.open_requests:,} open"
    yield "pages", _totals(statistics.pages)
    yield "tokens", _totals(statistics.tokens)
    yield "device", _tier(statistics.core.device) if statistics.core.device.capacity else "none"
    yield "host", _tier(statistics.core.host) if statistics.core.host.capacity else "none"
    yield "storage", "none" if statistics.storage is None else _storage(statistics.storage)
    moved = (
        ("device to host", statistics.bytes_device_to_host),
        ("host to device", statistics.bytes_host_to_device),
        ("to storage", statistics.bytes_to_storage),
        ("from storage", statistics.bytes_from_storage),
    )
    yield "moved", ", ".join(f"{edge} {format_size(size)}" for edge, size in moved)
    trouble = [
        ("failed pages: ", statistics.failed_pages),
        ("shed pages: ", statistics.shed_by_reason),
        ("", {"probes refused": statistics.probes_refused, "internal errors": statistics.internal_errors}),
    ]
    said = [text + _counts(counts) for text, counts in trouble if any(counts.values())]
    yield "trouble", "; ".join([*said, *statistics.degraded]) or "none"


def _totals(totals: Totals) -> str:
    rate = "" if totals.hit_rate is None else f"; hit rate {100 * totals.hit_rate:.2f} %"
    reasons = f" ({_counts(totals.missed)})" if any(totals.missed.values()) else ""
    missed = f"missed {sum(totals.missed.values()):,}{reasons}"
    tiers = f"device {totals.device:,}, host {totals.host:,}, storage {totals.storage:,}"
    return f"{totals.asked:,} asked: {tiers}, {missed}{rate}"


def _tier(tier: TierStatistics) -> str:
    return (
        f"{tier.capacity:,} pages: {tier.free:,} free, {tier.private:,} private, {tier.filling:,} filling, "
        f"{tier.resident:,} resident ({tier.pinned:,} pinned), {tier.quarantined:,} quarantined; "
        f"{tier.evicted:,} evicted"
    )


def _storage(storage: StorageStatistics) -> str:
    limit = "" if storage.capacity is None else f" of {format_size(storage.capacity)}"
    bad = f"; results not ok: {_counts(storage.by_reason)}" if any(storage.by_reason.values()) else ""
    return f"{storage.objects:,} objects, {format_size(storage.bytes_used)}{limit}{bad}"


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
