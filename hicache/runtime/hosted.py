"""One request to a hosted cache. Its pages are those of other processes: it owns pins and slots, never bytes.

Who owns the HOST slots of a prompt, page by page:

    [0, usable)              shared, pinned for this request: read only
    [first, committed)       entered the tree by `commit`: read only from then on, pinned until the request is closed
    [committed, reserved)    private: only this request's engines read and write them

Nothing of it goes back before `close`, whatever becomes of the engines. So whoever cannot be sure that no process
touches its slots any more just does not close it: they are then in quarantine, and still counted where they are.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from hicache.core.reasons import RequestCounts, count
from hicache.core.residency import NO_SLOTS, Slots
from hicache.core.symbols import EXTRAS_SIZE, TOKEN_SIZE
from hicache.core.transfers import Lease
from hicache.errors import CacheClosed, HashMismatch, InvalidInput
from hicache.records import Match
from hicache.runtime.arguments import whole
from hicache.runtime.leasing import past_counts
from hicache.runtime.planner import LoadDecision
from hicache.runtime.tokens import chain_of
from hicache.runtime.wiring import HASH_SIZE

if TYPE_CHECKING:
    from hicache.runtime.hosting import HostedCache
    from hicache.runtime.loading import Loading, Prefetch

_CLOSED: Final = "the request is closed: its slots belong to others now"


class HostedLoading:
    """What a request waits for. Used on the cache's own thread."""

    def __init__(self, request: HostedRequest, loading: Loading | None) -> None:
        self._request = request
        self._loading = loading

    @property
    def decision(self) -> LoadDecision | None:
        """Once finished: what was decided to be brought up, where the engine's prefill rate is known."""
        return None if self._loading is None else self._loading.decision

    def step(self) -> float | None:
        """Go on as far as it goes now. Never waits.

        Returns:
            Seconds after which to call again, or earlier when the cache tells of a change; None: it has finished,
            and `usable` has what came in time.

        Raises:
            CacheClosed: the request or the cache is closed.
        """
        self._request.check_open()
        with self._request.lock:
            return self.advance()

    def advance(self) -> float | None:
        """`step`, where the lock is held."""
        return None if self._loading is None else self._loading.step()

    def cancel(self) -> None:
        """Wait no longer: what is not there yet is withdrawn. Idempotent."""
        if self._loading is not None and not self._request.closed:
            with self._request.lock:
                self._loading.cancel()


class HostedRequest:
    """Made by `HostedCache.request`. Used on the cache's own thread; must be closed.

    Attributes:
        lease: what it holds in the core.
        tokens: of the prompt, with what `extend` added.
        bypassed: whether it goes past the cache: it matches nothing and commits nothing.
    """

    __slots__ = ("__weakref__", "_cache", "_counts", "_prefetch", "_started", "_touched", "bypassed", "lease", "tokens")

    def __init__(
        self, cache: HostedCache, lease: Lease, *, tokens: int, prefetch: Prefetch | None, started: float
    ) -> None:
        self._cache = cache
        self._prefetch = prefetch
        self._started = self._touched = started
        self._counts: RequestCounts | None = None
        self.lease = lease
        self.tokens = tokens
        self.bypassed = cache.bypasses(lease)

    # ---- looking

    @property
    def match(self) -> Match:
        """What was usable, by tier, when it began; what storage was found to have is added."""
        return self.lease.match

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._cache.page_size

    @property
    def pages(self) -> int:
        """Whole pages of the prompt; 0 where it goes past the cache."""
        return self.lease.prompt.pages

    @property
    def usable(self) -> Slots:
        """HOST slots of the usable leading pages, int64, in order: pinned, read only. Grows until `reserve`."""
        return NO_SLOTS if self.lease.closed else self.lease.usable_slots()

    @property
    def own(self) -> Slots:
        """HOST slots of the pages from `first` on that were reserved, int64; private until they are committed."""
        return self.lease.own

    @property
    def first(self) -> int:
        """Page index of the first own page: what is in front was usable when slots were first reserved."""
        start = self.lease.start
        return self.lease.usable if start is None else start

    @property
    def closed(self) -> bool:
        """Whether it was closed, by its owner or with the cache."""
        return self.lease.closed

    @property
    def lock(self) -> threading.Lock:
        """The cache's lock."""
        return self._cache.parts.reducer.lock

    def check_open(self) -> Lease:
        """The lease, if it may be used.

        Raises:
            CacheClosed: the request or the cache is closed.
        """
        if self.lease.closed:
            raise CacheClosed(_CLOSED)
        self._cache.check_open()
        return self.lease

    def of_session(self, session: int) -> None:
        """A session of a service has asked for it; for the access log."""
        if (access := self._cache.access) is not None:
            with self.lock:
                access.of_session(self.lease, session)

    # ---- reading

    def loading(self, until: float | None = None) -> HostedLoading:
        """Wait, by steps, for what is on its way from storage. To be finished before `reserve`.

        Args:
            until: when to give up, a time of the cache's clock; None leaves it to the options, which bound it anyhow.

        Raises:
            CacheClosed: the request or the cache is closed.
        """
        return self._load(until, patient=False)

    def patiently(self) -> HostedLoading:
        """`loading` where nobody waits, so that storage gets all of its time. The lock is held."""
        return HostedLoading(self, self._begin(None, patient=True))

    def _load(self, until: float | None, *, patient: bool) -> HostedLoading:
        lease = self.check_open()
        if lease.start is not None or self.bypassed:
            return HostedLoading(self, None)
        with self._cache.parts.reducer.lock:
            return HostedLoading(self, self._begin(until, patient=patient))

    def _begin(self, until: float | None, *, patient: bool) -> Loading:
        loader = self._cache.parts.loader
        return loader.begin(self.lease, self._prefetch, started=self._started, until=until, patient=patient)

    # ---- writing

    def reserve(self, pages: int) -> Slots:
        """Private HOST slots for the pages behind those that are usable or were reserved before. All or nothing.

        Returns:
            int64 `(pages,)`. Undefined content.

        Raises:
            OutOfSlots: not so many are free or evictable now; nothing was evicted.
            InvalidInput: no number of pages.
            CacheClosed: the request or the cache is closed.
        """
        lease = self.check_open()
        pages = whole("reserve: pages", pages, least=0)
        reducer = self._cache.parts.reducer
        with reducer.lock:
            reducer.settle()
            slots = reducer.core.allocate(lease, pages)
            reducer.flush()
        return slots

    def commit(self, upto: int, *, tokens: bytes | None, first: int, extras: bytes = b"") -> None:
        """Publish pages whose bytes are written, all of every page.

        Args:
            upto: page index behind the last of them.
            tokens: of the pages from `first` to `upto`, u32 little endian. Those of pages that were committed before
                may be left out. None: whoever asks knows hashes only, which are believed.
            first: page index of the first page that `tokens` describes.
            extras: for each of these pages the 16-byte digest of its non-text input; empty: none has any.

        Raises:
            HashMismatch: these are not the tokens of the page hashes. Nothing was published.
            InvalidInput: pages without slots, or tokens of other pages. Nothing was published.
            CacheClosed: the request or the cache is closed.
        """
        lease = self.check_open()
        if self.bypassed:
            return
        cache = self._cache
        start = self.first
        done = start if lease.start is None else lease.committed
        self._check_place(upto, first, done=done)
        if tokens is not None:
            self._check_size(upto - first, tokens, extras)
            self._check_hashes(upto, tokens, first, extras)
        reducer = cache.parts.reducer
        store = cache.parts.tokens
        assert store is not None
        with reducer.lock:
            reducer.settle()
            fresh = lease.own[done - start : upto - start]
            if len(fresh) and tokens is None:
                store.forget(fresh)
            elif len(fresh) and tokens is not None:
                known = done - first
                width = TOKEN_SIZE * self.page_size
                store.set(fresh, tokens[known * width :], extras[known * EXTRAS_SIZE :])
            reducer.core.commit(lease, upto, ready=True)
            self._touched = cache.touch(lease, self._touched)
            reducer.flush()

    def extend(self, page_hashes: bytes, tokens: int) -> None:
        """The prompt grew. Pages that became whole can be committed from now on.

        Args:
            page_hashes: of the whole pages that came to those known; may be empty.
            tokens: of the whole prompt now.

        Raises:
            InvalidInput: bytes that are no whole hashes, or fewer tokens than before.
            CacheClosed: the request or the cache is closed.
        """
        lease = self.check_open()
        if type(tokens) is not int or tokens < self.tokens:
            raise InvalidInput(f"extend: {tokens!r:.20} tokens in all are fewer than the {self.tokens} before")
        if len(page_hashes) % HASH_SIZE:
            raise InvalidInput(f"page hashes have {len(page_hashes)} bytes, not a multiple of {HASH_SIZE}")
        self.tokens = tokens
        reducer, access = self._cache.parts.reducer, self._cache.access
        if access is not None:
            with reducer.lock:
                access.grown(lease, tokens)
        if self.bypassed or not page_hashes:
            return
        with reducer.lock:
            reducer.core.extend(lease, lease.prompt.extended(page_hashes))
            reducer.settle()

    # ---- the end

    def close(self, *, aborted: bool = False) -> RequestCounts:
        """Give back every pin and every slot, and count the request. Idempotent. Nobody touches its slots any more.

        Args:
            aborted: it ended without success; it is counted as such.

        Returns:
            What it was counted as.
        """
        if self._counts is None:
            self._counts = self._cache.release(self.lease, aborted=aborted)
        return self._counts

    def discard(self) -> None:
        """Give everything back, and count nothing: nobody was given it. Idempotent."""
        if self._counts is None:
            self._cache.uncounted(self.lease)
            self.close(aborted=True)

    def ended(self, counts: RequestCounts) -> None:
        """Its cache has closed it."""
        self._counts = counts

    def counts_now(self, *, aborted: bool = False) -> RequestCounts:
        """What it would be counted as if it was closed now. Changes nothing."""
        if self._counts is not None:
            return self._counts
        lease, core = self.lease, self._cache.parts.core
        with self._cache.parts.reducer.lock:
            if lease.counts is not None:
                return lease.counts
            if self.bypassed:
                return past_counts(self._cache.asked(lease), aborted=aborted)
            return count(lease, core.registry.ghosts, aborted=aborted)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        found = f"host={self.match.host} storage={self.match.storage}"
        return f"<hicache.HostedRequest {self.tokens} tokens, {found} pages found: {state}>"

    def __del__(self) -> None:
        # May run in any thread, even inside the lock: so it only posts.
        if getattr(self, "_counts", True) is None:
            self._cache.drop(self.lease)

    # ---- inside

    def _check_place(self, upto: int, first: int, *, done: int) -> None:
        lease = self.lease
        end = min(self.first + len(lease.own), lease.prompt.pages)
        if type(upto) is not int or type(first) is not int or not 0 <= first <= upto:
            raise InvalidInput(f"commit: pages {first!r:.20} to {upto!r:.20} are no range of pages")
        if upto > end:
            raise InvalidInput(f"commit: page {upto} is behind the last one that can be committed, {end}")
        if first > done:
            raise InvalidInput(
                f"commit: tokens begin at page {first}, but those of pages {done} to {first} are missing"
            )

    def _check_size(self, pages: int, tokens: bytes, extras: bytes) -> None:
        if len(tokens) != pages * TOKEN_SIZE * self.page_size:
            raise InvalidInput(
                f"commit: {len(tokens)} bytes of tokens are not {pages} pages of {self.page_size} tokens of 4 bytes"
            )
        if extras and len(extras) != pages * EXTRAS_SIZE:
            raise InvalidInput(f"commit: {len(extras)} bytes of extras, {pages} pages need {EXTRAS_SIZE} each")

    def _check_hashes(self, upto: int, tokens: bytes, first: int, extras: bytes) -> None:
        prompt, pages = self.lease.prompt, upto - first
        parent = prompt.hash(first - 1) if first else None
        spans = _with_extras(tokens, extras, pages) if extras else tokens
        found = chain_of(self.lease.tree).extend(parent, spans, pages)
        said = prompt.symbols[first * HASH_SIZE : upto * HASH_SIZE]
        if found != said:
            wrong = next(
                i for i in range(pages) if found[i * HASH_SIZE :][:HASH_SIZE] != said[i * HASH_SIZE :][:HASH_SIZE]
            )
            raise HashMismatch(
                f"commit: the tokens of page {first + wrong} do not have the page hash that the request was made with: "
                "hash the same tokens, adapter, salt and non-text input as are committed; nothing was published"
            )


def _with_extras(tokens: bytes, extras: bytes, pages: int) -> bytes:
    both = np.hstack(
        [np.frombuffer(part, np.uint8).reshape(pages, -1) for part in (tokens, extras)],
    )
    return both.tobytes()
