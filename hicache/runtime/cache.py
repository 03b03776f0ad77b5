"""The embedded cache: one model's KV in device memory, host memory and storage, used in the engine's own process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from math import inf
from types import TracebackType

from hicache.core.identity import Adapter
from hicache.core.prompt import Prompt
from hicache.core.reasons import RequestCounts
from hicache.core.symbols import Span, Tokens, page_extras, symbols
from hicache.core.transfers import Lease
from hicache.core.tree import HiRadixTree
from hicache.memory.base import DevicePool, HostPool
from hicache.records import Match, MissReason
from hicache.runtime.arguments import (
    deadline_of,
    flag,
    length_of,
    no_spans,
    number_of_seconds,
    priority_of,
    spans_of,
)
from hicache.runtime.closing import CloseReport, drain, take_apart
from hicache.runtime.forks import watch
from hicache.runtime.parts import Parts
from hicache.runtime.reducer import Pump
from hicache.runtime.request import Request, usable_pages
from hicache.runtime.scopes import Scope
from hicache.runtime.statistics import Ledger
from hicache.runtime.upkeep import FORKED, Upkeep

_CLOSED = "the cache is closed"
_BYPASS = bytes(16)  # names the tree of requests that go past the cache; no sha256 prefix anybody will meet


class EmbeddedCache(Upkeep):
    """Made by `hicache.open`; a context manager. Thread-safe; a forked child must not use it.

    Attributes:
        namespace: the model as served.
        page_size: tokens a page.
        device, host: the pools; `host` is None without a host tier.
        warnings: what works with these settings but will cost, in words.
        parts: the machinery behind it; for requests and for tests.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.namespace = parts.namespace
        self.page_size = parts.namespace.page_size
        self.device: DevicePool = parts.pools.device
        self.host: HostPool | None = parts.pools.host
        self.warnings = parts.warnings
        self._reducer = parts.reducer
        self._core = parts.core
        self._loader = parts.loader
        self._now = parts.clock.now
        self._stores = parts.storage is not None
        touch_seconds = parts.core.config.touch_seconds
        self._touch_seconds = inf if touch_seconds is None else touch_seconds
        self._hashes = self._stores or parts.flight is not None  # recordings have hashes, no tokens
        self._extras = parts.options.extras
        self._width = parts.width
        self._ledger = Ledger()
        self._leases: dict[Lease, int] = {}  # open leases, and the tokens of their prompts
        self._past: dict[Lease, int] = {}  # of these, those that go past the cache, and the pages they ask for
        self._bypass_tree: HiRadixTree | None = None
        self._refusal: str | None = None
        self._closing = threading.Lock()
        self._attaching = threading.Lock()
        self._base = parts.scopes.open()
        threaded = parts.options.background and (self._stores or not parts.pools.copies.inline)
        self._pump = Pump(parts.reducer) if threaded else None
        if self._pump is not None and parts.storage is not None:
            parts.storage.begun = self._pump.watch
        self._report: CloseReport | None = None  # last: a cache that failed before has nothing to close
        self._start_canary()
        watch(self)

    @property
    def device_pages(self) -> int:
        """Slots of the device tier; a very large number where it has no limit."""
        pages = self._core.config.device_pages
        return 2**62 if pages is None else pages

    # ---- requests

    def request(
        self,
        tokens: Tokens,
        *,
        deadline: float | None = None,
        logits: bool = True,
        priority: int = 0,
        adapter: Adapter | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> Request:
        """Begin a request: pin what is usable of its prompt, and begin to fetch the rest. Returns at once.

        Args:
            tokens: the prompt, token ids of 0 to 2^32-1, as an integer array or a sequence; uint32 is fastest.
            deadline: seconds from now for probing, prefetching and loading together; None leaves it to the options.
            logits: whether the engine must compute at least the prompt's last token, so that never all of it may come
                from the cache.
            priority: of the pages it uses, -2^31 to 2^31-1, for the policy `priority`: the smallest go first.
            adapter: LoRA; one without a digest goes past the cache.
            tenant: who may share the pages.
            salt: a further separation, as an engine's cache_salt.
            extras: non-text input as (content hash, first token, tokens); needs `extras=True` at `open`.

        Returns:
            The request; close it, best by `with`.

        Raises:
            InvalidInput: what is no token id; a negative deadline; a priority that is no integer of 32 bits; an
                adapter, tenant or salt that names nothing; extras that overlap or end behind the prompt. Nothing was
                taken then.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        deadline = deadline_of(deadline)
        priority = priority_of(priority)
        started = self._now()
        page_size = self.page_size
        prompt_bytes, spans = self._symbols(tokens, extras)
        count = len(tokens)
        pages = len(prompt_bytes) // self._width
        limit = usable_pages(count, page_size) if flag("logits", logits) else pages
        tail = symbols(tokens[pages * page_size :], 1) if count != pages * page_size else b""
        if adapter is None and tenant is None and salt is None:
            scope: Scope | None = self._base
        else:
            scope = self._scope(adapter, tenant, salt, started, deadline)
        if scope is not None and started >= scope.ask_at:
            until = started + (self.parts.options.longest_wait if deadline is None else deadline)
            self.parts.scopes.refresh(scope, started, until)
        reducer = self._reducer
        prefetch = None
        if scope is None:
            lease = self._past_the_cache(count, limit, priority)
        else:
            prompt = Prompt(prompt_bytes, self._width, scope.hasher)
            self.prepare(prompt)
            with reducer.lock:
                self.check_open()  # again: from here on closing would find the lease
                if not reducer.idle:
                    reducer.settle()
                assert scope.tree is not None
                lease = self._core.lease(scope.tree, prompt, limit=limit, priority=priority)
                self._leases[lease] = count
                if self._stores:
                    prefetch = self._loader.start(lease)
                reducer.settle()
        return Request(
            self, lease, tokens=count, tail=tail, spans=spans, prefetch=prefetch, started=started, deadline=deadline
        )

    def match(
        self,
        tokens: Tokens,
        *,
        logits: bool = True,
        adapter: Adapter | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        extras: Iterable[Span] = (),
    ) -> Match:
        """How much of a prompt is usable now, by tier. Only looks: pins, moves, asks and counts nothing.

        Args and errors are those of `request`.
        """
        self.check_open()
        prompt_bytes, _ = self._symbols(tokens, extras)
        pages = len(prompt_bytes) // self._width
        limit = usable_pages(len(tokens), self.page_size) if flag("logits", logits) else pages
        scope = self.parts.scopes.known(adapter, tenant, salt)
        if scope is None:
            return Match()
        prompt = Prompt(prompt_bytes, self._width, scope.hasher)
        with self._reducer.lock:
            self._reducer.settle()
            return Match() if scope.tree is None else self._core.match(scope.tree, prompt, limit)

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
        with reducer.lock:
            reducer.closed = _CLOSED
            reducer.changed.notify_all()
        abandoned, stuck = take_apart(self.parts, self._pump, end=end)
        if self.parts.flight is not None:
            self.parts.flight.close()
        return CloseReport(complete, abandoned, len(leases), stuck)

    # ---- for requests

    def prepare(self, prompt: Prompt) -> None:
        """Hash a prompt where storage or the flight recorder will ask for it, before the lock is taken."""
        if self._hashes:
            prompt.hashes(0, prompt.pages)

    def bypasses(self, lease: Lease) -> bool:
        """Whether the lease's request goes past the cache."""
        return lease.tree is self._bypass_tree

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

    def drop(self, lease: Lease) -> None:
        """A request was collected without being closed. May be called by a finaliser, anywhere."""
        if self._refusal is not FORKED:
            self._reducer.post(self._dropped, lease)

    def forked(self) -> None:
        """This is a forked child."""
        self._refusal = FORKED

    def __repr__(self) -> str:
        held = [f"device={self.device.slots}", f"host={self.host.slots if self.host is not None else 0}"]
        storage = "storage" if self._attached else "no storage"
        state = self._refusal or "open"
        return f"<hicache.EmbeddedCache {self.namespace.model!r} {' '.join(held)} pages, {storage}: {state}>"

    def __del__(self) -> None:
        if getattr(self, "_report", True) is None and self._refusal is None:
            warnings.warn("a cache was never closed: its threads go on", ResourceWarning, stacklevel=1)

    def __enter__(self) -> EmbeddedCache:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside

    def _symbols(self, tokens: Tokens, extras: Iterable[Span]) -> tuple[bytes, tuple[Span, ...] | None]:
        """The prompt's whole pages as symbols, and its non-text input; None where the cache takes none."""
        if not self._extras:
            no_spans(extras)
            return symbols(tokens, self.page_size), None
        count = length_of(tokens)
        spans = spans_of(extras, tokens=count)
        pages = count // self.page_size
        return symbols(tokens, self.page_size, page_extras(spans, self.page_size, pages)), spans

    def _past_the_cache(self, tokens: int, pages: int, priority: int) -> Lease:
        reducer = self._reducer
        hasher = self._base.hasher
        with reducer.lock:
            self.check_open()
            if not reducer.idle:
                reducer.settle()
            if self._bypass_tree is None:
                self._bypass_tree = self._core.tree(_BYPASS, width=self._width, hasher=hasher)
            lease = self._core.lease(self._bypass_tree, Prompt(b"", self._width, hasher), priority=priority)
            self._leases[lease] = tokens
            self._past[lease] = pages
            return lease

    def _release(self, lease: Lease, *, aborted: bool) -> RequestCounts:
        if self._stores and not lease.closed:
            self._core.touch(lease, self._now())
        counts = self._core.release(lease, aborted=aborted)
        tokens = self._leases.pop(lease, None)
        if tokens is None:
            return counts
        pages = self._past.pop(lease, None) if self._past else None
        if pages is not None:
            missed = {MissReason.BYPASSED: pages} if pages else {}
            lease.counts = counts = RequestCounts(pages, missed=missed, aborted=aborted)
            self._ledger.bypassed += 1
        self._ledger.add(counts, tokens=tokens, found=lease.match.storage)
        self._reducer.notify()
        return counts

    def _dropped(self, lease: Lease) -> None:
        if not lease.closed:
            self._ledger.dropped += 1
            self._release(lease, aborted=True)
