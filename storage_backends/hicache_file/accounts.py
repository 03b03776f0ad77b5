"""This process's part in the ledger: it draws bytes, publishes what it did, and counts the folder anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from .ledger import Account, Books, Ledger, LedgerBusy
from .space import Space, Standing

__all__ = ["Accounts", "Count"]

_PORTION_SHARE: Final = 512  # of the capacity
_LARGEST_PORTION: Final = 64 * 2**20


class Count(NamedTuple):
    """What the books said when a count of the folder began."""

    epoch: int
    own: Standing
    others: dict[str, Account]


class Accounts:
    """Thread-safe. Holds no lock of the process during I/O besides the ledger's own, which has a time limit.

    Args:
        ledger: the shared file.
        space: this process's bytes.
        token: this writer.
        is_living: whether another writer's process is still there.
        pause: seconds for which a ledger that had nothing to give is not asked again.
        now: a monotonic clock in seconds.

    Attributes:
        others: whether other writers are on the root, as far as last seen.
        portion: bytes that are drawn at once, and after which this writer publishes itself.
        errors: times that the ledger could not be used.
    """

    def __init__(
        self,
        ledger: Ledger,
        space: Space,
        *,
        token: str,
        is_living: Callable[[str], bool],
        pause: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._space = space
        self._token = token
        self._is_living = is_living
        self._pause = pause
        self._now = now
        self._empty_until = float("-inf")
        self._complete = -1  # the epoch in which this process, alone, knows every object
        self._published = Standing(0, 0, 0, 0, 0)
        capacity = space.capacity
        self.portion: Final = (
            _LARGEST_PORTION if capacity is None else min(capacity // _PORTION_SHARE, _LARGEST_PORTION)
        )
        self.others = False
        self.errors = 0

    def join(self, *, empty: bool) -> None:
        """Enter the books.

        Args:
            empty: the folder has just been made, so nothing is in it.

        Raises:
            LedgerBusy, OSError: the ledger cannot be used.
        """
        with self._ledger.books() as books:
            self._bury(books)
            books.epoch += 1
            if empty and not books.writers:
                books.used, books.doubt = 0, False
                self._complete = books.epoch
            self._enter(books)

    def living(self) -> list[str]:
        """Other writers that are there now; raises as `join` does."""
        with self._ledger.books() as books:
            self._bury(books)
            return [token for token in books.writers if token != self._token]

    def leave(self) -> None:
        """Give back what is left, and go out of the books."""
        try:
            with self._ledger.books() as books:
                self._enter(books)
                standing = self._space.standing()
                if books.used is not None:
                    books.used = max(0, books.used - standing.held)
                del books.writers[self._token]
                books.epoch += 1
        except (LedgerBusy, OSError):
            self.errors += 1
        self._ledger.close()

    def start_over(self) -> None:
        """The folder is a new, empty one."""
        try:
            with self._ledger.books() as books:
                books.used, books.doubt = 0, False
                books.epoch += 1
                books.writers.clear()
                self._complete = books.epoch
                self._enter(books)
        except (LedgerBusy, OSError):
            self.errors += 1
        self._empty_until = float("-inf")

    def draw(self, lacking: int) -> bool:
        """Ask for at least `lacking` bytes; False if less or nothing was to be had.

        Raises:
            LedgerBusy, OSError: the ledger cannot be used.
        """
        if self._now() < self._empty_until:
            return False
        with self._ledger.books() as books:
            self._enter(books)
            wanted = max(lacking, self.portion)
            if self._space.capacity is not None:
                room = 0 if books.used is None else self._space.capacity - books.used
                wanted = max(0, min(wanted, room))
            if wanted:
                if books.used is not None:
                    books.used += wanted
                books.writers[self._token].held += wanted
        self._space.grant(wanted)
        if wanted < lacking:
            self._empty_until = self._now() + self._pause
        return wanted >= lacking

    def refill(self) -> None:
        """Ask the ledger again with the next draw, whatever it had last time."""
        self._empty_until = float("-inf")

    def is_due(self) -> bool:
        """Whether so much has happened that others must know."""
        standing, before = self._space.standing(), self._published
        moved = max(standing.settled - before.settled, standing.removed - before.removed)
        return moved >= max(self.portion, 1) or standing.idle > 4 * self.portion

    def publish(self, *, give: bool = False) -> Books | None:
        """Let others know what this writer did; None if the ledger cannot be used now.

        Args:
            give: give back what no write has set aside, else only what is more than a portion.

        Returns:
            What the books say; a copy that nobody else changes.
        """
        returned = self._space.withdraw(2**62 if give else max(0, self._space.standing().idle - self.portion))
        try:
            with self._ledger.books() as books:
                self._bury(books)
                if books.used is not None:
                    books.used = max(0, books.used - returned)
                self._enter(books)
        except (LedgerBusy, OSError):
            self._space.grant(returned)
            self.errors += 1
            return None
        return books

    def swept(self, namespace: str, generation: int) -> None:
        """What is older than a generation of a namespace (hex) is gone for good, and needs no look any more."""
        try:
            with self._ledger.books() as books:
                if books.cleared.get(namespace, -1) <= generation:
                    books.cleared.pop(namespace, None)
        except (LedgerBusy, OSError):
            self.errors += 1

    def put_by_others(self, books: Books) -> int:
        """Bytes that the writers who are there now have put in place, as far as they have said."""
        return sum(account.settled for account in self._others(books).values())

    # --- counting -----------------------------------------------------------------------------------------------

    def is_complete(self, books: Books) -> bool:
        """Whether this process is alone and its index knows every object."""
        return self._complete == books.epoch and not self._others(books)

    def begin_count(self) -> Count | None:
        """The books before the folder is walked; None if the ledger cannot be used now."""
        books = self.publish()
        if books is None:
            return None
        return Count(books.epoch, self._space.standing(), self._others(books))

    def end_count(self, before: Count, seen: int) -> bool:
        """Put right what the books say; False if writers came or went meanwhile, or the ledger cannot be used now.

        Alone, the index is the count. With others the sum of what was seen is only as exact as they are quiet: what
        they have put in place since the walk began may have been seen or not. So `used` is lowered to what it can be
        at most, and raised to what it must be at least.

        Args:
            before: from `begin_count`.
            seen: bytes of all objects that the walk came by, charges included.
        """
        try:
            with self._ledger.books() as books:
                if books.epoch != before.epoch:
                    return False
                others = self._others(books)
                if not others:
                    self._complete = books.epoch
                self._enter(books)
                if not others:
                    return True
                own = self._space.standing()
                most = seen + own.held + own.settled - before.own.settled
                least = seen - (own.removed - before.own.removed)
                for token, account in others.items():
                    start = before.others.get(token, Account())
                    most += account.held + account.settled - start.settled + 2 * account.portion
                    least -= account.removed - start.removed + account.portion
                used = most if books.used is None else books.used
                books.used = max(min(used, most), least, 0)
                books.doubt = False
        except (LedgerBusy, OSError):
            self.errors += 1
            return False
        return True

    # --- inside the books ---------------------------------------------------------------------------------------

    def _enter(self, books: Books) -> None:
        """Write this writer's standing; alone and with a complete index it knows better what is used."""
        standing = self._space.standing()
        books.writers[self._token] = Account(standing.held, standing.settled, standing.removed, self.portion)
        if self.is_complete(books):
            books.used = standing.known + standing.held
            books.doubt = False
        self._published = standing
        if books.used is not None and self._space.capacity is not None and books.used < self._space.capacity:
            self.refill()
        self.others = bool(self._others(books))

    def _others(self, books: Books) -> dict[str, Account]:
        return {token: account for token, account in books.writers.items() if token != self._token}

    def _bury(self, books: Books) -> None:
        """Take dead writers out. What they held stays counted until the next count."""
        for token in self._others(books):
            if not self._is_living(token):
                del books.writers[token]
                books.epoch += 1
                books.doubt = True
