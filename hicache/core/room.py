"""Where slots come from: free ones, then cleared ones that wait to be swept, then eviction."""

from __future__ import annotations

from hicache.core.copies import Copies
from hicache.core.node import Node
from hicache.core.registry import DEVICE, HOST, Registry
from hicache.core.residency import FREE, NO_SLOTS, Slots
from hicache.core.tree import HiRadixTree
from hicache.records import MissReason

SWEEP_PAGES = 8192
"""Pages swept in one step, in few nodes; fewer where nodes are short or pages are remembered. About a millisecond."""

# Measured, in pages that are only freed: 0.1 us each.
_NODE_COST = 100
_MOURNED_COST = 5


class Grave:
    """A cleared tree whose slots are still to be freed, node by node.

    Attributes:
        tree: the dead tree; its `resident`, `filling` and `pinned` count what is not swept yet.
        todo: nodes whose subtrees are still to be swept.
        mourned: pages that may still be remembered as gone, so that a huge clear costs no hashing of all.
    """

    __slots__ = ("mourned", "todo", "tree")

    def __init__(self, tree: HiRadixTree, mourned: int) -> None:
        self.tree = tree
        self.todo: list[Node] = [tree.root]
        self.mourned = mourned

    def loose(self, tier: int) -> int:
        """Unswept slots that nothing pins."""
        tree = self.tree
        return tree.resident[tier] + tree.filling[tier] - tree.pinned[tier]

    def left(self) -> int:
        """Unswept slots of both tiers."""
        return sum(self.tree.resident) + sum(self.tree.filling)


class Room:
    """Takes slots for transfers and requests. Not thread-safe.

    Attributes:
        graves: cleared trees that are not swept yet.
    """

    __slots__ = ("_copies", "_registry", "graves")

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._registry: Registry = copies.registry
        self.graves: list[Grave] = []

    def available(self, tier: int) -> int:
        """Slots that could be taken now: free, evictable, or cleared and unpinned. O(1)."""
        table = self._registry.tables[tier]
        loose = sum(grave.loose(tier) for grave in self.graves)
        return table.counts[FREE] + table.evictable + loose

    def take(self, tier: int, pages: int, *, older_than: object = None) -> Slots:
        """Up to `pages` PRIVATE slots. Evicts the clean, then the dirty, of what is older than the given key.

        Whoever needs all or nothing asks `available` first. Nodes that the caller knows may have been trimmed or
        merged afterwards, unless they are pinned, and even then they may have been merged.
        """
        table = self._registry.tables[tier]
        if tier == self._registry.top:
            self._registry.grow_older(pages)
        free = table.counts[FREE]
        if free < pages and not table.growing:
            while self.graves and table.counts[FREE] < pages:
                self.sweep(SWEEP_PAGES)
            if table.counts[FREE] < pages:
                self._copies.evict(tier, pages - table.counts[FREE], older_than=older_than)
            pages = min(pages, table.counts[FREE])
        return table.allocate(pages)

    def bury(self, tree: HiRadixTree) -> None:
        """A tree was cleared: in O(1) its slots count as quarantined, and will be swept."""
        for tier in (DEVICE, HOST):
            table = self._registry.tables[tier]
            table.bury(filling=tree.filling[tier], resident=tree.resident[tier], pinned=tree.pinned[tier])
            tree.pinned[tier] += tree.filling[tier]  # every FILLING page is pinned
            if self._registry.protected is not None:
                self._registry.protected[tier].forget(tree)
        self.graves.append(Grave(tree, self._registry.config.ghost_pages))

    def sweep(self, pages: int) -> int:
        """Free cleared slots, in about the time that `pages` of them in one node take. Returns how many are left."""
        while self.graves and pages > 0:
            grave = self.graves[0]
            if not grave.todo:
                self.graves.pop(0)
                continue
            pages -= self._sweep_node(grave, grave.todo.pop())
        while self.graves and not self.graves[0].todo:
            self.graves.pop(0)
        return sum(grave.left() for grave in self.graves)

    def _sweep_node(self, grave: Grave, node: Node) -> int:
        """Free one node's slots. Returns what that cost, in pages that are only freed."""
        tree = grave.tree
        grave.todo += node.children.values()
        cost = _NODE_COST + node.pages
        if grave.mourned > 0 and node.pages:
            grave.mourned -= node.pages
            cost += _MOURNED_COST * node.pages
            hashes = tree.hashes(node, 0, node.pages)
            self._registry.ghosts.add(tree.namespace, hashes, MissReason.EXPIRED, tick=self._registry.tick)
        for tier in (DEVICE, HOST):
            slots = node.slots[tier]
            if not len(slots):
                continue
            loose = self._registry.tables[tier].sweep(slots)
            tree.pinned[tier] -= len(slots) - len(loose)
            tree.resident[tier] -= node.resident[tier]
            tree.filling[tier] -= len(slots) - node.resident[tier]
            node.slots[tier] = NO_SLOTS
        node.children = {}  # whoever still knows the node must not keep all below it in memory
        self._registry.leave(node)
        return cost
