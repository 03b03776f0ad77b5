"""The backend's one thread: it scans at the start, then looks now and then at what there is to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from .election import Election
from .janitor import Janitor
from .ledger import Books
from .parts import Parts

__all__ = ["Keeper"]

_SCAN_SHARE: Final = 10  # of its time the thread spends at most one part in so many on scans
_LEARN_SHARE: Final = 4  # what others have put since the last scan, as a share of the capacity, that is worth one
_RETRY_TRIM: Final = 30.0
_LAST_TRIM: Final = 0.8  # of what closing may take goes to trimming; what is left, to the end of the thread


class Keeper:
    """Runs the janitor's work, and what every process has to do. Thread-safe.

    Args:
        parts: of the backend.
        election: whether this process is the janitor.
        refresh: seconds between two looks.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self, parts: Parts, election: Election, *, refresh: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._space = parts.space
        self._accounts = parts.accounts
        self._election = election
        self._refresh = refresh
        self._now = now
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._wake = threading.Condition()
        self._janitor = Janitor(parts, self._stop)
        self._cleared: dict[bytes, None] = {}
        self._jobs: list[Callable[[], None]] = []
        self._later: dict[str, float] = {}  # namespaces that are swept once more, and when
        self._was_janitor = False
        self._recount_at = 0.0
        self._trim_at = 0.0
        self._learned = 0  # bytes that others had put when this process last scanned
        self._last_settled = -1
        self._busy = True
        self._owing = False  # the folder is above its capacity, and this process is to trim it
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name="hicache-file-janitor", daemon=True)

    @property
    def is_janitor(self) -> bool:
        """Whether this process is the janitor of the root, as of its last look."""
        return self._election.elected

    @property
    def all_errors(self) -> int:
        """Jobs that failed, directories that could not be read, and times that the ledger was of no use."""
        return self.errors + self._janitor.errors + self._accounts.errors

    def start(self) -> None:
        """Start the thread: it scans first."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end, and wait for it; False if it takes longer. Idempotent.

        A folder that this process has found above its capacity is trimmed first, as far as that takes no longer.
        """
        end = time.monotonic() + timeout
        with self._wake:
            self._wake.wait_for(lambda: not self._owing or self._stop.is_set(), _LAST_TRIM * timeout)
        self._stop.set()
        self._notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def sweep(self, namespace: bytes) -> None:
        """Have the namespace's older generations removed, by whoever is the janitor."""
        with self._wake:
            self._cleared[namespace] = None
            self._busy = True
            self._wake.notify_all()

    def do(self, job: Callable[[], None]) -> None:
        """Have something done by the thread, once."""
        with self._wake:
            self._jobs.append(job)
            self._wake.notify_all()

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the first scan is through."""
        return self._ready.wait(timeout)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until there is nothing to sweep and the folder is not above its capacity."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._busy, timeout)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._guarded(self._elect)
        self._guarded(lambda: self._owe(self._accounts.publish()))
        if not self._space.ready:
            self._guarded(self._count)
            if not self._stop.is_set():
                self._space.scanned()  # also where it failed: puts must not wait for ever
        self._ready.set()
        while not self._stop.is_set():
            cleared = self._next()
            self._guarded(lambda cleared=cleared: self._look(cleared))  # type: ignore[misc]
            self._rest()

    def _next(self) -> list[bytes]:
        with self._wake:
            jobs, self._jobs = self._jobs, []
            cleared = list(self._cleared)
            self._cleared.clear()
        for job in jobs:
            self._guarded(job)
        return cleared

    def _rest(self) -> None:
        with self._wake:
            self._owing = False  # what could go has gone
            self._busy = bool(self._cleared or self._jobs)
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._cleared or self._jobs or self._stop.is_set(), self._refresh)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _guarded(self, work: Callable[[], object]) -> None:
        """Trouble with one job must not end the thread."""
        try:
            work()
        except Exception:
            self.errors += 1

    # --- what it does -------------------------------------------------------------------------------------------

    def _elect(self) -> None:
        if self._election.hold() and not self._was_janitor:
            self._recount_at = self._trim_at = 0.0
        self._was_janitor = self._election.elected

    def _look(self, cleared: list[bytes]) -> None:
        self._elect()
        settled = self._space.standing().settled
        books = self._accounts.publish(give=self._accounts.others and settled == self._last_settled)
        self._last_settled = settled
        if self._election.elected:
            self._sweep(cleared, books)
        if books is None:
            return
        if self._election.elected and self._now() >= self._trim_at:
            self._trim(books)
        if self._now() >= self._recount_at and self._must_count(books):
            self._count()

    def _must_count(self, books: Books) -> bool:
        if not self._accounts.others:
            return not self._accounts.is_complete(books)
        if self._election.elected and (books.doubt or books.used is None):
            return True
        capacity = self._space.capacity
        return capacity is not None and self._accounts.put_by_others(books) - self._learned > capacity // _LEARN_SHARE

    def _count(self) -> None:
        """Scan the folder, and put the books right if nobody came or went meanwhile."""
        start = self._now()
        before = self._accounts.begin_count()
        seen = self._janitor.scan(sweeping=self._election.elected)
        self._recount_at = self._now() + max(_SCAN_SHARE * (self._now() - start), 5 * self._refresh)
        if seen is None or before is None:
            return
        self._learned = sum(account.settled for account in before.others.values())
        if self._space.standing().known > seen:
            self._janitor.prune()
        if (self._election.elected or not self._accounts.others) and not self._accounts.end_count(before, seen):
            self._recount_at = self._now() + self._refresh

    def _sweep(self, cleared: list[bytes], books: Books | None) -> None:
        """Sweep at once what was cleared, and once more when no writer can be so late any more."""
        known = {} if books is None else books.cleared
        due = dict.fromkeys(cleared)
        for name in known:
            when = self._later.get(name)
            if when is None or self._now() >= when:
                due[bytes.fromhex(name)] = None
        for namespace in due:
            name = namespace.hex()
            last = name in self._later and self._now() >= self._later[name]
            floor = self._janitor.sweep_namespace(namespace)
            if self._stop.is_set():
                return
            if last or not self._accounts.others:
                self._later.pop(name, None)
                self._accounts.swept(name, floor)
            else:
                self._later[name] = self._now() + 2 * self._refresh

    def _trim(self, books: Books) -> None:
        if self._owe(books) and not self._janitor.trim():
            self._trim_at = self._now() + _RETRY_TRIM

    def _owe(self, books: Books | None) -> bool:
        """Whether this process is to trim the folder."""
        capacity = self._space.capacity
        used = None if books is None else books.used
        self._owing = self._election.elected and capacity is not None and used is not None and used > capacity
        return self._owing
