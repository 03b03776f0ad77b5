"""The embedded cache: one model's KV in device memory, host memory and storage, used in the engine's own process."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from hicache.core.identity import Adapter
from hicache.core.prompt import Prompt
from hicache.core.reasons import RequestCounts
from hicache.core.symbols import Span, Tokens, page_extras, symbols
from hicache.core.transfers import Lease
from hicache.core.tree import HiRadixTree
from hicache.errors import CacheClosed, ConfigError, InvalidInput, StorageUnavailable
from hicache.memory.base import DevicePool, HostPool
from hicache.records import Match, MissReason
from hicache.runtime.attaching import DetachReport, attach, check_attachable, detach, open_backend
from hicache.runtime.clearing import clear_memory, clear_storage
from hicache.runtime.closing import CloseReport, drain, take_apart
from hicache.runtime.events import Subscription
from hicache.runtime.forks import watch
from hicache.runtime.options import check_deadline
from hicache.runtime.parts import Parts
from hicache.runtime.reducer import Pump
from hicache.runtime.request import Request, usable_pages
from hicache.runtime.scopes import Scope
from hicache.runtime.statistics import CacheStatistics, Ledger, snapshot
from hicache.storage.base import StorageBackend

_CLOSED = "the cache is closed"
_FORKED = "this process is a fork of the one that opened the cache: open one here, after the fork"
_BYPASS = bytes(16)  # names the tree of requests that go past the cache; no sha256 prefix anybody will meet
_FIRST_USE = 1.0  # seconds for which the first request of a namespace waits for storage to tell its generation


class EmbeddedCache:
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
            priority: of the pages it uses, for the policy `priority`.
            adapter: LoRA; one without a digest goes past the cache.
            tenant: who may share the pages.
            salt: a further separation, as an engine's cache_salt.
            extras: non-text input as (content hash, first token, tokens); needs `extras=True` at `open`.

        Returns:
            The request; close it, best by `with`.

        Raises:
            InvalidInput: what is no token id, a negative deadline, an adapter, tenant or salt that names nothing.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        if deadline is not None:
            check_deadline(deadline)
        started = self._now()
        page_size = self.page_size
        spans = self._spans(extras)
        whole = self._symbols(tokens, spans)
        count = len(tokens)
        pages = len(whole) // self._width
        limit = usable_pages(count, page_size) if logits else pages
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
            prompt = Prompt(whole, self._width, scope.hasher)
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
        whole = self._symbols(tokens, self._spans(extras))
        pages = len(whole) // self._width
        limit = usable_pages(len(tokens), self.page_size) if logits else pages
        scope = self.parts.scopes.known(adapter, tenant, salt)
        if scope is None:
            return Match()
        prompt = Prompt(whole, self._width, scope.hasher)
        with self._reducer.lock:
            self._reducer.settle()
            return Match() if scope.tree is None else self._core.match(scope.tree, prompt, limit)

    # ---- upkeep

    def report_prefill(self, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens in so many seconds.

        A moving average of what is reported takes the place of the option `prefill_tokens_per_second`: from the first
        report on, pages are brought up only where that takes less time than computing them.

        Raises:
            ConfigError: not a number above 0 of both.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        with self._reducer.lock:
            self.parts.loader.planner.report(tokens, seconds)

    def clear(
        self,
        *,
        adapter: Adapter | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        deadline: float = 5.0,
    ) -> None:
        """Forget all pages of one namespace, in every tier, as after a change of weights.

        In memory it is done when this returns or raises; requests that are open keep what they have and publish
        nothing any more. In storage the namespace's generation is raised.

        Args:
            adapter: whose pages, as in `request`; with all three None those of requests that have none of them.
            tenant: as in `request`.
            salt: as in `request`.
            deadline: seconds to wait for storage.

        Raises:
            StorageError: storage did not confirm: after a restart old pages may be found again. Call it again.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        check_deadline(deadline)
        started = self._now()
        scope = self._scope(adapter, tenant, salt, started, deadline)
        if scope is None:
            raise StorageUnavailable("clear: the namespace's generation is not known, as storage does not answer")
        generation = clear_memory(self.parts, scope, self._pump)
        clear_storage(self.parts, scope, generation, end=started + deadline)

    def detach_storage(self, deadline: float = 5.0, *, force: bool = False) -> DetachReport:
        """Take the storage away; the tiers above go on. Requests may be open, and new ones begin meanwhile.

        From its beginning on nothing new is read from storage or written to it, and what was under way is waited for.
        Pages that were not written yet are kept as without storage; call `flush` before, to write them. Afterwards
        nothing is believed of what storage has, and `attach_storage` may give another one, or the same.

        Args:
            deadline: seconds to wait for what is under way.
            force: fail what is under way instead of refusing. What is inside a call that does not come back keeps
                its slots until it does, and is reported.

        Returns:
            What was failed, and what is stuck.

        Raises:
            StorageError: something was still under way at the deadline, and `force` was not given: it stays attached.
            ConfigError: no storage is attached.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        check_deadline(deadline)
        end = self._now() + deadline
        with self._attaching:
            return detach(self.parts, self._pump, end=end, force=force)

    def attach_storage(self, storage: str | StorageBackend) -> None:
        """Give a cache without storage one, while it is in use. What it holds above is written there by and by.

        Needs a cache that was opened with storage, or with `attachable=True`. How often its objects are touched was
        fixed then. Each namespace in use gets the higher of the generations that storage and this cache have.

        Args:
            storage: a URL, or an open backend, which stays the caller's to close.

        Raises:
            ConfigError: a storage is attached already, the cache cannot have one, or a bad URL.
            StorageError: storage cannot be reached.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        with self._attaching:
            check_attachable(self.parts)
            backend = open_backend(storage, self.parts.options, self.parts.clock)
            owned = isinstance(storage, str)
            try:
                attach(self.parts, backend, owned=owned)
            except BaseException:
                if owned:
                    backend.close()
                raise

    def flush(self, deadline: float = 60.0) -> bool:
        """Write all pages down that a lower tier should have, root first, and wait for it.

        Args:
            deadline: seconds to wait.

        Returns:
            Whether nothing is left; False when time was up, or HOST or storage could not take any more.

        Raises:
            CacheClosed: the cache is closed, or was closed meanwhile.
        """
        self.check_open()
        check_deadline(deadline)
        return drain(self.parts, end=self._now() + deadline)

    def events(self, *, limit: int = 65_536) -> Subscription:
        """Listen to residency changes from now on. Replayed from the opening on they equal residency.

        Args:
            limit: events that may wait to be read; what is above it is lost, and a `Gap` says so.

        Raises:
            ConfigError: the cache was opened without `events=True`.
        """
        self.check_open()
        if not self.parts.options.events:
            raise ConfigError("no events are produced: open the cache with events=True")
        return self.parts.publisher.subscribe(limit=limit)

    def statistics(self) -> CacheStatistics:
        """A snapshot. May be called at any time, also after `close`."""
        if self._refusal is _FORKED:
            raise CacheClosed(_FORKED)
        with self._reducer.lock:
            self._reducer.settle()
            return snapshot(self.parts, self._ledger, open_requests=len(self._leases))

    def check(self) -> None:
        """Check every invariant of tiers and tree, slowly.

        Raises:
            HicacheInternalError: one is broken, or an internal error was caught before.
        """
        self.check_open()
        with self._reducer.lock:
            self._reducer.settle()
            self._core.check()

    def dump_recording(self, path: str | os.PathLike[str]) -> None:
        """Write what the flight recorder has into one file, for `hicache replay`. The file is replaced.

        Raises:
            ConfigError: the cache was opened without `flight_recorder`, or the file cannot be written.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        if self.parts.flight is None:
            raise ConfigError("nothing was recorded: open the cache with flight_recorder=True or a folder")
        self.parts.flight.dump(Path(path))

    # ---- closing

    def close(self, deadline: float = 5.0) -> CloseReport:
        """Refuse new requests, release open ones, write down what is dirty, stop the threads, free the pools.

        Idempotent; safe from any thread.

        Args:
            deadline: seconds for all of it.

        Returns:
            What was left undone. Calling again returns the same.
        """
        if self._refusal is _FORKED:
            return CloseReport(complete=False)  # all of it belongs to the parent
        check_deadline(deadline)
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

    def check_open(self) -> None:
        """Raise `CacheClosed` unless the cache is open in this process."""
        if self._refusal is not None:
            raise CacheClosed(self._refusal)

    def prepare(self, prompt: Prompt) -> None:
        """Hash a prompt where storage or the flight recorder will ask for it, before the lock is taken."""
        if self._hashes:
            prompt.hashes(0, prompt.pages)

    def bypasses(self, lease: Lease) -> bool:
        """Whether the lease's request goes past the cache."""
        return lease.tree is self._bypass_tree

    def release(self, lease: Lease, *, aborted: bool) -> RequestCounts:
        """End a lease: free all it holds, and count it once."""
        if self._refusal is _FORKED:
            return RequestCounts(aborted=True)  # its slots are the parent's
        with self._reducer.lock:
            counts = self._release(lease, aborted=aborted)
            self._reducer.settle()
        return counts

    def drop(self, lease: Lease) -> None:
        """A request was collected without being closed. May be called by a finaliser, anywhere."""
        if self._refusal is not _FORKED:
            self._reducer.post(self._dropped, lease)

    def forked(self) -> None:
        """This is a forked child."""
        self._refusal = _FORKED

    def __del__(self) -> None:
        if getattr(self, "_report", True) is None and self._refusal is None:
            warnings.warn("a cache was never closed: its threads go on", ResourceWarning, stacklevel=1)

    def __enter__(self) -> EmbeddedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside

    @property
    def _attached(self) -> bool:
        return self.parts.storage is not None and self.parts.storage.attached

    def _symbols(self, tokens: Tokens, spans: tuple[Span, ...] | None) -> bytes:
        if spans is None:
            return symbols(tokens, self.page_size)
        pages = len(tokens) // self.page_size
        return symbols(tokens, self.page_size, page_extras(spans, self.page_size, pages))

    def _spans(self, extras: Iterable[Span]) -> tuple[Span, ...] | None:
        if self._extras:
            return tuple(extras)
        if extras and tuple(extras):
            raise InvalidInput("extras were given to a cache that was opened without extras=True: open it with it")
        return None

    def _scope(
        self, adapter: Adapter | None, tenant: str | None, salt: str | None, started: float, deadline: float | None
    ) -> Scope | None:
        patience = _FIRST_USE if deadline is None else min(deadline, _FIRST_USE)
        return self.parts.scopes.find(adapter, tenant, salt, deadline=started + patience)

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
        self._ledger.add(counts, tokens=tokens)
        self._reducer.notify()
        return counts

    def _dropped(self, lease: Lease) -> None:
        if not lease.closed:
            self._ledger.dropped += 1
            self._release(lease, aborted=True)
