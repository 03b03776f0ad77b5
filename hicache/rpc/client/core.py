"""What blocking and asyncio clients have in common: all of it but how they wait."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from hicache.clock import Clock, MonotonicClock
from hicache.core.identity import Adapter, Namespace
from hicache.core.symbols import Span, Tokens, page_extras, symbols
from hicache.errors import ConfigError, InvalidInput, ServiceUnavailable, StorageError
from hicache.memory.base import Bytes
from hicache.records import Match
from hicache.rpc.address import Address
from hicache.rpc.client.connection import ATTACHMENT, Connection, Dialer, clear
from hicache.rpc.client.flow import answer
from hicache.rpc.client.group import JoinedRequest, Ticket
from hicache.rpc.client.link import Link
from hicache.rpc.client.options import ClientOptions, Place, Secrets, check_namespace, stages_of
from hicache.rpc.client.protocol import Reply
from hicache.rpc.client.request import RequestView
from hicache.rpc.client.state import CLOSED, FORKED, ClientState
from hicache.rpc.client.statistics import ClientStatistics
from hicache.rpc.client.verbs import RequestVerbs
from hicache.rpc.service import RequestScope, Target
from hicache.rpc.v1 import session_pb2 as pb
from hicache.runtime.arguments import deadline_of, flag, length_of, no_spans, number_of_seconds, priority_of, spans_of
from hicache.runtime.forks import watch
from hicache.runtime.request import usable_pages
from hicache.units import whole_number

if TYPE_CHECKING:
    from hicache.rpc.client.memory import SharedPages

R = TypeVar("R", bound=RequestView)


class ConnectedHost:
    """The service's host pool as this process sees it: its own rank's part of each page.

    Attributes:
        page_bytes: bytes of that part.
    """

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self.page_bytes = state.page_bytes

    @property
    def slots(self) -> int:
        """Slots of the pool; 0 while the service is away."""
        connection = self._state.link.connection
        return 0 if connection is None else connection.attached.slots

    @property
    def memory(self) -> SharedPages | None:
        """Its memory as it is mapped here now, for those who copy by themselves; None while the service is away.

        None, too, where pages are streamed. A service that was started anew has another one.
        """
        connection = self._state.link.connection
        return None if connection is None else connection.memory

    def page(self, slot: int) -> Bytes:
        """The page in a slot of an open request, as it lies in shared memory, (page_bytes,), not a copy.

        See `ConnectedRequest.page` for what that means.

        Raises:
            GeometryError: no such slot, a page that lies in several places, or pages that are streamed.
            LeaseExpired: the slot's request is lost, and the slot may be another's by now.
            CacheClosed: the slot's request is closed, and so is its service; or the cache.
        """
        self._state.check_open()
        memory, number = self._state.memory_of(_slot(slot))
        return memory.page(number)

    def read_page(self, slot: int) -> Bytes:
        """A copy of the page in a slot of an open request. As `page` otherwise, but wherever its parts lie."""
        self._state.check_open()
        memory, number = self._state.memory_of(_slot(slot))
        return memory.read_page(number)

    def write_page(self, slot: int, data: Any) -> None:
        """Write the page in a private slot of an open request; parts that another rank writes are left out.

        Raises:
            GeometryError: no such slot, another number of bytes, or pages that are streamed.
            CacheClosed: as `page`.
        """
        self._state.check_open()
        memory, number = self._state.memory_of(_slot(slot))
        memory.write_page(number, data)


def _slot(slot: int) -> int:
    number = whole_number(slot)
    return -1 if number is None else number


class ClientCore:
    """Base of `ConnectedCache` and `AsyncConnectedCache`. A forked child must not use it.

    Attributes:
        address: of the service.
        namespace: the model as served.
        page_size: tokens a page.
        host: the service's pool.
    """

    def __init__(
        self,
        address: Address,
        namespace: Namespace,
        *,
        place: Place,
        secrets: Secrets,
        options: ClientOptions,
        clock: Clock,
    ) -> None:
        self.address = address
        self.namespace = namespace
        self.page_size = namespace.page_size
        page_bytes = place.page_bytes(namespace)
        self.state = ClientState(
            namespace,
            page_bytes=page_bytes,
            worker=place.worker,
            writes=place.writes(namespace),
            options=options,
            clock=clock,
        )
        self.host = ConnectedHost(self.state)
        self._dialer = Dialer(
            address, secrets=secrets, options=options, namespace=namespace, place=place, notice=self._notice
        )
        self._link = self.state.link = Link(self._dialer, options, self.state.lost, self.state.renew)
        self._closed = self._ended = False
        watch(self)

    def _notice(self, connection: Connection, reply: Reply) -> None:
        self.state.notice(connection, reply)

    def start(self) -> None:
        """Connect.

        Raises:
            HicacheError: the service refuses this client; or it is away, and it is required.
        """
        options = self.state.options
        self._link.start()
        self._link.wait_decided(options.timeout, connected=options.required)
        refusal = self._link.refusal
        if refusal is None and options.required and self._link.connection is None:
            refusal = ServiceUnavailable(f"{self.address}: {self._link.reason}")
        if refusal is not None:
            self._end(options.timeout)
            raise refusal

    # ---- looking

    @property
    def connected(self) -> bool:
        """Whether there is a service now. Without one every call answers at once that there is nothing."""
        connection = self._link.connection
        return connection is not None and connection.usable

    @property
    def warnings(self) -> tuple[str, ...]:
        """What works with these settings but will cost, in words, as the service says."""
        connection = self._link.connection
        return () if connection is None else connection.attached.warnings

    def wait_connected(self, timeout: float) -> bool:
        """Block until there is a service, at most `timeout` seconds; whether there is one."""
        self._link.wait_connected(number_of_seconds("timeout", timeout))
        return self.connected

    def statistics(self) -> ClientStatistics:
        """A snapshot of what this client counts; hits and misses are the service's to tell, see `ClientStatistics`.

        May be called at any time, also after `close`.
        """
        return self.state.statistics()

    # ---- verbs, as flows

    def _symbols(self, tokens: Tokens, extras: Iterable[Span]) -> tuple[bytes, tuple[Span, ...] | None]:
        """The prompt's whole pages as symbols, and its non-text input; None where this client takes none."""
        if not self.state.options.extras:
            no_spans(extras)
            return symbols(tokens, self.page_size), None
        count = length_of(tokens)
        spans = spans_of(extras, tokens=count)
        return symbols(tokens, self.page_size, page_extras(spans, self.page_size, count // self.page_size)), spans

    def _limit(self, tokens: int, *, logits: bool) -> int:
        return usable_pages(tokens, self.page_size) if flag("logits", logits) else tokens // self.page_size

    async def _request(
        self,
        kind: type[R],
        tokens: Tokens,
        *,
        deadline: float | None,
        logits: bool,
        priority: int,
        adapter: Adapter | None,
        salt: str | None,
        extras: Iterable[Span],
    ) -> R:
        state = self.state
        state.check_open()
        deadline = deadline_of(deadline)
        priority = priority_of(priority)
        content = self._symbols(tokens, extras)
        count = len(tokens)
        limit = self._limit(count, logits=logits)
        whole = count // self.page_size * self.page_size
        verbs = RequestVerbs(
            state,
            state.named(adapter, salt),
            content,
            tokens=count,
            tail=symbols(tokens[whole:], 1) if count != whole else b"",
            limit=limit,
            deadline=state.options.deadline if deadline is None else deadline,
        )
        await verbs.begin(priority)
        return kind(verbs)

    async def _request_by_hash(self, kind: type[R], page_hashes: bytes, *, deadline: float | None, priority: int) -> R:
        state = self.state
        state.check_open()
        deadline = deadline_of(deadline)
        priority = priority_of(priority)
        naming = state.named(None, None)
        assert naming is not None  # only adapters go past the cache
        hashes = bytes(page_hashes)
        if len(hashes) % naming.hasher.size:
            raise InvalidInput(f"page hashes have {len(hashes)} bytes, not a multiple of {naming.hasher.size}")
        pages = len(hashes) // naming.hasher.size
        verbs = RequestVerbs(
            state,
            naming,
            (b"", None),
            tokens=pages * self.page_size,
            tail=b"",
            limit=pages,
            deadline=state.options.deadline if deadline is None else deadline,
            page_hashes=hashes,
        )
        await verbs.begin(priority)
        return kind(verbs)

    async def _hashes(
        self, tokens: Tokens, *, logits: bool, adapter: Adapter | None, salt: str | None, extras: Iterable[Span]
    ) -> tuple[Connection, Any, bytes] | None:
        """What `match` and `prefetch` send: None where nothing would be found."""
        state = self.state
        state.check_open()
        content, _ = self._symbols(tokens, extras)
        limit = self._limit(len(tokens), logits=logits)
        naming = state.named(adapter, salt)
        if naming is None or not limit:
            return None
        connection = state.connection()
        if connection is None:
            return None
        width = len(content) // (len(tokens) // self.page_size)
        return connection, naming.scope, naming.hasher.extend(None, content[: limit * width], limit)

    async def _match(self, tokens: Tokens, **options: Any) -> Match:
        found = await self._hashes(tokens, **options)
        if found is None:
            return Match()
        connection, scope, hashes = found
        message = pb.MatchPages(attachment=ATTACHMENT, scope=scope, page_hashes=hashes)
        reply = await self.state.reply_to(self.state.ask(connection, pb.Request(match=message)))
        return Match() if reply is None else Match(host=reply.matched.host, storage=reply.matched.storage)

    async def _prefetch(self, tokens: Tokens, **options: Any) -> Match:
        found = await self._hashes(tokens, **options)
        if found is None:
            return Match()
        connection, scope, hashes = found
        message = pb.Prefetch(attachment=ATTACHMENT, scope=scope, page_hashes=hashes)
        reply = await self.state.reply_to(self.state.ask(connection, pb.Request(prefetch=message)))
        return Match() if reply is None else Match(host=reply.prefetching.host, storage=reply.prefetching.storage)

    async def _report_prefill(self, tokens: int, seconds: float) -> None:
        self.state.check_open()
        number, time = whole_number(tokens), number_of_seconds("seconds", seconds)
        if number is None or number < 1 or not time:
            raise ConfigError(f"report_prefill: {tokens!r:.40} tokens in {seconds!r:.40} s are not numbers above 0")
        connection = self.state.connection()
        if connection is not None:
            message = pb.ReportPrefill(attachment=ATTACHMENT, tokens=number, seconds=time)
            await self.state.reply_to(self.state.ask(connection, pb.Request(report_prefill=message)))

    async def _report_device(
        self,
        stored: bytes,
        parent_hash: bytes | None,
        first_page: int,
        removed: bytes,
        cleared: bool,
        adapter: Adapter | None,
        salt: str | None,
    ) -> None:
        self.state.check_open()
        naming = self.state.named(adapter, salt)
        connection = None if naming is None else self.state.connection()
        if naming is None or connection is None:
            return
        message = pb.ReportDevice(
            attachment=ATTACHMENT,
            scope=naming.scope,
            stored=stored,
            parent_hash=parent_hash or b"",
            first_page=first_page,
            removed=removed,
            cleared=cleared,
        )
        await self.state.reply_to(self.state.ask(connection, pb.Request(report_device=message)))

    def join(self, ticket: Ticket | bytes) -> JoinedRequest:
        """Take part in a request that another rank of this group has made.

        Args:
            ticket: of `ConnectedRequest.ticket`, also encoded.

        Returns:
            What reads and writes this rank's part of its pages. Where the service is away or was started anew, all
            of its verbs do nothing.

        Raises:
            InvalidInput: bytes that are no ticket.
            CacheClosed: the cache is closed.
        """
        self.state.check_open()
        return JoinedRequest(self.state, ticket if isinstance(ticket, Ticket) else Ticket.decode(ticket))

    async def _clear(self, adapter: Adapter | None, salt: str | None, deadline: float) -> None:
        state = self.state
        state.check_open()
        deadline = number_of_seconds("deadline", deadline)
        state.named(adapter, salt)  # refuses what names nothing
        connection = self._link.connection
        if connection is None:
            raise ServiceUnavailable(f"clear: nothing was cleared, as the service is away: {self._link.reason}")
        scope = RequestScope(adapter, salt)
        target = Target(namespace_digest=self.namespace.digest, scope=scope)
        cleared = await answer(self._link.run(clear(self._dialer, connection, target, deadline)))
        if cleared:
            raise StorageError(
                f"clear: storage has not confirmed it for {', '.join(cleared)}: after a restart old pages may be found "
                "again; call it again"
            )

    # ---- ending

    def _end(self, deadline: float) -> bool:
        """Stop everything; whether it has ended in time. Idempotent."""
        if self.state.refusal is FORKED:
            return True  # all of it belongs to the parent
        if self._closed:
            return self._ended
        self._closed, self._ended = True, False
        self.state.refusal = CLOSED
        # A writer that is still at work may go on: without a goodbye its slots stay its own until this process ends.
        self._dialer.orderly = orderly = not self.state.watcher.waiting
        self._ended = self._link.close(deadline)
        self.state.watcher.close(deadline)
        self.state.forget_memory(everything=True, finished=orderly)
        return self._ended

    def forked(self) -> None:
        """This is a forked child."""
        self.state.forked()

    def __repr__(self) -> str:
        state = self.state.refusal or ("connected" if self.connected else f"away: {self._link.reason}")
        return f"<hicache.{type(self).__name__} {self.namespace.model!r} at {self.address}: {state}>"

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self.state.refusal is None:
            warnings.warn("a connected cache was never closed: its thread goes on", ResourceWarning, stacklevel=1)


def prepared(
    kind: type[Any],
    address: str,
    namespace: Namespace,
    *,
    group: str,
    tp_rank: int,
    tp_size: int,
    pp_rank: int,
    pp_first_layers: Iterable[int],
    worker: bool,
    secrets: dict[str, Any],
    clock: Clock | None,
    options: dict[str, Any],
) -> Any:
    """A client that has not connected yet, of checked settings."""
    if not isinstance(address, str):
        raise ConfigError(f"address={address!r:.60} is no text: write unix:///run/hicache/hicache.sock, or host:port")
    where = Address.parse(address)
    try:
        settings = ClientOptions(**options)
    except TypeError as error:
        raise ConfigError(f"connect: {str(error).removeprefix('ClientOptions.__init__() ')}") from None
    place = Place(
        group=group,
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_first_layers=stages_of(pp_first_layers),
        pp_rank=pp_rank,
        worker=worker,
    )
    shown = Secrets(**secrets)
    shown.check(where)
    return kind(
        where,
        check_namespace(namespace),
        place=place,
        secrets=shown,
        options=settings,
        clock=MonotonicClock() if clock is None else clock,
    )
