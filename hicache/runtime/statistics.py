"""What a cache counts, as frozen snapshots. Nothing here is ever NaN: a rate without a denominator is None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.core.reasons import RequestCounts
from hicache.core.statistics import CoreStatistics
from hicache.core.transfers import TransferKind
from hicache.memory.base import CopyStatistics
from hicache.records import MissReason
from hicache.runtime.accesslog.writer import AccessLogStatistics
from hicache.runtime.canary import OFF
from hicache.runtime.health import degraded
from hicache.runtime.parts import Parts
from hicache.runtime.planner import PlanningStatistics
from hicache.runtime.queues import QueueStatistics
from hicache.runtime.summary import summary
from hicache.storage.base import StorageStatistics


@dataclass(frozen=True, slots=True)
class Totals:
    """What closed requests asked for and got, in one unit. `asked == device + host + storage + sum(missed)`, always.

    Attributes:
        asked: what was asked for.
        device, host, storage: what came from each tier.
        missed: the rest, by reason.
    """

    asked: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    missed: Mapping[MissReason, int] = field(default_factory=dict)

    @property
    def hits(self) -> int:
        """What came from any tier."""
        return self.device + self.host + self.storage

    @property
    def hit_rate(self) -> float | None:
        """`hits / asked`; None before anything was asked for."""
        return self.hits / self.asked if self.asked else None


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A snapshot of one cache; counts are since opening.

    Attributes:
        requests: requests that were closed.
        aborted: of these, those that ended without success.
        bypassed: of these, those that went past the cache.
        dropped: of these, those that were never closed, only collected.
        open_requests: requests open now.
        pages: whole pages that requests might have taken, and what became of them.
        tokens: all tokens of all prompts, unaligned tails included, and what became of them.
        bytes_device_to_host, bytes_host_to_device, bytes_to_storage, bytes_from_storage: page bytes moved well.
        failed_pages: pages whose transfer did not end well, by kind of transfer (`write_back`, `load`, ...).
        shed_by_reason: pages whose transfer was turned away because a queue was full, by reason.
        probes_refused: probes of storage that were turned away.
        planning: what load-or-recompute has decided.
        internal_errors: exceptions that point to a bug of ours.
        core: tiers, nodes and transfers as the core sees them.
        copies: the copy engine.
        storage: the backend's own counts, or None.
        reads, writes: the queues of storage work, or None.
        access_log: what the access log has of them, where this cache writes one of its own; else None.
        canary: whether storage works: "off", "running", "ok", "undecided: ...", "failed: ...".
        degraded: why the cache is not all that it should be, in words; empty when all is well.
    """

    requests: int
    aborted: int
    bypassed: int
    dropped: int
    open_requests: int
    pages: Totals
    tokens: Totals
    bytes_device_to_host: int
    bytes_host_to_device: int
    bytes_to_storage: int
    bytes_from_storage: int
    failed_pages: Mapping[str, int]
    shed_by_reason: Mapping[str, int]
    probes_refused: int
    planning: PlanningStatistics
    internal_errors: int
    core: CoreStatistics
    copies: CopyStatistics
    storage: StorageStatistics | None
    reads: QueueStatistics | None
    writes: QueueStatistics | None
    canary: str
    degraded: tuple[str, ...]
    access_log: AccessLogStatistics | None = None

    @property
    def idle(self) -> bool:
        """No request is open, and nothing is under way in any direction."""
        queues = (queue for queue in (self.reads, self.writes) if queue is not None)
        busy = any(queue.waiting or queue.running or queue.hung for queue in queues)
        return not (self.open_requests or self.core.transfers or busy)

    def __str__(self) -> str:
        """A few lines for people."""
        return summary(self)


class Ledger:
    """Running counts of closed requests. Used under the reducer's lock."""

    __slots__ = (
        "aborted", "asked", "bypassed", "device", "dropped", "host", "missed", "requests", "storage", "tokens",
        "unserved",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = self.aborted = self.bypassed = self.dropped = self.unserved = 0
        self.tokens = self.asked = self.device = self.host = self.storage = 0
        self.missed: Counter[MissReason] = Counter()

    def add(self, counts: RequestCounts, *, tokens: int, found: int = 0) -> None:
        """Count one request that was just closed.

        Args:
            counts: its pages.
            tokens: all tokens of its prompt.
            found: pages that storage was believed or found to have for it.
        """
        self.requests += 1
        # What was not worth its time or had no slots says nothing about storage.
        self.unserved += not counts.storage and found > counts.missed.get(MissReason.OVER_BUDGET, 0)
        self.aborted += counts.aborted
        self.tokens += tokens
        self.asked += counts.asked
        self.device += counts.device
        self.host += counts.host
        self.storage += counts.storage
        for reason, pages in counts.missed.items():
            self.missed[reason] += pages

    def pages(self) -> Totals:
        """In pages."""
        return Totals(self.asked, self.device, self.host, self.storage, dict(self.missed))

    def in_tokens(self, page_size: int) -> Totals:
        """In tokens: what is behind the last page that might have been taken is the unaligned tail."""
        missed = {reason: pages * page_size for reason, pages in self.missed.items()}
        tail = self.tokens - self.asked * page_size
        if tail:
            missed[MissReason.UNALIGNED_TAIL] = missed.get(MissReason.UNALIGNED_TAIL, 0) + tail
        return Totals(self.tokens, self.device * page_size, self.host * page_size, self.storage * page_size, missed)


def snapshot(
    parts: Parts, ledger: Ledger, *, open_requests: int, access_log: AccessLogStatistics | None = None
) -> CacheStatistics:
    """A snapshot of a cache. The reducer's lock is held, so that the numbers fit together."""
    core = parts.core.statistics()
    page_bytes = parts.pools.page_bytes
    queues = parts.storage.statistics() if parts.storage is not None else ()
    reads, writes = queues or (None, None)
    storage = parts.port.statistics() if parts.port is not None and parts.port.backend is not None else None
    return CacheStatistics(
        requests=ledger.requests,
        aborted=ledger.aborted,
        bypassed=ledger.bypassed,
        dropped=ledger.dropped,
        open_requests=open_requests,
        pages=ledger.pages(),
        tokens=ledger.in_tokens(parts.namespace.page_size),
        bytes_device_to_host=core.completed[TransferKind.WRITE_BACK] * page_bytes,
        bytes_host_to_device=core.completed[TransferKind.LOAD] * page_bytes,
        bytes_to_storage=core.completed[TransferKind.PUT] * page_bytes,
        bytes_from_storage=core.completed[TransferKind.FETCH] * page_bytes,
        failed_pages={kind.name.lower(): pages for kind, pages in core.failed.items() if pages},
        shed_by_reason=dict(parts.executor.shed),
        probes_refused=parts.loader.probes_refused,
        planning=parts.loader.planner.statistics(),
        internal_errors=parts.reducer.internal_errors,
        core=core,
        copies=CopyStatistics() if parts.pools.copies is None else parts.pools.copies.statistics(),
        storage=storage,
        reads=reads,
        writes=writes,
        canary=parts.canary.state if parts.canary is not None else OFF,
        degraded=(
            *degraded(
                parts,
                queues,
                storage=storage,
                stored=core.completed[TransferKind.PUT],
                expected=ledger.unserved,
                came=ledger.storage,
            ),
            *(() if access_log is None else access_log.degraded),
        ),
        access_log=access_log,
    )
