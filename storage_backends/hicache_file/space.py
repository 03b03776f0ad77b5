"""Who may work on which object, and how many bytes this process may still write.

The process writes only from what the ledger that all share has given it (`Accounts`) and what it has unlinked itself:
whose unlink succeeded owns the bytes. No lock is held during I/O; what I/O goes on for an object is marked by a claim
instead, so that one object has one writer or remover at a time in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from hicache.storage.base import ObjectResult

from .index import MINUTE, Index

__all__ = ["ENTRY_CHARGE", "Space", "Standing", "Ticket", "Victim"]

ENTRY_CHARGE: Final = 256
"""Bytes that an object counts beyond its file: its name and its share of the fan-out directories."""
_REMEMBERED: Final = 65_536


class Ticket:
    """A claim that somebody else holds: wait for its end and, if it was a put, take its result."""

    __slots__ = ("_done", "result")

    def __init__(self) -> None:
        # A lock that is held until the claim ends: an eighth of what an event costs, and most claims nobody waits for.
        self._done = threading.Lock()
        self._done.acquire()
        self.result: ObjectResult | None = None

    def wait(self, timeout: float) -> bool:
        """Wait for the end; False if it took longer than `timeout` seconds."""
        if not self._done.acquire(timeout=timeout):
            return False
        self._done.release()  # the next one waits for the same end
        return True

    def end(self, result: ObjectResult | None) -> None:
        """The claim is over."""
        self.result = result
        self._done.release()


class Victim(NamedTuple):
    """An object that was chosen to go: claimed, and no longer in the index. `minute` is that of its last use."""

    id: bytes
    size: int
    depth: int
    minute: int


class Standing(NamedTuple):
    """A snapshot of the byte accounts of this process.

    Attributes:
        held: bytes that may be written or are being written.
        settled, removed: bytes put in place, and unlinked, so far.
        known: bytes of all objects in the index and of victims that are not gone yet, charges included.
        idle: bytes of `held` that no write has reserved.
    """

    held: int
    settled: int
    removed: int
    known: int
    idle: int


class Space:
    """Index, claims and byte accounts under one lock. Thread-safe.

    Args:
        capacity: most bytes, or None.
        wall: wall clock in seconds, for the minute that files are stamped with.
        ready: there is nothing to scan.
    """

    def __init__(self, *, capacity: int | None, wall: Callable[[], float], ready: bool) -> None:
        self.capacity: Final = capacity
        self.ready = ready
        self.evicted = 0
        self._wall = wall
        self._lock = threading.Lock()
        self._index = Index()
        self._claims: dict[bytes, Ticket] = {}
        self._allowed = 0
        self._reserved = 0
        self._settled = 0
        self._removed = 0
        self._leaving = 0  # bytes of victims that are still there
        self._disbelieved: dict[bytes, None] = {}

    # --- claims -------------------------------------------------------------------------------------------------

    def claim(self, identity: bytes) -> Ticket | None:
        """Take the right to write or remove an object; None = it is yours, else the claim of who has it."""
        with self._lock:
            ticket = self._claims.get(identity)
            if ticket is None:
                self._claims[identity] = Ticket()
            return ticket

    def release(self, identity: bytes, result: ObjectResult | None = None) -> None:
        """End a claim; whoever waits gets the result."""
        with self._lock:
            ticket = self._claims.pop(identity)
        ticket.end(result)

    # --- what is known ------------------------------------------------------------------------------------------

    def minute(self) -> int:
        """The wall clock's minute."""
        return int(self._wall() // MINUTE)

    def bucket(self) -> int:
        """The recency bucket for all keys of one call."""
        minute = self.minute()
        with self._lock:
            return self._index.current(minute)

    def known(self, identity: bytes) -> int:
        """Bytes of an object in the index, 0 if it is not there."""
        with self._lock:
            return self._index.size(identity)

    def use(self, identity: bytes, bucket: int) -> bool | None:
        """Move to a bucket. None if not known, else whether its file should be stamped with the time."""
        with self._lock:
            return self._index.use(identity, bucket)

    def forget(self, identity: bytes, *, disbelieve: bool = False) -> int:
        """Drop from the index, so that the next put writes. Returns the bytes of its file as far as known.

        Args:
            identity: the object.
            disbelieve: a scan may not bring it back, because its file could not be removed.
        """
        with self._lock:
            if disbelieve:
                self._disbelieved[identity] = None
                if len(self._disbelieved) > _REMEMBERED:
                    del self._disbelieved[next(iter(self._disbelieved))]
            return self._index.remove(identity)

    def is_disbelieved(self, identity: bytes) -> bool:
        """Whether it was found damaged and could not be removed."""
        return identity in self._disbelieved

    def adopt(self, identity: bytes, *, size: int, depth: int, bucket: int) -> None:
        """Enter an object that was read and is not known: another process put it, or no scan has come by yet."""
        with self._lock:
            if identity not in self._index and identity not in self._claims:
                self._index.add(identity, size=size, depth=depth, bucket=bucket)

    def adopt_claimed(self, identity: bytes, *, size: int, depth: int, bucket: int) -> None:
        """Enter an object whose claim the caller has: another process has just put it."""
        with self._lock:
            self._disbelieved.pop(identity, None)
            self._index.add(identity, size=size, depth=depth, bucket=bucket)

    def found(self, identity: bytes, *, size: int, depth: int, mtime: float) -> None:
        """Enter an object that the scan came by."""
        minute = int(min(mtime, self._wall()) // MINUTE)
        with self._lock:
            skip = identity in self._index or identity in self._claims or identity in self._disbelieved
            if not skip:
                self._index.add_found(identity, size=size, depth=depth, minute=minute)

    def scanned(self) -> None:
        """The scan is through."""
        with self._lock:
            self.ready = True
            self._disbelieved.clear()

    def reset(self) -> None:
        """The folder is a new, empty one: nothing is known, and nothing has been given yet."""
        with self._lock:
            self._index.clear()
            self._allowed = 0

    def ids(self) -> list[bytes]:
        """All ids in the index, in no order."""
        with self._lock:
            return self._index.ids()

    # --- bytes --------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> int:
        """Set bytes aside for one object. Returns 0, or how many are lacking; then nothing was set aside."""
        with self._lock:
            lacking = size + ENTRY_CHARGE - self._allowed
            if lacking > 0:
                return lacking
            self._allowed -= size + ENTRY_CHARGE
            self._reserved += size + ENTRY_CHARGE
            return 0

    def lacking(self, size: int) -> int:
        """How many bytes `reserve` would lack now, 0 if none; sets nothing aside."""
        with self._lock:
            return max(0, size + ENTRY_CHARGE - self._allowed)

    def grant(self, amount: int) -> None:
        """The ledger gave bytes, or (below zero) took them back."""
        with self._lock:
            self._allowed += amount

    def withdraw(self, most: int) -> int:
        """Take back bytes that nothing has set aside, to be given to the ledger. Returns how many."""
        with self._lock:
            amount = max(0, min(most, self._allowed))
            self._allowed -= amount
            return amount

    def settle(self, identity: bytes, *, size: int, depth: int, bucket: int) -> None:
        """A reserved object is in its place."""
        with self._lock:
            self._reserved -= size + ENTRY_CHARGE
            self._settled += size + ENTRY_CHARGE
            self._disbelieved.pop(identity, None)
            self._index.add(identity, size=size, depth=depth, bucket=bucket)

    def cancel(self, size: int) -> None:
        """A reserved object was not written."""
        with self._lock:
            self._reserved -= size + ENTRY_CHARGE
            self._allowed += size + ENTRY_CHARGE

    def gone(self, identity: bytes, size: int) -> None:
        """An object's file of that size was unlinked by this process: its bytes may be written again."""
        with self._lock:
            self._index.remove(identity)
            self._free(size)

    def take(self, need: int) -> list[Victim] | None:
        """Victims of at least `need` bytes, claimed for the caller; None, and nothing is taken, if there are less."""
        with self._lock:
            return self._take(need)

    def take_some(self, most: int) -> list[Victim]:
        """Victims of `most` bytes or, if that is all there is, of less."""
        with self._lock:
            return self._take(min(most, self._evictable())) or []

    def unlinked(self, victim: Victim, *, ours: bool) -> None:
        """A victim's file is gone, by our doing or not: only who unlinked it may write its bytes again."""
        with self._lock:
            self._leaving -= victim.size + ENTRY_CHARGE
            if ours:
                self.evicted += 1
                self._free(victim.size)
        self.release(victim.id)

    def kept(self, victim: Victim, bucket: int) -> None:
        """A victim stays: it counts again, as used now, so that others go first."""
        with self._lock:
            self._leaving -= victim.size + ENTRY_CHARGE
            self._index.add(victim.id, size=victim.size, depth=victim.depth, bucket=bucket)
        self.release(victim.id)

    def standing(self) -> Standing:
        """A snapshot."""
        with self._lock:
            known = self._index.bytes + ENTRY_CHARGE * len(self._index) + self._leaving
            return Standing(self._allowed + self._reserved, self._settled, self._removed, known, self._allowed)

    def usage(self) -> tuple[int, int]:
        """(objects, bytes of their files), as far as known."""
        with self._lock:
            return len(self._index), self._index.bytes

    def _free(self, size: int) -> None:
        self._allowed += size + ENTRY_CHARGE
        self._removed += size + ENTRY_CHARGE

    def _evictable(self) -> int:
        busy = [self._index.size(identity) for identity in self._claims if identity in self._index]
        return self._index.bytes - sum(busy) + ENTRY_CHARGE * (len(self._index) - len(busy))

    def _take(self, need: int) -> list[Victim] | None:
        if need <= 0:
            return []
        if self._evictable() < need:
            return None
        victims = [Victim(*v) for v in self._index.victims(need, self._claims.keys(), charge=ENTRY_CHARGE)]
        for victim in victims:
            self._claims[victim.id] = Ticket()
            self._leaving += victim.size + ENTRY_CHARGE
        return victims
