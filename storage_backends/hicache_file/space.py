"""Who may work on which object, and how many bytes may be in the folder.

The hard limit holds because every byte is counted before it is written and until it is unlinked: objects in the
index, reservations of writers, and what an earlier process left and no scan has seen yet. No lock is held during I/O;
what I/O goes on for an object is marked by a claim instead, so that one object has one writer or remover at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from hicache.storage.base import ObjectResult

from .index import MINUTE, Index

__all__ = ["ENTRY_CHARGE", "Space", "Ticket", "Victim"]

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
    """An object that was chosen to go: claimed, and no longer in the index."""

    id: bytes
    size: int
    depth: int


class Space:
    """Index, claims and byte accounts under one lock. Thread-safe.

    Args:
        capacity: most bytes, or None.
        wall: wall clock in seconds, for the minute that files are stamped with.
        unseen: bytes of an earlier process that may be in the folder; None = unknown, up to the whole capacity.
        ready: there is nothing to scan.
    """

    def __init__(self, *, capacity: int | None, wall: Callable[[], float], unseen: int | None, ready: bool) -> None:
        self.capacity: Final = capacity
        self.exact = unseen is not None  # whether the sum below is a measured one
        self.ready = ready
        self.evicted = 0
        self._wall = wall
        self._lock = threading.Lock()
        self._index = Index()
        self._claims: dict[bytes, Ticket] = {}
        self._reserved = 0
        self._reservations = 0
        self._unseen = (capacity or 0) if unseen is None else unseen
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

    def bucket(self) -> int:
        """The recency bucket for all keys of one call."""
        minute = int(self._wall() // MINUTE)
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
        """Drop from the index, so that the next put writes. Returns the bytes that were counted.

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

    def adopt(self, identity: bytes, *, size: int, depth: int, bucket: int) -> None:
        """Enter an object that was read and is not known: left by another process, and no scan has come by yet."""
        with self._lock:
            if identity not in self._index and identity not in self._claims:
                self._index.add(identity, size=size, depth=depth, bucket=bucket)
                self._unseen = max(0, self._unseen - size - ENTRY_CHARGE)

    def found(self, identity: bytes, *, size: int, depth: int, mtime: float) -> None:
        """Enter an object that the scan came by."""
        minute = int(min(mtime, self._wall()) // MINUTE)
        with self._lock:
            skip = identity in self._index or identity in self._claims or identity in self._disbelieved
            if not skip:
                self._index.add_found(identity, size=size, depth=depth, minute=minute)
                self._unseen = max(0, self._unseen - size - ENTRY_CHARGE)

    def unseen_removed(self, size: int) -> None:
        """A file that no scan had counted yet was replaced or removed."""
        with self._lock:
            self._unseen = max(0, self._unseen - size - ENTRY_CHARGE)

    def scanned(self, *, exact: bool = True) -> None:
        """The scan is through: nothing is unseen any more, or (not `exact`) it broke off and nobody knows."""
        with self._lock:
            self._unseen = 0
            self.ready = True
            self.exact = exact
            self._disbelieved.clear()

    def reset(self) -> None:
        """The folder is a new, empty one."""
        with self._lock:
            self._index.clear()
            self._unseen = 0
            self.exact = True

    # --- bytes --------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> list[Victim] | str:
        """Room for one object. Decided before anything is taken: what cannot fit evicts nothing.

        Returns:
            The victims, which the caller unlinks before it writes (`unlinked` or `kept` for each), or a reason.
        """
        with self._lock:
            if self.capacity is None:
                self._add_reservation(size)
                return []
            if size + ENTRY_CHARGE > self.capacity:
                return "too_large"
            excess = self._used() + size + ENTRY_CHARGE - self.capacity
            if excess > 0 and not self.ready:
                # The sum may be too high, or the folder too full from before: replace byte by byte, trim later.
                excess = min(excess, size + ENTRY_CHARGE)
            victims = self._take(excess)
            if victims is None:
                return "no_room" if self.ready else "rebuilding"
            self._add_reservation(size)
            return victims

    def settle(self, identity: bytes, *, reserved: int, size: int, depth: int, bucket: int) -> None:
        """A reserved object is in its place."""
        with self._lock:
            self._drop_reservation(reserved)
            self._disbelieved.pop(identity, None)
            self._index.add(identity, size=size, depth=depth, bucket=bucket)

    def cancel(self, reserved: int) -> None:
        """A reserved object was not written."""
        with self._lock:
            self._drop_reservation(reserved)

    def spare(self, size: int) -> list[Victim]:
        """Victims of `size` bytes because the file system is full; none if all that may go is less."""
        with self._lock:
            return self._take(size) or []

    def over(self, most: int) -> list[Victim]:
        """Up to `most` bytes of victims, as far as the folder is above its capacity."""
        with self._lock:
            excess = 0 if self.capacity is None else self._used() - self.capacity
            return self._take(min(excess, most)) or []

    def unlinked(self, victim: Victim) -> None:
        """A victim's file is gone."""
        with self._lock:
            self.evicted += 1
        self.release(victim.id)

    def kept(self, victim: Victim, bucket: int) -> None:
        """A victim's file could not be removed: it counts again, as used now, so that others go first."""
        with self._lock:
            self._index.add(victim.id, size=victim.size, depth=victim.depth, bucket=bucket)
        self.release(victim.id)

    def usage(self) -> tuple[int, int, int]:
        """(objects, bytes of their files, bytes that count against the capacity), as far as known."""
        with self._lock:
            return len(self._index), self._index.bytes, self._used()

    def _take(self, need: int) -> list[Victim] | None:
        if need <= 0:
            return []
        busy = [self._index.size(identity) for identity in self._claims if identity in self._index]
        if self._index.bytes - sum(busy) + ENTRY_CHARGE * (len(self._index) - len(busy)) < need:
            return None
        victims = [Victim(*v) for v in self._index.victims(need, self._claims.keys(), charge=ENTRY_CHARGE)]
        for victim in victims:
            self._claims[victim.id] = Ticket()
        return victims

    def _used(self) -> int:
        counted = ENTRY_CHARGE * (len(self._index) + self._reservations)
        return self._index.bytes + self._reserved + self._unseen + counted

    def _add_reservation(self, size: int) -> None:
        self._reserved += size
        self._reservations += 1

    def _drop_reservation(self, size: int) -> None:
        self._reserved -= size
        self._reservations -= 1
