"""What caches of all profiles share: open leases, counting them once, and the end of the cache."""

from __future__ import annotations

import threading
from math import inf

from hicache.core.prompt import Hasher, Prompt
from hicache.core.reasons import RequestCounts
from hicache.core.transfers import Lease
from hicache.core.tree import HiRadixTree
from hicache.memory.base import HostPool
from hicache.records import MissReason
from hicache.runtime.accesslog.recorder import Recorder
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.runtime.arguments import number_of_seconds
from hicache.runtime.closing import CloseReport, drain, take_apart, unwritten
from hicache.runtime.loading import Prefetch
from hicache.runtime.parts import Parts
from hicache.runtime.reducer import Ringer
from hicache.runtime.statistics import Ledger
from hicache.runtime.upkeep import FORKED, Upkeep

_CLOSED = "the cache is closed"
LEAST_TO_LOG = 0.5
"""Seconds that a closing cache gives its access log, although its deadline has passed."""

_BYPASS = bytes(16)  # names the tree of requests that go past the cache; no sha256 prefix anybody will meet


class LeasingCache(Upkeep):
    """The part of a cache that knows its open leases. Thread-safe; a forked child must not use it.

    Attributes:
        namespace: the model as served.
        page_size: tokens a page.
        host: the host pool; None without a host tier.
        warnings: what works with these settings but will cost, in words.
        parts: the machinery behind it; for requests and for tests.
        access: notes requests for the access log; None without one. Used under the reducer's lock.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.namespace = parts.namespace
        self.page_size = parts.namespace.page_size
        self.host: HostPool | None = parts.pools.host
        self.warnings = parts.warnings
        self._reducer = parts.reducer
        self._core = parts.core
        self._loader = parts.loader
        self._now = parts.clock.now
        self._stores = parts.storage is not None
        touch_seconds = parts.core.config.touch_seconds
        self._touch_seconds = inf if touch_seconds is None else touch_seconds
        self._width = parts.width
        self._ledger = Ledger()
        self._leases: dict[Lease, int] = {}  # open leases, and the tokens of their prompts
        self._past: dict[Lease, int] = {}  # of these, those that go past the cache, and the pages they ask for
        self._bypass_tree: HiRadixTree | None = None
        self._refusal: str | None = None
        self._closing = threading.Lock()
        self._attaching = threading.Lock()
        self._pump: Ringer | None = None
        self.access: Recorder | None = None
        self._own_log: AccessLogWriter | None = None

    def record_access(self, writer: AccessLogWriter, *, tenant: str | None = None, owned: bool = False) -> None:
        """Note requests that begin from now on for an access log, whose clock is the cache's.

        Args:
            writer: of the process, for this cache and others.
            tenant: of all requests, where they have one.
            owned: the log is this cache's alone: it is closed and told of by it. Else it is closed behind this cache.
        """
        parts = self.parts
        self._own_log = writer if owned else None
        with self._reducer.lock:
            self.access = Recorder(writer, parts.scopes, parts.namespace, now=self._now, tenant=tenant)
            self._loader.loaded = self.access.loaded

    # ---- closing

    def close(self, deadline: float = 5.0) -> CloseReport:
        """Refuse new requests, release open ones, write down what is dirty, stop the threads, free the pools.

        Idempotent; safe from any thread.

        Args:
            deadline: seconds for all of it.

        Returns:
            What was left undone. Calling again returns the same.
        """
        if self._refusal is FORKED:
            return CloseReport(complete=False)  # all of it belongs to the parent
        deadline = number_of_seconds("deadline", deadline)
        with self._closing:
            if self._report is None:
                self._report = self._close(self._now() + deadline)
            return self._report

    def _close(self, end: float) -> CloseReport:
        reducer = self._reducer
        self._refusal = _CLOSED
        with reducer.lock:
            reducer.settle()
            leases = list(self._leases)
            for lease in leases:
                self._release(lease, aborted=True)
            reducer.settle()
            reducer.changed.notify_all()
        # Without storage nothing outlives this process, so there is nothing worth writing down.
        complete = drain(self.parts, end=end) if self._attached else True
        left = 0 if complete else unwritten(self.parts)
        with reducer.lock:
            reducer.closed = _CLOSED
            reducer.changed.notify_all()
        abandoned, stuck = take_apart(self.parts, self._pump, end=end)
        if self.parts.flight is not None:
            self.parts.flight.close()
        if self._own_log is not None:
            self._own_log.close(max(LEAST_TO_LOG, end - self._now()))
        return CloseReport(complete, abandoned, len(leases), stuck, left)

    # ---- for requests

    def bypasses(self, lease: Lease) -> bool:
        """Whether the lease's request goes past the cache."""
        return lease.tree is self._bypass_tree

    def asked(self, lease: Lease) -> int:
        """Pages that a lease asks for which goes past the cache. The lock is held."""
        return self._past.get(lease, 0)

    def touch(self, lease: Lease, last: float) -> float:
        """Tell storage that a request's pages are in use, if the last time is so long ago. The lock is held.

        Closing does that too, so this is for requests that live long. Returns the last time.
        """
        if self._stores and (now := self._now()) - last >= self._touch_seconds:
            self._core.touch(lease, now)
            return now
        return last

    def release(self, lease: Lease, *, aborted: bool) -> RequestCounts:
        """End a lease: free all it holds, and count it once."""
        if self._refusal is FORKED:
            return RequestCounts(aborted=True)  # its slots are the parent's
        with self._reducer.lock:
            counts = self._release(lease, aborted=aborted)
            self._reducer.settle()
        return counts

    def uncounted(self, lease: Lease) -> None:
        """The lease is nobody's request: its end will not be counted."""
        with self._reducer.lock:
            self._leases.pop(lease, None)
            self._past.pop(lease, None)

    def drop(self, lease: Lease) -> None:
        """A request was collected without being closed. May be called by a finaliser, anywhere."""
        if self._refusal is not FORKED:
            self._reducer.post(self._dropped, lease)

    def forked(self) -> None:
        """This is a forked child."""
        self._refusal = FORKED

    # ---- inside

    _report: CloseReport | None  # set last: a cache that failed before has nothing to close

    def _leased(
        self, tree: HiRadixTree, prompt: Prompt, tokens: int, limit: int, priority: int, started: float
    ) -> tuple[Lease, Prefetch | None]:
        """The lease of a request that began at `started`, and what is fetched for it. The lock is held."""
        lease = self._core.lease(tree, prompt, limit=limit, priority=priority)
        self._leases[lease] = tokens
        if self.access is not None:
            self.access.begun(lease, started)
        return lease, self._loader.start(lease) if self._stores else None

    def _past_the_cache(self, tokens: int, pages: int, priority: int, hasher: Hasher) -> Lease:
        reducer = self._reducer
        with reducer.lock:
            self.check_open()
            if not reducer.idle:
                reducer.settle()
            if self._bypass_tree is None:
                self._bypass_tree = self._core.tree(_BYPASS, width=self._width, hasher=hasher)
            lease = self._core.lease(self._bypass_tree, Prompt(b"", self._width, hasher), priority=priority)
            self._leases[lease] = tokens
            self._past[lease] = pages
            if self.access is not None:
                self.access.begun(lease, self._now())
            return lease

    def _release(self, lease: Lease, *, aborted: bool) -> RequestCounts:
        if self._stores and not lease.closed:
            self._core.touch(lease, self._now())
        counts = self._core.release(lease, aborted=aborted)
        tokens = self._leases.pop(lease, None)
        if tokens is None:
            if self.access is not None:
                self.access.ended(lease, counts, None)
            return counts
        pages = self._past.pop(lease, None) if self._past else None
        if pages is not None:
            lease.counts = counts = past_counts(pages, aborted=aborted)
            self._ledger.bypassed += 1
        self._ledger.add(counts, tokens=tokens, found=lease.match.storage)
        if self.access is not None:
            self.access.ended(lease, counts, tokens)
        self._reducer.notify()
        return counts

    def _dropped(self, lease: Lease) -> None:
        if not lease.closed:
            self._ledger.dropped += 1
            self._release(lease, aborted=True)


def past_counts(pages: int, *, aborted: bool) -> RequestCounts:
    """What a request for so many pages is counted as that goes past the cache."""
    return RequestCounts(pages, missed={MissReason.BYPASSED: pages} if pages else {}, aborted=aborted)
