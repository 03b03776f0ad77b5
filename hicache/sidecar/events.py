"""The residency changes of all pools as one numbered stream, which can be entered at any moment.

    append            numbers what changes something, keeps it in a bounded ring, and in the table of residency
    watch(0)          a snapshot, then all that follows it
    watch(number)     all from that number on, if the ring still has it; else `lost`, and then as `watch(0)`

Numbers have no gaps within one life of the service. They begin at a moment in time, so that no number of an earlier
life is one of this life: who asks for it gets `lost` and a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from hicache.core.identity import DerivedNamespace
from hicache.errors import LimitExceeded
from hicache.events import Cleared, Event, Removed, Stored
from hicache.records import Tier
from hicache.rpc.service import EventBatch
from hicache.sidecar.batches import BATCH_BYTES, BATCH_EVENTS, news, packed, page_tokens, size_of, split
from hicache.sidecar.residency import BUCKETS, ResidencyTable, Scope, View

SLICE_PAGES: Final = 512
"""Pages that one step takes over, in about a millisecond."""

PURGED: Final = 128
"""Buckets that each step looks at for pages of scopes that are over."""

Describe = Callable[[bytes], DerivedNamespace | None]


def first_number(seconds: float) -> int:
    """The first number of a life that begins now: above all of earlier lives, exact as a 64-bit float.

    Two million numbers a second are free until the next life's.
    """
    return int(seconds * 1000) << 11


class Listener(Protocol):
    """Is told of changes at once, under the log's lock: it must not wait, nor call the log but for what needs it."""

    def reset(self, view: View) -> None:
        """It begins to listen, and this is what there is."""
        ...

    def changed(self, event: Stored | Removed, scope: Scope) -> None:
        """Pages came or went. The table has it already; it may be asked."""
        ...

    def cleared(self, scopes: Sequence[Scope], view: View) -> None:
        """All pages of these scopes went at once; `view` still has them."""
        ...


@dataclass(frozen=True, slots=True)
class EventLogStatistics:
    """A snapshot of the log.

    Attributes:
        next_number: number of the next event.
        events: numbered since the start.
        kept: events that the ring holds.
        pages: pages that any tier holds, by namespace.
        watchers: open now.
        snapshots: given since the start; `lost`: of these, to watchers that had fallen behind.
        unchanged: events that changed nothing, and so have no number.
        waiting: events that have no number yet.
    """

    next_number: int
    events: int
    kept: int
    pages: int
    watchers: int
    snapshots: int
    lost: int
    unchanged: int
    waiting: int


@dataclass(frozen=True, slots=True)
class _Kept:
    first: int
    timestamp_ms: int
    events: tuple[Event, ...]
    bytes: int


class EventLog:
    """See the module. Thread-safe; watchers belong to the loop that iterates them.

    Args:
        most_events: that the ring keeps.
        most_bytes: about so many bytes of hashes and tokens in them.
        watchers: most watchers at once; each may keep an older state of the table while it reads a snapshot.
        buckets: of the table, see `ResidencyTable`.
        wall: seconds since the epoch.
        later: calls a function soon, such as a loop's `call_soon_threadsafe`. With it no call does more than a slice
            of about `SLICE_PAGES` pages, and the rest follows in order; without it each call does all of its own.

    Attributes:
        lock: held while anything changes; a listener is called under it.
        table: what is resident; under the lock.
    """

    def __init__(
        self,
        *,
        most_events: int = 65_536,
        most_bytes: int = 64 * 2**20,
        watchers: int = 64,
        buckets: int = BUCKETS,
        wall: Callable[[], float] = time.time,
        later: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.table = ResidencyTable(buckets)
        self._most_events, self._most_bytes, self._most_watchers = most_events, most_bytes, watchers
        self._wall = wall
        self._start = self._next = first_number(wall())
        self._ring: deque[_Kept] = deque()
        self._kept_events = self._kept_bytes = 0
        self._scopes: dict[tuple[Hashable, bytes, int], Scope] = {}
        self._twins: dict[tuple[bytes, int], list[Scope]] = {}
        self._kin: dict[Hashable, list[Scope]] = {}
        self._numbers = itertools.count()
        self._later = later
        self._waiting: deque[tuple[Event | None, Hashable, Describe | None]] = deque()
        self._scheduled = False
        self._listeners: list[Listener] = []
        self._watchers: list[_Watcher] = []
        self._snapshots = self._lost = self._unchanged = 0
        self._closed = False

    # ---- what comes in

    def append(self, events: Iterable[Event], *, source: Hashable = None, describe: Describe | None = None) -> None:
        """Residency has changed.

        Args:
            events: in order.
            source: whose pages they are, such as a pool. A page of two sources is gone when both have removed it.
            describe: gives the namespace of a digest; needed for tokens, and for whoever meets more than hashes.
        """
        with self.lock:
            self._waiting.extend((part, source, describe) for event in events for part in split(event, SLICE_PAGES))
            self._settle()

    def forget(self, source: Hashable) -> None:
        """A source is over, and with it all that it held."""
        with self.lock:
            self._waiting.append((None, source, None))
            self._settle()

    def _settle(self) -> None:
        """Number what waits: a slice of it, where somebody does the rest later."""
        fresh: list[Event] = []
        left = SLICE_PAGES
        while self._waiting and left > 0:
            event, source, describe = self._waiting.popleft()
            before = len(fresh)
            if event is None:
                for scope in [scope for scope in self._scopes.values() if scope.source == source]:
                    self._end(scope, fresh)
            elif isinstance(event, Stored):
                self._store(event, self._scope(source, event, describe), fresh)
            elif (known := self._scopes.get((source, event.namespace, event.generation))) is None:
                pass  # it holds nothing here
            elif isinstance(event, Removed):
                self._remove(event.tier, event.page_hashes, event.reason, known, fresh)
            else:
                self._end(known, fresh)
            self._unchanged += event is not None and len(fresh) == before
            if self._later is not None:
                left -= 1 if event is None or isinstance(event, Cleared) else len(event.page_hashes)
        more = self.table.purge(PURGED) or bool(self._waiting)
        self._number(fresh)
        if more and self._later is not None and not self._scheduled:
            self._scheduled = True
            self._later(self._go_on)

    def _go_on(self) -> None:
        with self.lock:
            self._scheduled = False
            self._settle()

    def listen(self, listener: Listener) -> None:
        """Tell a listener what there is, and all that follows."""
        with self.lock:
            self._listeners.append(listener)
            listener.reset(self.view())

    def leave(self, listener: Listener) -> None:
        """Tell it no more."""
        with self.lock:
            self._listeners.remove(listener)

    def view(self) -> View:
        """All that is resident now. The lock is held."""
        return self.table.view(self._scopes.values())

    def close(self) -> None:
        """All watchers end when they have what is here. Idempotent."""
        with self.lock:
            self._closed = True
            self._wake()

    def statistics(self) -> EventLogStatistics:
        """A snapshot."""
        with self.lock:
            return EventLogStatistics(
                next_number=self._next,
                events=self._next - self._start,
                kept=self._kept_events,
                pages=sum(max(scope.counts) for scope in self._scopes.values()),
                watchers=len(self._watchers),
                snapshots=self._snapshots,
                lost=self._lost,
                unchanged=self._unchanged,
                waiting=len(self._waiting),
            )

    def _scope(self, source: Hashable, event: Event, describe: Describe | None) -> Scope:
        key = (source, event.namespace, event.generation)
        scope = self._scopes.get(key)
        if scope is None:
            derived = None if describe is None else describe(event.namespace)
            scope = Scope(next(self._numbers), source, event.namespace, event.generation, derived)
            scope.twins = self._twins.setdefault((event.namespace, event.generation), [])
            scope.kin = self._kin.setdefault(scope.chain, [])
            scope.twins.append(scope)
            scope.kin.append(scope)
            self._scopes[key] = scope
        return scope

    def _drop(self, scope: Scope) -> None:
        del self._scopes[scope.source, scope.namespace, scope.generation]
        scope.twins.remove(scope)
        scope.kin.remove(scope)
        if not scope.twins:
            del self._twins[scope.namespace, scope.generation]
        if not scope.kin:
            del self._kin[scope.chain]

    def _store(self, event: Stored, scope: Scope, fresh: list[Event]) -> None:
        new, tokens = self.table.store(scope, event, page_tokens(event, scope.token_bytes))
        if len(scope.twins) > 1:
            hashes, tier = event.page_hashes, event.tier
            new = [at for at in new if not self.table.holds(scope.twins, hashes[at], tier, but=scope)]
        for stored in news(event, new, tokens):
            fresh.append(stored)
            for listener in self._listeners:
                listener.changed(stored, scope)

    def _remove(self, tier: Tier, page_hashes: Iterable[bytes], reason: str, scope: Scope, fresh: list[Event]) -> None:
        gone = self.table.remove(scope, tier, page_hashes)
        if len(scope.twins) > 1:
            gone = [page_hash for page_hash in gone if not self.table.holds(scope.twins, page_hash, tier, but=scope)]
        for first in range(0, len(gone), SLICE_PAGES):
            some = tuple(gone[first : first + SLICE_PAGES])
            removed = Removed(scope.namespace, scope.generation, tier, some, reason)
            fresh.append(removed)
            for listener in self._listeners:
                listener.changed(removed, scope)
        if scope.empty:
            self._drop(scope)

    def _end(self, scope: Scope, fresh: list[Event]) -> None:
        """All of a scope goes: at once, or page by page where another source has the same namespace."""
        if len(scope.twins) > 1:
            pages = next(found for found in self.view().by_depth([scope]) if found is not None)
            for tier in [tier for tier in Tier if scope.counts[tier]]:
                deepest_first = (
                    page_hash
                    for index in sorted(pages, reverse=True)
                    for _, page_hash, page in pages[index]
                    if page[3] >> tier & 1
                )
                self._remove(tier, list(deepest_first), "cleared", scope, fresh)
            return
        self._drop(scope)
        fresh.append(Cleared(scope.namespace, scope.generation))
        if self._listeners:
            view = self.view()
            for listener in self._listeners:
                listener.cleared([scope], view)
        self.table.bury(scope)

    def _number(self, fresh: list[Event]) -> None:
        timestamp = int(self._wall() * 1000)
        for events, size in packed(fresh):
            self._ring.append(_Kept(self._next, timestamp, events, size))
            self._next += len(events)
            self._kept_events += len(events)
            self._kept_bytes += size
        while len(self._ring) > 1 and (self._kept_events > self._most_events or self._kept_bytes > self._most_bytes):
            old = self._ring.popleft()
            self._kept_events -= len(old.events)
            self._kept_bytes -= old.bytes
        if fresh:
            self._wake()

    # ---- who watches

    async def watch(self, from_sequence: int) -> AsyncIterator[EventBatch]:
        """Batches from a number on; 0: a snapshot first. Ends when the log is closed.

        Raises:
            LimitExceeded: too many watch already.
        """
        watcher = self._join()
        try:
            at: int | None = from_sequence or None
            while True:
                if at is None:
                    async for batch in self._snapshot(lost=0):
                        at = batch.sequence
                        yield batch
                    assert at is not None
                found = self._take(at, watcher)
                if isinstance(found, EventBatch):
                    at = found.sequence + len(found.events)
                    yield found
                elif found is not None:
                    async for batch in self._snapshot(lost=found):
                        at = batch.sequence
                        yield batch
                elif watcher.over:
                    return
                else:
                    await watcher.changed.wait()
        finally:
            self._part(watcher)

    def _join(self) -> _Watcher:
        watcher = _Watcher()
        with self.lock:
            if len(self._watchers) >= self._most_watchers:
                raise LimitExceeded(f"{len(self._watchers)} watch events already, the limit is {self._most_watchers}")
            self._watchers.append(watcher)
        return watcher

    def _part(self, watcher: _Watcher) -> None:
        with self.lock:
            self._watchers.remove(watcher)

    def _take(self, at: int, watcher: _Watcher) -> EventBatch | int | None:
        """The batch with event `at`; or how many were lost, as far as that is known; or None: nothing yet."""
        with self.lock:
            watcher.over = self._closed
            watcher.rest()
            if at == self._next:
                return None
            oldest = self._ring[0].first if self._ring else self._next
            if not self._start <= at < self._next:
                return 1  # of another life: nobody knows
            if at < oldest:
                return oldest - at
            last = self._ring[-1]
            if last.first > at:
                last = self._ring[bisect_right(self._ring, at, key=lambda kept: kept.first) - 1]
            return EventBatch(at, last.timestamp_ms, last.events[at - last.first :])

    async def _snapshot(self, *, lost: int) -> AsyncIterator[EventBatch]:
        with self.lock:
            view, number = self.view(), self._next
            self._snapshots += 1
            self._lost += bool(lost)
        timestamp = int(self._wall() * 1000)
        if lost:
            yield EventBatch(number, timestamp, lost=lost)
        waiting: list[Event] = []
        size = 0
        for found in view.stored():
            if found is None:
                await asyncio.sleep(0)  # others have their turn
                continue
            if len(waiting) == BATCH_EVENTS or size >= BATCH_BYTES:
                yield EventBatch(number, timestamp, tuple(waiting), snapshot=True)
                waiting, size = [], 0
            waiting.append(found[1])
            size += size_of(found[1])
        yield EventBatch(number, timestamp, tuple(waiting), snapshot=True, snapshot_end=True)

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.wake()


class _Watcher:
    """Wakes one iterator, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = False
        self.changed = asyncio.Event()
        self.over = False

    def wake(self) -> None:
        """There is something new. Under the log's lock, from any thread."""
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # its loop is closed: it can be told nothing any more
                self._loop.call_soon_threadsafe(self.changed.set)

    def rest(self) -> None:
        """All is seen. Under the log's lock, on the loop's thread."""
        self._woken = False
        self.changed.clear()
