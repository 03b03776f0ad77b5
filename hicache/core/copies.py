"""How pages come and go in the owned tiers: pin, fill, publish, cut.

Everything that changes residency does it through `Copies`, so the rules that keep a tier usable stand in one place:

* What a tier holds is closed under prefixes. A page is published only when its parent is resident; a cut takes what
  lies below with it.
* A slot that is taken away while something pins it goes to quarantine, and is free at its last unpin.
* A finished transfer keeps its pins until each of its pages is visible or detached, so every FILLING page is pinned.
  One wait mark, on its last attached filling page, is enough: pages become visible in order, and a cut takes tails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hicache.core.registry import DEVICE, HOST, Registry
from hicache.core.residency import FILLING, NO_SLOTS, PRIVATE, QUARANTINED, RESIDENT, SlotEvent, Slots
from hicache.core.transfers import PinSet, Transfer
from hicache.events import Removed, Stored
from hicache.records import MissReason, Tier

if TYPE_CHECKING:
    from hicache.core.node import Node, Path
    from hicache.core.prompt import Prompt
    from hicache.core.tree import HiRadixTree


class Copies:
    """Residency of all trees of one core. Not thread-safe.

    Attributes:
        registry: the shared state.
        settled: finished transfers whose wait mark was reached, for `Core` to end.
    """

    __slots__ = ("_waits", "registry", "settled")

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.settled: list[Transfer] = []
        self._waits: tuple[dict[int, Transfer], dict[int, Transfer]] = ({}, {})

    # ---- pins

    def pin(self, tier: int, tree: HiRadixTree, slots: Slots, base: PinSet | None = None) -> PinSet:
        """Pin a root-prefix of a tier as it stands in the live tree: `slots` from the root on.

        If it begins with the whole of `base`, only the rest is pinned and `base` is kept; a set that adds nothing
        is `base` itself, held once more. The caller owns one hold of what is returned.
        """
        if base is not None and base.end and base.end <= len(slots) and slots[base.end - 1] == base.last_slot():
            # The slot is pinned, so it was not reused: it is still attached, and so is all in front of it.
            base.holders += 1
            if base.end == len(slots):
                return base
            slots = slots[base.end :]
        else:
            base = None
        if len(slots):
            table = self.registry.tables[tier]
            fresh = table.pin(slots)
            if len(fresh):
                # What is attached and does not fill is resident.
                resident = table.count(fresh, RESIDENT) if tree.filling[tier] else len(fresh)
                table.pinned += resident
                tree.pinned[tier] += resident
        return PinSet(tier, tree, slots, base)

    def drop(self, pins: PinSet) -> None:
        """Give back one hold of a set; the last one unpins it, and then what it continued."""
        link: PinSet | None = pins
        while link is not None:
            link.holders -= 1
            if link.holders:
                return
            self._unpin(link)
            link = link.base

    def _unpin(self, pins: PinSet) -> None:
        slots, tier, tree = pins.slots, pins.tier, pins.tree
        if not len(slots):
            return
        table = self.registry.tables[tier]
        loose = table.unpin(slots)
        if not len(loose):
            return
        resident = table.count(loose, RESIDENT) if table.unsettled else len(loose)
        gone = NO_SLOTS if resident == len(loose) else loose[table.state[loose] == QUARANTINED]
        if len(gone):
            table.reclaim(gone)
        if not tree.live:
            # What was cleared and is not swept yet counts as quarantined; the sweep frees what nothing pins.
            self._loosen_grave(tier, tree, len(loose) - len(gone))
            return
        table.pinned -= resident
        tree.pinned[tier] -= resident
        # Wake the owner of the deepest slot that is still attached: it may be a candidate now.
        owner = int(table.owner[slots[-1]])
        if owner < 0:
            owners = table.owner[slots]
            attached = owners[owners >= 0]
            if not len(attached):
                return
            owner = int(attached[-1])
        self.registry.candidates[tier].file(self.registry.node(owner))

    def _loosen_grave(self, tier: int, tree: HiRadixTree, pages: int) -> None:
        # A dead tree's `pinned` counts its unswept slots that are pinned, resident and filling alike.
        tree.pinned[tier] -= pages

    def guard(self, slots: Slots) -> None:
        """Keep private slots from being free when their request ends: a writer has not ended."""
        self.registry.tables[self.registry.top].pins[slots] += 1

    def unguard(self, slots: Slots) -> None:
        """The writer has ended. What its request has given up meanwhile is free."""
        table = self.registry.tables[self.registry.top]
        table.pins[slots] -= 1
        gone = slots[(table.state[slots] == QUARANTINED) & (table.pins[slots] == 0)]
        if len(gone):
            table.reclaim(gone)

    # ---- filling

    def fill(
        self,
        tier: int,
        tree: HiRadixTree,
        prompt: Prompt,
        at: int,
        slots: Slots,
        *,
        hits: int,
        extend_from: int | None = None,
        path: Path | None = None,
    ) -> Path:
        """Attach PRIVATE slots as the FILLING copies of pages `at`.. of a prompt, behind what the tier holds.

        Never evicts. Returns the path up to the last of them. `path` is the walk of these pages, if it is still true.
        """
        path = tree.grow(prompt, at + len(slots), hits=hits, extend_from=extend_from, path=path)
        self.fill_path(tier, tree, path, slots)
        return path

    def fill_path(self, tier: int, tree: HiRadixTree, path: Path, slots: Slots) -> None:
        """`fill` for nodes that are there already."""
        registry = self.registry
        table = registry.tables[tier]
        table.advance(slots, PRIVATE, SlotEvent.RESERVE)
        tree.filling[tier] += len(slots)
        used = 0
        for node, pages in path:
            held = node.slots[tier]
            have = len(held)
            if have >= pages:
                continue
            mine = slots[used : used + pages - have]
            used += len(mine)
            if not have and node.parent is not None and not node.parent.is_root():
                node.parent.below[tier] += 1
            node.slots[tier] = np.concatenate((held, mine)) if have else mine
            table.owner[mine] = node.id
            table.depth[mine] = np.arange(node.first + have, node.first + have + len(mine), dtype=np.int32)
            registry.count_stubs(node)
            if used == len(slots):
                break
        assert used == len(slots)

    # ---- publication, in chain order

    def publish(self, tier: int, node: Node) -> None:
        """Make the verified pages of a node visible as far as their parents are, and go on below."""
        registry = self.registry
        table = registry.tables[tier]
        todo = [node]
        while todo:
            node = todo.pop()
            parent = node.parent
            if parent is None or (not parent.is_root() and parent.resident[tier] < parent.pages):
                continue
            resident = node.resident[tier]
            filling = node.slots[tier][resident:]
            if len(filling):
                verified = table.verified[filling]
                ready = filling[: _leading(verified)]
                if len(ready):
                    self._make_visible(tier, node, resident, ready)
            if node.resident[tier] == node.pages and node.below[tier]:
                todo += [child for child in node.children.values() if len(child.slots[tier])]

    def _make_visible(self, tier: int, node: Node, resident: int, slots: Slots) -> None:
        registry, tree = self.registry, node.tree
        table = registry.tables[tier]
        pages = len(slots)
        table.advance(slots, FILLING, SlotEvent.PUBLISH)
        pinned = table.pinned_of(slots)
        table.pinned += pinned
        tree.pinned[tier] += pinned
        tree.filling[tier] -= pages
        tree.resident[tier] += pages
        node.resident[tier] = resident + pages
        if registry.config.events:
            self.tell_stored(Tier(tier), node, resident, resident + pages)
        if self._waits[tier]:
            self._settle(tier, slots)
        if registry.protected is not None:
            registry.protected[tier].count(node)
        registry.candidates[tier].file(node)
        if tier == HOST:
            registry.candidates[DEVICE].refile(node)  # it has become clean

    # ---- cutting

    def cut(self, tier: int, node: Node, keep: int, reason: MissReason) -> None:
        """Take from a tier the pages behind the first `keep` of a node, and all below them, whoever fills them.

        The trees are tidied only when the whole cut is done.
        """
        if not node.below[tier]:
            self._detach(tier, node, keep, reason)
            node.tree.trim(node, reason)
            return
        todo, cut = [(node, keep)], []
        while todo:
            here, left = todo.pop()
            cut.append((here, left))
            if here.below[tier]:
                todo += [(child, 0) for child in here.children.values() if len(child.slots[tier])]
        for here, left in reversed(cut):
            self._detach(tier, here, left, reason)
        for here, _ in reversed(cut):
            if here.alive:
                here.tree.trim(here, reason)

    def _detach(self, tier: int, node: Node, keep: int, reason: MissReason) -> None:
        registry, tree = self.registry, node.tree
        table = registry.tables[tier]
        held = node.slots[tier]
        if keep >= len(held):
            return
        resident = node.resident[tier]
        gone = held[keep:]
        lost = resident - keep
        node.slots[tier] = held[:keep] if keep else NO_SLOTS
        table.owner[gone] = -1
        if lost > 0:
            if registry.config.events:
                self._tell_removed(Tier(tier), node, keep, resident, reason)
            taken = held[keep:resident]
            pinned = table.pinned_of(taken)
            if pinned:
                table.pinned -= pinned
                tree.pinned[tier] -= pinned
                table.advance(taken[:pinned], RESIDENT, SlotEvent.DETACH)
            if pinned < lost:
                table.let_go(taken[pinned:])
            tree.resident[tier] -= lost
            node.resident[tier] = keep
        if resident < len(held):
            unfilled = held[max(resident, keep) :]
            table.advance(unfilled, FILLING, SlotEvent.DETACH)
            tree.filling[tier] -= len(unfilled)
            if self._waits[tier]:
                self._settle(tier, unfilled)
            loose = unfilled[table.pins[unfilled] == 0]
            if len(loose):
                table.reclaim(loose)
        registry.recount(node)
        candidates = registry.candidates[tier]
        if keep:
            candidates.file(node)
        elif node.parent is not None and not node.parent.is_root():
            node.parent.below[tier] -= 1
            candidates.file(node.parent)
        # A DEVICE copy that has become dirty by this is filed anew when its entry among the clean is looked at.

    # ---- eviction

    def evict(self, tier: int, pages: int, *, dirty: bool = True, older_than: object = None) -> int:
        """Free up to `pages` slots, coldest leaf first, the clean before the dirty. Returns how many."""
        registry = self.registry
        table, candidates = registry.tables[tier], registry.candidates[tier]
        registry.keep_shares()
        got = 0
        while got < pages:
            node = candidates.coldest(dirty=False, older_than=older_than)
            if node is None and dirty:
                node = candidates.coldest(dirty=True, older_than=older_than)
            if node is None:
                break
            resident = node.resident[tier]
            slots = node.slots[tier]
            keep = table.pinned_of(slots)
            if is_dirty := candidates.is_dirty(node):
                # Only the dirty tail: what is in front of it is clean, and other clean pages may be colder.
                keep = max(keep, candidates.clean(node))
            taken = min(pages - got, resident - keep)
            if is_dirty:
                registry.dropped_dirty[tier] += taken
            registry.evicted[tier] += taken
            candidates.unfile(node)
            self.cut(tier, node, resident - taken, MissReason.EVICTED)
            got += taken
        return got

    # ---- wait marks

    def wait(self, tier: int, transfer: Transfer) -> bool:
        """Mark the last attached filling page of a finished transfer. False if there is none: it has ended."""
        slots = transfer.target_slots
        if slots is None or not transfer.tree.live:
            return False
        table = self.registry.tables[tier]
        if not table.count(slots, FILLING):
            return False
        hanging = slots[(table.state[slots] == FILLING) & (table.filler[slots] == transfer.id)]
        if not len(hanging):
            return False
        last = int(hanging[-1])
        table.waiting[last] = True
        self._waits[tier][last] = transfer
        return True

    def _settle(self, tier: int, slots: Slots) -> None:
        table = self.registry.tables[tier]
        for slot in slots[table.waiting[slots]].tolist():
            table.waiting[slot] = False
            self.settled.append(self._waits[tier].pop(slot))

    def settle_tree(self, tree: HiRadixTree) -> None:
        """A tree was cleared: whatever waited for its pages ends."""
        for tier in (DEVICE, HOST):
            waits = self._waits[tier]
            for slot in [slot for slot, transfer in waits.items() if transfer.tree is tree]:
                self.registry.tables[tier].waiting[slot] = False
                self.settled.append(waits.pop(slot))

    def waiting_transfers(self, tier: int) -> dict[int, Transfer]:
        """Finished transfers by the slot that they wait for. For the invariants' checker."""
        return self._waits[tier]

    # ---- beliefs

    def raise_belief(self, node: Node) -> None:
        """Advance what is believed to be in STORAGE over pages whose puts have been acknowledged."""
        stored = self.registry.tables[HOST].stored
        todo = [node]
        while todo:
            node = todo.pop()
            parent = node.parent
            if parent is None or (not parent.is_root() and parent.believed < parent.pages):
                continue
            acknowledged = stored[node.slots[HOST][node.believed :]]
            if len(acknowledged):
                self.set_belief(node, node.believed + _leading(acknowledged))
            if node.believed == node.pages:
                todo += [child for child in node.children.values() if len(child.slots[HOST]) > child.believed]

    def set_belief(self, node: Node, pages: int) -> None:
        """Believe that exactly the first `pages` pages of a node are in STORAGE."""
        registry = self.registry
        before = node.believed
        if pages == before:
            return
        if pages < before and registry.config.events:
            self._tell_removed(Tier.STORAGE, node, pages, before, MissReason.EVICTED)
        node.believed = pages
        if pages < before:
            registry.tables[HOST].stored[node.slots[HOST][pages:]] = False
        elif registry.config.events:
            self.tell_stored(Tier.STORAGE, node, before, pages)
        registry.count_stubs(node)
        for tier in (DEVICE, HOST):
            registry.candidates[tier].refile(node)

    def forget_beliefs(self, nodes: int) -> bool:
        """After a detach: believe nothing of the next `nodes` nodes. Returns whether any may be left.

        Nodes split and get new places meanwhile, so only a whole pass that found nothing is the end.
        """
        registry = self.registry
        if registry.forgetting is None:
            return False
        at, found = registry.forgetting
        end = min(at + nodes, len(registry.nodes))
        while at < end:
            node = registry.nodes[at]
            at += 1
            if node is not None and node.believed and node.tree.live:
                found = True
                self.set_belief(node, 0)
                node.tree.trim(node, MissReason.EVICTED)
        if at < len(registry.nodes):
            registry.forgetting = (at, found)
        else:
            registry.forgetting = (0, False) if found else None
        return registry.forgetting is not None

    # ---- events

    def tell_stored(self, tier: Tier, node: Node, first: int, end: int) -> None:
        """Report pages of a node as visible in a tier."""
        tree = node.tree
        hashes = tree.hashes(node, first, end)
        parent = tree.hashes(node, first - 1, first)[0] if first else tree.hash_before(node)
        symbols = node.span[first * tree.width : end * tree.width]
        tokens = b""
        if self.registry.tokens is not None and end <= node.resident[HOST]:  # of what fills, nothing is known yet
            tokens = self.registry.tokens(node.slots[HOST][first:end])
        self.registry.events.append(
            Stored(tree.namespace, tree.generation, tier, tuple(hashes), parent, node.first + first, symbols, tokens)
        )

    def _tell_removed(self, tier: Tier, node: Node, first: int, end: int, reason: MissReason) -> None:
        tree = node.tree
        hashes = tree.hashes(node, first, end)
        hashes.reverse()
        self.registry.events.append(Removed(tree.namespace, tree.generation, tier, tuple(hashes), reason.value))


def _leading(flags: NDArray[np.bool_]) -> int:
    """How many leading flags are set."""
    first_unset = int(flags.argmin())
    return len(flags) if flags[first_unset] else first_unset
