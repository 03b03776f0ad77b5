"""What a hosted cache learns from the requests that end: what other sizes would hit, and which prefixes are hot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hicache.core.partition import plan_shards
from hicache.core.whatif import SizeGhost, WhatIf, WhatIfStatistics
from hicache.runtime.popular import Popular, Prefix, described
from hicache.runtime.wiring import HASH_SIZE

if TYPE_CHECKING:
    from hicache.core.reasons import RequestCounts
    from hicache.core.transfers import Lease
    from hicache.runtime.parts import Parts

__all__ = ["Insight", "InsightStatistics"]

SHOWN: Final = 10
"""Prefixes that are told."""

_SLICE: Final = 256
"""Sampled pages that are worked out in one step, for each tier: under a millisecond."""

_PER_OBJECT: Final = 4096 + 256
"""Bytes that a stored object costs beside its payload, about."""


@dataclass(frozen=True, slots=True)
class InsightStatistics:
    """A snapshot.

    Attributes:
        what_if: of each tier that has a size: HOST, and STORAGE where it has a limit, as if this cache alone used it.
        prefixes: those with most requests.
    """

    what_if: tuple[WhatIfStatistics, ...]
    prefixes: tuple[Prefix, ...]


class Insight:
    """Learns from requests. Used under the reducer's lock.

    Args:
        parts: the cache's.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._popular = Popular()
        self._whatif = WhatIf([SizeGhost("host", parts.core.config.host_pages)], size=HASH_SIZE)
        self._stored = WhatIf([], size=HASH_SIZE)
        self._attachment = -1  # of the storage that `_stored` is about

    def closed(self, lease: Lease, counts: RequestCounts) -> None:
        """A request was counted."""
        prompt = lease.prompt
        if not prompt.pages:
            return
        hit = counts.device + counts.host + counts.storage
        self._popular.note(lease.tree.namespace, prompt.symbols[:HASH_SIZE], asked=counts.asked, hit=hit)
        kept = max(lease.usable, lease.committed)
        self._whatif.use(prompt.symbols, asked=counts.asked, kept=kept)
        storage = self._parts.storage
        if storage is not None and storage.attached:
            if storage.attachment != self._attachment:
                self._begin(storage.attachment)
            self._stored.use(prompt.symbols, asked=counts.asked, kept=kept)

    def _begin(self, attachment: int) -> None:
        """Another storage is there."""
        parts, port = self._parts, self._parts.port
        self._attachment = attachment
        capacity = None if port is None else port.statistics().capacity
        ghosts = []
        if capacity is not None:
            shards = len(plan_shards(parts.namespace.geometry, parts.namespace.page_size).parts)
            pages = capacity // (parts.pools.page_bytes + shards * _PER_OBJECT)
            ghosts = [SizeGhost("storage", max(1, pages))]
        self._stored = WhatIf(ghosts, size=HASH_SIZE)

    def settle(self) -> bool:
        """Work out one slice of what waits. Returns whether more does."""
        first = self._whatif.settle(_SLICE)
        return self._stored.settle(_SLICE) or first

    def statistics(self) -> InsightStatistics:
        """A snapshot."""
        parts = self._parts
        trees = {tree.namespace: tree for tree in parts.core.trees}
        prefixes = [described(prefix, trees.get(prefix.namespace)) for prefix in self._popular.top(SHOWN)]
        return InsightStatistics((*self._whatif.statistics(), *self._stored.statistics()), tuple(prefixes))
