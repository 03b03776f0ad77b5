"""The whole state of a core as plain values, and back: where a recording begins when its start was thrown away.

The copy that is made back has the page hashes as its alphabet, so a checkpoint has no token in it. Everything that
decides what a core does next is kept: orders of children and of candidates, numbers, pins by set. Left out, as they
only choose words for a miss, are the pages remembered as gone and the sketch of first pages.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np

from hicache.core.cache import Core
from hicache.core.config import CoreConfig
from hicache.core.node import Node
from hicache.core.prompt import PageIdentity, Prompt, SymbolsAreHashes
from hicache.core.registry import DEVICE, HOST
from hicache.core.residency import SlotTable
from hicache.core.room import Grave
from hicache.core.transfers import Lease, PinSet, Transfer, TransferKind
from hicache.core.tree import HiRadixTree
from hicache.records import Match, MissReason

_TABLE_ARRAYS = ("state", "pins", "owner", "depth", "filler", "verified", "stored", "waiting", "free")
_NODE_PLAIN = ("pages", "first", "believed", "stubs", "stub_filed", "stamp", "hits", "heat", "priority", "alive")
_TREE_PLAIN = ("namespace", "generation", "live", "span_pages", "stub_pages")


class State(msgspec.Struct, array_like=True):
    """A core as plain values; numbers stand for trees, nodes, pin sets and leases."""

    config: CoreConfig
    registry: dict[str, Any]
    tables: list[dict[str, Any]]
    trees: list[dict[str, Any]]
    nodes: list[dict[str, Any]]
    pins: list[tuple[int, int, bytes, int, int]]
    leases: list[dict[str, Any]]
    transfers: list[dict[str, Any]]
    log: dict[str, Any]
    graves: list[tuple[int, list[int], int]]
    draining: list[int] | None


def encode(state: State) -> bytes:
    """As bytes (MessagePack)."""
    return msgspec.msgpack.encode(state)


def decode(data: bytes) -> State:
    """From bytes; raises `msgspec.MsgspecError` for anything else."""
    return msgspec.msgpack.decode(data, type=State)


# ---- taking


class Taker:
    """Turns a core into plain values. O(pages and nodes).

    Args:
        core: the core; not changed but for page hashes that had not been computed yet.
        trees, leases: numbers by which a recording calls them.
    """

    def __init__(self, core: Core, *, trees: dict[HiRadixTree, int], leases: dict[Lease, int]) -> None:
        self._core = core
        self._trees = trees
        self._leases = leases
        self._pins: dict[int, int] = {}
        self._pin_rows: list[tuple[int, int, bytes, int, int]] = []

    def state(self) -> State:
        """The state now."""
        core = self._core
        registry, log = core.registry, core.log
        graves = [(self._trees[grave.tree], [node.id for node in grave.todo], grave.mourned) for grave in core.graves]
        leases = [self._lease(lease, number) for lease, number in self._leases.items() if not lease.closed]
        transfers = [self._transfer(transfer) for transfer in log.open.values()]
        draining = core.draining
        return State(
            config=core.config,
            registry={
                "tick": registry.tick,
                "age": registry.age,
                "stores": registry.stores,
                "forgetting": registry.forgetting,
                "evicted": registry.evicted,
                "dropped_dirty": registry.dropped_dirty,
                "free_ids": registry.free_ids,
                "stubs": registry.stub_entries(),
                "filed": [candidates.entries() for candidates in registry.candidates],
                "ids": len(registry.nodes),
            },
            tables=[_table(table) for table in registry.tables],
            trees=[self._tree(tree, number) for tree, number in self._trees.items()],
            nodes=[self._node(node) for node in registry.nodes if node is not None],
            pins=self._pin_rows,
            leases=leases,
            transfers=transfers,
            log={
                "number": log.number,
                "waits": [{s: t.id for s, t in core.waiting(tier).items()} for tier in (DEVICE, HOST)],
                "pages": [(kind.name, good, pages) for (kind, good), pages in log.pages.items()],
            },
            graves=graves,
            draining=None if draining is None else [node.id for node in draining if node.alive],
        )

    def _tree(self, tree: HiRadixTree, number: int) -> dict[str, Any]:
        row = {name: getattr(tree, name) for name in _TREE_PLAIN}
        return row | {
            "number": number,
            "root": tree.root.id,
            "hash_size": tree.hasher.size,
            "resident": tree.resident,
            "filling": tree.filling,
            "pinned": tree.pinned,
            "putting": sorted(tree.putting),
            "current": tree in self._core.trees,
        }

    def _node(self, node: Node) -> dict[str, Any]:
        tree = node.tree
        row = {name: getattr(node, name) for name in _NODE_PLAIN}
        return row | {
            "id": node.id,
            "tree": self._trees[tree],
            "hashes": b"".join(tree.hashes(node, 0, node.pages)),
            "children": [child.id for child in node.children.values()],
            "slots": [slots.tobytes() for slots in node.slots],
            "resident": node.resident,
            "below": node.below,
            "filed": node.filed,
            "filed_dirty": node.filed_dirty,
            "touched": node.touched,
            "demoted": node.demoted,
        }

    def _pin(self, pins: PinSet | None) -> int:
        """Number of a set; those it continues come before it."""
        if pins is None:
            return -1
        for link in reversed(list(pins.links())):
            if id(link) not in self._pins:
                self._pins[id(link)] = len(self._pin_rows)
                base = -1 if link.base is None else self._pins[id(link.base)]
                self._pin_rows.append((link.tier, self._trees[link.tree], link.slots.tobytes(), base, link.holders))
        return self._pins[id(pins)]

    def _lease(self, lease: Lease, number: int) -> dict[str, Any]:
        return {
            "number": number,
            "tree": self._trees[lease.tree],
            "prompt": b"".join(lease.prompt.hashes(0, lease.prompt.pages)),
            "limit": lease.limit,
            "priority": lease.priority,
            "match": [lease.match.device, lease.match.host, lease.match.storage],
            "usable": lease.usable,
            "start": lease.start,
            "own": lease.own.tobytes(),
            "committed": lease.committed,
            "waiting": sorted(lease.waiting),
            "pins": [self._pin(pins) for pins in lease.pins],
            "spare": [self._pin(pins) for pins in lease.spare_pins],
            "failed_at": lease.failed_at,
            "failure": lease.failure.value,
            "writers": [writer.id for writer in lease.writers if len(writer.private)],
            "short_at": lease.short_at,
            "unanswered_at": lease.unanswered_at,
            "unanswered": lease.unanswered.value,
        }

    def _transfer(self, transfer: Transfer) -> dict[str, Any]:
        prompt = transfer.prompt
        return {
            "id": transfer.id,
            "kind": transfer.kind.name,
            "tree": self._trees[transfer.tree],
            "first": transfer.first,
            "source": None if transfer.source_slots is None else transfer.source_slots.tobytes(),
            "target": None if transfer.target_slots is None else transfer.target_slots.tobytes(),
            "pages": [(page.hash, page.parent, page.depth) for page in transfer.pages],
            "prompt": None if prompt is None else b"".join(prompt.hashes(0, prompt.pages)),
            "private": transfer.private.tobytes(),
            "completed": transfer.completed,
            "cancelled": transfer.cancelled,
            "orphaned": transfer.orphaned,
            "interest": [self._leases[lease] for lease in transfer.interest],
            "pins": [self._pin(pins) for pins in transfer.pins],
        }


def _table(table: SlotTable) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(table, name).tobytes() for name in _TABLE_ARRAYS}
    return row | {"capacity": table.capacity, "counts": table.counts, "pinned": table.pinned}


# ---- making


class Maker:
    """Makes a core from plain values.

    Attributes:
        core: the core.
        trees, leases: by number.
    """

    def __init__(self, state: State) -> None:
        self.core = Core(state.config)
        self.trees: dict[int, HiRadixTree] = {}
        self.leases: dict[int, Lease] = {}
        self._nodes: dict[int, Node] = {}
        self._pins: list[PinSet] = []
        registry = self.core.registry
        for table, row in zip(registry.tables, state.tables, strict=True):
            _fill_table(table, row)
        for row in state.trees:
            self._make_tree(row)
        registry.nodes = [None] * state.registry["ids"]  # the roots that the trees came with are replaced, too
        for row in state.nodes:
            self._make_node(row)
        for row in state.nodes:
            self._link(row)
        self._fill_registry(state.registry)
        for tier, tree, slots, base, holders in state.pins:
            pins = PinSet(tier, self.trees[tree], _slots(slots), self._pins[base] if base >= 0 else None)
            pins.holders = holders
            self._pins.append(pins)
        for row in state.leases:
            self._make_lease(row)
        self._fill_log(state)
        self.core.restore(
            trees=[self.trees[row["number"]] for row in state.trees if row["current"]],
            leases=list(self.leases.values()),
            graves=[self._grave(*row) for row in state.graves],
            draining=None if state.draining is None else [self._nodes[number] for number in state.draining],
        )

    def prompt(self, tree: HiRadixTree, hashes: bytes) -> Prompt:
        """A prompt of page hashes."""
        return Prompt(hashes, tree.width, tree.hasher)

    def _make_tree(self, row: dict[str, Any]) -> None:
        registry = self.core.registry
        size = row["hash_size"]
        hasher = SymbolsAreHashes(size)
        tree = HiRadixTree(registry, row["namespace"], generation=row["generation"], width=size, hasher=hasher)
        for name in _TREE_PLAIN:
            setattr(tree, name, row[name])
        tree.resident, tree.filling, tree.pinned = list(row["resident"]), list(row["filling"]), list(row["pinned"])
        tree.putting = set(row["putting"])
        self.trees[row["number"]] = tree

    def _make_node(self, row: dict[str, Any]) -> None:
        tree = self.trees[row["tree"]]
        node = Node(tree, None, row["hashes"], row["pages"], row["first"])
        for name in _NODE_PLAIN:
            setattr(node, name, row[name])
        node.id = row["id"]
        node.touched = row["touched"]
        node.demoted = tuple(row["demoted"])
        node.slots = [_slots(slots) for slots in row["slots"]]
        node.resident, node.below = list(row["resident"]), list(row["below"])
        node.filed, node.filed_dirty = list(row["filed"]), list(row["filed_dirty"])
        self._nodes[node.id] = self.core.registry.nodes[node.id] = node
        if not node.pages:
            tree.root = node

    def _link(self, row: dict[str, Any]) -> None:
        node = self._nodes[row["id"]]
        for number in row["children"]:
            child = self._nodes.get(number)
            if child is None:
                continue  # swept from under a cleared parent
            child.parent = node
            node.children[child.span[: node.tree.width]] = child

    def _fill_registry(self, row: dict[str, Any]) -> None:
        registry = self.core.registry
        registry.tick = row["tick"]
        registry.age = row["age"]
        for node in self._nodes.values():
            registry.count_protected(node)
        registry.stores = row["stores"]
        registry.forgetting = None if row["forgetting"] is None else tuple(row["forgetting"])
        registry.evicted, registry.dropped_dirty = list(row["evicted"]), list(row["dropped_dirty"])
        registry.free_ids[:] = row["free_ids"]
        registry.living = len(self._nodes)
        registry.stub_pages = sum(tree.stub_pages for tree in self.trees.values() if tree.live)
        registry.restore_stubs(row["stubs"])
        for candidates, entries in zip(registry.candidates, row["filed"], strict=True):
            candidates.restore(entries, registry.node)

    def _make_lease(self, row: dict[str, Any]) -> None:
        tree = self.trees[row["tree"]]
        lease = Lease(tree, self.prompt(tree, row["prompt"]), row["limit"], row["priority"])
        lease.match = Match(*row["match"])
        lease.own = _slots(row["own"])
        lease.waiting = set(row["waiting"])
        for name in ("usable", "start", "committed", "failed_at", "short_at", "unanswered_at"):
            setattr(lease, name, row[name])
        lease.failure = MissReason(row["failure"])
        lease.unanswered = MissReason(row["unanswered"])
        lease.pins = [self._pins[number] if number >= 0 else None for number in row["pins"]]
        lease.spare_pins = [self._pins[number] for number in row["spare"]]
        self.leases[row["number"]] = lease

    def _fill_log(self, state: State) -> None:
        log = self.core.log
        log.number = state.log["number"]
        log.pages = Counter({(TransferKind[kind], good): pages for kind, good, pages in state.log["pages"]})
        for row in state.transfers:
            transfer = self._transfer(row)
            log.open[transfer.id] = transfer
        for row in state.leases:
            self.leases[row["number"]].writers = [log.open[number] for number in row["writers"]]
        for tier, waits in zip((DEVICE, HOST), state.log["waits"], strict=True):
            self.core.waiting(tier).update({slot: log.open[number] for slot, number in waits.items()})

    def _transfer(self, row: dict[str, Any]) -> Transfer:
        tree = self.trees[row["tree"]]
        source, target = row["source"], row["target"]
        pages = tuple(PageIdentity(own, parent, depth, own) for own, parent, depth in row["pages"])
        source_slots = None if source is None else _slots(source)
        target_slots = None if target is None else _slots(target)
        moved = target_slots if target_slots is not None else source_slots
        transfer = Transfer(
            row["id"],
            TransferKind[row["kind"]],
            tree,
            first=row["first"],
            count=len(pages) if moved is None else len(moved),
            source_slots=source_slots,
            target_slots=target_slots,
            pages=pages,
            pins=[self._pins[number] for number in row["pins"]],
            prompt=None if row["prompt"] is None else self.prompt(tree, row["prompt"]),
        )
        transfer.private = _slots(row["private"])
        transfer.completed, transfer.cancelled = row["completed"], row["cancelled"]
        transfer.orphaned = row["orphaned"]
        transfer.interest = {self.leases[number]: None for number in row["interest"]}
        return transfer

    def _grave(self, tree: int, todo: list[int], mourned: int) -> Grave:
        grave = Grave(self.trees[tree], mourned)
        grave.todo = [self._nodes[number] for number in todo]
        return grave


def _slots(data: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.frombuffer(data, np.int64).copy()


def _fill_table(table: SlotTable, row: dict[str, Any]) -> None:
    for name in _TABLE_ARRAYS:
        setattr(table, name, np.frombuffer(row[name], getattr(table, name).dtype).copy())
    table.capacity, table.counts, table.pinned = row["capacity"], list(row["counts"]), row["pinned"]
