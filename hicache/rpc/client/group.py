"""Requests of a group of ranks: one session makes the lease, all read and write their own part of its pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hicache.core.symbols import EXTRAS_SIZE, TOKEN_SIZE
from hicache.errors import CacheClosed, InvalidInput
from hicache.memory.base import Bytes
from hicache.memory.writer import READY, WriterEvent
from hicache.rpc.client.commits import Commits
from hicache.rpc.client.flow import run
from hicache.rpc.client.loans import Loan
from hicache.rpc.client.pages import Buffers, LeasedPages
from hicache.rpc.client.state import FORKED, ClientState
from hicache.rpc.v1 import session_pb2 as pb
from hicache.runtime.arguments import event_of
from hicache.units import whole_number

if TYPE_CHECKING:
    from hicache.rpc.client.verbs import RequestVerbs

__all__ = ["JoinedRequest", "Ticket"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's lease as its session hands it to the other ranks of the group.

    Attributes:
        boot: life of the service that it belongs to.
        lease: its id.
        start: page index of the first private slot; the pages before it are usable.
        tokens: of the whole prompt.
        slots: of the usable pages and those allocated, glued u32; `words`: their generation words, glued u64.
        content: tokens of the whole pages among those allocated, glued u32; empty where the request's own session
            commits and so tells them.
        extras: digests of non-text input of those pages, 16 bytes each; empty where there is none.
    """

    boot: bytes
    lease: int
    start: int
    tokens: int
    slots: bytes
    words: bytes
    content: bytes
    extras: bytes = b""

    @classmethod
    def of(cls, verbs: RequestVerbs) -> Ticket | None:
        """The ticket of a request now."""
        pages = verbs.pages
        if pages is None or not pages.live:
            return None
        slots, words = pages.described(0, pages.end)
        content, extras = (b"", b"") if verbs.state.worker else verbs.own_content()
        boot = pages.connection.welcome.boot
        return cls(boot, pages.lease, verbs.start, verbs.tokens, slots, words, content, extras)

    def encode(self) -> bytes:
        """As bytes, for whatever the ranks talk over."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """The ticket of such bytes.

        Raises:
            InvalidInput: they are none.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"these bytes are no ticket of a request: {error}") from None


class JoinedRequest:
    """A request that another session of the group has made. Made by `ConnectedCache.join`; a context manager.

    For one thread at a time. Its pages may be used until it is closed, or the request is; nothing is counted here.
    """

    __slots__ = ("__weakref__", "_commits", "_pages", "_reason", "_sent", "_state", "_ticket")

    def __init__(self, state: ClientState, ticket: Ticket) -> None:
        self._state = state
        self._ticket = ticket
        self._sent = ticket.start
        self._commits = Commits(state.watcher, state.counters, self._publish)
        self._pages: LeasedPages | None = None
        self._reason = "the service is away, or has been started anew"
        connection = state.connection()
        if connection is None or connection.welcome.boot != ticket.boot:
            return
        if ticket.lease <= connection.attached.newest_lease:
            # The service does not wait for this session when that lease ends, and may have given its slots to others.
            self._reason = "the request was made before this rank has joined the group"
        else:
            self._pages = LeasedPages(state, connection, ticket.lease, owned=False)
            self._pages.replace(ticket.slots, ticket.words)
            state.opened(self._pages)

    @property
    def lost(self) -> str | None:
        """Why nothing comes of it: another life of the service, the session has ended, ...; None while it is good."""
        if self._pages is None:
            return self._reason
        return self._pages.ended

    def read_into(self, buffers: Buffers, *, first: int = 0) -> int:
        """Copy this rank's part of pages out; see `ConnectedRequest.read_into`."""
        pages = self._open()
        return 0 if pages is None else run(pages.read_into(buffers, first))

    def write_from(self, buffers: Buffers, *, first: int | None = None) -> int:
        """Copy this rank's part of computed pages in; see `ConnectedRequest.write_from`."""
        pages = self._open()
        first = self._ticket.start if first is None else first
        return 0 if pages is None else run(pages.write_from(buffers, first, least=self._ticket.start))

    def lend(self, first: int, count: int, *, write: bool = False) -> Loan | None:
        """Slots of this rank's part of pages, for somebody who copies their bytes himself, as a device does.

        Args:
            first: index of the first page.
            count: pages; fewer where the request has fewer.
            write: to be written; those before the first private page are not.

        Returns:
            To be closed when the copies have ended; None where nothing may be touched any more, or pages are streamed.

        Raises:
            InvalidInput: a first page that this request has not, or may not write.
            CacheClosed: the request or the cache is closed.
        """
        pages = self._open()
        return None if pages is None else pages.lend(first, count, least=self._ticket.start if write else 0)

    def page(self, page: int) -> Bytes:
        """This rank's part of a page, not a copy; see `ConnectedRequest.page`."""
        pages = self._open()
        if pages is None:
            raise InvalidInput(f"page {page!r:.40}: {self.lost}")
        return pages.page(page)

    def commit(self, upto: int | None = None, *, ready: WriterEvent | None = None, wait: bool = True) -> None:
        """This rank's part of the pages up to a token is written, or will be when `ready` passes.

        Pages become visible when every rank has said so. `wait` as in `ConnectedRequest.commit`.

        Raises:
            InvalidInput: `upto` is not within the prompt, `ready` is no event, or a page of which this rank writes a
                part was never written. Nothing was published.
            HashMismatch: the service computes other page hashes; nothing was published.
            CacheClosed: the request or the cache is closed.
        """
        tokens = self._ticket.tokens if upto is None else whole_number(upto)
        if tokens is None or not 0 <= tokens <= self._ticket.tokens:
            raise InvalidInput(
                f"commit: upto={upto!r:.40} is not within the {self._ticket.tokens} tokens of the prompt"
            )
        event = event_of(ready)
        pages = self._open()
        if pages is not None:
            end = min(tokens // self._state.page_size, pages.end)
            if end > self._sent and (event is None or event is READY):  # else they are perhaps written meanwhile
                pages.check_written(self._sent, end)
            run(self._commits.add(end, event, wait=wait))

    async def _publish(self, end: int) -> None:
        pages = self._pages
        assert pages is not None
        if end <= self._sent or not pages.live:
            return
        pages.check_written(self._sent, end)
        begin, self._sent = self._sent, end
        commit = pb.Commit(lease=pages.lease, upto=end)
        if self._ticket.content:
            width, start = TOKEN_SIZE * self._state.page_size, self._ticket.start
            commit.first_page = begin
            commit.tokens = self._ticket.content[(begin - start) * width : (end - start) * width]
            commit.extras = self._ticket.extras[(begin - start) * EXTRAS_SIZE : (end - start) * EXTRAS_SIZE]
        await self._state.reply_to(self._state.ask(pages.connection, pb.Request(commit=commit)), pages)

    def close(self) -> None:
        """Nothing of it is touched here any more, behind the writers whose events have not passed. Idempotent."""
        pages = self._pages
        if self._state.refusal is FORKED:
            return
        if pages is not None and not pages.closed and not self._commits.then(self._end):
            run(self._end())

    async def _end(self) -> None:
        assert self._pages is not None
        self._pages.close()
        self._state.closed(self._pages)

    def _open(self) -> LeasedPages | None:
        self._state.check_open()
        if self._pages is not None and self._pages.closed:
            raise CacheClosed("the request is closed: its slots belong to others now")
        return self._pages

    def __enter__(self) -> JoinedRequest:
        self._open()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
