"""The hosted cache: HOST and STORAGE of one model, kept by a service for engines in other processes.

The engines own DEVICE. They name pages by their hashes, copy the bytes of HOST slots themselves, and give tokens once,
with the commit. All verbs are called on one thread, that of an event loop, and none of them waits: where something is
on its way, `HostedRequest.loading` is stepped, and `on_change` tells when to look again. What may wait (`clear`,
`flush`, `attach_storage`, `detach_storage`, `close`) is called on another thread, while the loop goes on calling
`settle`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

from hicache.clock import Clock, MonotonicClock
from hicache.core.config import EdgePolicy
from hicache.core.identity import Adapter, Namespace
from hicache.core.prompt import Prompt, SymbolsAreHashes
from hicache.core.reasons import RequestCounts
from hicache.core.residency import Words
from hicache.core.transfers import Lease
from hicache.errors import ConfigError, GeometryError, InvalidInput, NamespaceError
from hicache.events import Event
from hicache.memory.base import HostPool
from hicache.records import Match
from hicache.runtime.arguments import clock_of, storage_of, whole
from hicache.runtime.attaching import open_backend
from hicache.runtime.closing import CloseReport
from hicache.runtime.flight import flight_recorder as read_flight_recorder
from hicache.runtime.forks import watch
from hicache.runtime.hosted import HostedLoading, HostedRequest
from hicache.runtime.insight import Insight, InsightStatistics
from hicache.runtime.leasing import LeasingCache
from hicache.runtime.moments import Moments
from hicache.runtime.options import PrefetchTimeout
from hicache.runtime.parts import Parts
from hicache.runtime.pools import Pools
from hicache.runtime.port import StoragePort
from hicache.runtime.quota import Account, StorageQuota
from hicache.runtime.ringing import LoopRinger
from hicache.runtime.scopes import Scope
from hicache.runtime.wiring import HASH_SIZE, settings_of, wire
from hicache.storage.base import StorageBackend

__all__ = ["PREFETCHES", "HostedCache", "HostedLoading", "HostedRequest", "open_hosted"]

PREFETCHES: Final = 64
"""Prefetches without a request that are under way at once; what is above it only looks."""

_HASH: Final = "sha256"


def open_hosted(
    namespace: Namespace,
    *,
    host: HostPool,
    storage: str | StorageBackend | None = None,
    words: Words | None = None,
    tenant: str | None = None,
    account: Account | None = None,
    wake: Callable[[], None] | None = None,
    publish: Callable[[Iterable[Event]], None] | None = None,
    write_policy: str | EdgePolicy = "write_through",
    prefetch_timeout: PrefetchTimeout | float = PrefetchTimeout(),  # noqa: B008  frozen
    clock: Clock | None = None,
    flight_recorder: Any = None,
    **options: Any,
) -> HostedCache:
    """Open a cache for one model whose HOST tier other processes see.

    Args:
        namespace: the model as served; with `hash="sha256"`, since pages are named by hashes alone.
        host: the HOST tier: whole canonical pages. It stays the caller's to close, and must not be closed while the
            report of `close` counts pages under way.
        storage: as in `hicache.open`. None is none, unless `attachable=True`.
        words: uint64 `(slots,)`, raised by one whenever a slot is given away; it may be memory that readers share.
        tenant: whose pages: the namespaces without one are not this cache's. It is asked about at once.
        account: bounds the bytes that are put to storage; None: nothing does.
        wake: as in `HostedCache.start`.
        publish: as in `HostedCache.start`.
        write_policy: of HOST to STORAGE.
        prefetch_timeout: as in `hicache.open`.
        clock: a monotonic clock; that of an event loop is the machine's, which is the default.
        flight_recorder: as in `hicache.open`.
        options: fields of `hicache.Options`; what concerns DEVICE and its copies means nothing here.

    Raises:
        NamespaceError: another page hash, or no namespace.
        GeometryError: a pool of another page size.
        ConfigError: options that cannot work here.
        StorageError: storage cannot be reached.
    """
    if not isinstance(namespace, Namespace):
        raise NamespaceError(f"namespace must be a Namespace, not {type(namespace).__name__}")
    if namespace.hash != _HASH:
        raise NamespaceError(
            f'namespace has hash="{namespace.hash}": pages are named by hashes alone here, so give hash="{_HASH}"'
        )
    page_bytes = namespace.geometry.page_bytes(namespace.page_size)
    if host.page_bytes != page_bytes:
        raise GeometryError(f"the host pool has pages of {host.page_bytes} bytes, the namespace's have {page_bytes}")
    options["flight_recorder"] = read_flight_recorder(flight_recorder)
    if isinstance(write_policy, Sequence) and not isinstance(write_policy, str):
        raise ConfigError("write_policy is a pair, but there is one edge here, HOST to STORAGE: give one policy")
    settings = settings_of(options, write_policy, prefetch_timeout)
    storage = storage_of(storage)
    clock = MonotonicClock() if clock is None else clock_of(clock)
    with ExitStack() as undo:
        pools = Pools(device=None, owns_device=False, host=host, copies=None, owns_host=False)
        port = None
        if storage is not None or settings.attachable:
            backend = None if storage is None else open_backend(storage, settings, clock)
            port = StoragePort(backend, owned=isinstance(storage, str), now=clock.now)
            undo.callback(port.close)
        parts = wire(namespace, settings, pools=pools, port=port, clock=clock, undo=undo, hashes=True, words=words)
        if account is not None and port is not None:
            parts.executor.quota = StorageQuota(account, page_bytes=page_bytes)
        cache = HostedCache(parts, tenant=tenant)
        undo.pop_all()
    if wake is not None:
        cache.start(wake, publish)
    return cache


class HostedCache(LeasingCache):
    """Made by `open_hosted`. Verbs on one thread and never waiting; what may wait, on any other (see the module).

    Attributes:
        namespace: the model as served.
        page_size: tokens a page.
        host: the host pool.
        words: generation words of its slots, or None.
        warnings: what works with these settings but will cost, in words.
        prefetches_refused: prefetches that only looked, since `PREFETCHES` were under way.
        moments: when the core's ticks were. Used under the reducer's lock.
        parts: the machinery behind it; for requests and for tests.
    """

    host: HostPool

    def __init__(self, parts: Parts, *, tenant: str | None) -> None:
        super().__init__(parts)
        self.words = parts.core.registry.tables[1].words
        self.prefetches_refused = 0
        self.moments = Moments()
        self._insight = Insight(parts)
        self._tenant = tenant
        self._prefetches: list[tuple[HostedRequest, HostedLoading]] = []
        self._news: list[Event] = []
        self._told: Callable[[Iterable[Event]], None] | None = None
        self._on_change: Callable[[], None] = _nothing
        self._ringer = self._pump = LoopRinger()
        parts.reducer.use_pump(self._ringer.ring)
        parts.publisher.tap = self._hear  # what happens before `start`, such as an inheritance, is told by it
        if parts.storage is not None:
            parts.storage.begun = self._ringer.watch
        self._report = None
        self._start_canary()
        parts.scopes.begin(None, tenant, None)
        watch(self)

    # ---- the loop

    def start(self, wake: Callable[[], None], publish: Callable[[Iterable[Event]], None] | None = None) -> None:
        """From now on the loop does its part.

        Args:
            wake: called from any thread, finalisers included, when `settle` and then `look` are to be called soon. It
                must only note that.
            publish: takes residency events, in order; called by `settle`. None where nobody listens that way. They
                come from the beginning on, if `events=True`.
        """
        self._told = publish
        if publish is None:
            self.parts.publisher.tap = None
            self._news = []
        self._ringer.wake = wake
        wake()

    def settle(self) -> None:
        """Apply what storage's threads have posted, start what the core wants done, publish events. Never waits."""
        with self._reducer.lock:
            self._reducer.settle()
            self._end_prefetches()
            news, self._news = self._news, []
        if news and self._told is not None:
            self._told(news)

    def look(self) -> float | None:
        """Give up storage calls that hang, and prefetches that took too long.

        Returns:
            Seconds after which to call again, also when nothing has happened; None: there is no need before `wake`.
        """
        self._ringer.looking()
        soon = self._reducer.look()
        with self._reducer.lock:
            waits = [wait for wait in (soon, *self._end_prefetches()) if wait is not None]
            self._reducer.settle()
        self._ringer.looked(watching=bool(waits))
        return min(waits, default=None)

    def upkeep(self) -> bool:
        """One slice of what is to be freed or forgotten after a clear or a detach, about a millisecond.

        Returns:
            Whether to call it again soon.
        """
        reducer = self._reducer
        if reducer.sweeping:
            reducer.sweep()
        elif reducer.forgetting:
            reducer.forget()
        return reducer.sweeping or reducer.forgetting

    def insight(self) -> InsightStatistics:
        """What other sizes of its tiers would hit, and which prefixes are hot, by the requests so far."""
        with self._reducer.lock:
            return self._insight.statistics()

    def settle_insight(self) -> bool:
        """Work out one slice of what requests have left to that, about a millisecond. Returns whether more is left."""
        with self._reducer.lock:
            return self._insight.settle()

    @property
    def on_change(self) -> Callable[[], None]:
        """Called, under the lock and from any thread, when something that a waiter waits for may have changed.

        It must not wait, nor call this cache.
        """
        return self._on_change

    @on_change.setter
    def on_change(self, call: Callable[[], None]) -> None:
        self._on_change = self._reducer.on_change = call

    def let_go_of_words(self) -> None:
        """After `close`, when nothing is under way: give up the view of the generation words."""
        with self._reducer.lock:
            self.words = self._core.registry.tables[1].words = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child."""
        return self._refusal is not None

    # ---- namespaces

    def scope(self, adapter: Adapter | None = None, tenant: str | None = None, salt: str | None = None) -> Scope | None:
        """The namespace of requests; None if they must go past the cache (an adapter without a digest).

        Its `tree` is None while its generation is not known. While it is `asking`, an answer is under way and
        `on_change` tells when it is there; else storage cannot be asked now.

        Raises:
            NamespaceError: an adapter, tenant or salt that names nothing.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        return self.parts.scopes.begin(adapter, tenant, salt)

    def known(self, adapter: Adapter | None = None, tenant: str | None = None, salt: str | None = None) -> Scope | None:
        """The namespace if a request used it before. Changes nothing."""
        return self.parts.scopes.known(adapter, tenant, salt)

    def unconfirmed(self, scope: Scope) -> bool:
        """Whether a request should wait a moment for storage to confirm the generation; see `Scopes.unconfirmed`."""
        return self.parts.scopes.unconfirmed(scope)

    def scopes_in_use(self) -> Iterator[tuple[Adapter | None, str | None]]:
        """Adapter and salt of the tenant's namespaces whose generation is known."""
        for scope in self.parts.scopes.resolved():
            for adapter, tenant, salt in scope.keys[:1]:
                if tenant == self._tenant:
                    yield adapter, salt

    # ---- requests

    def match(self, scope: Scope | None, page_hashes: bytes, limit: int | None = None) -> Match:
        """How far the first `limit` of these pages are usable, by tier. Changes nothing that anyone could see.

        Args:
            scope: their namespace; None matches nothing.
            page_hashes: of the prompt's whole pages, 32 bytes each.
            limit: pages; None is all.
        """
        self.check_open()
        if scope is None:
            return Match()
        prompt = self.prompt(scope, page_hashes)
        with self._reducer.lock:
            self._reducer.settle()
            return Match() if scope.tree is None else self._core.match(scope.tree, prompt, limit)

    def request(
        self, scope: Scope | None, page_hashes: bytes, *, tokens: int, limit: int | None = None, priority: int = 0
    ) -> HostedRequest:
        """Begin a request: pin what is usable, and begin to fetch the rest.

        Args:
            scope: the namespace; None, or one without a tree: the request goes past the cache.
            page_hashes: of all whole pages of the prompt, 32 bytes each.
            tokens: of the prompt, its unaligned tail included; for the statistics.
            limit: leading pages that it may take from the cache; None is all.
            priority: for the policy `priority`.

        Returns:
            The request, which must be closed.

        Raises:
            InvalidInput: bytes that are no whole hashes, fewer tokens than pages have, a limit above the pages or a
                priority that is no integer of 32 bits. Nothing was taken then.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        pages = _pages_in(page_hashes)
        if type(tokens) is not int or tokens < pages * self.page_size:
            raise InvalidInput(f"a prompt of {tokens!r:.20} tokens has fewer than {pages} pages of {self.page_size}")
        limit = pages if limit is None else whole("limit", limit, least=0)
        if limit > pages:
            raise InvalidInput(f"limit {limit} is above the prompt's {pages} whole pages")
        return self._request(scope, page_hashes, tokens=tokens, limit=limit, priority=priority)

    def prefetch(self, scope: Scope | None, page_hashes: bytes) -> Match:
        """Bring pages from storage into HOST for requests to come. It ends by itself, and is counted nowhere.

        Returns:
            What was usable before, by tier.

        Raises:
            InvalidInput: bytes that are no whole hashes.
            CacheClosed: the cache is closed.
        """
        self.check_open()
        pages = _pages_in(page_hashes)
        if scope is None or scope.tree is None:
            return Match()
        if len(self._prefetches) >= PREFETCHES:
            self.prefetches_refused += 1
            return self.match(scope, page_hashes)
        request = self._request(scope, page_hashes, tokens=0, limit=pages, priority=0)
        match = request.match
        with self._reducer.lock:
            self._leases.pop(request.lease, None)  # it is nobody's request; a `close` may have taken it already
            self._prefetches.append((request, request.patiently()))
            self._end_prefetches()
        self._ringer.watch()
        return match

    def prompt(self, scope: Scope, page_hashes: bytes) -> Prompt:
        """Pages by their hashes, as the tree of a namespace sees them.

        Raises:
            InvalidInput: bytes that are no whole hashes.
        """
        _pages_in(page_hashes)
        return Prompt(page_hashes, HASH_SIZE, scope.hasher)

    def __repr__(self) -> str:
        storage = "storage" if self._attached else "no storage"
        return f"<hicache.HostedCache {self.namespace.model!r} host={self.host.slots} pages, {storage}: {self._state}>"

    def __del__(self) -> None:
        if getattr(self, "_report", True) is None and self._refusal is None:
            warnings.warn("a hosted cache was never closed: its threads go on", ResourceWarning, stacklevel=1)

    # ---- inside

    @property
    def _state(self) -> str:
        return self._refusal or "open"

    def _request(
        self, scope: Scope | None, page_hashes: bytes, *, tokens: int, limit: int, priority: int
    ) -> HostedRequest:
        started = self._now()
        tree = None if scope is None else scope.tree
        if scope is None or tree is None:
            lease = self._past_the_cache(tokens, limit, priority, SymbolsAreHashes(HASH_SIZE))
            return HostedRequest(self, lease, tokens=tokens, prefetch=None, started=started)
        prompt = self.prompt(scope, page_hashes)
        reducer = self._reducer
        with reducer.lock:
            self.check_open()  # again: from here on closing would find the lease
            reducer.settle()
            assert scope.tree is not None
            lease, prefetch = self._leased(scope.tree, prompt, tokens, limit, priority, started)
            self.moments.note(self._core.registry.tick, started)
            reducer.settle()
        return HostedRequest(self, lease, tokens=tokens, prefetch=prefetch, started=started)

    def _release(self, lease: Lease, *, aborted: bool) -> RequestCounts:
        counted = lease in self._leases
        counts = super()._release(lease, aborted=aborted)
        if counted and not self.bypasses(lease):
            self._insight.closed(lease, counts)
        return counts

    def _end_prefetches(self) -> list[float]:
        """Release prefetches that have finished. Returns the seconds that the others may wait. The lock is held."""
        if not self._prefetches:
            return []
        waits, going = [], []
        for request, loading in self._prefetches:
            seconds = None if request.lease.closed else loading.advance()
            if seconds is None:
                request.ended(self._release(request.lease, aborted=True))
            else:
                waits.append(seconds)
                going.append((request, loading))
        self._prefetches = going
        self._reducer.settle()
        return waits

    def _close(self, end: float) -> CloseReport:
        with self._reducer.lock:
            for request, _ in self._prefetches:
                request.ended(self._release(request.lease, aborted=True))
            self._prefetches = []
        return super()._close(end)

    def _hear(self, events: Sequence[Event]) -> None:
        self._news += events
        self._ringer.ring()


def _pages_in(page_hashes: bytes) -> int:
    pages, rest = divmod(len(page_hashes), HASH_SIZE)
    if rest:
        raise InvalidInput(f"page hashes have {len(page_hashes)} bytes, not a multiple of {HASH_SIZE}")
    return pages


def _nothing() -> None:
    pass
