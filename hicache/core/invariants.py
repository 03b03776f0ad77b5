"""The invariants of the core, checked against the structures themselves. Slow: for tests and idle hooks.

Each check recomputes from the trees, the leases and the transfers what the running counters and indices claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from hicache.core.registry import DEVICE, HOST, Registry
from hicache.core.residency import SlotState, SlotTable
from hicache.core.segments import is_protected
from hicache.core.transfers import TransferKind
from hicache.errors import HicacheInternalError

if TYPE_CHECKING:
    from hicache.core.copies import Copies
    from hicache.core.node import Node
    from hicache.core.room import Room
    from hicache.core.transferlog import TransferLog
    from hicache.core.transfers import Lease, PinSet
    from hicache.core.tree import HiRadixTree

_TIERS = (DEVICE, HOST)


def _must(holds: bool | np.bool_, what: str) -> None:
    if not holds:
        raise HicacheInternalError(f"broken invariant: {what}")


def check(copies: Copies, log: TransferLog, room: Room, trees: Iterable[HiRadixTree], leases: Iterable[Lease]) -> None:
    """Raise HicacheInternalError at the first invariant that does not hold."""
    registry = copies.registry
    live = list(trees)
    nodes = [node for tree in live for node in preorder(tree)]
    for node in nodes:
        _check_node(registry, node)
    _check_ids(registry, room, nodes, live)
    for tier in _TIERS:
        _check_slots(registry, room, tier, nodes)
        _check_totals(registry, tier, live, nodes)
        _check_evictable(registry.tables[tier], tier, live)
        _check_waits(copies, log, tier)
        _check_protected(registry, tier, nodes)
    _check_pins(registry, log, leases)
    _must(registry.stub_pages == sum(node.stubs for node in nodes), "stub pages are miscounted")
    for tree in live:
        flying = {
            page.hash
            for transfer in log.open.values()
            if transfer.kind is TransferKind.PUT and transfer.tree is tree
            if not transfer.completed and not transfer.orphaned
            for page in transfer.pages
        }
        _must(tree.putting == flying, "puts in flight differ from what the tree says")
    if not registry.stores:
        _must(not registry.tables[HOST].stored.any(), "pages count as stored, and there is no storage")
        believed = any(node.believed for node in nodes)
        _must(registry.forgetting is not None or not believed, "beliefs about a storage that was detached are left")


def preorder(tree: HiRadixTree) -> Iterator[Node]:
    """All nodes of a tree but its root, parents first."""
    todo = list(tree.root.children.values())
    while todo:
        node = todo.pop()
        yield node
        todo += node.children.values()


def _check_node(registry: Registry, node: Node) -> None:
    tree, parent, where = node.tree, node.parent, f"node {node.id} at depth {node.first}"
    _must(node.alive and registry.nodes[node.id] is node, f"{where} is not registered")
    _must(0 < node.pages <= tree.span_pages, f"{where} has {node.pages} pages")
    _must(len(node.span) == node.pages * tree.width, f"{where}: span and pages differ")
    size = tree.hasher.size
    _must(len(node.hashes) <= node.pages * size and len(node.hashes) % size == 0, f"{where}: odd hashes")
    assert parent is not None
    _must(parent.children.get(node.span[: tree.width]) is node, f"{where} is not its parent's child")
    _must(node.first == parent.first + parent.pages, f"{where} does not follow its parent")
    _must(0 <= node.believed <= node.pages, f"{where} believes {node.believed} of {node.pages} pages")
    _must(bool(node.children) or max(node.held, node.believed) == node.pages, f"{where} keeps pages that nothing holds")
    _must(node.stubs == (max(0, node.believed - node.held) if registry.config.storage else 0), f"{where}: stubs")
    for tier in _TIERS:
        _check_copies(registry, node, tier, f"{where}, tier {tier}")


def _check_copies(registry: Registry, node: Node, tier: int, where: str) -> None:
    table, slots, resident, parent = registry.tables[tier], node.slots[tier], node.resident[tier], node.parent
    held = len(slots)
    _must(0 <= resident <= held <= node.pages, f"{where}: {resident} resident of {held} held of {node.pages}")
    assert parent is not None
    if held and not parent.is_root():
        _must(len(parent.slots[tier]) == parent.pages, f"{where}: held, but its parent is not")
    if resident and not parent.is_root():
        _must(parent.resident[tier] == parent.pages, f"{where}: resident, but its parent is not")
    below = sum(1 for child in node.children.values() if len(child.slots[tier]))
    _must(node.below[tier] == below, f"{where}: {below} children hold something, {node.below[tier]} counted")
    if held:
        _must((table.owner[slots] == node.id).all(), f"{where}: a slot names another owner")
        _must((table.depth[slots] == node.first + np.arange(held)).all(), f"{where}: a slot names another depth")
        _must((table.state[slots[:resident]] == SlotState.RESIDENT).all(), f"{where}: resident by index, not by state")
        _must((table.state[slots[resident:]] == SlotState.FILLING).all(), f"{where}: filling by index, not by state")
        _must((table.pins[slots[resident:]] > 0).all(), f"{where}: FILLING and unpinned")
        if held > resident and (parent.is_root() or parent.resident[tier] == parent.pages):
            _must(not table.verified[slots[resident]], f"{where}: verified behind a resident page, yet not visible")
    candidates = registry.candidates[tier]
    if candidates.is_candidate(node):
        _must(node.filed[tier] > 0, f"{where}: could be evicted, but is not filed")
        if not candidates.is_dirty(node):
            _must(not node.filed_dirty[tier], f"{where}: clean, but filed as dirty")


def _check_ids(registry: Registry, room: Room, nodes: list[Node], trees: list[HiRadixTree]) -> None:
    buried = sum(1 for grave in room.graves for _ in _unswept(grave.todo))
    known = sum(1 for node in registry.nodes if node is not None)
    _must(known == len(nodes) + len(trees) + buried == registry.living, "registered nodes differ from those in trees")


def _unswept(todo: list[Node]) -> Iterator[Node]:
    todo = list(todo)
    while todo:
        node = todo.pop()
        yield node
        todo += node.children.values()


def _check_slots(registry: Registry, room: Room, tier: int, nodes: list[Node]) -> None:
    table = registry.tables[tier]
    attached = [node.slots[tier] for node in nodes] + [
        node.slots[tier] for grave in room.graves for node in _unswept(grave.todo)
    ]
    slots = np.concatenate(attached) if attached else np.empty(0, np.int64)
    _must(len(np.unique(slots)) == len(slots), f"tier {tier}: a slot is in two places of the trees")
    _must((table.owner >= 0).sum() == len(slots), f"tier {tier}: slots name owners that do not hold them")
    free = table.free[: table.counts[SlotState.FREE]]
    _must(len(np.unique(free)) == len(free), f"tier {tier}: a slot is twice in the free list")
    _must((table.state[free] == SlotState.FREE).all(), f"tier {tier}: the free list has slots that are not free")
    _must((table.pins >= 0).all(), f"tier {tier}: negative pins")
    _must((table.pins[table.state == SlotState.FREE] == 0).all(), f"tier {tier}: pinned although free")
    _must((table.pins[table.state == SlotState.QUARANTINED] > 0).all(), f"tier {tier}: quarantined for nobody")


def _check_totals(registry: Registry, tier: int, trees: list[HiRadixTree], nodes: list[Node]) -> None:
    table = registry.tables[tier]
    counted = np.bincount(table.state, minlength=len(SlotState)).tolist()
    resident = sum(node.resident[tier] for node in nodes)
    filling = sum(len(node.slots[tier]) for node in nodes) - resident
    # Unswept slots of cleared trees keep their state, but count as quarantined.
    counted[SlotState.QUARANTINED] += counted[SlotState.RESIDENT] - resident + counted[SlotState.FILLING] - filling
    counted[SlotState.RESIDENT], counted[SlotState.FILLING] = resident, filling
    _must(table.counts == counted, f"tier {tier}: counts {table.counts} differ from states {counted}")
    _must(sum(table.counts) == table.capacity, f"tier {tier}: conservation: {table.counts} of {table.capacity}")
    _must(resident == sum(tree.resident[tier] for tree in trees), f"tier {tier}: resident pages by tree")
    _must(filling == sum(tree.filling[tier] for tree in trees), f"tier {tier}: filling pages by tree")
    pinned = sum(int(np.count_nonzero(table.pins[node.slots[tier][: node.resident[tier]]])) for node in nodes)
    _must(table.pinned == pinned == sum(tree.pinned[tier] for tree in trees), f"tier {tier}: pinned pages")


def _check_evictable(table: SlotTable, tier: int, trees: list[HiRadixTree]) -> None:
    """What can be evicted leaf-first, by brute force, is what the counters say."""
    evictable = 0
    for tree in trees:
        blocked: dict[int, bool] = {}
        for node in reversed(list(preorder(tree))):
            stop = any(blocked[child.id] for child in node.children.values())
            for i in range(len(node.slots[tier]) - 1, -1, -1):
                slot = node.slots[tier][i]
                if table.pins[slot] or (i >= node.resident[tier] and not table.verified[slot]):
                    stop = True
                elif i < node.resident[tier]:
                    evictable += not stop
            blocked[node.id] = stop
    _must(table.evictable == evictable, f"tier {tier}: {evictable} evictable, {table.evictable} counted")


def _check_protected(registry: Registry, tier: int, nodes: list[Node]) -> None:
    if registry.protected is None:
        return
    segment = registry.protected[tier]
    found = {node: node.resident[tier] for node in nodes if node.resident[tier] and is_protected(node, tier)}
    _must(segment.counted() == found, f"tier {tier}: other nodes are protected than counted")
    _must(segment.pages == sum(found.values()), f"tier {tier}: protected pages are miscounted")


def _check_waits(copies: Copies, log: TransferLog, tier: int) -> None:
    table, waits = copies.registry.tables[tier], copies.waiting_transfers(tier)
    _must(set(np.flatnonzero(table.waiting).tolist()) == set(waits), f"tier {tier}: wait marks without a transfer")
    for slot, transfer in waits.items():
        _must(transfer.completed and log.open.get(transfer.id) is transfer, f"{transfer} waits, but is not open")
        _must(table.state[slot] == SlotState.FILLING, f"{transfer} waits for a slot that is not filling")
    waiting = {transfer.id for transfer in waits.values()}
    for transfer in log.open.values():
        if transfer.completed and transfer.kind.target == tier:
            _must(transfer.id in waiting, f"{transfer} is completed and waits for nothing")


def _check_pins(registry: Registry, log: TransferLog, leases: Iterable[Lease]) -> None:
    """Pins equal the sets that leases and transfers hold, slot by slot."""
    holders: Counter[int] = Counter()
    sets: dict[int, PinSet] = {}
    tips = [pins for lease in leases for pins in (*lease.pins, *lease.spare_pins) if pins is not None]
    tips += [pins for transfer in log.open.values() for pins in transfer.pins]
    for tip in tips:
        holders[id(tip)] += 1
        for link in tip.links():
            if id(link) in sets:
                break
            sets[id(link)] = link
            if link.base is not None:
                holders[id(link.base)] += 1
    pins = [np.zeros(registry.tables[tier].capacity, np.int32) for tier in _TIERS]
    for link in sets.values():
        _must(link.holders == holders[id(link)], "a pin set has other holders than it counts")
        pins[link.tier][link.slots] += 1
    for transfer in log.open.values():
        pins[registry.top][transfer.private] += 1
    for tier in _TIERS:
        _must((pins[tier] == registry.tables[tier].pins).all(), f"tier {tier}: pins without an owner")
