"""One request to a service, for callers that block."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from hicache.core.reasons import RequestCounts
from hicache.core.residency import Slots
from hicache.core.symbols import Span, Tokens
from hicache.errors import InvalidInput
from hicache.memory.base import Bytes
from hicache.memory.writer import WriterEvent
from hicache.records import Match
from hicache.rpc.client.flow import run
from hicache.rpc.client.group import Ticket
from hicache.rpc.client.loans import Loan
from hicache.rpc.client.pages import Buffers
from hicache.rpc.client.verbs import RequestVerbs


class RequestView:
    """What there is to know of a request, without asking the service."""

    __slots__ = ("__weakref__", "_verbs")

    def __init__(self, verbs: RequestVerbs) -> None:
        self._verbs = verbs
        verbs.state.counters.add("opened")

    @property
    def match(self) -> Match:
        """What was usable, by tier, when the request began; what storage was found to have is added."""
        return self._verbs.match

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, with what `extend` added."""
        return self._verbs.tokens

    @property
    def page_hashes(self) -> bytes:
        """Names of the prompt's whole pages, one behind the other; empty where its adapter has no digest."""
        return self._verbs.page_hashes

    @property
    def closed(self) -> bool:
        """Whether it was closed, by its owner or with the cache."""
        return self._verbs.closed

    @property
    def bypassed(self) -> bool:
        """Whether it goes past the cache: its adapter has no digest, or the service was away when it began."""
        return self._verbs.bypassed

    @property
    def lost(self) -> str | None:
        """Why nothing more comes of its lease: the session has ended, it has expired, ...; None while it is good."""
        pages = self._verbs.pages
        return None if pages is None else pages.ended

    @property
    def counts(self) -> RequestCounts:
        """What it was counted as, in pages.

        Raises:
            InvalidInput: it is still open; it is counted once, at its end.
        """
        if not self._verbs.closed or self._verbs.counts is None:
            raise InvalidInput("a request is counted when it is closed: read counts after close()")
        return self._verbs.counts

    def page(self, page: int) -> Bytes:
        """One page of the prompt as it lies in shared memory, (page_bytes,), not a copy.

        `torch.from_numpy` makes a tensor of it that needs no copy either. It must not be used after `close`, and what
        was computed from it counts only if the request is not `lost` afterwards. Engines that use it tell the service
        that they are done by `close` alone, so close requests soon.

        Raises:
            InvalidInput: none of the usable and allocated pages.
            GeometryError: this rank's page lies in several places, or the pages are streamed.
            LeaseExpired: the request is lost, and its slots may be others' by now.
            CacheClosed: the request or the cache is closed.
        """
        self._verbs.check_open()
        pages = self._verbs.pages
        if pages is None:
            raise InvalidInput(f"page {page!r:.40}: the request goes past the cache and has no pages")
        return pages.page(page)

    def ticket(self) -> Ticket | None:
        """What the other ranks of the group need to read and write its pages; None where there are none.

        Pages that are allocated later are not in it: give another one then.
        """
        return Ticket.of(self._verbs)

    def extend(self, tokens: Tokens, *, extras: Iterable[Span] = ()) -> None:
        """The prompt grew, by decoded tokens or the next turn. Pages that became whole can be committed from now on.

        Never waits: the service is told with the next verb.

        Args:
            tokens: what follows.
            extras: non-text input in what follows, by its place in the whole prompt.

        Raises:
            InvalidInput: what is no token id; non-text input that does not lie in what follows.
            CacheClosed: the request or the cache is closed.
        """
        self._verbs.extend(tokens, extras)

    def __repr__(self) -> str:
        match = self.match
        state = "closed" if self.closed else "past the cache" if self.bypassed else "lost" if self.lost else "open"
        found = f"host={match.host} storage={match.storage}"
        return f"<hicache.{type(self).__name__} {self.tokens} tokens, {found} pages found: {state}>"

    def __del__(self) -> None:
        # May run in any thread, even inside a lock: so it only posts.
        verbs = getattr(self, "_verbs", None)
        if verbs is not None and not verbs.closed:
            verbs.dropped()


class ConnectedRequest(RequestView):
    """Made by `ConnectedCache.request`; a context manager. For one thread at a time, of any threads.

    It has the verbs of `hicache.Request`, over HOST slots of the service. Left by an exception it counts as aborted. A
    request that is collected without being closed is released too, and counted as dropped.
    """

    __slots__ = ()

    def load(self) -> Slots:
        """Bring up what storage has, as far as it comes in time.

        Blocks at most until the request's deadline. Call it before `allocate`; afterwards it only repeats its answer.

        Returns:
            int64 `(pages,)`: HOST slots of the usable prefix, in order. Read only; valid until `close`. None where the
            service is away.

        Raises:
            CacheClosed: the request or the cache is closed.
        """
        return run(self._verbs.load())

    def allocate(self, pages: int | None = None, *, deadline: float | None = None) -> Slots:
        """Private HOST slots for the pages behind the usable prefix, or behind those allocated before.

        All or nothing. Never waits for I/O, unless given a deadline.

        Args:
            pages: how many; by default as many as the prompt still lacks, the unaligned tail included.
            deadline: seconds for which to wait until other requests and transfers let go of enough slots.

        Returns:
            int64 `(pages,)`. Undefined content; yours until `close`. None at all where the service is away: then the
            engine computes as it would without a cache.

        Raises:
            OutOfSlots: not enough slots are free or evictable; nothing was evicted.
            PermissionDenied: this client may not write.
            CacheClosed: the request or the cache is closed.
        """
        return run(self._verbs.allocate(pages, deadline))

    def read_into(self, buffers: Buffers, *, first: int = 0) -> int:
        """Copy pages into an engine's buffers, over shared memory or over the connection.

        Args:
            buffers: an array of bytes `(pages, page_bytes)`, anything whose bytes are so many whole pages, or a
                sequence with one buffer a page. Pages beyond those of the request are left alone.
            first: index of the first page in the prompt.

        Returns:
            Leading pages whose bytes count. Fewer than asked where the lease was lost meanwhile: the others may hold
            anything and have to be computed.

        Raises:
            GeometryError: buffers that are no whole pages, or read-only.
            InvalidInput: no such page.
            CacheClosed: the request or the cache is closed.
        """
        return run(self._verbs.read_into(buffers, first))

    def write_from(self, buffers: Buffers, *, first: int | None = None) -> int:
        """Copy computed pages into slots of `allocate`. Commit them afterwards.

        Args:
            buffers: as in `read_into`.
            first: index of the first page in the prompt; by default that of the first allocated one.

        Returns:
            Pages that were written; fewer where the lease was lost.

        Raises:
            GeometryError: buffers that are no whole pages.
            InvalidInput: a page that is shared, not allocated.
            CacheClosed: the request or the cache is closed.
        """
        return run(self._verbs.write_from(buffers, first))

    def lend(self, first: int, count: int, *, write: bool = False) -> Loan | None:
        """Slots of pages, for somebody who copies their bytes himself, as a device does.

        Args:
            first: index of the first page.
            count: pages; fewer where the request has fewer.
            write: to be written; those before the first private page are not.

        Returns:
            To be closed when the copies have ended, before the request is; None where nothing may be touched any more,
            or pages are streamed.

        Raises:
            InvalidInput: a first page that this request has not, or may not write.
            CacheClosed: the request or the cache is closed.
        """
        return self._verbs.lend(first, count, write=write)

    def commit(self, upto: int | None = None, *, ready: WriterEvent | None = None, wait: bool = True) -> None:
        """Publish computed pages. Only whole pages become visible, and only once the writer's event has passed.

        May be called once per prefill chunk; pages committed before are not committed again. Until the event has
        passed none of the request's slots is given to others, also after `close`.

        Args:
            upto: tokens, from the prompt's start, whose KV is written or will be when `ready` passes; default all.
            ready: the event behind which the bytes are written; None or `READY` if they are.
            wait: whether pages that are written are waited for until they are visible. Without, this returns at once,
                what this process asks afterwards finds them all the same, and a refusal is logged and counted.

        Raises:
            InvalidInput: `upto` is not within the prompt and the slots allocated, `ready` is no event, or a page was
                never written: by `write_from`, or as memory (`page`, `cache.host`). Nothing was published.
            HashMismatch: the service computes other page hashes; nothing was published.
            CacheClosed: the request or the cache is closed.
        """
        run(self._verbs.commit(upto, ready, wait=wait))

    def close(self, *, aborted: bool = False) -> RequestCounts:
        """Give back every pin and every slot, and count the request. Idempotent.

        Args:
            aborted: it ended without success; it is counted as such.

        Returns:
            What it was counted as. Where the service does not say it, what this side knows.
        """
        return run(self._verbs.close(aborted=aborted))

    def __enter__(self) -> ConnectedRequest:
        self._verbs.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(aborted=kind is not None)
