"""Transfers, leases and the pin sets they hold. Plain records; what they mean is in `copies` and `cache`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from hicache.core.residency import NO_SLOTS, Slots
from hicache.records import Match, MissReason, Tier

if TYPE_CHECKING:
    from hicache.core.prompt import PageIdentity, Prompt
    from hicache.core.reasons import RequestCounts
    from hicache.core.tree import HiRadixTree


class TransferKind(Enum):
    """What a transfer moves. The value is (source tier, target tier).

    Attributes:
        source: where bytes are read.
        target: where they are written.
        is_engines: whether an engine moves them, so that there is nothing to execute.
    """

    WRITE = (None, Tier.DEVICE)  # the engine's own computation of committed pages
    HOST_WRITE = (None, Tier.HOST)  # the same, where HOST is the top tier
    WRITE_BACK = (Tier.DEVICE, Tier.HOST)
    LOAD = (Tier.HOST, Tier.DEVICE)
    FETCH = (Tier.STORAGE, Tier.HOST)
    PUT = (Tier.HOST, Tier.STORAGE)
    TOUCH = (Tier.STORAGE, Tier.STORAGE)  # no bytes: tells storage that pages hot above are in use

    __hash__ = object.__hash__  # members are unique; the enum's own hash is a call of Python code in every look-up

    def __init__(self, source: Tier | None, target: Tier) -> None:
        self.source = source
        self.target = target
        self.is_engines = source is None


_NOTHING = Match()


class PinSet:
    """A root-prefix of one tier as it stood in a tree, pinned.

    It may continue another set, which it then keeps: so one more page behind 2,048 pins one slot. Every slot of a set
    has one pin of it. Whoever holds a set holds one of its `holders`; the last to drop it unpins.

    Attributes:
        tier: index of the tier.
        tree: the tree (one generation) it was made in.
        slots: the slots that this set itself pins.
        base: the set that it continues, or None.
        end: pages from the root to its end.
        holders: how many hold it.
    """

    __slots__ = ("base", "end", "holders", "slots", "tier", "tree")

    def __init__(self, tier: int, tree: HiRadixTree, slots: Slots, base: PinSet | None) -> None:
        self.tier = tier
        self.tree = tree
        self.slots = slots
        self.base = base
        self.end: int = len(slots) + (base.end if base is not None else 0)
        self.holders = 1

    def last_slot(self) -> int:
        """Its deepest slot, -1 if it is empty. Sets that continue others are never empty."""
        return int(self.slots[-1]) if len(self.slots) else -1

    def links(self) -> Iterator[PinSet]:
        """This set and those that it continues, deepest first."""
        link: PinSet | None = self
        while link is not None:
            yield link
            link = link.base


class Transfer:
    """Bytes on their way, or a finished transfer that waits for its pages to become visible.

    A transfer ends when its I/O has ended and each of its pages is visible or detached; until then its pins keep
    source and target from being reused, whatever becomes of the request that wanted it.

    Attributes:
        id: unique in one core.
        kind: what it moves.
        tree: the tree it belongs to; `.namespace` and `.generation` are its identity.
        first: page index of its first page (consecutive pages follow, but for PUT and TOUCH).
        source_slots, target_slots: int64 slots in the owned tiers that it touches, else None.
        pages: identities of the pages, for FETCH, PUT and TOUCH; a TOUCH has them deepest first, only hash and depth.
        count: number of pages.
        prompt: for a TOUCH, the prompt whose pages it touches.
        completed: its I/O has ended.
        cancelled: nobody wants it any more. If it has not begun it may be completed as FAILED without any I/O.
        orphaned: STORAGE was detached under it, or its copy was given up: how it ends says nothing any more.
        interest: leases that wait for it, in order; a dict, so that every run does the same in the same order.
        pins: its pin sets.
        private: for an engine's write, slots of its request that stay private, and that its writer writes all the same.
    """

    __slots__ = (
        "cancelled",
        "completed",
        "count",
        "first",
        "id",
        "interest",
        "kind",
        "orphaned",
        "pages",
        "pins",
        "private",
        "prompt",
        "source_slots",
        "target_slots",
        "tree",
    )

    def __init__(
        self,
        number: int,
        kind: TransferKind,
        tree: HiRadixTree,
        *,
        first: int,
        count: int,
        source_slots: Slots | None = None,
        target_slots: Slots | None = None,
        pages: tuple[PageIdentity, ...] = (),
        pins: list[PinSet],
        prompt: Prompt | None = None,
    ) -> None:
        self.id = number
        self.kind = kind
        self.tree = tree
        self.first = first
        self.count = count
        self.source_slots = source_slots
        self.target_slots = target_slots
        self.pages = pages
        self.prompt = prompt
        self.private = NO_SLOTS
        self.completed = False
        self.cancelled = False
        self.orphaned = False
        self.interest: dict[Lease, None] = {}
        self.pins = pins

    def __repr__(self) -> str:
        return f"<Transfer {self.id} {self.kind.name} pages {self.first}..{self.first + self.count - 1}>"


class Lease:
    """What one request holds: pins on what it may read, and private slots.

    Attributes:
        tree: the tree it was made in.
        prompt: the request's whole pages; `extend` replaces it by a longer one.
        limit: leading pages that the request may take from the cache.
        priority: priority of the request.
        match: what was usable when it was made; `believe` raises its `storage`.
        usable: leading pages usable in the top tier now, pinned. Grows when loads end, until slots are allocated.
        start: page index of its first private slot; None before the first allocation.
        own: slots of the pages from `start` on, private, or committed by this lease.
        committed: page index up to which pages were committed.
        waiting: ids of transfers whose end it waits for.
        pins: per owned tier, the pin set that covers what it holds there.
        spare_pins: sets whose pages were withdrawn from the tree while it may still read them.
        failed_at: lowest page index at which a transfer that it waited for failed, or None.
        failure: the reason of that.
        short_at: lowest page index for which there were no slots, or that was not worth bringing up; or None.
        unanswered_at: page index from which on storage did not tell what it has, or None.
        unanswered: why it did not.
        writers: engines' writes that guard private slots of it.
        closed: whether it was released.
        counts: what it was counted as, once closed.
    """

    __slots__ = (
        "__weakref__",
        "closed",
        "committed",
        "counts",
        "failed_at",
        "failure",
        "limit",
        "match",
        "own",
        "pins",
        "priority",
        "prompt",
        "short_at",
        "spare_pins",
        "start",
        "tree",
        "unanswered",
        "unanswered_at",
        "usable",
        "waiting",
        "writers",
    )

    def __init__(self, tree: HiRadixTree, prompt: Prompt, limit: int, priority: int) -> None:
        self.tree = tree
        self.prompt = prompt
        self.limit = limit
        self.priority = priority
        self.match = _NOTHING
        self.usable = 0
        self.start: int | None = None
        self.own: Slots = NO_SLOTS
        self.committed = 0
        self.waiting: set[int] = set()
        self.pins: list[PinSet | None] = [None, None]
        self.spare_pins: list[PinSet] = []
        self.writers: list[Transfer] = []
        self.failed_at: int | None = None
        self.failure = MissReason.FAILED
        self.short_at: int | None = None
        self.unanswered_at: int | None = None
        self.unanswered = MissReason.FAILED
        self.closed = False
        self.counts: RequestCounts | None = None

    def usable_slots(self) -> Slots:
        """Top-tier slots of the usable leading pages, int64 `(usable,)`. Valid until the lease is released."""
        tip = self.pins[self.tree.registry.top]
        if tip is None or not self.usable:
            return NO_SLOTS
        parts = [link.slots for link in tip.links()]
        parts.reverse()
        slots: Slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return slots[: self.usable]


def lowest(known: int | None, page: int) -> int:
    """The lower of a page index known so far, if any, and a new one."""
    return page if known is None or page < known else known
