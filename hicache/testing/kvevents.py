"""Consumers that rebuild residency from events, to be held against the residency that there is."""

from __future__ import annotations

from hicache.events import Cleared, Event, Stored
from hicache.records import Tier
from hicache.rpc.service import EventBatch
from hicache.sidecar.kv_wire import AllBlocksCleared, BlockBatch, BlockHash, BlockRemoved, BlockStored
from hicache.sidecar.residency import View

Place = tuple[bytes, int, Tier, bytes]
"""A page in a tier: namespace, generation, tier, page hash."""


def places(view: View) -> set[Place]:
    """All that a view has, looked at page by page."""
    return {
        (scope.namespace, scope.generation, tier, page_hash)
        for found in view.by_depth(view.scopes)
        for pages in (found or {}).values()
        for scope, page_hash, page in pages
        for tier in Tier
        if page[3] >> tier & 1
    }


class EventMirror:
    """What a watcher of the numbered stream knows.

    Attributes:
        pages: what is resident.
        next_number: number of the next event; 0 before the first batch.
        lost: how many events were lost, as told; `snapshots`: how often everything was told.
        events: what was applied, snapshots not counted.
        told: what the last snapshot said.
    """

    def __init__(self) -> None:
        self.pages: set[Place] = set()
        self.next_number = 0
        self.lost = self.snapshots = 0
        self.events: list[Event] = []
        self.told: list[Event] = []
        self._in_snapshot = self._wrong = False

    @property
    def incomplete(self) -> bool:
        """Whether what it knows is wrong: events were lost, or a snapshot has not ended."""
        return self._in_snapshot or self._wrong

    def apply(self, batch: EventBatch) -> None:
        """Take a batch over. Gaps that are not told, and changes that are none, are refused."""
        if batch.lost:
            self.lost += batch.lost
            self._wrong = True
            return
        if batch.snapshot:
            if not self._in_snapshot:
                self.pages.clear()
                self.told.clear()
                self.snapshots += 1
            self.told += batch.events
            self._in_snapshot = not batch.snapshot_end
            self.next_number = batch.sequence
            self._wrong = False
        else:
            assert not self._in_snapshot, "a snapshot was not ended"
            assert not self._wrong, "events were lost, and no snapshot followed"
            assert batch.sequence == self.next_number, f"{batch.sequence} after {self.next_number}"
            self.next_number += len(batch.events)
            self.events += batch.events
        for event in batch.events:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        if isinstance(event, Cleared):
            gone = {place for place in self.pages if place[:2] == (event.namespace, event.generation)}
            assert gone, "cleared, though nothing was there"
            self.pages -= gone
            return
        told = {(event.namespace, event.generation, event.tier, page_hash) for page_hash in event.page_hashes}
        assert len(told) == len(event.page_hashes) > 0
        if isinstance(event, Stored):
            assert not told & self.pages, "stored twice"
            self.pages |= told
        else:
            assert told <= self.pages, "removed before it was stored"
            self.pages -= told


class BlockMirror:
    """What a router knows of one publisher, by medium.

    Attributes:
        blocks: (medium, hash) of what is resident.
        tokens: tokens of each block that was described.
        parents: hash before each block that was stored.
        cleared: how often all blocks were cleared.
    """

    def __init__(self) -> None:
        self.blocks: set[tuple[str | None, BlockHash]] = set()
        self.tokens: dict[BlockHash, tuple[int, ...]] = {}
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.cleared = 0

    def apply(self, batch: BlockBatch) -> None:
        """Take a message over."""
        stores = False
        for event in batch.events:
            if isinstance(event, BlockStored):
                stores = True
                self._store(event)
                continue
            assert not stores, "in one message removals come first"
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.cleared += 1
            elif isinstance(event, BlockRemoved):
                self.blocks -= {(event.medium, block) for block in event.block_hashes}

    def _store(self, event: BlockStored) -> None:
        before = event.parent_block_hash
        assert len(event.token_ids) in (0, event.block_size * len(event.block_hashes))
        for number, block in enumerate(event.block_hashes):
            self.blocks.add((event.medium, block))
            self.parents[block] = before
            if event.token_ids:
                first = number * event.block_size
                self.tokens[block] = event.token_ids[first : first + event.block_size]
            before = block
