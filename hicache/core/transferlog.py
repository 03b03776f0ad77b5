"""The life of transfers: begun, completed page by page, waiting for their pages to become visible, ended."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hicache.core.copies import Copies
from hicache.core.registry import HOST
from hicache.core.residency import FILLING, NO_SLOTS, Slots, SlotTable
from hicache.core.transfers import Lease, PinSet, Transfer, TransferKind
from hicache.errors import HicacheInternalError
from hicache.records import MissReason, PageResult, Tier

if TYPE_CHECKING:
    from hicache.core.node import Node
    from hicache.core.prompt import PageIdentity, Prompt
    from hicache.core.tree import HiRadixTree


_AGAINST_SOURCE = (PageResult.SOURCE_BAD, PageResult.SOURCE_GONE)


class TransferLog:
    """All transfers of one core. Not thread-safe.

    Attributes:
        open: transfers whose I/O runs, or that wait for the visibility of their pages, by id.
        actions: transfers to be executed, first in first out; the runtime takes them away.
        finished: transfers that have ended since the runtime last cleared this list.
        number: id of the last transfer begun.
        pages: pages completed, by (kind, whether they were good).
    """

    __slots__ = ("actions", "copies", "finished", "number", "open", "pages")

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.open: dict[int, Transfer] = {}
        self.actions: deque[Transfer] = deque()
        self.finished: list[Transfer] = []
        self.pages: Counter[tuple[TransferKind, bool]] = Counter()
        self.number = 0

    def begin(
        self,
        kind: TransferKind,
        tree: HiRadixTree,
        *,
        first: int,
        source_slots: Slots | None = None,
        target_slots: Slots | None = None,
        pages: tuple[PageIdentity, ...] = (),
        pins: list[PinSet],
        lease: Lease | None = None,
        prompt: Prompt | None = None,
    ) -> Transfer:
        """Open a transfer that owns one hold of each of `pins`. All but engines' writes become actions."""
        self.number += 1
        moved = target_slots if target_slots is not None else source_slots
        transfer = Transfer(
            self.number,
            kind,
            tree,
            first=first,
            count=len(pages) if moved is None else len(moved),
            source_slots=source_slots,
            target_slots=target_slots,
            pages=pages,
            pins=pins,
            prompt=prompt,
        )
        if target_slots is not None:
            self.copies.registry.tables[kind.target].filler[target_slots] = transfer.id
        self.open[transfer.id] = transfer
        if not kind.is_engines:
            self.actions.append(transfer)
        if lease is not None:
            self.join(lease, transfer)
        return transfer

    @staticmethod
    def join(lease: Lease, transfer: Transfer) -> None:
        """The lease waits for the transfer."""
        transfer.interest[lease] = None
        lease.waiting.add(transfer.id)

    def join_fillers(self, lease: Lease, tier: int, slots: Slots) -> None:
        """The lease waits for whatever fills those of the slots that are FILLING."""
        if not len(slots):
            return
        table = self.copies.registry.tables[tier]
        filling = slots[table.state[slots] == FILLING]
        for number in np.unique(table.filler[filling]).tolist():
            transfer = self.open.get(number)
            if transfer is not None:
                self.join(lease, transfer)

    @property
    def writing(self) -> int:
        """Pages on their way to the STORAGE that is attached. O(transfers)."""
        return sum(
            transfer.count
            for transfer in self.open.values()
            if transfer.kind is TransferKind.PUT and not transfer.completed and not transfer.orphaned
        )

    # ---- completion

    def complete(self, number: int, results: Sequence[PageResult]) -> list[Node]:
        """The I/O of a transfer has ended, with one result a page.

        Returns the nodes that it filled, for the write policies.

        Raises:
            HicacheInternalError: no such transfer, or a wrong number of results. Nothing was changed.
        """
        transfer = self.open.get(number)
        if transfer is None or transfer.completed:
            raise HicacheInternalError(f"transfer {number} is not under way: it was never begun, or completed before")
        if len(results) != transfer.count:
            raise HicacheInternalError(f"{transfer}: {len(results)} results for {transfer.count} pages")
        transfer.completed = True
        good = results.count(PageResult.OK)
        self.pages[transfer.kind, True] += good
        if good < transfer.count:
            self.pages[transfer.kind, False] += transfer.count - good
        filled: list[Node] = []
        if transfer.orphaned and transfer.kind is not TransferKind.FETCH:
            pass  # another STORAGE may be attached by now, of which this says nothing
        elif transfer.kind is TransferKind.PUT:
            self._put_ended(transfer, results)
        elif transfer.kind is TransferKind.TOUCH:
            filled = self._touch_ended(transfer, results)
        elif transfer.tree.live:
            filled = self._filled(transfer, results)
        self.end_settled()
        self.end_or_wait(transfer)
        return [node for node in filled if node.alive]

    def _put_ended(self, transfer: Transfer, results: Sequence[PageResult]) -> None:
        tree = transfer.tree
        tree.putting.difference_update(page.hash for page in transfer.pages)
        if not tree.live:
            return
        table = self.copies.registry.tables[HOST]
        slots = transfer.source_slots
        assert slots is not None
        if results.count(PageResult.OK) < transfer.count:
            slots = slots[np.fromiter((result == PageResult.OK for result in results), np.bool_, transfer.count)]
        # A page may have been taken away meanwhile: the object is stored all the same, but there is no slot to say so.
        table.stored[_attached(table, slots)] = True
        for node in self._owners(HOST, slots):
            self.copies.raise_belief(node)

    def _touch_ended(self, transfer: Transfer, results: Sequence[PageResult]) -> list[Node]:
        """Pages that storage has lost are believed no more. Returns their nodes: what is above heals them."""
        tree, prompt = transfer.tree, transfer.prompt
        assert prompt is not None
        answers = zip(transfer.pages, results, strict=True)
        lost = sorted(page.depth for page, result in answers if result in _AGAINST_SOURCE)
        if not lost or not tree.live:
            return []
        holed: list[Node] = []
        for node, pages in tree.walk(prompt, lost[-1] + 1):
            at = bisect_left(lost, node.first)  # the first lost page of the node, if it is one of its
            keep = lost[at] - node.first if at < len(lost) else pages
            if keep < min(pages, node.believed):
                self.copies.set_belief(node, keep)
                holed.append(node)
        holed.reverse()  # deepest first, so that what holds nothing any more goes from its leaf on
        for node in holed:
            if node.alive:
                tree.trim(node, MissReason.EVICTED)
        return holed

    def _filled(self, transfer: Transfer, results: Sequence[PageResult]) -> list[Node]:
        copies = self.copies
        tier = int(transfer.kind.target)
        table = copies.registry.tables[tier]
        slots = transfer.target_slots
        assert slots is not None
        bad = transfer.count
        if results.count(PageResult.OK) < bad:
            bad = next(i for i, result in enumerate(results) if result != PageResult.OK)
        good = slots[:bad]
        table.verified[_attached(table, good)] = True
        if bad < transfer.count:
            # What a store has evicted by itself has been evicted; the rest has failed.
            reason = MissReason.EVICTED if results[bad] == PageResult.SOURCE_GONE else MissReason.FAILED
            for lease in transfer.interest:
                if lease.failed_at is None or transfer.first + bad < lease.failed_at:
                    lease.failed_at, lease.failure = transfer.first + bad, reason
            if results[bad] in _AGAINST_SOURCE and not transfer.orphaned:
                self._blame_source(transfer, bad)
            self._cut_at(tier, int(slots[bad]), reason)
        fetched = transfer.kind is TransferKind.FETCH and not transfer.orphaned
        if fetched:
            table.stored[_attached(table, good)] = True
        filled = []
        for node in self._owners(tier, good):
            if not node.alive:
                continue
            copies.publish(tier, node)
            if fetched:
                copies.raise_belief(node)
            filled.append(node)
        return filled

    def _blame_source(self, transfer: Transfer, page: int) -> None:
        """A page was missing or corrupt where it was read. DEVICE is never blamed: the engine vouches for it."""
        if transfer.kind is TransferKind.LOAD:
            assert transfer.source_slots is not None
            self._cut_at(HOST, int(transfer.source_slots[page]), MissReason.FAILED)
        elif transfer.kind is TransferKind.FETCH:
            assert transfer.target_slots is not None
            table = self.copies.registry.tables[HOST]
            slot = int(transfer.target_slots[page])
            if table.owner[slot] >= 0:
                node = self.copies.registry.node(int(table.owner[slot]))
                keep = int(table.depth[slot]) - node.first
                if keep < node.believed:
                    self.copies.set_belief(node, keep)

    def _cut_at(self, tier: int, slot: int, reason: MissReason) -> None:
        table = self.copies.registry.tables[tier]
        if table.owner[slot] >= 0:
            node = self.copies.registry.node(int(table.owner[slot]))
            self.copies.cut(tier, node, int(table.depth[slot]) - node.first, reason)

    def _owners(self, tier: int, slots: Slots) -> list[Node]:
        """The nodes that attached slots belong to, in chain order."""
        registry = self.copies.registry
        owners = registry.tables[tier].owner[slots]
        if not len(owners):
            return []
        if owners[0] == owners[-1] >= 0:
            return [registry.node(int(owners[0]))]  # what is between two pages of a node is of it, too
        owners = owners[owners >= 0]
        if not len(owners):
            return []
        first = np.concatenate(([True], owners[1:] != owners[:-1]))
        return [registry.node(number) for number in owners[first].tolist()]

    # ---- ending

    def end_or_wait(self, transfer: Transfer) -> None:
        """End a completed transfer, or let it wait while verified pages of it are not visible yet."""
        tier = transfer.kind.target
        if tier is Tier.STORAGE or not self.copies.wait(tier, transfer):
            self._end(transfer)

    def end_settled(self) -> None:
        """Look again at the transfers whose wait mark was reached."""
        settled = self.copies.settled
        while settled:
            self.end_or_wait(settled.pop())

    def _end(self, transfer: Transfer) -> None:
        tier = transfer.kind.target
        for lease in transfer.interest:
            lease.waiting.discard(transfer.id)
            if tier is not Tier.STORAGE:
                self.hand_over(lease, tier)
        transfer.interest.clear()
        for pins in transfer.pins:
            self.copies.drop(pins)
        transfer.pins.clear()
        if len(transfer.private):
            self.copies.unguard(transfer.private)
            transfer.private = NO_SLOTS
        del self.open[transfer.id]
        self.finished.append(transfer)

    def hand_over(self, lease: Lease, tier: int) -> None:
        """Pin for a lease what has become usable in a tier, before anything else can take it."""
        tree = lease.tree
        top = tier == self.copies.registry.top
        if lease.closed or not tree.live or (top and lease.start is not None):
            return
        path = tree.walk(lease.prompt)
        held, resident = tree.held(path, tier)
        usable = min(resident, lease.limit)
        if top:
            if usable <= lease.usable:
                return
            lease.usable = usable
        self.hold(lease, tier, held, usable)

    def hold(self, lease: Lease, tier: int, held: Slots, pages: int) -> None:
        """Let a lease pin the first `pages` of what the tier holds along its prompt, continuing what it has."""
        tip = lease.pins[tier]
        if tip is not None and pages <= tip.end <= len(held) and tip.end and held[tip.end - 1] == tip.last_slot():
            return
        pins = self.copies.pin(tier, lease.tree, held[:pages], tip)
        if tip is not None:
            if pins is tip or pins.base is tip:
                self.copies.drop(tip)  # the new set keeps it
            else:
                lease.spare_pins.append(tip)  # withdrawn from the tree, but the request may still read it
        lease.pins[tier] = pins

    # ---- cancelling

    def withdraw_interest(self, lease: Lease) -> None:
        """The lease waits no longer. What nobody else wants, and nothing fills behind, is cut.

        Slots of a cut transfer stay in quarantine until its I/O has really ended.
        """
        for number in sorted(lease.waiting, reverse=True):  # later ones fill behind earlier ones
            transfer = self.open.get(number)
            if transfer is None:
                continue  # an earlier cancel of this loop has ended it
            transfer.interest.pop(lease, None)
            if not transfer.interest and transfer.kind in (TransferKind.FETCH, TransferKind.LOAD):
                self.cancel(transfer)
        lease.waiting.clear()
        self.end_settled()

    def orphan(self) -> None:
        """STORAGE is detached: nobody waits for its transfers any more, and what they fill is cut where it may be.

        They keep their slots and pins until their I/O has really ended, like any cancelled transfer.
        """
        for transfer in reversed(list(self.open.values())):  # later ones fill behind earlier ones
            if Tier.STORAGE not in transfer.kind.value or transfer.completed:
                continue
            if transfer.kind is TransferKind.PUT:
                transfer.tree.putting.difference_update(page.hash for page in transfer.pages)
            self._disown(transfer)
            if transfer.kind is TransferKind.FETCH:
                self.cancel(transfer)
        self.end_settled()

    def give_up(self, number: int) -> None:
        """Nobody can tell how the I/O of a copy ends, or whether it ever does: its pages have failed.

        It keeps its slots and pins until it is completed, if it ever is.

        Raises:
            HicacheInternalError: it is not under way, or no copy between owned tiers. Nothing was changed.
        """
        transfer = self.open.get(number)
        if transfer is None or transfer.completed or transfer.kind not in (TransferKind.LOAD, TransferKind.WRITE_BACK):
            raise HicacheInternalError(f"transfer {number} is no copy that is under way")
        self._disown(transfer)
        slots, tier = transfer.target_slots, int(transfer.kind.target)
        assert slots is not None
        attached = slots[self.copies.registry.tables[tier].owner[slots] >= 0]
        if transfer.tree.live and len(attached):
            self._cut_at(tier, int(attached[0]), MissReason.FAILED)
        self.end_settled()

    @staticmethod
    def _disown(transfer: Transfer) -> None:
        """Nobody waits for it any more, and nothing it says counts."""
        transfer.orphaned = True
        for lease in transfer.interest:
            lease.waiting.discard(transfer.id)
            if lease.failed_at is None or transfer.first < lease.failed_at:
                lease.failed_at, lease.failure = transfer.first, MissReason.FAILED
        transfer.interest.clear()

    def cancel(self, transfer: Transfer) -> None:
        """Cut what a transfer fills, unless others fill or hold pages behind it."""
        if transfer.completed or transfer.cancelled or not transfer.tree.live or transfer.target_slots is None:
            return
        tier = int(transfer.kind.target)
        table = self.copies.registry.tables[tier]
        slots = transfer.target_slots[table.owner[transfer.target_slots] >= 0]
        if len(slots):
            last = int(slots[-1])
            node = self.copies.registry.node(int(table.owner[last]))
            if node.below[tier] or len(node.slots[tier]) > int(table.depth[last]) - node.first + 1:
                return
        transfer.cancelled = True
        if len(slots):
            self._cut_at(tier, int(slots[0]), MissReason.LATE)
        self.end_settled()


def _attached(table: SlotTable, slots: Slots) -> Slots:
    """Those of a transfer's slots that are still attached; usually all, as the last one tells: cuts take tails."""
    owners = table.owner[slots]
    return slots if not len(slots) or owners[-1] >= 0 else slots[owners >= 0]
