"""Writing down: DEVICE to HOST, HOST to STORAGE, by use, by eviction pressure, and before closing.

A write-back always covers a root-prefix: page k is written together with all in front of it that the tier below
lacks, so what is below is usable at any time. It makes room in HOST only from what is older than the page it writes;
otherwise a HOST smaller than DEVICE would never come to rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice, repeat
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from hicache.core.prompt import PageIdentity, Prompt, cut
from hicache.core.registry import DEVICE, HOST, Registry
from hicache.core.residency import FREE, Slots
from hicache.core.room import Room
from hicache.core.transferlog import TransferLog
from hicache.core.transfers import TransferKind

if TYPE_CHECKING:
    from hicache.core.node import Node, Path
    from hicache.core.transfers import PinSet
    from hicache.core.tree import HiRadixTree

_MOST_LOOKED_AT = 64
"""Candidates that one `flush` looks at per tier: it runs often, and what it leaves the next one finds."""


class Writer:
    """Plans writes. Not thread-safe."""

    __slots__ = ("_copies", "_log", "_registry", "_room", "draining")

    def __init__(self, log: TransferLog, room: Room) -> None:
        self._log = log
        self._room = room
        self._copies = log.copies
        self._registry = log.copies.registry
        self.draining: list[Node] | None = None  # nodes whose subtrees `drain` has still to visit

    # ---- by use

    def used(self, path: Path, pins: list[PinSet | None] | None = None) -> None:
        """Pages along the path were committed or used: write down what the policies ask for.

        `pins`: per owned tier, sets of whoever used them, which the writes may continue instead of pinning anew.
        """
        config = self._registry.config
        if not config.host_pages or not path:
            return
        # Puts first: making room for a write-back may change the nodes of the path.
        if self._registry.stores and config.host_to_storage.hits is not None:
            self.put(_used_at_least(path, config.host_to_storage.hits), pins=pins)
        if config.device_to_host.hits is not None:
            self.back_up(_used_at_least(path, config.device_to_host.hits), pins=pins)

    def filled(self, node: Node) -> None:
        """A transfer has filled pages of the node."""
        if node.alive and node.tree.live:
            self.used(node.tree.path_to(node))

    # ---- DEVICE to HOST

    def back_up(self, path: Path, *, pins: list[PinSet | None] | None = None) -> int:
        """Write what DEVICE has along the path and HOST has not. Returns the pages begun."""
        if not path or not self._registry.config.host_pages:
            return 0
        last_node, pages = path[-1]
        tree = last_node.tree
        if len(last_node.slots[HOST]) >= pages or not tree.resident[DEVICE]:
            return 0  # what HOST has is closed under prefixes
        device, resident = tree.held(path, DEVICE)
        host, _ = tree.held(path, HOST)
        at = len(host)
        if resident <= at:
            return 0
        copies = self._copies
        last = device[resident - 1]
        source = copies.pin(DEVICE, tree, device[:resident], None if pins is None else pins[DEVICE])
        target = copies.pin(HOST, tree, host, None if pins is None else pins[HOST])
        slots = self._room.take(
            HOST, resident - at, older_than=self._registry.candidates[HOST].policy(self._owner(DEVICE, last))
        )
        if not len(slots):
            copies.drop(source)
            copies.drop(target)
            return 0
        # Making room may have trimmed and merged nodes: find the path again, by what is pinned.
        end = at + len(slots)
        copies.fill_path(HOST, tree, self._path_to_slot(tree, DEVICE, device[end - 1]), slots)
        whole = copies.pin(HOST, tree, np.concatenate((host, slots)), target)
        copies.drop(target)
        self._log.begin(
            TransferKind.WRITE_BACK,
            tree,
            first=at,
            source_slots=device[at:end],
            target_slots=slots,
            pins=[source, whole],
        )
        return len(slots)

    # ---- HOST to STORAGE

    def put(self, path: Path, *, bounded: bool = True, pins: list[PinSet | None] | None = None) -> int:
        """Put what HOST has along the path and STORAGE is not believed to have. Returns the pages begun.

        Args:
            path: from the root on.
            bounded: begin no more than `write_pages` leaves room for.
            pins: as in `used`.
        """
        if not path or not self._registry.stores:
            return 0
        tree = path[0][0].tree
        resident = tree.resident_pages(path, HOST)
        believed = tree.believed_pages(path)
        if resident <= believed:
            return 0
        room = self._room_to_write() if bounded else resident
        if room <= 0:
            return 0
        host, _ = tree.held(path, HOST)
        missing = list(islice(self._missing(tree, path, host, believed, resident), room))
        most = self._registry.config.fetch_pages
        tip = None if pins is None else pins[HOST]
        for first in range(0, len(missing), most):
            tip = self._begin_put(tree, host, missing[first : first + most], tip)
        return len(missing)

    def _missing(self, tree: HiRadixTree, path: Path, host: Slots, first: int, end: int) -> Iterator[PageIdentity]:
        """Of the pages from index `first` to `end - 1` those that are neither stored nor on their way."""
        stored = self._registry.tables[HOST].stored[host[first:end]].tobytes()
        for identity in self._identities(tree, path, first, end):
            if not stored[identity.depth - first] and identity.hash not in tree.putting:
                yield identity

    def _room_to_write(self) -> int:
        most = self._registry.config.write_pages
        return sys.maxsize if most is None else most - self._log.writing

    def _begin_put(self, tree: HiRadixTree, host: Slots, batch: list[PageIdentity], tip: PinSet | None) -> PinSet:
        """One transfer. Returns its pin set, which the next one may continue."""
        first, end = batch[0].depth, batch[-1].depth + 1
        whole = end - first == len(batch)
        tree.putting.update([identity.hash for identity in batch])
        pins = self._copies.pin(HOST, tree, host[:end], tip)
        self._log.begin(
            TransferKind.PUT,
            tree,
            first=first,
            source_slots=host[first:end] if whole else host[[identity.depth for identity in batch]],
            pages=tuple(batch),
            pins=[pins],
        )
        return pins

    @staticmethod
    def _identities(tree: HiRadixTree, path: Path, first: int, end: int) -> Iterator[PageIdentity]:
        width = tree.width
        for node, pages in path:
            start = max(first - node.first, 0)
            stop = min(end - node.first, pages)
            if start >= stop:
                continue
            parent = tree.hashes(node, start - 1, start)[0] if start else tree.hash_before(node)
            hashes = tree.hashes(node, start, stop)
            depths = range(node.first + start, node.first + stop)
            symbols = cut(node.span[start * width : stop * width], width)
            yield from map(PageIdentity, hashes, [parent, *hashes[:-1]], depths, symbols)

    # ---- against eviction in storage

    def touch(self, tree: HiRadixTree, prompt: Prompt, now: float) -> int:
        """Tell storage that a prompt's pages are in use, if it is time. Returns the pages begun.

        What is hot above never reaches storage, which would evict just that. Pages are touched deepest first, so
        that the root is the newest; a page that is absent is put again from above.
        """
        path = tree.walk(prompt)
        pages = tree.believed_pages(path)
        while path and path[-1][0].first >= pages:
            path.pop()
        interval = self._registry.config.touch_seconds
        if not path or interval is None:
            return 0
        due = False
        for node, _ in path:
            if node.touched == -inf:
                node.touched = now  # its pages were put or read a moment ago: they are as new as a touch makes them
            elif now - node.touched >= interval:
                due = True
        if not due:
            return 0
        for node, _ in path:
            node.touched = now  # all of it, so that no page becomes newer than the one in front of it
        identities: list[PageIdentity] = []
        for node, whole in reversed(path):
            here = min(whole, pages - node.first)
            depths = range(node.first + here - 1, node.first - 1, -1)
            hashes = reversed(tree.hashes(node, 0, here))
            identities += map(PageIdentity, hashes, repeat(None), depths, repeat(b""))  # names are all that it takes
        self._log.begin(TransferKind.TOUCH, tree, first=0, pages=tuple(identities), pins=[], prompt=prompt)
        return pages

    def heal(self, node: Node) -> None:
        """Storage has lost pages of the node that it had: write them again, whatever the policies say."""
        if node.alive and node.tree.live:
            self.put(node.tree.path_to(node))
            self.back_up(node.tree.path_to(node))

    # ---- by eviction pressure

    def flush(self) -> int:
        """Keep the clean reserve of tiers that write on eviction. Returns the pages begun."""
        config = self._registry.config
        begun = 0
        if config.host_pages and config.device_to_host.on_eviction:
            begun += self._keep_reserve(DEVICE)
        if self._registry.stores and config.host_to_storage.on_eviction:
            begun += self._keep_reserve(HOST)
        return begun

    def _keep_reserve(self, tier: int) -> int:
        """Free slots plus the clean among the coldest candidates shall cover the reserve; write the dirty of them."""
        registry = self._registry
        table, candidates = registry.tables[tier], registry.candidates[tier]
        missing = int(registry.config.reserve * table.capacity) - table.counts[FREE]
        looked_at: list[Node] = []
        dirty: list[Node] = []
        while missing > 0 and len(looked_at) < _MOST_LOOKED_AT:
            node = candidates.take_coldest()
            if node is None:
                break
            looked_at.append(node)
            if candidates.is_dirty(node):
                dirty.append(node)
            missing -= node.resident[tier]
        for node in looked_at:
            candidates.file(node)
        begun = 0
        for node in dirty:
            if node.alive:
                path = node.tree.path_to(node)
                begun += self.back_up(path) if tier == DEVICE else self.put(path)
        return begun

    # ---- before closing

    def drain(self, trees: list[HiRadixTree], limit: int) -> int:
        """Begin writing what is still dirty and may be written at all, root first. Returns the pages begun.

        It goes on where it stopped; 0 means that a whole pass over all trees found nothing to begin.
        """
        begun = 0
        if self.draining is None:
            self.draining = [tree.root for tree in reversed(trees)]
        todo = self.draining
        while todo:
            node = todo.pop()
            todo += node.children.values()
            if node.pages and node.alive and node.tree.live:
                begun += self._write_down(node)
                if begun >= limit:
                    return begun
        self.draining = None
        return begun

    def _write_down(self, node: Node) -> int:
        config = self._registry.config
        begun = 0
        dirty = self._registry.stores and node.resident[HOST] > node.believed
        if dirty and _allowed(node, config.host_to_storage.hits):
            begun += self.put(node.tree.path_to(node), bounded=False)  # `limit` bounds it
        if node.resident[DEVICE] > len(node.slots[HOST]) and _allowed(node, config.device_to_host.hits):
            begun += self.back_up(node.tree.path_to(node))
        return begun

    # ---- finding

    def _owner(self, tier: int, slot: np.int64) -> Node:
        return self._registry.node(int(self._registry.tables[tier].owner[slot]))

    def _path_to_slot(self, tree: HiRadixTree, tier: int, slot: np.int64) -> Path:
        node = self._owner(tier, slot)
        return tree.path_to(node, int(self._registry.tables[tier].depth[slot]) - node.first + 1)


def _used_at_least(path: Path, hits: int) -> Path:
    """The leading nodes of the path that have had so many uses."""
    if hits <= 1 or all(node.hits >= hits for node, _ in path):
        return path
    return path[: next(i for i, (node, _) in enumerate(path) if node.hits < hits)]


def _allowed(node: Node, hits: int | None) -> bool:
    # None is "on eviction": closing evicts everything.
    return hits is None or node.hits >= hits


def unwritten(registry: Registry, trees: list[HiRadixTree]) -> int:
    """Pages that STORAGE should have by the policies, and is not believed to have. O(nodes)."""
    config = registry.config
    if not registry.stores:
        return 0
    pages, todo = 0, [tree.root for tree in trees]
    while todo:
        node = todo.pop()
        todo += node.children.values()
        goes_down = _allowed(node, config.device_to_host.hits)
        held = max(node.resident[HOST], node.resident[DEVICE] if goes_down else 0)
        if _allowed(node, config.host_to_storage.hits):
            pages += max(0, held - node.believed)
    return pages
