"""A node: a run of pages without a branch, and where each of them is."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from hicache.core.residency import NO_SLOTS, Slots

if TYPE_CHECKING:
    from hicache.core.tree import HiRadixTree


_NEVER = (0, 0)


class Node:
    """A run of consecutive pages.

    Residency in an owned tier is one array and one integer: `slots[tier]` holds the leading pages that are filling or
    resident there, of which the first `resident[tier]` are visible. `believed` says the same of STORAGE. Eviction,
    publication and loading move these numbers; the states of the slots are the truth that they index.

    Attributes:
        tree: the tree (one generation of one namespace) that it belongs to.
        id: its place in the registry of nodes; slots name their owner by it.
        span: the pages' symbols, `pages * width` bytes.
        pages: number of pages, 1 or more (0 for a root).
        first: depth of its first page.
        hashes: page hashes, glued together, of as many leading pages as have been needed.
        parent, children: the tree; children by their first symbol.
        slots, resident: per owned tier, see above.
        believed: leading pages believed to be in STORAGE.
        below: per owned tier, how many children hold slots there.
        stubs: pages here that only STORAGE is believed to have.
        stub_filed: whether it has an entry in the heap of such nodes.
        stamp: recency, in ticks of the core's own counter.
        hits: requests that used it, counted at their close.
        heat: frequency with forgetting (see `hicache.core.eviction`).
        demoted: per owned tier, the tick at which it last lost its protection there (see `hicache.core.segments`).
        priority: the highest priority of a request that used it.
        filed: per owned tier, the number of its valid entry in the candidates' heap, 0 if none.
        filed_dirty: per owned tier, whether that entry is in the heap of dirty ones.
        touched: when STORAGE was last told that its pages are in use, by the caller's clock.
        alive: False once it has left the tree.
    """

    __slots__ = (
        "alive",
        "believed",
        "below",
        "children",
        "demoted",
        "filed",
        "filed_dirty",
        "first",
        "hashes",
        "heat",
        "hits",
        "id",
        "pages",
        "parent",
        "priority",
        "resident",
        "slots",
        "span",
        "stamp",
        "stub_filed",
        "stubs",
        "touched",
        "tree",
    )

    def __init__(self, tree: HiRadixTree, parent: Node | None, span: bytes, pages: int, first: int) -> None:
        self.tree = tree
        self.id = -1
        self.span = span
        self.pages = pages
        self.first = first
        self.hashes = b""
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.slots: list[Slots] = [NO_SLOTS, NO_SLOTS]
        self.resident = [0, 0]
        self.believed = 0
        self.below = [0, 0]
        self.stubs = 0
        self.stub_filed = False
        self.stamp = 0
        self.hits = 0
        self.heat = 0.0
        self.demoted = _NEVER
        self.priority = 0
        self.touched = -inf
        self.filed = [0, 0]
        self.filed_dirty = [False, False]
        self.alive = True

    @property
    def held(self) -> int:
        """Leading pages that an owned tier holds, filling or resident."""
        device, host = self.slots
        return max(len(device), len(host))

    def is_root(self) -> bool:
        """Whether it is the pageless root of its tree."""
        return self.parent is None


Path = list[tuple[Node, int]]
"""Nodes from the root downwards, each with how many of its leading pages are meant; all but the last one whole."""
