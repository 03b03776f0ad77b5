"""A snapshot of the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache.core.registry import DEVICE, HOST
from hicache.core.residency import SlotState
from hicache.core.transfers import TransferKind

if TYPE_CHECKING:
    from hicache.core.registry import Registry
    from hicache.core.transferlog import TransferLog


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Pages of one owned tier. `free + private + filling + resident + quarantined == capacity`.

    Attributes:
        capacity: slots.
        free, private, filling, resident, quarantined: slots by state.
        pinned: resident slots that something pins.
        evicted: pages evicted since opening.
        dropped_dirty: of those, pages that had no copy below although there is a tier below.
    """

    capacity: int
    free: int
    private: int
    filling: int
    resident: int
    quarantined: int
    pinned: int
    evicted: int
    dropped_dirty: int


@dataclass(frozen=True, slots=True)
class CoreStatistics:
    """What the core holds, and what it has done since it was made.

    Attributes:
        device, host: the owned tiers.
        nodes: nodes of all trees, roots included.
        stub_pages: pages that only STORAGE is believed to have.
        transfers: transfers under way, or finished and waiting for pages in front.
        completed, failed: pages by kind of transfer, good and not good.
        leases: requests open now.
    """

    device: TierStatistics
    host: TierStatistics
    nodes: int
    stub_pages: int
    transfers: int
    completed: dict[TransferKind, int]
    failed: dict[TransferKind, int]
    leases: int


def snapshot(registry: Registry, log: TransferLog, leases: int) -> CoreStatistics:
    """Read the counters. O(1) in the number of pages."""
    return CoreStatistics(
        device=_tier(registry, DEVICE),
        host=_tier(registry, HOST),
        nodes=registry.living,
        stub_pages=registry.stub_pages,
        transfers=len(log.open),
        completed={kind: log.pages[kind, True] for kind in TransferKind},
        failed={kind: log.pages[kind, False] for kind in TransferKind},
        leases=leases,
    )


def _tier(registry: Registry, tier: int) -> TierStatistics:
    table = registry.tables[tier]
    free, private, filling, resident, quarantined = (table.counts[state] for state in SlotState)
    return TierStatistics(
        table.capacity,
        free,
        private,
        filling,
        resident,
        quarantined,
        table.pinned,
        registry.evicted[tier],
        registry.dropped_dirty[tier],
    )
