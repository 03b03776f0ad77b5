"""A request's verbs as flows (see `hicache.rpc.client.flow`): written once for callers that block and for asyncio.

Who owns the host slots of a prompt, page by page:

    [0, usable)              shared, pinned for this request: read only
    [start, committed)       published by `commit`: read only from then on, pinned until the request is closed
    [committed, allocated)   private: only this request's engine (its ranks) reads and writes them

Whatever the service does, a verb answers. Where it is away, or the lease is lost, there is nothing in the cache: no
page is usable, no slot is given, nothing is published, and closing works.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from hicache.core.reasons import RequestCounts
from hicache.core.residency import Slots
from hicache.core.symbols import TOKEN_SIZE, Span, Tokens, page_extras, symbols
from hicache.errors import CacheClosed, InvalidInput, ProtocolMismatch
from hicache.memory.writer import READY, WriterEvent
from hicache.records import Match, MissReason
from hicache.rpc.client.commits import Commits
from hicache.rpc.client.connection import ATTACHMENT, Connection
from hicache.rpc.client.loans import Loan
from hicache.rpc.client.pages import NONE, Buffers, LeasedPages, as_pages
from hicache.rpc.client.protocol import Reply
from hicache.rpc.client.state import FORKED, ClientState, Naming
from hicache.rpc.convert.session import decode_counts
from hicache.rpc.service import BY_HASH
from hicache.rpc.v1 import session_pb2 as pb
from hicache.runtime.arguments import deadline_of, event_of, flag, no_spans, spans_of, whole
from hicache.units import whole_number

_UNKNOWN: Final = RequestCounts()


class RequestVerbs:
    """What a request does. For one thread at a time, of any threads; commits behind events end in others.

    Args:
        state: of the client.
        naming: how its pages are named; None: it goes past the cache.
        content: its whole pages as symbols, and its non-text input; None where the client takes none.
        tokens: of the prompt, the tail included.
        tail: tokens behind the last whole page.
        limit: leading pages that it may take from the cache.
        deadline: seconds for looking and loading together.
        page_hashes: of all its pages, where its tokens are not known; then there is no content.
    """

    def __init__(
        self,
        state: ClientState,
        naming: Naming | None,
        content: tuple[bytes, tuple[Span, ...] | None],
        *,
        tokens: int,
        tail: bytes,
        limit: int,
        deadline: float,
        page_hashes: bytes | None = None,
    ) -> None:
        self.state = state
        self.naming = naming
        self.tokens = tokens
        self.limit = limit
        self.match = Match()
        self.closed = False
        self.counts: RequestCounts | None = None
        self.pages: LeasedPages | None = None
        self._symbols, self._spans = content
        self._width = TOKEN_SIZE * state.page_size + (0 if self._spans is None else 16)
        self._tail = tail
        self._until = state.now() + deadline
        self._by_hash = page_hashes is not None
        self._hashes = page_hashes or b""
        if naming is not None and not self._by_hash:
            self._hashes = naming.hasher.extend(None, self._symbols, self.whole)
        self._told_pages, self._told_tokens = self.whole, tokens  # what the service knows of the prompt
        self._usable = 0
        self._settled = False  # whether the usable prefix cannot grow any more
        self._start: int | None = None  # page index of the first private slot
        self._sent = 0  # page index up to which commits were sent
        self.commits = Commits(state.watcher, state.counters, self._publish)

    @property
    def page_hashes(self) -> bytes:
        """Of the whole pages; empty where they have no names."""
        return self._hashes

    @property
    def whole(self) -> int:
        """Whole pages of the prompt."""
        return self.limit if self._by_hash else len(self._symbols) // self._width

    @property
    def bypassed(self) -> bool:
        """Whether it goes past the cache."""
        return self.pages is None

    @property
    def start(self) -> int:
        """Page index of the first private slot, whether or not there is one yet."""
        return self._usable if self._start is None else self._start

    # ---- beginning

    async def begin(self, priority: int) -> None:
        """Look, pin, and begin to fetch the rest."""
        state = self.state
        connection = None if self.naming is None else state.connection()
        if connection is None:
            return
        assert self.naming is not None
        lease = pb.Lease(
            attachment=ATTACHMENT,
            scope=self.naming.scope,
            page_hashes=self._hashes,
            tokens=self.tokens,
            limit=self.limit,
            priority=priority,
        )

        def late(reply: Reply) -> None:
            if reply.WhichOneof("result") == "leased":
                connection.drop(reply.leased.lease)

        seconds = min(max(self._until - state.now(), 0.0), state.options.deadline)
        asked = state.ask(connection, pb.Request(lease=lease), seconds=seconds, late=late)
        try:
            reply = await state.reply_to(asked)
        except BaseException:  # who waited was interrupted, and the answer may still come
            asked.add_done_callback(lambda asked: None if asked.exception() else late(asked.result()))
            raise
        if reply is None:
            return
        self._leased(connection, reply.leased)

    def _leased(self, connection: Connection, leased: pb.Leased) -> None:
        if leased.bypassed:
            connection.drop(leased.lease)
            return
        pages = LeasedPages(self.state, connection, leased.lease, owned=True)
        pages.replace(leased.slots, leased.words)
        self.pages = pages
        self.match = Match(host=leased.host, storage=leased.storage)
        self._usable = min(pages.end, self.limit)
        self._settled = self._usable == self.limit
        self.state.opened(pages)

    # ---- loading

    async def load(self) -> Slots:
        """Bring up what storage has; see `ConnectedRequest.load`."""
        self.check_open()
        pages = self.pages
        if pages is None:
            return NONE
        if not self._settled:
            await self._settle(pages, max(self._until - self.state.now(), 0.0))
        return pages.slots(0, self._usable)

    async def _settle(self, pages: LeasedPages, seconds: float) -> None:
        """Wait for what is on its way, at most so long; afterwards the usable prefix stays as it is."""
        self._settled = True
        loaded = None
        if pages.live:
            message = pb.Request(load=pb.Load(lease=pages.lease))
            reply = await self.state.reply_to(self.state.ask(pages.connection, message, seconds=seconds), pages)
            loaded = None if reply is None else reply.loaded
        if loaded is None:
            self._usable = 0
            return
        pages.replace(loaded.slots, loaded.words)
        self._usable = pages.end
        self.match = Match(host=self.match.host, storage=max(loaded.storage, self.match.storage))

    # ---- writing

    async def allocate(self, count: int | None, deadline: float | None) -> Slots:
        """Private slots; see `ConnectedRequest.allocate`."""
        self.check_open()
        if count is not None:
            count = whole("allocate: pages", count, least=0)
        deadline = deadline_of(deadline)
        pages = self.pages
        if pages is None:
            return NONE
        if not self._settled:
            await self._settle(pages, 0.0)
        first = self._usable if self._start is None else pages.end
        if count is None:
            count = max(-(-self.tokens // self.state.page_size) - first, 0)
        if not count or not pages.live:
            return NONE
        self._tell_extension(pages)
        message = pb.Request(reserve=pb.Reserve(lease=pages.lease, pages=count))
        asked = self.state.ask(pages.connection, message, seconds=deadline, told=deadline is not None)
        reply = await self.state.reply_to(asked, pages)
        if reply is None:
            return NONE
        reserved = reply.reserved
        if reserved.first_page != first:
            pages.lose(f"the service gave slots of page {reserved.first_page} on, {first} was the next")
            return NONE
        pages.append(reserved.slots, reserved.words)
        if self._start is None:
            self._start = self._sent = first
        return pages.slots(first, pages.end)

    # ---- bytes

    async def read_into(self, buffers: Buffers, first: int) -> int:
        """Copy pages out; see `ConnectedRequest.read_into`."""
        self.check_open()
        if self.pages is None:
            as_pages(buffers, self.state.page_bytes, writable=True)
            return 0
        return await self.pages.read_into(buffers, first)

    async def write_from(self, buffers: Buffers, first: int | None) -> int:
        """Copy pages in; see `ConnectedRequest.write_from`."""
        self.check_open()
        if self.pages is None:
            as_pages(buffers, self.state.page_bytes, writable=False)
            return 0
        return await self.pages.write_from(buffers, self.start if first is None else first, least=self.start)

    def lend(self, first: int, count: int, *, write: bool) -> Loan | None:
        """Slots of pages for others to copy; see `ConnectedRequest.lend`."""
        self.check_open()
        return None if self.pages is None else self.pages.lend(first, count, least=self.start if write else 0)

    # ---- publishing

    async def commit(self, upto: int | None, ready: WriterEvent | None, *, wait: bool) -> None:
        """Publish pages; see `ConnectedRequest.commit`."""
        self.check_open()
        end = self._pages_to_commit(upto)
        event = event_of(ready)
        flag("commit: wait", wait)
        if self.pages is None:
            return
        own = 0 if self._start is None else self.pages.end - self._start
        if self.pages.live and end > min(self._usable + own, self.whole):
            raise InvalidInput(
                f"commit: page {end} is behind the last one that can be committed: {own} slots were allocated behind "
                f"{self._usable} usable pages of {self.whole} whole ones"
            )
        if event is None or event is READY:  # else they are perhaps written meanwhile
            self._check_written(end)
        await self.commits.add(end, event, wait=wait)

    def _check_written(self, end: int) -> None:
        assert self.pages is not None
        if self._start is not None and end > self._sent:
            self.pages.check_written(self._sent, end)

    def _pages_to_commit(self, upto: int | None) -> int:
        tokens = self.tokens if upto is None else whole_number(upto)
        if tokens is None or not 0 <= tokens <= self.tokens:
            raise InvalidInput(
                f"commit: upto={upto!r:.40} is not a whole number between 0 and the {self.tokens} tokens of the prompt"
            )
        return tokens // self.state.page_size

    async def _publish(self, end: int) -> None:
        pages = self.pages
        assert pages is not None
        if self._start is None or end <= self._sent or not pages.live:
            return
        self._check_written(end)
        if self._by_hash and BY_HASH not in pages.connection.welcome.capabilities:
            raise ProtocolMismatch(
                f"commit: the service is hicache {pages.connection.welcome.server}, which takes no pages by hash: "
                "upgrade it"
            )
        begin, self._sent = self._sent, end
        self._tell_extension(pages)
        if self._by_hash:
            commit = pb.Commit(lease=pages.lease, upto=end, by_hash=True)
        else:
            tokens, extras = self._content(begin, end)
            commit = pb.Commit(lease=pages.lease, upto=end, tokens=tokens, first_page=begin, extras=extras)
        await self.state.reply_to(self.state.ask(pages.connection, pb.Request(commit=commit)), pages)

    def _content(self, begin: int, end: int) -> tuple[bytes, bytes]:
        """Tokens and extras digests of pages, as they travel."""
        part = self._symbols[begin * self._width : end * self._width]
        if self._spans is None:
            return part, b""
        rows = np.frombuffer(part, np.uint8).reshape(-1, self._width)
        at = TOKEN_SIZE * self.state.page_size
        return rows[:, :at].tobytes(), rows[:, at:].tobytes()

    def own_content(self) -> tuple[bytes, bytes]:
        """Tokens and extras digests of the whole pages among the private ones."""
        if self._start is None or self.pages is None:
            return b"", b""
        return self._content(self._start, min(self.whole, self.pages.end))

    # ---- growing

    def extend(self, tokens: Tokens, extras: Iterable[Span]) -> None:
        """The prompt grew; see `ConnectedRequest.extend`. The service is told with the next verb that needs it."""
        self.check_open()
        if self._by_hash:
            raise InvalidInput("extend: this request names its pages by hash: make another one with more of them")
        more = symbols(tokens, 1)
        count = self.tokens + len(more) // TOKEN_SIZE
        if self._spans is None:
            no_spans(extras)
        else:
            self._spans = spans_of(extras, tokens=count, first=self.tokens, before=self._spans)
        self.tokens = count
        tail = self._tail + more
        page_size = self.state.page_size
        pages = len(tail) // (TOKEN_SIZE * page_size)
        self._tail = tail[pages * TOKEN_SIZE * page_size :]
        if not pages or self.naming is None or self.pages is None:
            return
        digests = None if self._spans is None else page_extras(self._spans, page_size, pages, first_page=self.whole)
        fresh = symbols(np.frombuffer(tail, "<u4", pages * page_size), page_size, digests)
        size = self.naming.hasher.size
        self._hashes += self.naming.hasher.extend(self._hashes[-size:] or None, fresh, pages)
        self._symbols += fresh

    def _tell_extension(self, pages: LeasedPages) -> None:
        """Say how the prompt grew, in front of the verb that follows; what it is answered with shows there."""
        if self.tokens == self._told_tokens or self.naming is None:
            return
        hashes = self._hashes[self._told_pages * self.naming.hasher.size :]
        self._told_pages, self._told_tokens = self.whole, self.tokens
        extend = pb.Extend(lease=pages.lease, page_hashes=hashes, tokens=self.tokens)
        self.state.ask(pages.connection, pb.Request(extend=extend))

    # ---- ending

    async def close(self, *, aborted: bool) -> RequestCounts:
        """Give back all that it holds; see `ConnectedRequest.close`."""
        if self.closed:
            return self.counts or _UNKNOWN
        self.closed = True
        self.counts = self._own_counts(aborted=aborted)  # until the service has told better
        if self.state.refusal is FORKED:
            return self.counts  # the lease is the parent's
        self.state.counters.add("requests")
        self.state.counters.add("past", int(self.pages is None))
        # Where writers are at work in slots of this request, they stay its own until those have ended.
        if not self.commits.then(lambda: self._release(aborted=aborted)):
            await self._release(aborted=aborted)
        return self.counts

    async def _release(self, *, aborted: bool) -> None:
        pages = self.pages
        if pages is None:
            return
        connection = pages.connection
        self._tell_extension(pages)
        pages.close()
        self.state.closed(pages)
        release = pb.Request(release=pb.Release(lease=pages.lease, aborted=aborted))
        reply = await self.state.reply_to(self.state.ask(connection, release))
        if reply is not None:
            counts = decode_counts(reply.released)
            self.counts = RequestCounts(
                counts.asked, host=counts.host, storage=counts.storage, missed=dict(counts.missed), aborted=aborted
            )

    def _own_counts(self, *, aborted: bool) -> RequestCounts:
        """What this side knows: pages that came, those that were there and did not, and the rest."""
        if self.pages is None:
            missed = {MissReason.BYPASSED: self.limit} if self.limit else {}
            return RequestCounts(self.limit, missed=missed, aborted=aborted)
        got = min(self._usable, self.limit)
        host = min(self.match.host, got)
        known = min(max(self.match.pages, got), self.limit)
        missed = {MissReason.LATE: known - got, MissReason.COLD: self.limit - known}
        return RequestCounts(
            self.limit,
            host=host,
            storage=got - host,
            missed={reason: count for reason, count in missed.items() if count},
            aborted=aborted,
        )

    def dropped(self) -> None:
        """It was collected without being closed. For finalisers: takes no lock."""
        if self.state.refusal is not FORKED:
            if self.pages is not None:
                self.pages.connection.drop(self.pages.lease)
            self.state.drop()

    def check_open(self) -> None:
        """Raise `CacheClosed` unless it may be used."""
        if self.closed:
            raise CacheClosed("the request is closed: its slots belong to others now")
        self.state.check_open()
