"""What a request fills itself: private slots, from their allocation to their commit or to the request's release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from hicache.core.registry import DEVICE, HOST
from hicache.core.residency import FREE, NO_SLOTS, PRIVATE, RESIDENT, SlotEvent, Slots
from hicache.core.room import Room
from hicache.core.transferlog import TransferLog
from hicache.core.transfers import Lease, Transfer, TransferKind
from hicache.core.writeback import Writer
from hicache.errors import InvalidInput, OutOfSlots

if TYPE_CHECKING:
    from hicache.core.node import Path

_WRITES: Final = {DEVICE: TransferKind.WRITE, HOST: TransferKind.HOST_WRITE}


class Committer:
    """Gives private slots to requests, and takes them into the tree. Not thread-safe."""

    __slots__ = ("_copies", "_log", "_registry", "_room", "_writer")

    def __init__(self, log: TransferLog, room: Room, writer: Writer) -> None:
        self._log = log
        self._room = room
        self._writer = writer
        self._copies = log.copies
        self._registry = log.copies.registry

    def allocate(self, lease: Lease, pages: int) -> Slots:
        """Private top-tier slots for the request's next pages; see `Core.allocate`."""
        if lease.closed:
            raise InvalidInput("allocate: the request is closed")
        if pages < 0:
            raise InvalidInput(f"allocate: {pages} pages is negative")
        top = self._registry.top
        table = self._registry.tables[top]
        if not table.growing and self._room.available(top) < pages:
            raise OutOfSlots(
                asked=pages,
                free=table.counts[FREE],
                evictable=self._room.available(top) - table.counts[FREE],
                capacity=table.capacity,
            )
        if lease.start is None:
            lease.start = lease.committed = lease.usable
        if not pages:
            return NO_SLOTS
        slots = self._room.take(top, pages)
        assert len(slots) == pages
        lease.own = _joined(lease.own, slots)
        return slots

    def commit(self, lease: Lease, upto: int, *, ready: bool) -> Transfer | None:
        """Hand the private slots of the pages up to index `upto` to the tree; see `Core.commit`."""
        if lease.closed:
            raise InvalidInput("commit: the request is closed")
        # Without an allocation there is only what came from the cache, which is committed already.
        start, first = (lease.usable,) * 2 if lease.start is None else (lease.start, lease.committed)
        if upto > min(start + len(lease.own), lease.prompt.pages):
            raise InvalidInput(
                f"commit: page {upto} is behind the last one that can be committed: {len(lease.own)} slots were "
                f"allocated from page {start} on, and the prompt has {lease.prompt.pages} whole pages"
            )
        transfer = self._commit(lease, start, first, upto, ready=ready) if upto > first else None
        return transfer if ready else self._guarded(lease, transfer, upto)

    def _guarded(self, lease: Lease, transfer: Transfer | None, upto: int) -> Transfer | None:
        """A transfer that keeps the request's private slots until its writer has ended, if it has any."""
        top = self._registry.top
        private = lease.own[self._registry.tables[top].state[lease.own] == PRIVATE]
        if not len(private):
            return transfer
        if transfer is None:
            transfer = self._log.begin(_WRITES[top], lease.tree, first=upto, target_slots=NO_SLOTS, pins=[])
        transfer.private = private
        self._copies.guard(private)
        lease.writers = [*(writer for writer in lease.writers if len(writer.private)), transfer]
        return transfer

    def _hand_on(self, lease: Lease, fresh: Slots) -> None:
        """What is committed now is no more guarded by earlier writers: this commit's own covers their writes."""
        for writer in lease.writers:
            taken = np.isin(writer.private, fresh)
            self._copies.unguard(writer.private[taken])
            writer.private = writer.private[~taken]

    def _commit(self, lease: Lease, start: int, first: int, upto: int, *, ready: bool) -> Transfer | None:
        lease.committed = upto
        tree, prompt = lease.tree, lease.prompt
        if not tree.live:
            return None
        self._registry.tick += 1
        top = self._registry.top
        walked = tree.walk(prompt, upto)
        held, _ = tree.held(walked, top)
        at = len(held)
        if at < first:
            return None
        fresh = lease.own[at - start : upto - start]
        if not len(fresh):
            self._log.hold(lease, top, held, at)
            return None
        if lease.writers:
            self._hand_on(lease, fresh)
        path = self._copies.fill(top, tree, prompt, at, fresh, hits=1, extend_from=start, path=walked)
        for node, _ in path:
            self._registry.use(node, lease.priority, again=True)
        if not at:
            self._registry.ghosts.met_first_page(tree.namespace, prompt.symbols[: prompt.width])
        self._log.hold(lease, top, _joined(held, fresh), upto)
        return self._written(lease, path, at, fresh, ready=ready)

    def _written(self, lease: Lease, path: Path, at: int, fresh: Slots, *, ready: bool) -> Transfer | None:
        tree = lease.tree
        top = self._registry.top
        table = self._registry.tables[top]
        if ready:
            table.verified[fresh] = True
            for node, _ in path:
                if node.first + node.pages > at:
                    self._copies.publish(top, node)
                    break
            if table.state[fresh[-1]] == RESIDENT:
                self._log.end_settled()
                self._writer.used(path, lease.pins)
                return None
        pins = lease.pins[top]
        assert pins is not None
        pins.holders += 1
        transfer = self._log.begin(_WRITES[top], tree, first=at, target_slots=fresh, pins=[pins])
        if not ready:
            return transfer
        # Another request's pages in front are still being written: wait for them like any finished transfer.
        transfer.completed = True
        self._log.end_settled()
        self._log.end_or_wait(transfer)
        return None

    def give_back(self, lease: Lease) -> None:
        """Free the private slots of a request that is released; a writer that is not done keeps its own until it is."""
        table = self._registry.tables[self._registry.top]
        if len(lease.own) and table.count(lease.own, PRIVATE):
            private = lease.own[table.state[lease.own] == PRIVATE]
            written = table.pins[private] > 0
            table.give_back(private[~written])
            table.advance(private[written], PRIVATE, SlotEvent.DETACH)


def _joined(first: Slots, second: Slots) -> Slots:
    if not len(first):
        return second
    return np.concatenate((first, second)) if len(second) else first
