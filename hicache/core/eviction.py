"""Which page goes next: policies as small pure functions, and lazy heaps of candidates.

What a tier holds is closed under prefixes, so only a tier's leaf can go: a node with resident pages, nothing filling,
and no child that holds anything in that tier. Candidates are filed in a heap when they become one; an entry is looked
at again only when it is popped, and one that is pinned is dropped there: the unpin files it anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import log2
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import ConfigError
from hicache.records import Tier

if TYPE_CHECKING:
    from hicache.core.node import Node
    from hicache.core.residency import SlotTable

Policy = Callable[["Node"], Any]
"""Maps a node's use to a sortable key: the smallest goes first. A key may only grow with use, never by itself."""

POLICIES: Final[dict[str, Policy]] = {
    "lru": lambda node: node.stamp,
    "lfu": lambda node: node.heat,
    "slru": lambda node: (node.hits > 1, node.stamp),  # of what storage alone has; tiers have segments of their own
    "priority": lambda node: (node.priority, node.stamp),
}

_SMALL_HEAP: Final = 64
_HOST: Final = int(Tier.HOST)

HALF_LIFE: Final = 0.5
"""A use counts half for `lfu` when requests have taken so many pages since, as a share of the largest owned tier.

Time must pass as fast as the tier's content changes: with a fixed one, small tiers keep what was popular long ago."""


def heated(heat: float, now: float) -> float:
    """The frequency of a node after one more use, `now` half-lives after the begin.

    It is the logarithm of the sum of 2^t over its uses t: an exponentially forgetting frequency that can be compared
    at any later time without being recomputed (the LRFU family: D. Lee and others, "LRFU: a spectrum of policies",
    IEEE Transactions on Computers 50(12), 2001).
    """
    return now + log2(1.0 + 2.0 ** (heat - now))


def first_heat(now: float) -> float:
    """The frequency of a node used once, `now` half-lives after the begin."""
    return now


def register_policy(name: str, policy: Policy) -> None:
    """Add an eviction policy under a new name.

    Raises:
        ConfigError: the name is taken.
    """
    if name in POLICIES:
        raise ConfigError(f"eviction policy {name!r} exists already: choose another name")
    POLICIES[name] = policy


def policy_named(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: there is none.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"unknown eviction policy {name!r}: one of {', '.join(sorted(POLICIES))}")
    return policy


def as_key(plain: Any) -> Any:
    """A policy's key back from plain values: sequences are tuples."""
    return tuple(plain) if isinstance(plain, list) else plain


class Candidates:
    """The leaves of one tier that could give up pages, the clean apart from the dirty.

    Clean means that every resident page of the node has an acknowledged copy below. Clean pages lie in front of dirty
    ones, so a node is dirty because of its tail.
    """

    __slots__ = ("_bounds", "_heaps", "_number", "policy", "table", "tier")

    def __init__(self, table: SlotTable, policy: Policy) -> None:
        self.table = table
        self.tier = int(table.tier)
        self.policy = policy
        self._heaps: tuple[list[tuple[Any, int, Node]], list[tuple[Any, int, Node]]] = ([], [])
        self._bounds = [_SMALL_HEAP, _SMALL_HEAP]  # entries at which each heap is rid of stale ones
        self._number = 0

    def is_candidate(self, node: Node) -> bool:
        """Whether its last page could be taken now."""
        tier = self.tier
        resident = node.resident[tier]
        if not resident or node.below[tier] or not node.alive or not node.tree.live:
            return False
        slots = node.slots[tier]
        return len(slots) == resident and not self.table.pins[slots[-1]]

    def is_dirty(self, node: Node) -> bool:
        """Whether its last resident page has no copy below."""
        tier = self.tier
        resident = node.resident[tier]
        return resident > node.believed and (tier == _HOST or resident > node.resident[_HOST])

    def clean(self, node: Node) -> int:
        """How many leading pages of a node have a copy below this tier."""
        return node.believed if self.tier == _HOST else max(node.resident[_HOST], node.believed)

    def file(self, node: Node) -> None:
        """Make it a candidate if it is one. Cheap, harmless when repeated."""
        tier = self.tier
        dirty = self.is_dirty(node)
        if (node.filed[tier] and node.filed_dirty[tier] == dirty) or not self.is_candidate(node):
            return
        heap = self._heaps[dirty]
        if len(heap) >= self._bounds[dirty]:
            # Stale entries keep dead nodes in memory, and those what is above them, until something is evicted.
            heap[:] = [entry for entry in heap if entry[2].filed[tier] == entry[1]]
            heapq.heapify(heap)
            self._bounds[dirty] = max(_SMALL_HEAP, 2 * len(heap))
        self._number += 1
        node.filed[tier] = self._number
        node.filed_dirty[tier] = dirty
        heapq.heappush(heap, (self.policy(node), self._number, node))

    def refile(self, node: Node) -> None:
        """File it anew if it is filed: its copies below have changed."""
        if node.filed[self.tier]:
            self.file(node)

    def unfile(self, node: Node) -> None:
        """Forget its entry; the heap drops it later."""
        node.filed[self.tier] = 0

    def coldest(self, *, dirty: bool, older_than: Any = None) -> Node | None:
        """The first valid candidate of its kind, left where it is; None if none is older than the given key."""
        heap = self._heaps[dirty]
        tier = self.tier
        while heap:
            key, number, node = heap[0]
            if node.filed[tier] != number:
                heapq.heappop(heap)
            elif not self.is_candidate(node):
                heapq.heappop(heap)
                node.filed[tier] = 0  # parked: what pins or covers it files it again
            elif self.policy(node) != key or self.is_dirty(node) != dirty:
                heapq.heappop(heap)
                node.filed[tier] = 0
                self.file(node)
            else:
                return None if older_than is not None and key >= older_than else node
        return None

    def take_coldest(self) -> Node | None:
        """The colder of the coldest clean and the coldest dirty candidate, its entry removed."""
        clean, dirty = self.coldest(dirty=False), self.coldest(dirty=True)
        if clean is None or (dirty is not None and self.policy(dirty) < self.policy(clean)):
            node, is_dirty = dirty, True
        else:
            node, is_dirty = clean, False
        if node is not None:
            heapq.heappop(self._heaps[is_dirty])
            node.filed[self.tier] = 0
        return node

    def entries(self) -> list[list[tuple[Any, int, int]]]:
        """The valid entries of both heaps as (key, number, node id). For checkpoints."""
        tier = self.tier
        return [[(key, n, node.id) for key, n, node in heap if node.filed[tier] == n] for heap in self._heaps]

    def restore(self, entries: list[list[tuple[Any, int, int]]], node: Callable[[int], Node]) -> None:
        """Put back what `entries` gave."""
        for heap, rows in zip(self._heaps, entries, strict=True):
            heap[:] = [(as_key(key), number, node(identity)) for key, number, identity in rows]
            heapq.heapify(heap)
            self._number = max(self._number, max((row[1] for row in rows), default=0))

    def __len__(self) -> int:
        """Entries in both heaps, stale ones included."""
        return len(self._heaps[0]) + len(self._heaps[1])
