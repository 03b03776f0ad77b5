"""One client's session: the verbs of `hicache.rpc.service.Session` over pools, groups and leases."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hicache.core.reasons import RequestCounts
from hicache.errors import (
    InvalidInput,
    LeaseExpired,
    LimitExceeded,
    NamespaceError,
    NotFound,
    OutOfSlots,
    PermissionDenied,
)
from hicache.rpc.service import (
    ArenaView,
    Attached,
    Attachment,
    Caller,
    Counts,
    Leased,
    Loaded,
    Matched,
    Notice,
    Piece,
    RequestScope,
    Reserved,
    Revoked,
    Welcome,
)
from hicache.runtime.scopes import PATIENCE
from hicache.sidecar.groups import Group, Member

if TYPE_CHECKING:
    from hicache.core.residency import Slots
    from hicache.runtime.scopes import Scope
    from hicache.sidecar.leases import HeldLease
    from hicache.sidecar.lifeline import Lifeline
    from hicache.sidecar.pool import Pool
    from hicache.sidecar.pools import PoolTable
    from hicache.sidecar.service import SidecarService

_log = logging.getLogger("hicache.sidecar")

HASH_BYTES = 32
FIRST_USE = 1.0
"""Seconds for which the first request of a namespace waits for storage to tell its generation."""


class _Place:
    """One attachment of a session."""

    __slots__ = ("attachment", "group", "member", "pool")

    def __init__(self, attachment: Attachment, pool: Pool, group: Group, member: Member) -> None:
        self.attachment = attachment
        self.pool = pool
        self.group = group
        self.member = member


class SidecarSession:
    """Implements `hicache.rpc.service.Session`, whose methods say what they do. On the loop's thread only.

    Attributes:
        welcome: what the client was told.
        caller: who it is.
        client: what it calls itself.
    """

    def __init__(
        self, service: SidecarService, caller: Caller, welcome: Welcome, *, client: str, lifeline: Lifeline | None
    ) -> None:
        self.welcome = welcome
        self.caller = caller
        self.client = client
        self.lifeline = lifeline
        self._service = service
        self._pools: PoolTable = service.pools
        self._loop = service.loop
        self._limits = welcome.limits
        self._places: dict[int, _Place] = {}
        self._attaching: set[int] = set()
        self._notices: deque[Notice] = deque()
        self._told = asyncio.Event()
        self._ended = False
        if lifeline is not None:
            lifeline.when_ended(lambda: self.end(orderly=False))

    # ---- attaching

    async def attach(self, attachment: Attachment) -> Attached:
        """Join a model's pool and group."""
        self._may(read=True)
        self._service.check_accepting()
        if attachment.number in self._places or attachment.number in self._attaching:
            raise InvalidInput(f"attach: attachment {attachment.number} exists already: choose another number")
        if attachment.namespace.hash != "sha256":
            raise NamespaceError(
                f"attach: the namespace hashes pages by {attachment.namespace.hash}: a service sees hashes only, so "
                'use hash="sha256"'
            )
        if not attachment.streamed and attachment.worker and self.lifeline is None:
            raise InvalidInput(
                "attach: memory is mapped over the lifeline, and this session has none: connect one, or attach with "
                "streamed=true"
            )
        self._attaching.add(attachment.number)
        try:
            pool = await self._pools.find(attachment, self.caller)
            if self._ended:
                raise NotFound("attach: the session has ended")
            return self._join(pool, attachment)
        finally:
            self._attaching.discard(attachment.number)

    def _join(self, pool: Pool, attachment: Attachment) -> Attached:
        rank = (attachment.tp_rank, attachment.pp_rank)
        group = self._service.group(pool, attachment.group, self.caller, session=self.welcome.session)
        group.check(rank, worker=attachment.worker)
        mapped = attachment.worker and not attachment.streamed
        views = pool.views(rank)
        member = Member(
            self.welcome.session,
            rank,
            worker=attachment.worker,
            life=self.lifeline if mapped else None,
            arenas=[view.index for view in views if view.writes] if attachment.worker else (),
            tell=self.tell,
        )
        group.join(member)
        self._places[attachment.number] = _Place(attachment, pool, group, member)
        pool.members += 1
        _log.info(
            "attached",
            extra={
                "session": self.welcome.session,
                "tenant": self.caller.tenant,
                "model": attachment.namespace.model,
                "group": attachment.group or None,
                "rank": f"{rank[0]}/{attachment.tp_size}",
                "slots": pool.slots,
            },
        )
        arenas: tuple[ArenaView, ...] = ()
        if mapped:
            assert self.lifeline is not None
            pool.grant(self.lifeline, views)
            self.lifeline.when_gone(lambda: self._service.member_gone(group, member))
            arenas = tuple(pool.arena_view(view) for view in views)
        return Attached(
            slots=pool.slots,
            page_bytes=pool.page_bytes,
            rank_page_bytes=sum(run.length for view in views for run in view.runs),
            namespace_digest=attachment.namespace.digest,
            arenas=arenas,
            words_id=pool.words_id if mapped else 0,
            warnings=pool.warnings,
            newest_lease=self._service.leases.newest,
        )

    # ---- looking and reading

    def match(self, attachment: int, scope: RequestScope, page_hashes: bytes) -> Matched:
        """How far a prompt is usable."""
        self._may(read=True)
        place = self._place(attachment)
        pages = self._pages(page_hashes)
        known = place.pool.cache.known(scope.adapter, self.caller.tenant, scope.salt)
        if known is None or known.tree is None:
            return Matched()
        match = place.pool.cache.match(known, page_hashes, pages)
        device = place.pool.mirror.leading(place.group, known.namespace.digest, page_hashes)
        return Matched(device, match.host, match.storage, known.tree.generation)

    async def lease(
        self,
        attachment: int,
        scope: RequestScope,
        page_hashes: bytes,
        *,
        tokens: int,
        limit: int,
        priority: int,
        until: float,
    ) -> Leased:
        """Match and pin."""
        self._may(read=True)
        self._service.check_accepting()
        place = self._place(attachment)
        pages = self._pages(page_hashes)
        if limit > pages:
            raise InvalidInput(f"lease: limit {limit} is above the prompt's {pages} whole pages")
        self._service.leases.check_room(place.member, self._limits.leases)
        found = await self._scope(place, scope, until)
        if self._ended:
            raise NotFound("lease: the session has ended")
        request = await place.pool.request(found, page_hashes, tokens=tokens, limit=limit, priority=priority)
        if self._ended:
            request.close(aborted=True)
            raise NotFound("lease: the session has ended")
        request.of_session(self.welcome.session)
        lease = self._service.leases.open(place.group, place.member, request)
        slots = request.usable
        return Leased(
            lease.number,
            host=request.match.host,
            storage=request.match.storage,
            slots=_packed(slots),
            words=place.pool.words_of(slots),
            bypassed=request.bypassed,
            generation=0 if found is None or found.tree is None else found.tree.generation,
        )

    async def load(self, lease: int, *, until: float) -> Loaded:
        """Wait for what is on its way."""
        held, _ = self._find(lease, own=True)
        pool = held.group.pool
        loading = held.request.loading(until)
        try:
            while (seconds := loading.step()) is not None:
                await pool.changes.wait(min(until, self._loop.time() + seconds))
                self._service.leases.find(lease, self._members(), own=True)
        except asyncio.CancelledError:
            loading.cancel()
            raise
        if not await pool.proven(held.request):
            raise LeaseExpired(f"lease {lease}: pages of it were found to be damaged; lease again")
        slots = held.request.usable
        return Loaded(_packed(slots), pool.words_of(slots), held.request.match.storage)

    async def prefetch(
        self, attachment: int, scope: RequestScope, page_hashes: bytes, *, until: float
    ) -> tuple[int, int]:
        """Bring pages up without a lease."""
        self._may(read=True)
        self._service.check_accepting()
        place = self._place(attachment)
        self._pages(page_hashes)
        found = await self._scope(place, scope, until)
        if found is None:
            return 0, 0
        match = place.pool.cache.prefetch(found, page_hashes)
        return match.host, match.storage

    # ---- writing

    async def reserve(self, lease: int, pages: int, *, until: float | None) -> Reserved:
        """Private slots, all or nothing."""
        self._may(write=True)
        while True:
            held, _ = self._find(lease, own=True)
            pool = held.group.pool
            try:
                slots = self._service.pins.reserve(pool, held.request, pages)
                break
            except OutOfSlots:
                if until is None or self._loop.time() >= until or pages > pool.slots:
                    raise
            await pool.changes.wait(until)
        held.reserved(len(pool.plan.arenas))
        return Reserved(_packed(slots), pool.words_of(slots), held.end - len(slots))

    def extend(self, lease: int, page_hashes: bytes, tokens: int) -> None:
        """The prompt grew."""
        held, _ = self._find(lease, own=True)
        more = self._pages(page_hashes)
        total = held.request.pages + more
        if total > self._limits.pages:
            raise LimitExceeded(f"extend: the prompt would have {total} pages, the limit is {self._limits.pages}")
        held.request.extend(page_hashes, tokens)

    def commit(
        self, lease: int, upto: int, *, tokens: bytes, first_page: int, extras: bytes, by_hash: bool = False
    ) -> int:
        """This rank's part of the pages up to an index is written."""
        self._may(write=True)
        held, member = self._find(lease)
        if not member.worker:
            raise PermissionDenied("commit: this session only schedules; the ranks that wrote the pages commit them")
        return self._service.leases.commit(
            held, member, upto, tokens=tokens, first_page=first_page, extras=extras, by_hash=by_hash
        )

    def release(self, lease: int, *, aborted: bool) -> Counts:
        """Give back all that a lease holds."""
        return _counts(self._service.leases.release(lease, self._members(), aborted=aborted))

    # ---- bytes over the stream

    async def put_bytes(self, lease: int, piece: Piece) -> None:
        """Write part of a page into a reserved slot."""
        self._may(write=True)
        held, member = self._find(lease)
        first = held.request.first
        if not first <= piece.page < held.end or piece.page < held.visible:
            raise InvalidInput(f"put_bytes: page {piece.page} is not a reserved page that is not committed yet")
        slot = int(held.request.own[piece.page - first])
        held.group.pool.write(member.rank, slot, piece.offset, piece.data)

    async def get_bytes(self, lease: int, first: int, end: int) -> AsyncIterator[Piece]:
        """Pages of a lease in pieces."""
        self._may(read=True)
        held, member = self._find(lease)
        usable = held.request.usable
        if not 0 <= first <= end <= len(usable):
            raise InvalidInput(f"get_bytes: pages {first} to {end} are not within the {len(usable)} usable ones")
        pool = held.group.pool
        for page in range(first, end):
            for offset, data in pool.read(member.rank, int(usable[page]), self._limits.chunk_bytes):
                self._find(lease)  # again for each piece: between two of them the lease may have ended
                yield Piece(page, offset, data)

    # ---- what the engine tells

    def report_device(
        self,
        attachment: int,
        scope: RequestScope,
        *,
        stored: bytes,
        parent_hash: bytes,
        first_page: int,
        removed: bytes,
        cleared: bool,
    ) -> None:
        """The engine's own memory holds other pages now."""
        place = self._place(attachment)
        self._pages(stored)
        self._pages(removed)
        found = place.pool.cache.scope(scope.adapter, self.caller.tenant, scope.salt)
        if found is None or found.tree is None:
            return  # an adapter without a digest, or a namespace that nobody has used: nothing of it can be named yet
        events = place.pool.mirror.report(
            place.group,
            found.namespace.digest,
            found.tree.generation,
            stored=stored,
            parent_hash=parent_hash or None,
            first_page=first_page,
            removed=removed,
            cleared=cleared,
        )
        self._service.publish(place.pool, events)

    def report_prefill(self, attachment: int, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens in so many seconds."""
        self._place(attachment).pool.cache.report_prefill(tokens, seconds)

    def acknowledge(self, leases: Sequence[int]) -> None:
        """The client does not touch these leases' slots any more."""
        self._service.leases.acknowledged(leases, self._members())

    def renew(self, leases: Sequence[int]) -> None:
        """These leases are in use."""
        self._service.leases.renew(leases, self._members())

    # ---- notices, and the end

    async def next_notice(self) -> Notice:
        """The next thing that the client must be told. Revocations that wait are told together."""
        while not self._notices:
            self._told.clear()
            await self._told.wait()
        notice = self._notices.popleft()
        while isinstance(notice, Revoked) and self._notices:
            following = self._notices[0]
            if not isinstance(following, Revoked) or following.reason != notice.reason:
                break
            self._notices.popleft()
            notice = Revoked(notice.leases + following.leases, notice.reason)
        return notice

    def tell(self, notice: Notice) -> None:
        """Send the client a notice."""
        self._notices.append(notice)
        self._told.set()

    def end(self, *, orderly: bool) -> None:
        """The stream has ended."""
        if self._ended:
            return
        self._ended = True
        for place in self._places.values():
            place.member.ended = True
            place.member.goodbye = orderly
            self._service.member_left(place.group, place.member)
            place.pool.left(self._loop.time())
        self._places.clear()
        self._service.session_ended(self)

    # ---- inside

    def _may(self, *, read: bool = False, write: bool = False) -> None:
        for needed, granted, what in ((read, self.caller.read, "read"), (write, self.caller.write, "write")):
            if needed and not granted:
                raise PermissionDenied(f"{self.caller.name or 'this caller'} has no right to {what}")

    def _place(self, attachment: int) -> _Place:
        place = self._places.get(attachment)
        if place is None:
            raise NotFound(f"attachment {attachment} is not one of this session: attach first")
        return place

    def _members(self) -> list[Member]:
        return [place.member for place in self._places.values()]

    def _find(self, lease: int, *, own: bool = False) -> tuple[HeldLease, Member]:
        return self._service.leases.find(lease, self._members(), own=own)

    def _pages(self, page_hashes: bytes) -> int:
        pages, rest = divmod(len(page_hashes), HASH_BYTES)
        if rest:
            raise InvalidInput(f"page hashes have {len(page_hashes)} bytes, not a multiple of {HASH_BYTES}")
        if pages > self._limits.pages:
            raise LimitExceeded(f"a prompt of {pages} pages is above the limit of {self._limits.pages}")
        return pages

    async def _scope(self, place: _Place, scope: RequestScope, until: float) -> Scope | None:
        """The namespace of a request; None if it must go past the cache."""
        until = min(until, self._loop.time() + FIRST_USE)
        find: Callable[[], Scope | None] = lambda: place.pool.cache.scope(  # noqa: E731
            scope.adapter, self.caller.tenant, scope.salt
        )
        found = find()
        while found is not None and found.tree is None and found.asking and self._loop.time() < until:
            await place.pool.changes.wait(until)
        if found is not None and found.tree is not None:
            soon = min(until, self._loop.time() + PATIENCE)
            while place.pool.cache.unconfirmed(found) and self._loop.time() < soon:
                await place.pool.changes.wait(soon)
            found.slow = found.slow or place.pool.cache.unconfirmed(found)
        return found if found is not None and found.tree is not None else None


def _packed(slots: Slots) -> bytes:
    return slots.astype(np.dtype("<u4")).tobytes()


def _counts(counts: RequestCounts) -> Counts:
    return Counts(counts.asked, counts.host, counts.storage, counts.missed)
