"""One request to the cache: it owns every pin and every private slot, and leaving it frees them, whatever happened.

Who owns the device slots of a prompt, page by page:

    [0, device)              shared, pinned for this request: read only
    [start, committed)       entered the tree by `commit`: read only from then on, pinned until the request is closed
    [committed, allocated)   private: only this request's engine reads and writes them

All of them go back to the cache at `close`; an engine must not touch them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from hicache.core.reasons import RequestCounts
from hicache.core.residency import Slots
from hicache.core.symbols import TOKEN_SIZE, Span, Tokens, page_extras, symbols
from hicache.core.transfers import Lease
from hicache.errors import CacheClosed, InvalidInput, OutOfSlots
from hicache.memory.writer import READY, WriterEvent
from hicache.records import Match
from hicache.runtime.arguments import deadline_of, event_of, no_spans, spans_of, whole
from hicache.runtime.layered import LayeredLoad, begin_layered
from hicache.units import whole_number

if TYPE_CHECKING:
    from hicache.runtime.cache import EmbeddedCache
    from hicache.runtime.loading import Loading, Prefetch
    from hicache.runtime.planner import LoadDecision

Spans = tuple[Span, ...]


def usable_pages(tokens: int, page_size: int) -> int:
    """Leading pages that a request which must produce logits may take: its last token is always computed.

    What is left out is a whole page, never a token, so that the hash chain stays whole.
    """
    return max(tokens - 1, 0) // page_size


class Request:
    """Made by `EmbeddedCache.request`; a context manager. For one thread at a time, of any threads.

    Left by an exception it counts as aborted. A request that is collected without being closed is released too, and
    counted as dropped.
    """

    __slots__ = (
        "_cache",
        "_closed",
        "_counts",
        "_deadline",
        "_decision",
        "_lease",
        "_loading",
        "_prefetch",
        "_spans",
        "_started",
        "_tail",
        "_tokens",
        "_touched",
    )

    def __init__(
        self,
        cache: EmbeddedCache,
        lease: Lease,
        *,
        tokens: int,
        tail: bytes,
        spans: Spans | None,
        prefetch: Prefetch | None,
        started: float,
        deadline: float | None,
    ) -> None:
        self._cache = cache
        self._lease = lease
        self._tokens = tokens
        self._tail = tail
        self._spans = spans
        self._prefetch = prefetch
        self._started = self._touched = started
        self._deadline = deadline
        self._closed = False
        self._counts: RequestCounts | None = None
        self._decision: LoadDecision | None = None
        self._loading: Loading | None = None

    @property
    def match(self) -> Match:
        """What was usable, by tier, when the request began; what storage was found to have is added."""
        return self._lease.match

    @property
    def decision(self) -> LoadDecision | None:
        """What `load` decided to bring up and what to leave to be computed.

        None before `load`, where the engine's prefill rate is not known, and where no lower tier had anything.
        """
        return self._decision if self._loading is None else self._loading.decision

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, with what `extend` added."""
        return self._tokens

    @property
    def closed(self) -> bool:
        """Whether it was closed, by its owner or with the cache."""
        return self._closed or self._lease.closed

    @property
    def bypassed(self) -> bool:
        """Whether it goes past the cache: it matches nothing and commits nothing."""
        return self._cache.bypasses(self._lease)

    @property
    def counts(self) -> RequestCounts:
        """What it was counted as, in pages.

        Raises:
            InvalidInput: it is still open; it is counted once, at its end.
        """
        if self._counts is None:
            raise InvalidInput("a request is counted when it is closed: read counts after close()")
        return self._counts

    def load(self) -> Slots:
        """Bring up what other tiers have, as far as it comes in time.

        Blocks at most until the request's deadline. Call it before `allocate`; afterwards it only repeats its answer.

        Returns:
            int64 `(pages,)`: DEVICE slots of the usable prefix, in order. Read only; valid until `close`.

        Raises:
            CacheClosed: the request or the cache is closed.
        """
        lease = self._open()
        if lease.start is None and (self._prefetch is not None or lease.match.host):
            loader = self._cache.parts.loader
            self._decision = loader.load(lease, self._prefetch, started=self._started, deadline=self._deadline)
        return lease.usable_slots()

    def load_by_layer(self) -> LayeredLoad:
        """As `load`, but the last copies into DEVICE are not waited for: readers wait for each layer of them.

        Blocks as `load` does while pages come from storage. Call its `finish` before anything but `close`.

        Raises:
            CacheClosed: the request or the cache is closed.
        """
        lease, parts = self._open(), self._cache.parts
        if lease.start is not None or (self._prefetch is None and not lease.match.host):
            return LayeredLoad(parts, lease, None, lease.usable_slots(), ())
        until = None if self._deadline is None else self._started + self._deadline
        with parts.reducer.lock:
            self._loading = parts.loader.begin(lease, self._prefetch, started=self._started, until=until)
            return begin_layered(parts, lease, self._loading)

    def allocate(self, pages: int | None = None, *, deadline: float | None = None) -> Slots:
        """Private DEVICE slots for the pages behind the usable prefix, or behind those allocated before.

        All or nothing. Never waits for I/O, unless given a deadline.

        Args:
            pages: how many; by default as many as the prompt still lacks, the unaligned tail included.
            deadline: seconds for which to wait until other requests and transfers let go of enough slots.

        Returns:
            int64 `(pages,)`. Undefined content; yours until `close`.

        Raises:
            OutOfSlots: not enough slots are free or evictable; nothing was evicted.
            CacheClosed: the request or the cache is closed.
        """
        lease = self._open()
        if pages is None:
            first = lease.usable if lease.start is None else lease.start + len(lease.own)
            pages = max(-(-self._tokens // self._cache.page_size) - first, 0)
        elif type(pages) is not int or pages < 0:
            pages = whole("allocate: pages", pages, least=0)
        if (deadline := deadline_of(deadline)) is not None:
            return self._wait_for_slots(pages, deadline)
        reducer = self._cache.parts.reducer
        with reducer.lock:
            if not reducer.idle:
                reducer.settle()
            fresh = reducer.core.allocate(lease, pages)
            reducer.flush()
        return fresh

    def commit(self, upto: int | None = None, *, ready: WriterEvent | None = None) -> None:
        """Publish computed pages. Only whole pages become visible, and only once the writer's event has passed.

        May be called once per prefill chunk; pages committed before are not committed again. Until the event has
        passed none of the request's slots is given to others, also after `close`.

        Args:
            upto: tokens, from the prompt's start, whose KV is written or will be when `ready` passes; default all.
            ready: the event behind which the bytes are written; `READY` if they are. None means the same, and is
                accepted only where a device pool cannot have writes under way (plain host memory).

        Raises:
            InvalidInput: `upto` is not within the prompt and the slots allocated, `ready` is no event, or None for a
                pool that needs one.
            CacheClosed: the request or the cache is closed.
        """
        lease = self._open()
        cache = self._cache
        pages = self._pages_to_commit(upto)
        ready = event_of(ready)
        if ready is None and not cache.device.synchronous:
            raise InvalidInput("commit needs ready=: the event behind which the device has written, or hicache.READY")
        passed = ready is None or ready is READY or ready.query()
        if cache.bypasses(lease):
            if passed:
                return
            pages = 0  # publishes nothing, but its slots are not free before the writer has ended
        reducer = cache.parts.reducer
        with reducer.lock:
            if not reducer.idle:
                reducer.settle()
            transfer = reducer.core.commit(lease, pages, ready=passed)
            if transfer is not None:
                assert ready is not None
                cache.parts.executor.written(transfer, ready)
            self._touched = cache.touch(lease, self._touched)
            reducer.flush()

    def extend(self, tokens: Tokens, *, extras: Iterable[Span] = ()) -> None:
        """The prompt grew, by decoded tokens or the next turn. Pages that became whole can be committed from now on.

        Args:
            tokens: what follows.
            extras: non-text input in what follows, by its place in the whole prompt.

        Raises:
            InvalidInput: what is no token id; non-text input that does not lie in what follows.
            CacheClosed: the request or the cache is closed.
        """
        lease = self._open()
        more = symbols(tokens, 1)
        spans, count = self._spans, self._tokens + len(more) // TOKEN_SIZE
        if spans is None:
            no_spans(extras)
        else:
            self._spans = spans = spans_of(extras, tokens=count, first=self._tokens, before=spans)
        self._tokens = count
        if (access := self._cache.access) is not None:
            with self._cache.parts.reducer.lock:
                access.grown(lease, count)
        tail = self._tail + more
        page_size = self._cache.page_size
        pages = len(tail) // (TOKEN_SIZE * page_size)
        self._tail = tail[pages * TOKEN_SIZE * page_size :]
        if not pages or self._cache.bypasses(lease):
            return
        old = lease.prompt
        digests = None if spans is None else page_extras(spans, page_size, pages, first_page=old.pages)
        ids = np.frombuffer(tail, "<u4", pages * page_size)
        prompt = old.extended(symbols(ids, page_size, digests))
        self._cache.prepare(prompt)
        reducer = self._cache.parts.reducer
        with reducer.lock:
            reducer.core.extend(lease, prompt)
            reducer.settle()

    def close(self, *, aborted: bool = False) -> RequestCounts:
        """Give back every pin and every slot, and count the request. Idempotent.

        Args:
            aborted: it ended without success; it is counted as such.

        Returns:
            What it was counted as.
        """
        if not self._closed:
            self._closed = True
            self._counts = self._cache.release(self._lease, aborted=aborted)
        assert self._counts is not None
        return self._counts

    def __enter__(self) -> Request:
        self._open()
        return self

    def __repr__(self) -> str:
        match, state = self._lease.match, "closed" if self.closed else "open"
        found = f"device={match.device} host={match.host} storage={match.storage}"
        return f"<hicache.Request {self._tokens} tokens, {found} pages found: {state}>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(aborted=kind is not None)

    def __del__(self) -> None:
        # May run in any thread, even inside the lock: so it only posts.
        if not getattr(self, "_closed", True):
            self._cache.drop(self._lease)

    def _open(self) -> Lease:
        if self._closed or self._lease.closed:
            raise CacheClosed("the request is closed: its slots belong to others now")
        self._cache.check_open()
        return self._lease

    def _pages_to_commit(self, upto: int | None) -> int:
        tokens = self._tokens if upto is None else whole_number(upto)
        if tokens is None or not 0 <= tokens <= self._tokens:
            raise InvalidInput(
                f"commit: upto={upto!r:.40} is not a whole number between 0 and the {self._tokens} tokens of the prompt"
            )
        return tokens // self._cache.page_size

    def _wait_for_slots(self, pages: int, deadline: float) -> Slots:
        reducer, now = self._cache.parts.reducer, self._cache.parts.clock.now
        lease, end = self._lease, now() + deadline
        with reducer.lock:
            while True:
                reducer.settle()
                try:
                    fresh = reducer.core.allocate(lease, pages)
                except OutOfSlots:
                    reducer.flush()
                    # What the request itself holds is not let go of while it waits.
                    held = (lease.usable if lease.start is None else lease.start) + len(lease.own)
                    if (left := end - now()) <= 0 or held + pages > self._cache.device_pages:
                        raise
                    reducer.wait(left)
                    if lease.closed:
                        raise CacheClosed("the request was closed while it waited for slots") from None
                else:
                    reducer.flush()
                    return fresh
