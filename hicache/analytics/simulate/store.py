"""A storage that holds no bytes: which pages it has, in the order of their use, and how long it takes to say so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from hicache.analytics.simulate.clock import Link, SimulatedTime
from hicache.core.transfers import Transfer, TransferKind
from hicache.records import PageResult
from hicache.runtime.options import Options
from hicache.runtime.storage_io import PREFETCH_REFUSED, QUEUE_FULL, Done, Probe


class SimulatedStore:
    """What all instances share. Evicts by recency, of what was used together the deepest page first.

    Args:
        capacity: pages; None is without limit.

    Attributes:
        written: pages put, again counted.
        read: pages got.
        evicted: pages that made room.
        never_read: pages put and evicted without having been read.
    """

    __slots__ = ("_capacity", "_pages", "evicted", "never_read", "read", "written")

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._pages: OrderedDict[bytes, bool] = OrderedDict()  # whether it was read, by its hash; the oldest first
        self.written = self.read = self.evicted = self.never_read = 0

    def leading(self, hashes: list[bytes]) -> int:
        """How many of the first pages are there."""
        pages = self._pages
        return next((place for place, name in enumerate(hashes) if name not in pages), len(hashes))

    def get(self, name: bytes) -> bool:
        """Read a page; whether it is there."""
        if name not in self._pages:
            return False
        self.read += 1
        self._pages[name] = True
        return True

    def put(self, names: list[bytes]) -> None:
        """Write pages, given root first."""
        pages = self._pages
        self.written += len(names)
        for name in reversed(names):
            pages[name] = pages.pop(name, False)
        if self._capacity is not None:
            while len(pages) > self._capacity:
                _, was_read = pages.popitem(last=False)
                self.evicted += 1
                self.never_read += not was_read

    def touch(self, names: Iterable[bytes]) -> list[bool]:
        """Mark pages as used, in the order given; which are there."""
        found = []
        for name in names:
            there = name in self._pages
            if there:
                self._pages.move_to_end(name)
            found.append(there)
        return found

    def unread(self) -> int:
        """Pages put, there or gone, that nobody has read."""
        return self.never_read + sum(not was_read for was_read in self._pages.values())


class SimulatedStorage:
    """One instance's way to the store: what the executor and the loader ask of storage, with the runtime's own bounds.

    Args:
        store: what is behind it; None where there is no storage.
        time: the clock.
        options: the runtime's, whose bounds count.
        page_bytes: of a page.
        read, write: links to it.
        latency: seconds of each call.
        settle: called when something has ended that took time.
    """

    attachment = 1

    def __init__(
        self,
        store: SimulatedStore,
        time: SimulatedTime,
        options: Options,
        *,
        page_bytes: int,
        read: Link,
        write: Link,
        latency: float,
        settle: Callable[[], None],
    ) -> None:
        self.attached = True
        self._store = store
        self._time = time
        self._page_bytes = page_bytes
        self._read, self._write = read, write
        self._latency = latency
        self._settle = settle
        self._bounds = {TransferKind.FETCH: options.read_bound, TransferKind.PUT: options.write_bound}
        self._bytes = dict.fromkeys(self._bounds, 0)
        self._jobs = dict.fromkeys(self._bounds, 0)

    def fetch(self, transfer: Transfer, done: Done) -> bool:
        """Read pages, in the time that the link takes."""

        def read() -> list[PageResult]:
            return [PageResult.OK if self._store.get(page.hash) else PageResult.SOURCE_GONE for page in transfer.pages]

        return self._begin(transfer, self._read, read, done)

    def put(self, transfer: Transfer, done: Done) -> bool:
        """Write pages, likewise."""

        def write() -> list[PageResult]:
            self._store.put([page.hash for page in transfer.pages])
            return [PageResult.OK] * transfer.count

        return self._begin(transfer, self._write, write, done)

    def touch(self, transfer: Transfer, done: Done) -> bool:
        """Mark pages as used, at once: no bytes go."""
        found = self._store.touch(page.hash for page in transfer.pages)
        done(transfer.id, [PageResult.OK if there else PageResult.SOURCE_GONE for there in found])
        return True

    def probe(self, probe: Probe) -> bool:
        """Say how many of the pages are there."""

        def answer() -> None:
            probe.found(self._store.leading(probe.page_hashes), True)

        self._after(self._time.now() + self._latency, answer, takes_time=self._latency > 0)
        return True

    def refusal(self, kind: TransferKind) -> str:
        """The bound of its queue."""
        return PREFETCH_REFUSED if kind is TransferKind.FETCH else QUEUE_FULL

    def _begin(self, transfer: Transfer, link: Link, work: Callable[[], list[PageResult]], done: Done) -> bool:
        kind, size = transfer.kind, transfer.count * self._page_bytes
        bound = self._bounds[kind]
        if self._jobs[kind] and (self._jobs[kind] >= bound.requests or self._bytes[kind] + size > bound.bytes):
            return False
        self._jobs[kind] += 1
        self._bytes[kind] += size

        def end() -> None:
            self._jobs[kind] -= 1
            self._bytes[kind] -= size
            done(transfer.id, work())

        self._after(link.send(size) + self._latency, end, takes_time=link.takes_time)
        return True

    def _after(self, when: float, call: Callable[[], None], *, takes_time: bool) -> None:
        if not takes_time:
            call()
            return

        def end() -> None:
            call()
            self._settle()

        self._time.at(when, end)
