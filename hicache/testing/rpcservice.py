"""A service without tiers, for tests of what stands in front of one: the server, clients in other languages.

It keeps pages in a dict, one slot each, and implements `hicache.rpc.service`: enough for every verb to mean something,
and to see that nothing is held when it should not be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from hicache.core.identity import Namespace
from hicache.core.symbols import symbols as page_symbols
from hicache.errors import HashMismatch, InvalidInput, NotFound, OutOfSlots, PermissionDenied
from hicache.records import MissReason
from hicache.rpc.service import (
    Attached,
    Attachment,
    Caller,
    Counts,
    EventBatch,
    Finding,
    Leased,
    Limits,
    Loaded,
    Matched,
    Notice,
    Piece,
    Ping,
    Pinned,
    RequestScope,
    Reserved,
    Target,
    Welcome,
)

__all__ = ["FakeService", "FakeSession"]

BOOT = b"boot of the fake"
HASH = 32


def _glued(slots: Iterable[int]) -> bytes:
    return b"".join(slot.to_bytes(4, "little") for slot in slots)


def _split(page_hashes: bytes) -> list[bytes]:
    return [page_hashes[at : at + HASH] for at in range(0, len(page_hashes), HASH)]


@dataclass(slots=True)
class _Lease:
    namespace: Namespace
    scope: RequestScope
    hashes: list[bytes]
    found: list[int]
    own: list[int] = field(default_factory=list)
    visible: int = 0


class FakeSession:
    """A session of `FakeService`; see `hicache.rpc.service.Session` for its methods."""

    def __init__(self, service: FakeService, welcome: Welcome, caller: Caller) -> None:
        self.welcome = welcome
        self.caller = caller
        self.notices: asyncio.Queue[Notice] = asyncio.Queue()
        self.attachments: dict[int, Attachment] = {}
        self.leases: dict[int, _Lease] = {}
        self._service = service

    async def attach(self, attachment: Attachment) -> Attached:
        """Join; every namespace shares the one pool."""
        await self._service.stop_here("attach")
        if attachment.number in self.attachments:
            raise InvalidInput(f"attachment {attachment.number} is taken: choose another number")
        self.attachments[attachment.number] = attachment
        size = attachment.namespace.geometry.page_bytes(attachment.namespace.page_size)
        return Attached(self._service.slots, size, size, attachment.namespace.digest)

    def match(self, attachment: int, scope: RequestScope, page_hashes: bytes) -> Matched:
        """Pages in the dict."""
        namespace = self._namespace(attachment)
        return Matched(host=len(self._service.find(namespace, scope, _split(page_hashes))))

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
        """Match, and remember."""
        del tokens, priority, until
        namespace = self._namespace(attachment)
        await self._service.stop_here("lease")
        hashes = _split(page_hashes)
        found = self._service.find(namespace, scope, hashes)[:limit]
        number = self._service.number()
        self.leases[number] = _Lease(namespace, scope, hashes, found, visible=len(found))
        return Leased(number, host=len(found), slots=_glued(found), words=bytes(8 * len(found)))

    async def load(self, lease: int, *, until: float) -> Loaded:
        """Nothing is on its way; waits where the test says so, at most until the deadline."""
        held = self._find(lease)
        await self._service.stop_here("load", until)
        return Loaded(_glued(held.found), bytes(8 * len(held.found)))

    async def prefetch(
        self, attachment: int, scope: RequestScope, page_hashes: bytes, *, until: float
    ) -> tuple[int, int]:
        """Nothing to bring up."""
        await self._service.stop_here("prefetch", until)
        return self.match(attachment, scope, page_hashes).host, 0

    async def reserve(self, lease: int, pages: int, *, until: float | None) -> Reserved:
        """Free slots, or not; nothing is evicted."""
        held = self._find(lease)
        await self._service.stop_here("reserve", until)
        slots = self._service.take(pages)
        first = len(held.found) + len(held.own)
        held.own += slots
        return Reserved(_glued(slots), bytes(8 * pages), first)

    def extend(self, lease: int, page_hashes: bytes, tokens: int) -> None:
        """More hashes."""
        del tokens
        self._find(lease).hashes += _split(page_hashes)

    def commit(
        self, lease: int, upto: int, *, tokens: bytes, first_page: int, extras: bytes, by_hash: bool = False
    ) -> int:
        """Check the chain, unless hashes are to be believed, and publish."""
        del extras
        held = self._find(lease)
        if upto > len(held.found) + len(held.own) or upto > len(held.hashes):
            raise InvalidInput(f"commit up to page {upto}: {len(held.found) + len(held.own)} have slots")
        if not by_hash:
            self._check(held, first_page, tokens)
        for page in range(held.visible, upto):
            key = (held.namespace.digest, held.scope, held.hashes[page])
            self._service.pages.setdefault(key, held.own[page - len(held.found)])
        held.visible = max(held.visible, upto)
        return held.visible

    def _check(self, held: _Lease, first_page: int, tokens: bytes) -> None:
        namespace = held.namespace
        parent = held.hashes[first_page - 1] if 0 < first_page <= len(held.hashes) else None
        hasher = namespace.derive(adapter=held.scope.adapter, salt=held.scope.salt).hasher()
        ids = memoryview(tokens).cast("I") if tokens else ()
        symbols = page_symbols(list(ids), namespace.page_size)
        pages = len(symbols) // (4 * namespace.page_size)
        if _split(hasher.extend(parent, symbols, pages)) != held.hashes[first_page : first_page + pages]:
            raise HashMismatch(f"tokens of the pages from {first_page} are not those of their hashes")

    def release(self, lease: int, *, aborted: bool) -> Counts:
        """Give back what was not published."""
        del aborted
        held = self._find(lease)
        self._service.drop(self.leases.pop(lease))
        missed = len(held.hashes) - len(held.found)
        return Counts(len(held.hashes), len(held.found), 0, {MissReason.COLD: missed} if missed else {})

    async def put_bytes(self, lease: int, piece: Piece) -> None:
        """Into a slot of its own."""
        await self._service.stop_here("put_bytes")
        held = self._find(lease)
        own = piece.page - len(held.found)
        if not 0 <= own < len(held.own):
            raise InvalidInput(f"put_bytes: page {piece.page} is not reserved")
        data = self._service.bytes[held.own[own]]
        if piece.offset + len(piece.data) > len(data):
            raise InvalidInput(f"put_bytes: {len(piece.data)} bytes at {piece.offset} are beyond the page")
        data[piece.offset : piece.offset + len(piece.data)] = piece.data

    async def get_bytes(self, lease: int, first: int, end: int) -> AsyncIterator[Piece]:
        """Chunk by chunk."""
        held = self._find(lease)
        if end > len(held.found):
            raise InvalidInput(f"get_bytes: {len(held.found)} pages are usable, not {end}")
        chunk = self.welcome.limits.chunk_bytes
        self._service.reading += 1
        try:
            for page in range(first, end):
                data = self._service.bytes[held.found[page]]
                for offset in range(0, len(data), chunk):
                    await self._service.stop_here("get_bytes")
                    self._service.given += 1
                    yield Piece(page, offset, memoryview(data)[offset : offset + chunk])
        finally:
            self._service.reading -= 1

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
        """Checked, and forgotten."""
        del scope, stored, parent_hash, first_page, removed, cleared
        self._namespace(attachment)

    def report_prefill(self, attachment: int, tokens: int, seconds: float) -> None:
        """Checked, and forgotten."""
        del tokens, seconds
        self._namespace(attachment)

    def acknowledge(self, leases: Sequence[int]) -> None:
        """Nothing is ever revoked here."""

    def renew(self, leases: Sequence[int]) -> None:
        """Nothing ever expires here."""

    async def next_notice(self) -> Notice:
        """What the test has put there."""
        return await self.notices.get()

    def end(self, *, orderly: bool) -> None:
        """Everything back."""
        self._service.ended.append((self.welcome.session, orderly))
        for lease in self.leases.values():
            self._service.drop(lease)
        self.leases.clear()
        self._service.sessions.pop(self.welcome.session, None)

    def _namespace(self, attachment: int) -> Namespace:
        found = self.attachments.get(attachment)
        if found is None:
            raise NotFound(f"attachment {attachment} is not one of this session: attach first")
        return found.namespace

    def _find(self, lease: int) -> _Lease:
        found = self.leases.get(lease)
        if found is None:
            raise NotFound(f"lease {lease} is not open in this session")
        return found


class FakeService:
    """Implements `hicache.rpc.service.Service`. Used on one event loop.

    Args:
        limits: of every session.
        slots: of its pool; pages stay there for good.
        page_bytes: of each slot.

    Attributes:
        sessions: open, by number. `ended`: (number, orderly) of each that has ended, in order.
        blocked: verbs that stop at the door until their deadline or until they are cancelled; `waiting`: how many do.
        reading: `get_bytes` that are under way; `given`: pieces that all of them have given.
        free: slots that are neither published nor a lease's.
    """

    def __init__(self, limits: Limits | None = None, *, slots: int = 64, page_bytes: int = 64) -> None:
        self.limits = limits or Limits()
        self.slots = slots
        self.bytes = [bytearray(page_bytes) for _ in range(slots)]
        self.free = list(range(slots))
        self.pages: dict[tuple[bytes, RequestScope, bytes], int] = {}
        self.sessions: dict[int, FakeSession] = {}
        self.ended: list[tuple[int, bool]] = []
        self.blocked: set[str] = set()
        self.waiting = 0
        self.reading = 0
        self.given = 0
        self.batches: list[EventBatch] = []
        self._number = 0

    # ---- for sessions

    def number(self) -> int:
        """A number that was not there before."""
        self._number += 1
        return self._number

    async def stop_here(self, verb: str, until: float | None = None) -> None:
        """Where a blocked verb waits."""
        if verb not in self.blocked:
            return
        self.waiting += 1
        try:
            async with asyncio.timeout_at(until):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            return
        finally:
            self.waiting -= 1

    def find(self, namespace: Namespace, scope: RequestScope, hashes: Sequence[bytes]) -> list[int]:
        """Slots of the leading pages that are known."""
        slots: list[int] = []
        for page_hash in hashes:
            slot = self.pages.get((namespace.digest, scope, page_hash))
            if slot is None:
                break
            slots.append(slot)
        return slots

    def take(self, pages: int) -> list[int]:
        """Free slots, all or nothing."""
        if pages > len(self.free):
            raise OutOfSlots(asked=pages, free=len(self.free), evictable=0, capacity=self.slots)
        taken, self.free = self.free[:pages], self.free[pages:]
        return taken

    def drop(self, lease: _Lease) -> None:
        """Its own slots that were not published are free again."""
        published = set(self.pages.values())
        self.free += [slot for slot in lease.own if slot not in published]

    # ---- of the contract

    async def open_session(self, caller: Caller, client: str) -> FakeSession:
        """A session for whoever asks."""
        del client
        await self.stop_here("hello")
        number = self.number()
        session = FakeSession(self, Welcome("fake", BOOT, number, self.limits, caller.tenant), caller)
        self.sessions[number] = session
        return session

    def ping(self, caller: Caller) -> Ping:
        """All is well."""
        return Ping("fake", BOOT, 1.5, True, ("storage: none",), caller.tenant)

    def statistics_json(self, caller: Caller) -> str:
        """Next to nothing."""
        del caller
        return '{"sessions": ' + str(len(self.sessions)) + "}"

    async def clear(self, caller: Caller, target: Target | None) -> tuple[int, tuple[str, ...]]:
        """Forget all."""
        if not caller.admin:
            raise PermissionDenied("clear needs the right admin")
        await self.stop_here("clear")
        del target
        self.pages.clear()
        return 1, ("storage has not answered",)

    async def pin(
        self, caller: Caller, target: Target, tokens: bytes, *, hard: bool, ttl_seconds: float, name: str
    ) -> Pinned:
        """Say so."""
        del caller, target, hard, ttl_seconds
        return Pinned(name or "pin-1", len(tokens) // 64, 4096, len(tokens) // 64)

    def unpin(self, caller: Caller, name: str) -> int:
        """There are none."""
        del caller
        if name:
            raise NotFound(f"no pin {name!r}: see `hicache pins`")
        return 0

    def pins_of(self, caller: Caller) -> tuple[Pinned, ...]:
        """One, for its form."""
        return (Pinned("pin-1", 2, 4096, 2, hard=False, tenant=caller.tenant, namespace_digest=BOOT, seconds_left=9.5),)

    async def warm(
        self, caller: Caller, target: Target, prompts: Sequence[bytes], *, deadline_seconds: float
    ) -> AsyncIterator[tuple[int, int, int]]:
        """Count prompts."""
        del caller, target, deadline_seconds
        self.reading += 1
        try:
            for done in range(1, len(prompts) + 1):
                yield done, done, 0
                await self.stop_here("warm")
        finally:
            self.reading -= 1

    async def diagnose(self, caller: Caller) -> tuple[Finding, ...]:
        """All is well."""
        del caller
        return (Finding("canary", True, "a page went through"),)

    async def explain(self, caller: Caller, target: Target, tokens: bytes, *, storage_seconds: float) -> str:
        """What it was asked."""
        del caller
        return json.dumps({"explanations": [], "model": target.model, "bytes": len(tokens), "seconds": storage_seconds})

    async def watch_events(self, caller: Caller, from_sequence: int) -> AsyncIterator[EventBatch]:
        """What the test has put there, from a number on."""
        del caller
        for batch in self.batches:
            if batch.sequence >= from_sequence:
                yield batch
