"""The core of the cache: a reducer. Verbs and completions in, transfers and events out.

It does no I/O, reads no clock and starts no thread. The caller holds one lock around every call, executes the
transfers in `actions`, and reports each end with `complete`. Every verb that takes slots goes in this order: walk, pin,
take (which may evict, trim and merge), walk again, fill (which never evicts).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hicache.core import invariants
from hicache.core.commit import Committer
from hicache.core.config import CoreConfig
from hicache.core.copies import Copies
from hicache.core.prefetch import Loader
from hicache.core.prompt import Hasher, Prompt
from hicache.core.reasons import RequestCounts, count
from hicache.core.registry import DEVICE, HOST, Registry
from hicache.core.residency import Slots, Words
from hicache.core.room import SWEEP_PAGES, Grave, Room
from hicache.core.statistics import CoreStatistics, snapshot
from hicache.core.transferlog import TransferLog
from hicache.core.transfers import Lease, Transfer, TransferKind, lowest
from hicache.core.tree import HiRadixTree
from hicache.core.writeback import Writer
from hicache.errors import InvalidInput
from hicache.events import Cleared, Event
from hicache.records import Match, MissReason, PageResult

if TYPE_CHECKING:
    from hicache.core.node import Node

FORGET_NODES = 1024
"""Nodes whose beliefs are dropped in one step; well under a millisecond."""


class Core:
    """All trees and slots of one cache. Not thread-safe: the caller holds one lock around every call.

    Args:
        config: its settings.
        words: a generation word a HOST slot (see `SlotTable`), the caller's memory; None for none.

    Attributes:
        config: its settings.
        registry: shared state of the trees.
        log: the transfers.
    """

    __slots__ = (
        "_committer",
        "_copies",
        "_leases",
        "_loader",
        "_room",
        "_trees",
        "_writer",
        "config",
        "log",
        "registry",
    )

    def __init__(self, config: CoreConfig, words: Words | None = None) -> None:
        self.config = config
        self.registry = Registry(config, words)
        self._copies = Copies(self.registry)
        self._room = Room(self._copies)
        self.log = TransferLog(self._copies)
        self._writer = Writer(self.log, self._room)
        self._loader = Loader(self.log, self._room)
        self._committer = Committer(self.log, self._room, self._writer)
        self._trees: dict[bytes, HiRadixTree] = {}
        self._leases: set[Lease] = set()

    @property
    def actions(self) -> deque[Transfer]:
        """Transfers to be executed, first in first out. The runtime takes them away under the lock."""
        return self.log.actions

    @property
    def finished(self) -> list[Transfer]:
        """Transfers that have ended since the runtime last cleared this list."""
        return self.log.finished

    @property
    def events(self) -> list[Event]:
        """Residency events since the runtime last cleared this list."""
        return self.registry.events

    @property
    def trees(self) -> list[HiRadixTree]:
        """The live trees."""
        return list(self._trees.values())

    def tree(self, namespace: bytes, *, width: int, hasher: Hasher, generation: int = 0) -> HiRadixTree:
        """The live tree of a derived namespace, made on first use with that generation."""
        tree = self._trees.get(namespace)
        if tree is None:
            tree = HiRadixTree(self.registry, namespace, generation=generation, width=width, hasher=hasher)
            self._trees[namespace] = tree
        return tree

    def drop(self, tree: HiRadixTree) -> bool:
        """Forget a namespace of which nothing is held, believed or under way, so that idle ones cost no memory.

        Returns whether it was forgotten; the namespace gets a new tree at its next use. O(open requests).
        """
        used = tree.root.children or not tree.live or any(lease.tree is tree for lease in self._leases)
        if used or any(transfer.tree is tree for transfer in self.log.open.values()):
            return False
        tree.live = False
        self.registry.leave(tree.root)
        del self._trees[tree.namespace]
        return True

    # ---- looking

    def match(self, tree: HiRadixTree, prompt: Prompt, limit: int | None = None) -> Match:
        """How far the prompt's first `limit` pages are usable, by tier. Changes nothing that anyone could see."""
        path = tree.walk(prompt, limit)
        device = HiRadixTree.resident_pages(path, DEVICE)
        if not self.config.host_pages:
            return Match(device)
        host = max(device, HiRadixTree.resident_pages(path, HOST))
        stored = max(host, HiRadixTree.believed_pages(path)) if self.registry.stores else host
        return Match(device, host - device, stored - host)

    # ---- requests

    def lease(self, tree: HiRadixTree, prompt: Prompt, *, limit: int | None = None, priority: int = 0) -> Lease:
        """Pin what is usable of a prompt, at most its first `limit` pages, and mark it as used now.

        It walks anew, so it may find less than an earlier match. The caller owns the lease and must `release` it.

        Raises:
            InvalidInput: a priority that is no integer of 32 bits.
        """
        if type(priority) is not int or not -(2**31) <= priority < 2**31:
            raise InvalidInput(f"priority {priority!r:.40} is not an integer of -2^31 to 2^31-1")
        limit = prompt.pages if limit is None else max(0, min(limit, prompt.pages))
        lease = Lease(tree, prompt, limit, priority)
        self._leases.add(lease)
        if not tree.live:
            return lease
        registry = self.registry
        registry.tick += 1
        path = tree.walk(prompt)
        if not path:
            return lease
        last, pages = path[-1]
        if pages < last.pages:
            tree.split(last, pages)  # else the rest, which is older, would become as recent as this use
        for node, _ in path:
            registry.use(node, priority)
        top = registry.top
        held, resident = tree.held(path, top)
        lease.usable = host = min(resident, limit)
        lease.pins[top] = self._copies.pin(top, tree, held[: lease.usable])
        if top == DEVICE and self.config.host_pages:
            held, on_host = tree.held(path, HOST)
            on_host = min(on_host, limit)
            lease.pins[HOST] = self._copies.pin(HOST, tree, held[:on_host])
            host = max(lease.usable, on_host)
        stored = max(host, min(limit, HiRadixTree.believed_pages(path))) if registry.stores else host
        device = lease.usable if top == DEVICE else 0
        lease.match = Match(device, host - device, stored - host)
        return lease

    def believe(self, lease: Lease, upto: int) -> None:
        """Storage was probed: the pages behind `lease.match`, up to page index `upto`, are there."""
        self._loader.believe(lease, upto)

    def prefetch(self, lease: Lease, upto: int | None = None) -> int:
        """Begin bringing pages up to index `upto` (default: all that are believed) into HOST.

        Returns the page index that HOST will reach when nothing fails; fewer slots shorten it.
        """
        return self._loader.prefetch(lease, upto)

    def decline(self, lease: Lease, page: int) -> None:
        """Bringing up the pages from index `page` on does not pay: those missed are counted as over budget."""
        lease.short_at = lowest(lease.short_at, page)

    def unanswered(self, lease: Lease, page: int, reason: MissReason) -> None:
        """Storage did not tell whether it has the pages from index `page` on: those missed are counted so."""
        lease.unanswered_at, lease.unanswered = page, reason

    def load(self, lease: Lease, upto: int | None = None) -> int:
        """Begin bringing what HOST has into the top tier. Returns the page index that the top tier will reach."""
        return self._loader.load(lease, upto)

    def allocate(self, lease: Lease, pages: int) -> Slots:
        """Private top-tier slots for the request's next pages: all or nothing.

        Takes free slots, then evicts clean pages, then drops dirty ones. The lease owns the slots until they are
        committed, or until its release.

        Raises:
            OutOfSlots: not so many can be had now. Nothing was evicted.
        """
        return self._committer.allocate(lease, pages)

    def commit(self, lease: Lease, upto: int, *, ready: bool) -> Transfer | None:
        """Hand the private slots of the pages up to index `upto` to the tree.

        With `ready` their bytes are written, and they become visible at once if what is in front of them is. Else
        the returned write is to be completed when the writer's event has passed; it is not an action. Until then no
        slot of the request is free, also those that stay private: the writer may be in any of them.

        Nothing is published, and the slots stay private until the release, for pages that the tree holds already and
        where the pages in front are no longer held in the top tier: hanging them anywhere else would be a wrong hit.

        Raises:
            InvalidInput: pages without slots, or a closed request.
        """
        return self._committer.commit(lease, upto, ready=ready)

    def extend(self, lease: Lease, prompt: Prompt) -> None:
        """The request's prompt has grown by decoding; its whole pages must begin with the old ones."""
        if not prompt.symbols.startswith(lease.prompt.symbols):
            raise InvalidInput("extend: the longer prompt does not begin with the request's own")
        lease.prompt = prompt

    def touch(self, lease: Lease, now: float) -> int:
        """Tell storage that a request's pages are in use, at most once in `config.touch_seconds`.

        `now` is any monotonic clock in seconds. Returns the pages of the TOUCH begun.
        """
        if self.config.touch_seconds is None or not self.registry.stores or not lease.tree.live:
            return 0
        return self._writer.touch(lease.tree, lease.prompt, now)

    def withdraw_interest(self, lease: Lease) -> None:
        """The lease waits no longer for what is on its way. What only it wanted is cut."""
        self.log.withdraw_interest(lease)

    def release(self, lease: Lease, *, aborted: bool = False) -> RequestCounts:
        """Give back all pins and private slots, and count the request, once. A second call returns the same."""
        if lease.counts is not None:
            return lease.counts
        self.log.withdraw_interest(lease)
        lease.closed = True
        self._leases.discard(lease)
        lease.counts = count(lease, self.registry.ghosts, aborted=aborted)
        self._committer.give_back(lease)
        if lease.tree.live:
            self._count_use(lease)
        for pins in (*lease.pins, *lease.spare_pins):
            if pins is not None:
                self._copies.drop(pins)
        lease.pins = [None, None]
        lease.spare_pins = []
        return lease.counts

    def _count_use(self, lease: Lease) -> None:
        # Fresh pages have had their first use at commit; only what was there before counts once more.
        if not lease.match.device + lease.match.host and not lease.usable:
            return
        path = lease.tree.walk(lease.prompt, max(lease.usable, lease.match.device + lease.match.host))
        self.registry.hit(path)
        self._writer.used(path, lease.pins)

    # ---- completions and upkeep

    def give_up(self, transfer_id: int) -> None:
        """Nobody can tell how a copy between owned tiers ends: its pages have failed.

        Its slots are quarantined until it is completed, if it ever is.

        Raises:
            HicacheInternalError: it is not under way, or no copy between owned tiers; nothing changed.
        """
        self.log.give_up(transfer_id)

    def complete(self, transfer_id: int, results: Sequence[PageResult]) -> None:
        """The I/O of a transfer has ended: one result a page, in order.

        Must be called exactly once for each transfer, cancelled ones included: their slots are quarantined until then.

        Raises:
            HicacheInternalError: no such transfer, completed before, or a wrong number of results; nothing changed.
        """
        transfer = self.log.open.get(transfer_id)
        for node in self.log.complete(transfer_id, results):
            if transfer is not None and transfer.kind is TransferKind.TOUCH:
                self._writer.heal(node)
            else:
                self._writer.filled(node)
        self.registry.keep_shares()
        self._loader.forget_stubs()

    def flush(self) -> int:
        """Plan the writes that keep the clean reserve. Returns the pages begun."""
        return self._writer.flush()

    def drain(self, limit: int = 512) -> int:
        """Begin writing down what is dirty, root first; 0 when a whole pass found nothing to begin."""
        return self._writer.drain(self.trees, limit)

    def clear(self, tree: HiRadixTree, generation: int | None = None) -> HiRadixTree:
        """End a tree and begin its namespace's next generation, in O(1) but for transfers that wait.

        Its slots are freed in slices by `sweep`. Leases on it keep what they have, and publish nothing any more.
        `generation` is the new one where others have raised it; by default it is the next number.

        Raises:
            InvalidInput: a generation that is not higher than the tree's.
        """
        if not tree.live:
            return self._trees[tree.namespace]
        if generation is None:
            generation = tree.generation + 1
        if generation <= tree.generation:
            raise InvalidInput(f"clear: generation {generation} is not above {tree.generation}, which is current")
        tree.live = False
        self.registry.drop_stubs(tree)
        self._room.bury(tree)
        self._copies.settle_tree(tree)
        self.log.end_settled()
        if self.config.events:
            self.registry.events.append(Cleared(tree.namespace, tree.generation))
        del self._trees[tree.namespace]
        return self.tree(tree.namespace, width=tree.width, hasher=tree.hasher, generation=generation)

    def detach_storage(self) -> None:
        """There is no STORAGE from now on: nothing is fetched, put or touched, and no match finds anything there.

        Transfers that are open keep their slots until they are completed, and publish nothing of STORAGE any more;
        nobody waits for them. What is believed is dropped in slices by `forget_storage`.
        """
        if not self.registry.stores:
            return
        self.registry.stores = False
        self.registry.forgetting = (0, False)
        self.registry.tables[HOST].stored[:] = False
        self.log.orphan()

    def forget_storage(self, nodes: int = FORGET_NODES) -> bool:
        """Drop beliefs about the STORAGE that was detached, in about so many nodes. Returns whether any may be left."""
        return self._copies.forget_beliefs(nodes)

    def attach_storage(self) -> None:
        """There is a STORAGE again, of which nothing is known.

        Raises:
            InvalidInput: the core was made without one, or beliefs about the last one are left.
        """
        if not self.config.storage:
            raise InvalidInput("attach: the cache was made without a storage tier")
        if self.registry.forgetting is not None:
            raise InvalidInput("attach: what is believed of the storage before is not forgotten yet")
        self.registry.stores = True

    def sweep(self, pages: int = SWEEP_PAGES) -> int:
        """Free cleared slots, about `pages` of them. Returns how many are left."""
        return self._room.sweep(pages)

    def evict(self, tier: int, pages: int) -> int:
        """Free up to `pages` slots of an owned tier as its policy says. Returns how many were freed."""
        return self._copies.evict(tier, pages)

    def available(self, tier: int) -> int:
        """Slots of an owned tier that could be taken now."""
        return self._room.available(tier)

    # ---- for checkpoints

    @property
    def graves(self) -> list[Grave]:
        """Cleared trees that are not swept yet."""
        return self._room.graves

    @property
    def draining(self) -> list[Node] | None:
        """Nodes whose subtrees `drain` has still to visit."""
        return self._writer.draining

    def waiting(self, tier: int) -> dict[int, Transfer]:
        """Finished transfers by the slot that they wait for."""
        return self._copies.waiting_transfers(tier)

    def restore(
        self, *, trees: list[HiRadixTree], leases: list[Lease], graves: list[Grave], draining: list[Node] | None
    ) -> None:
        """Take over what a checkpoint held."""
        self._trees = {tree.namespace: tree for tree in trees}
        self._leases = set(leases)
        self._room.graves = graves
        self._writer.draining = draining

    # ---- looking after it

    def statistics(self) -> CoreStatistics:
        """A snapshot."""
        return snapshot(self.registry, self.log, len(self._leases))

    def check(self) -> None:
        """Check every invariant, slowly.

        Raises:
            HicacheInternalError: one is broken.
        """
        invariants.check(self._copies, self.log, self._room, self.trees, self._leases)
