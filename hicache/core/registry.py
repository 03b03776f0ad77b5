"""What all trees of one core share: slot tables, nodes by number, candidates, and the memory of pages gone."""

from __future__ import annotations

import heapq
from math import inf
from typing import TYPE_CHECKING, Any

from hicache.core.eviction import HALF_LIFE, Candidates, as_key, heated, policy_named
from hicache.core.ghosts import Ghosts
from hicache.core.residency import SlotTable, Words
from hicache.core.segments import Protected, segmented
from hicache.records import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.core.config import CoreConfig
    from hicache.core.node import Node, Path
    from hicache.core.residency import Slots
    from hicache.core.tree import HiRadixTree
    from hicache.events import Event

DEVICE, HOST = int(Tier.DEVICE), int(Tier.HOST)


class Registry:
    """Shared state of the trees. Not thread-safe: the caller holds the one lock.

    Attributes:
        config: the core's settings.
        tables: slot tables of DEVICE and HOST; a tier that is left out has no slots.
        top: the highest owned tier, in which requests have their slots.
        candidates: candidates for eviction of DEVICE and HOST.
        nodes: nodes by id; None where an id is free.
        free_ids: ids to be given again, the last one first.
        ghosts: pages gone, and why.
        tick: the core's own clock: it counts uses, not time.
        age: half-lives of a use for `lfu` that have passed.
        protected: the protected segments of DEVICE and HOST for `slru`, else None.
        events: residency events since they were last taken.
        stub_pages: pages in all live trees that only STORAGE is believed to have.
        stores: whether STORAGE is attached now; never without `config.storage`.
        forgetting: after a detach, the next node whose belief is to be dropped, and whether this pass found any;
            None when nothing is left.
        tokens: gives the tokens of pages in HOST slots, for events of trees of hashes; None where symbols are tokens.
        hits_that_matter: uses of a node above this are told apart by no policy, so they part no nodes.
        living: nodes registered now, roots and unswept ones included.
        evicted, dropped_dirty: pages evicted per owned tier; of those, pages that left no copy below.
    """

    __slots__ = (
        "_keep_heat",
        "_pages_a_half_life",
        "_stub_heap",
        "_stub_number",
        "age",
        "candidates",
        "config",
        "dropped_dirty",
        "events",
        "evicted",
        "forgetting",
        "free_ids",
        "ghosts",
        "hits_that_matter",
        "living",
        "nodes",
        "policy",
        "protected",
        "stores",
        "stub_pages",
        "tables",
        "tick",
        "tokens",
        "top",
    )

    def __init__(self, config: CoreConfig, words: Words | None = None) -> None:
        self.config = config
        self.policy = policy_named(config.eviction)
        self.protected: tuple[Protected, Protected] | None = None
        policies = (self.policy, self.policy)
        if config.eviction == "slru":
            policies = (segmented(DEVICE), segmented(HOST))
            self.protected = (
                Protected(DEVICE, config.device_pages, config.protected_share),
                Protected(HOST, config.host_pages, config.protected_share),
            )
        self.tables = (
            SlotTable(Tier.DEVICE, config.device_pages),
            SlotTable(Tier.HOST, config.host_pages, words),
        )
        self.top = HOST if config.device_pages == 0 else DEVICE
        self.candidates = (
            Candidates(self.tables[DEVICE], policies[DEVICE]),
            Candidates(self.tables[HOST], policies[HOST]),
        )
        self.nodes: list[Node | None] = []
        self.free_ids: list[int] = []
        self.ghosts = Ghosts(config.ghost_pages)
        self.tick = 0
        self.age = 0.0
        # A growing tier evicts nothing, so it forgets nothing.
        largest = max(config.device_pages or 0, config.host_pages)
        self._pages_a_half_life = inf if config.device_pages is None else max(1.0, HALF_LIFE * largest)
        self.events: list[Event] = []
        self.tokens: Callable[[Slots], bytes] | None = None
        self.stub_pages = 0
        self.stores = config.storage
        self.forgetting: tuple[int, bool] | None = None
        self.living = 0
        self.evicted = [0, 0]
        self.dropped_dirty = [0, 0]
        self._stub_heap: list[tuple[Any, int, Node]] = []
        self._stub_number = 0
        self._keep_heat = config.eviction not in {"lru", "slru", "priority"}
        edges = (config.device_to_host.hits, config.host_to_storage.hits)
        self.hits_that_matter = inf if self._keep_heat else max(2, *(hits or 0 for hits in edges))

    def enter(self, node: Node) -> None:
        """Give the node an id."""
        self.living += 1
        if self.free_ids:
            node.id = self.free_ids.pop()
            self.nodes[node.id] = node
        else:
            node.id = len(self.nodes)
            self.nodes.append(node)

    def leave(self, node: Node) -> None:
        """The node has left its tree and holds no slots."""
        node.alive = False
        self.living -= 1
        node.filed[DEVICE] = node.filed[HOST] = 0
        self.count_protected(node)
        self.nodes[node.id] = None
        self.free_ids.append(node.id)

    def node(self, number: int) -> Node:
        """The node with that id; it must exist."""
        node = self.nodes[number]
        assert node is not None
        return node

    def use(self, node: Node, priority: int, *, again: bool = False) -> None:
        """A request uses the node now; `again`: it has begun to before, and counts once."""
        if self._keep_heat and not again:
            node.heat = heated(node.heat, self.age)
        node.stamp = self.tick
        node.priority = max(node.priority, priority)
        if self.protected is not None:
            self.count_protected(node)

    def hit(self, path: Path) -> None:
        """A request that has used these nodes ends."""
        for node, _ in path:
            node.hits += 1
            self.count_protected(node)
        self.keep_shares()

    def grow_older(self, pages: int) -> None:
        """Requests take so many pages of the top tier: time, as `lfu` counts it."""
        self.age += pages / self._pages_a_half_life

    def recount(self, node: Node) -> None:
        """Bring the counts up to date after the node's pages, beliefs or place have changed."""
        if node.believed or node.stubs:
            self.count_stubs(node)
        if self.protected is not None:
            self.count_protected(node)

    # ---- pages that are protected

    def count_protected(self, node: Node) -> None:
        """Bring what `slru` counts up to date after the node's uses or pages have changed."""
        if self.protected is not None:
            for segment in self.protected:
                segment.count(node)

    def keep_shares(self) -> None:
        """Send back to probation what is protected beyond its share. The tree keeps its form."""
        if self.protected is not None:
            for segment, candidates in zip(self.protected, self.candidates, strict=True):
                segment.shrink(candidates, self.tick)

    def file(self, node: Node) -> None:
        """Make it a candidate in both owned tiers, where it is one."""
        self.candidates[DEVICE].file(node)
        self.candidates[HOST].file(node)

    # ---- pages that only storage has: a bounded memory, coldest leaf first

    def count_stubs(self, node: Node) -> None:
        """Bring `node.stubs` and the total up to date after its beliefs or slots have changed."""
        if not node.tree.live or not (node.believed or node.stubs):
            return
        stubs = max(0, node.believed - node.held) if node.alive else 0
        if stubs != node.stubs:
            self.stub_pages += stubs - node.stubs
            node.tree.stub_pages += stubs - node.stubs
            node.stubs = stubs
        if stubs and not node.children and not node.stub_filed:
            self._file_stub(node)

    def drop_stubs(self, tree: HiRadixTree) -> None:
        """A tree was cleared: its stubs count no more."""
        self.stub_pages -= tree.stub_pages

    def coldest_stub(self) -> Node | None:
        """The coldest leaf that has stub pages, its entry removed; None when none is left."""
        heap = self._stub_heap
        while heap:
            key, _, node = heapq.heappop(heap)
            node.stub_filed = False
            if not node.alive or not node.tree.live or not node.stubs or node.children:
                continue  # what makes it a leaf with stubs again files it again
            if self.policy(node) != key:
                self._file_stub(node)
                continue
            return node
        return None

    def stub_entries(self) -> list[tuple[Any, int, int]]:
        """The heap's entries that still mean something, as (key, number, node id). For checkpoints."""
        return [(key, number, node.id) for key, number, node in self._stub_heap if node.alive]

    def restore_stubs(self, entries: list[tuple[Any, int, int]]) -> None:
        """Put back what `stub_entries` gave."""
        self._stub_heap = [(as_key(key), number, self.node(node)) for key, number, node in entries]
        heapq.heapify(self._stub_heap)
        self._stub_number = max((entry[1] for entry in entries), default=0)

    def _file_stub(self, node: Node) -> None:
        heap = self._stub_heap
        if len(heap) > 64 and len(heap) > 2 * len(self.nodes):
            kept = []
            for entry in heap:
                if entry[2].alive and entry[2].stubs:
                    kept.append(entry)
                else:
                    entry[2].stub_filed = False  # else it would never be filed again
            heap[:] = kept
            heapq.heapify(heap)
        self._stub_number += 1
        node.stub_filed = True
        heapq.heappush(heap, (self.policy(node), self._stub_number, node))
