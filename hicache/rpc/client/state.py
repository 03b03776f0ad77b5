"""What the requests of one client share: its connection, its counts, and how trouble of the service is answered."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Any, Final

from hicache.clock import Clock
from hicache.core.hashing import PageHasher
from hicache.core.identity import Adapter, Namespace, can_cache
from hicache.errors import (
    CacheClosed,
    DeadlineExceeded,
    HicacheError,
    HicacheInternalError,
    LeaseExpired,
    LimitExceeded,
    NotFound,
    ServiceUnavailable,
    StorageError,
)
from hicache.memory.watcher import EventWatcher
from hicache.rpc.client.flow import answer
from hicache.rpc.client.options import ClientOptions
from hicache.rpc.client.pages import EPOCH_SHIFT
from hicache.rpc.client.protocol import Away, NoAnswer, Reply
from hicache.rpc.client.statistics import ClientStatistics, Counters
from hicache.rpc.convert.identity import encode_scope
from hicache.rpc.service import RequestScope
from hicache.rpc.v1 import identity_pb2
from hicache.rpc.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from hicache.rpc.client.connection import Connection
    from hicache.rpc.client.link import Link
    from hicache.rpc.client.memory import SharedPages
    from hicache.rpc.client.pages import LeasedPages

FORKED: Final = "this process is a fork of the one that connected: connect here, after the fork"
CLOSED: Final = "the cache is closed"

_NO_CACHE: Final = (
    ServiceUnavailable,
    DeadlineExceeded,
    LeaseExpired,
    LimitExceeded,
    NotFound,
    StorageError,
    HicacheInternalError,
)
"""Trouble of the service, which an engine goes on without. What else is raised is the caller's to know."""

_TOLD_ANYWAY: Final = frozenset({"commit", "extend", "release", "acknowledge"})
"""What a service that is silent is told all the same, for when it goes on; nobody waits for its answer."""

_COMPLAINT_SECONDS: Final = 10.0
"""Between two warnings of one kind: an engine may be refused a thousand times a second."""

_REMEMBERED: Final = 4096  # scopes of requests, and revoked leases that nobody had here

_log = logging.getLogger("hicache.client")


def failed(error: HicacheError) -> Future[Reply]:
    """A call that has failed before it was sent."""
    future: Future[Reply] = Future()
    future.set_exception(error)
    return future


class Naming:
    """How pages of one scope are named, and how the scope travels."""

    __slots__ = ("hasher", "scope")

    def __init__(self, hasher: PageHasher, scope: identity_pb2.Scope) -> None:
        self.hasher = hasher
        self.scope = scope


class ClientState:
    """Shared by the requests and by the cache. Thread-safe.

    Attributes:
        namespace, page_size: the model as served.
        page_bytes: bytes of this rank's part of a page.
        worker: whether this process reads and writes pages, or only schedules.
        writes: whether it writes any part of them.
        options: of the client.
        counters: what it counts.
        link: keeps it connected.
        viewed: whether the engine was given pages without a copy, so that only it knows when it is done with them.
        viewing: held while that changes, and while it decides.
        given_up: open leases whose slots this process has let go of, so that it gives no views of them any more.
        refusal: why nothing can be done here any more, or None.
        watcher: waits for the events of writers.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        page_bytes: int,
        worker: bool,
        writes: bool,
        options: ClientOptions,
        clock: Clock,
    ) -> None:
        self.namespace = namespace
        self.page_size = namespace.page_size
        self.page_bytes = page_bytes
        self.worker = worker
        self.writes = writes
        self.options = options
        self.now = clock.now
        self.counters = Counters()
        self.viewed = False
        self.viewing = threading.Lock()
        self.given_up: weakref.WeakSet[LeasedPages] = weakref.WeakSet()
        self.refusal: str | None = None
        self.watcher = EventWatcher("hicache-client-events")
        self.link: Link
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[LeasedPages] = weakref.WeakSet()
        self._revoked: dict[tuple[int, int], None] = {}
        self._memories: dict[int, SharedPages] = {}
        self._complained: dict[type[HicacheError], float] = {}
        self._drops = itertools.count(1)
        self._dropped = 0
        self.naming = lru_cache(_REMEMBERED)(self._naming)

    def check_open(self) -> None:
        """Raise `CacheClosed` unless the client is open in this process."""
        if self.refusal is not None:
            raise CacheClosed(self.refusal)

    def forked(self) -> None:
        """This is a forked child: nothing here is its own, and locks may be held by threads that it does not have."""
        self.refusal = FORKED
        self._lock = threading.Lock()
        self.counters.forked()
        connection = self.link.connection
        if connection is not None and connection.lifeline is not None:
            connection.lifeline.forked()

    def connection(self) -> Connection | None:
        """The connection on which something new may begin; None: the service is away, and that is counted."""
        connection = self.link.connection
        if connection is not None and connection.usable:
            return connection
        self.counters.add("answered_away")
        return None

    def _naming(self, adapter: Adapter | None, salt: str | None) -> Naming | None:
        if isinstance(adapter, Adapter) and not can_cache(adapter):
            return None
        derived = self.namespace.derive(adapter=adapter, salt=salt)
        return Naming(derived.hasher(), encode_scope(RequestScope(adapter, salt)))

    def named(self, adapter: Adapter | None, salt: str | None) -> Naming | None:
        """How a request's pages are named; None: it goes past the cache, as its adapter has no digest.

        Raises:
            NamespaceError: an adapter or salt that names nothing.
        """
        try:
            return self.naming(adapter, salt)
        except TypeError:  # not hashable, so not what it should be: `derive` says so
            return self._naming(adapter, salt)

    # ---- asking

    def ask(
        self,
        connection: Connection,
        message: pb.Request,
        *,
        seconds: float | None = None,
        told: bool = True,
        sink: Callable[[pb.Bytes], None] | None = None,
        late: Callable[[Reply], None] | None = None,
    ) -> Future[Reply]:
        """Send a request; by default with the options' deadline."""
        options = self.options
        if self.refusal is FORKED:
            return failed(Away(FORKED))
        wait = options.deadline if seconds is None else seconds
        silent = connection.protocol.silent
        if silent and message.WhichOneof("verb") not in _TOLD_ANYWAY:
            return failed(Away("the service does not answer"))
        try:
            asked = connection.call(message, seconds=wait, grace=options.grace, told=told, sink=sink, late=late)
        except LimitExceeded as error:
            return failed(error)
        return failed(Away("the service does not answer")) if silent else asked

    async def reply_to(self, future: Future[Reply], pages: LeasedPages | None = None) -> Reply | None:
        """Wait for a reply. None where the engine goes on without; then the lease that it was for is lost.

        Raises:
            HicacheError: what the caller is to know.
        """
        try:
            reply: Reply = await answer(future)
        except _NO_CACHE as error:
            if isinstance(error, Away):
                self.counters.add("answered_away")
            elif isinstance(error, NoAnswer):
                self.counters.add("unanswered")
            elif not isinstance(error, LeaseExpired) and (pages is None or not isinstance(error, NotFound)):
                self.counters.add("refused")
                self._complain(error)
            if pages is not None:
                pages.lose(str(error))
            return None
        return reply

    def _complain(self, error: HicacheError) -> None:
        now, kind = self.now(), type(error)
        again = self._complained.get(kind, -inf) + _COMPLAINT_SECONDS > now
        if not again:
            self._complained[kind] = now
        _log.log(logging.DEBUG if again else logging.WARNING, "going on without the cache: %s", error)

    def acknowledge(self, connection: Connection, leases: tuple[int, ...]) -> None:
        """Tell the service that these leases' slots are not touched any more. Does not wait."""
        self.ask(connection, pb.Request(acknowledge=pb.Acknowledge(leases=leases)))

    def renew(self, connection: Connection) -> None:
        """Tell the service that what is open here is in use: a process that lives keeps its leases. Does not wait."""
        with self._lock:
            leases = [pages.lease for pages in self._open if pages.connection is connection and pages.live]
        most = connection.welcome.limits.leases
        for first in range(0, len(leases), most):
            self.ask(connection, pb.Request(renew=pb.Renew(leases=leases[first : first + most])))

    # ---- leases

    def opened(self, pages: LeasedPages) -> None:
        """There is a lease that can be revoked from now on."""
        connection = pages.connection
        with self._lock:
            self._open.add(pages)
            if connection.memory is not None:
                self._memories[connection.epoch] = connection.memory
            revoked = (connection.epoch, pages.lease) in self._revoked
        if revoked:
            pages.revoke("it was revoked before this process could use it")

    def closed(self, pages: LeasedPages) -> None:
        """It is closed."""
        with self._lock:
            self._open.discard(pages)
        self.forget_memory()

    def drop(self) -> None:
        """A request was collected. For finalisers: takes no lock."""
        self._dropped = next(self._drops)

    @property
    def open_leases(self) -> int:
        """Leases that are open here."""
        with self._lock:
            return len(self._open)

    def notice(self, connection: Connection, reply: Reply) -> None:
        """The service says something unasked. On the loop's thread."""
        kind = reply.WhichOneof("result")
        if kind == "draining":
            connection.draining = True
            _log.info("the service ends in %.1f s: nothing new begins", reply.draining.milliseconds / 1000)
        elif kind == "revoked":
            self._revoke(connection, tuple(reply.revoked.leases), reply.revoked.reason)

    def _revoke(self, connection: Connection, leases: tuple[int, ...], reason: str) -> None:
        self.counters.add("revoked", len(leases))
        with self._lock:
            for lease in leases:
                self._revoked[connection.epoch, lease] = None
            while len(self._revoked) > _REMEMBERED:
                del self._revoked[next(iter(self._revoked))]
            affected = [pages for pages in self._open if pages.connection is connection and pages.lease in leases]
        for pages in affected:
            pages.revoke(reason)
        strange = set(leases) - {pages.lease for pages in affected}
        if strange:
            self.acknowledge(connection, tuple(strange))

    def lost(self, connection: Connection) -> None:
        """A connection has ended. On the loop's thread."""
        self.counters.add("late_answers", connection.protocol.late)
        with self._lock:
            if connection.memory is not None:
                self._memories[connection.epoch] = connection.memory
            affected = [pages for pages in self._open if pages.connection is connection]
        for pages in affected:
            pages.gone(self.link.reason)
        self.forget_memory()

    # ---- memory

    def memory_of(self, slot: int) -> tuple[SharedPages, int]:
        """Where a slot that was handed out lies, and its number there.

        Raises:
            CacheClosed: its requests are closed, and their service is gone.
            LeaseExpired: its request has lost it, and others may have it by now.
        """
        self.view()
        epoch, number = slot >> EPOCH_SHIFT, slot & (1 << EPOCH_SHIFT) - 1
        self._check_held(epoch, number)
        connection = self.link.connection
        if connection is not None and connection.epoch == epoch and connection.memory is not None:
            return connection.memory, number
        with self._lock:
            memory = self._memories.get(epoch)
        if memory is None:
            raise CacheClosed(f"slot {slot} belongs to a request that is closed")
        return memory, number

    def view(self) -> None:
        """From now on the engine may have views: what is open stays its own until it is closed."""
        if not self.viewed:
            with self.viewing:
                self.viewed = True

    def _check_held(self, epoch: int, number: int) -> None:
        if not self.given_up:
            return
        with self._lock:
            holders = [pages for pages in self._open if pages.connection.epoch == epoch and number in pages.numbers]
        if any(pages in self.given_up for pages in holders) and not any(pages.live for pages in holders):
            raise LeaseExpired(f"slot {number}: {holders[0].ended}; close the request, and make another one")

    def forget_memory(self, *, everything: bool = False, finished: bool = True) -> None:
        """Let go of the memory of connections that have ended, where no request is open that may still use it.

        Args:
            everything: also where requests are open, and of the connection that lives.
            finished: whether the engine touches nothing of it any more.
        """
        current = None if everything else self.link.connection
        with self._lock:
            used = set() if everything else {pages.connection.epoch for pages in self._open - self.given_up}
            if current is not None:
                used.add(current.epoch)
            gone = [self._memories.pop(epoch) for epoch in set(self._memories) - used]
        for memory in gone:
            memory.close(finished=finished)

    def statistics(self) -> ClientStatistics:
        """A snapshot."""
        link, get = self.link, self.counters.get
        connection = link.connection
        away = link.reason if connection is None else ""
        if connection is not None and not connection.usable:
            away = "the service is draining" if connection.draining else "the service does not answer"
        late = get("late_answers") + (0 if connection is None else connection.protocol.late)
        counted: dict[str, Any] = {
            name: get(name)
            for name in (
                "requests", "past", "answered_away", "unanswered", "lost", "refused", "revoked", "overwritten_pages",
                "failed_commits", "pages_read", "pages_written",
            )
        }  # fmt: skip
        return ClientStatistics(
            connected=not away,
            why_away=away,
            connections=link.connections,
            attempts=link.attempts,
            open_requests=get("opened") - get("requests") - self._dropped,
            late_answers=late,
            dropped=self._dropped,
            **counted,
        )
