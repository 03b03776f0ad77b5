"""Segmented LRU: what was used again is protected, up to a share of its tier.

A page begins in probation; a second use protects it. When more pages are protected than the share allows, the least
recently used of them go back to the head of probation, where a further use protects them again and others go first (R.
Karedla, J. S. Love and B. G. Wherry, "Caching strategies to improve disk system performance", Computer 27(3), 1994).
Here the unit is the node: it goes back as a whole, deeper ones before those above them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from math import ceil, inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache.core.eviction import Candidates, Policy
    from hicache.core.node import Node
    from hicache.core.tree import HiRadixTree

_SMALL_HEAP = 64


def is_protected(node: Node, tier: int) -> bool:
    """Whether it was used more than once, and since it last went back to probation in that tier."""
    return node.hits > 1 and node.stamp > node.demoted[tier]


def segmented(tier: int) -> Policy:
    """The policy `slru` as one tier sees it: its own segments."""

    def key(node: Node) -> Any:
        stamp, demoted = node.stamp, node.demoted[tier]
        return (True, stamp) if node.hits > 1 and stamp > demoted else (False, max(stamp, demoted))

    return key


class Protected:
    """The protected segment of one tier. Not thread-safe.

    Args:
        tier: index of the tier.
        capacity: pages of the tier; None is without limit.
        share: of them that may be protected.

    Attributes:
        bound: pages that may be protected.
        pages: pages that are, of live trees.
    """

    __slots__ = ("_by_node", "_by_tree", "_filed", "_heap", "_number", "_tier", "bound", "pages")

    def __init__(self, tier: int, capacity: int | None, share: float) -> None:
        self._tier = tier
        self.bound = inf if capacity is None else ceil(capacity * share)
        self.pages = 0
        self._by_node: dict[Node, int] = {}
        self._by_tree: Counter[HiRadixTree] = Counter()
        self._heap: list[tuple[int, int, int, Node]] = []  # oldest first; looked at again when popped
        self._filed: set[Node] = set()
        self._number = 0

    def count(self, node: Node) -> None:
        """Bring the count up to date after the node's uses or pages have changed."""
        tier, tree = self._tier, node.tree
        if not tree.live:
            self._by_node.pop(node, None)
            return
        pages = node.resident[tier] if node.alive and is_protected(node, tier) else 0
        before = self._by_node.get(node, 0)
        if pages == before:
            return
        self.pages += pages - before
        self._by_tree[tree] += pages - before
        if not pages:
            del self._by_node[node]
            return
        self._by_node[node] = pages
        if node not in self._filed:
            self._file(node)

    def forget(self, tree: HiRadixTree) -> None:
        """A tree was cleared. O(1); its nodes go when they are swept."""
        self.pages -= self._by_tree.pop(tree, 0)

    def shrink(self, candidates: Candidates, tick: int) -> None:
        """Send the least recently used back to probation, as used at `tick`, until the others are within the bound."""
        while self.pages > self.bound:
            stamp, _, _, node = heapq.heappop(self._heap)
            self._filed.discard(node)
            if node not in self._by_node or not node.tree.live:
                continue
            if node.stamp != stamp:
                self._file(node)
                continue
            demoted = list(node.demoted)
            demoted[self._tier] = tick
            node.demoted = (demoted[0], demoted[1])
            self.count(node)
            candidates.unfile(node)
            candidates.file(node)

    def counted(self) -> dict[Node, int]:
        """Protected pages by node, those of cleared trees left out. For the invariants' checker."""
        return {node: pages for node, pages in self._by_node.items() if node.tree.live}

    def _file(self, node: Node) -> None:
        heap = self._heap
        if len(heap) > _SMALL_HEAP and len(heap) > 2 * len(self._by_node):
            # Entries of nodes that are no more protected keep them in memory.
            heap[:] = [entry for entry in heap if entry[3] in self._by_node]
            heapq.heapify(heap)
            self._filed = {entry[3] for entry in heap}
        self._filed.add(node)
        self._number += 1  # of two at the same place one is there no more
        heapq.heappush(heap, (node.stamp, -node.first, self._number, node))
