"""The service itself: sessions, groups, leases, pins and pools put together, and what administrators ask of it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from hicache.config import Config
from hicache.errors import (
    InvalidInput,
    LimitExceeded,
    PermissionDenied,
    ServiceUnavailable,
    StorageError,
)
from hicache.events import Event
from hicache.rpc.latency import VerbStatistics
from hicache.rpc.service import (
    Caller,
    Draining,
    EventBatch,
    Finding,
    Ping,
    Pinned,
    Target,
    Welcome,
)
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.sidecar.diagnosis import diagnose
from hicache.sidecar.document import document, sees_all
from hicache.sidecar.estate import Estate, HeldPool
from hicache.sidecar.events import EventLog
from hicache.sidecar.explaining import explain
from hicache.sidecar.groups import Group, Member
from hicache.sidecar.heritage import estate_of, left_of
from hicache.sidecar.heritage import leave as leave_pool
from hicache.sidecar.kv_events import KvPublisher
from hicache.sidecar.leases import HeldLease, LeaseBook, LeaseStatistics
from hicache.sidecar.pins import Pins, PinStatistics
from hicache.sidecar.pool import Pool
from hicache.sidecar.pools import PoolTable
from hicache.sidecar.quotas import Quotas
from hicache.sidecar.session import SidecarSession
from hicache.sidecar.targets import check_admin, named, targeted, token_ids, visible
from hicache.sidecar.waiting import Changes
from hicache.sidecar.wiring import session_limits
from hicache.storage.base import StorageBackend

if TYPE_CHECKING:
    from hicache.sidecar.lifeline import Lifeline, LifelineServer

_log = logging.getLogger("hicache.sidecar")

_TICK = 1.0
"""Seconds between two looks at leases and pins whose time may be over."""


@dataclass(frozen=True, slots=True)
class ServiceStatistics:
    """A snapshot of the service beside its pools.

    Attributes:
        uptime_seconds: since its start.
        sessions: open now; `sessions_opened`: since the start.
        groups: groups that have members.
        leases, pins: see there.
        degraded: why it is not all that it should be, in words.
    """

    uptime_seconds: float
    sessions: int
    sessions_opened: int
    groups: int
    leases: LeaseStatistics
    pins: PinStatistics
    degraded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """How it ended.

    Attributes:
        dropped_pages: pages that storage should have and was not given.
        estate: what is left to the next service; its descriptors are the caller's to close. None: nothing.
    """

    dropped_pages: int
    estate: Estate | None


class SidecarService:
    """Implements `hicache.rpc.service.Service`. Made and used on the loop's thread.

    Args:
        config: its settings.
        quotas: what tenants may hold.
        storage: the store of all pools, or None; closed by whoever opened it.
        storage_name: names that store without its secrets.
        lifelines: where clients' lifelines arrive; None where no Unix socket is listened on.
        log: the access log, or None; closed by whoever opened it.

    Attributes:
        boot: names this life of the service.
        limits: bounds of a session.
        pools: its memory.
        leases, pins: what is held.
        events: residency changes of all pools.
        publisher: who tells routers of them, if anybody does.
        access_log: where requests are written, or None.
        ready: whether it takes requests.
        verbs: gives the latencies of what is served; set by whoever serves it.
    """

    def __init__(
        self,
        config: Config,
        *,
        quotas: Quotas,
        storage: StorageBackend | None = None,
        storage_name: str = "",
        lifelines: LifelineServer | None = None,
        log: AccessLogWriter | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.config = config
        self.boot = secrets.token_bytes(16)
        self.limits = session_limits(config)
        self.ready = False
        self.verbs: Callable[[], Iterable[VerbStatistics]] = tuple
        self.events = EventLog(later=self.loop.call_soon_threadsafe)
        self.publisher: KvPublisher | None = None
        self.quotas = quotas
        self.storage_name = storage_name
        self.access_log = log
        self.pools = PoolTable(config, storage, quotas=quotas, publish=self.publish, closed=self._pool_closed, log=log)
        self.leases = LeaseBook(
            self.loop.time,
            seconds=config.leases.seconds,
            most_quarantined=config.leases.quarantined_slots,
            freed=self._freed,
        )
        self.pins = Pins(self.loop.time, most_bytes=int(config.limits.pinned_bytes))
        self.pools.gives_way = self._gives_way
        self._lifelines = lifelines
        self._changes = Changes(self.loop)
        self._groups: dict[tuple[Pool, str | None, str], Group] = {}
        self._sessions: dict[int, SidecarSession] = {}
        self._opened = 0
        self._draining = False
        self._started = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._tick()

    # ---- sessions

    async def open_session(self, caller: Caller, client: str) -> SidecarSession:
        """A session for a client that has said hello."""
        self.check_accepting()
        if len(self._sessions) >= self.config.limits.sessions:
            raise LimitExceeded(f"{len(self._sessions)} sessions are open, the limit is {self.config.limits.sessions}")
        lifeline = self._lifeline(caller)
        self._opened += 1
        welcome = Welcome(version("hicache"), self.boot, self._opened, self.limits, caller.tenant)
        session = SidecarSession(self, caller, welcome, client=client, lifeline=lifeline)
        self._sessions[self._opened] = session
        pid = None if lifeline is None else lifeline.peer.pid
        _log.info(
            "session opened",
            extra={"session": self._opened, "client": client, "tenant": caller.tenant, "pid": pid},
        )
        return session

    def _lifeline(self, caller: Caller) -> Lifeline | None:
        if not caller.lifeline_key:
            return None
        lifeline = None if self._lifelines is None else self._lifelines.find(caller.lifeline_key)
        if lifeline is None:
            raise InvalidInput(
                "hello: the lifeline's key is not known: connect the lifeline first, and use its key once"
            )
        return lifeline

    def check_accepting(self) -> None:
        """Raises `ServiceUnavailable` unless new work is taken."""
        if self._draining:
            raise ServiceUnavailable("the service is draining: it ends soon")
        if not self.ready:
            raise ServiceUnavailable("the service is starting: try again")

    @property
    def sessions(self) -> tuple[SidecarSession, ...]:
        """Sessions that are open."""
        return tuple(self._sessions.values())

    def withdraw(self, callers: Container[str]) -> None:
        """Take all rights from sessions of callers by these names: their tokens are not valid any more."""
        for session in self.sessions:
            if session.caller.name in callers:
                session.caller = replace(session.caller, read=False, write=False, admin=False)

    def session_ended(self, session: SidecarSession) -> None:
        """A session is over."""
        if self._sessions.pop(session.welcome.session, None) is not None:
            _log.info("session ended", extra={"session": session.welcome.session, "tenant": session.caller.tenant})

    # ---- groups

    def group(self, pool: Pool, name: str, caller: Caller, *, session: int) -> Group:
        """The group of that name in a pool, made at its first use. A session without one is a group of its own.

        Raises:
            GeometryError: its ranks have another namespace or topology.
        """
        if not name:
            return self._groups.setdefault((pool, caller.tenant, f"\0{session}-{len(self._groups)}"), Group("", pool))
        for (other, tenant, known), group in self._groups.items():
            if known == name and tenant == caller.tenant and other is not pool and not group.empty:
                pool.disagree(other, name)
        return self._groups.setdefault((pool, caller.tenant, name), Group(name, pool))

    def member_left(self, group: Group, member: Member) -> None:
        """A session of the group has ended."""
        self.leases.left(member)
        self._tidy(group)

    def member_gone(self, group: Group, member: Member) -> None:
        """A session's process can touch nothing any more."""
        if not member.ended:
            return  # its stream ends too, and says so
        self.leases.gone(member)
        self._tidy(group)

    def _tidy(self, group: Group) -> None:
        group.forget()
        if not any(not member.ended for member in group.members):
            self.publish(group.pool, group.pool.mirror.forget(group))
        if group.empty:
            for key, known in list(self._groups.items()):
                if known is group:
                    del self._groups[key]

    def _freed(self, lease: HeldLease) -> None:
        lease.group.pool.changes.notify()
        self._changes.notify()

    def _gives_way(self, pool: Pool) -> bool:
        """Whether a pool may be closed to make room for another: nobody is attached and nothing is held."""
        used = pool.members or self.pins.holds(pool) or any(lease.group.pool is pool for lease in self.leases)
        return not used

    # ---- time

    def _tick(self) -> None:
        self.leases.expire()
        self.pins.expire()
        for pool in self.pools:
            pool.cache.settle_insight()
        self._timer = self.loop.call_later(_TICK, self._tick)

    # ---- what it says of itself

    def publish(self, pool: Pool, events: Iterable[Event]) -> None:
        """Residency of a pool has changed."""
        self.events.append(events, source=pool.key, describe=pool.describe_namespace)

    def _pool_closed(self, pool: Pool) -> None:
        self.pins.leave(pool)
        self.events.forget(pool.key)

    @property
    def degraded(self) -> tuple[str, ...]:
        """Why it is not all that it should be, in words."""
        log = () if self.access_log is None else self.access_log.statistics().degraded
        return tuple(dict.fromkeys([*log, *(text for pool in self.pools for text in pool.cache.statistics().degraded)]))

    def ping(self, caller: Caller) -> Ping:
        """Whether it answers."""
        return Ping(
            version("hicache"),
            self.boot,
            self.loop.time() - self._started,
            self.ready and not self._draining,
            self.degraded,
            caller.tenant,
        )

    def statistics(self) -> ServiceStatistics:
        """A snapshot, without the pools."""
        return ServiceStatistics(
            uptime_seconds=self.loop.time() - self._started,
            sessions=len(self._sessions),
            sessions_opened=self._opened,
            groups=len(self._groups),
            leases=self.leases.statistics(),
            pins=self.pins.statistics(),
            degraded=self.degraded,
        )

    def statistics_json(self, caller: Caller) -> str:
        """Everything it counts, as a JSON document."""
        return json.dumps(document(self, caller))

    def visible(self, caller: Caller) -> Iterator[Pool]:
        """The pools that a caller may see."""
        return visible(self.pools, caller)

    # ---- administration

    async def clear(self, caller: Caller, target: Target | None) -> tuple[int, tuple[str, ...]]:
        """Forget pages."""
        check_admin(caller)
        unconfirmed: list[str] = []
        cleared = 0
        for pool, scope in targeted(self.pools, caller, target):
            adapter, salt = scope.adapter, scope.salt
            cleared += 1
            try:
                await asyncio.to_thread(pool.cache.clear, adapter=adapter, tenant=pool.tenant, salt=salt)
            except StorageError as error:
                unconfirmed.append(f"{pool.namespace.model}: {error}")
        self.pins.expire()
        return cleared, tuple(unconfirmed)

    async def pin(
        self, caller: Caller, target: Target, tokens: bytes, *, hard: bool, ttl_seconds: float, name: str
    ) -> Pinned:
        """Keep a prefix in HOST."""
        check_admin(caller)
        self.check_accepting()
        pool = named(self.pools, caller, target)[0]
        seconds = self.config.policies.prefetch_cap
        request = await pool.bring_up(target.scope, token_ids(tokens), until=self.loop.time() + seconds)
        if request is None:
            raise StorageError(
                "pin: the namespace's generation is not known yet, as storage does not answer: try again"
            )
        return self.pins.hold(pool, pool.tenant, request, hard=hard, ttl_seconds=ttl_seconds, name=name)

    def unpin(self, caller: Caller, name: str) -> int:
        """End a pin, or all of the caller's tenant."""
        check_admin(caller)
        return self.pins.release(caller.tenant, name)

    def pins_of(self, caller: Caller) -> tuple[Pinned, ...]:
        """Pins that the caller may see."""
        return self.pins.records(caller.tenant, all_tenants=sees_all(caller))

    async def warm(
        self, caller: Caller, target: Target, prompts: Sequence[bytes], *, deadline_seconds: float
    ) -> AsyncIterator[tuple[int, int, int]]:
        """Bring prompts into HOST. That is no request of an engine's, so hit rates do not move."""
        if not caller.write:
            raise PermissionDenied(f"{caller.name or 'this caller'} has no right to write")
        self.check_accepting()
        pool = named(self.pools, caller, target)[0]
        until = self.loop.time() + (deadline_seconds or self.config.policies.prefetch_cap * max(len(prompts), 1))
        host = missed = 0
        for done, prompt in enumerate(prompts, 1):
            request = await pool.bring_up(target.scope, token_ids(prompt), until=until)
            if request is not None:
                host += len(request.usable)
                missed += request.pages - len(request.usable)
                request.discard()
            yield done, host, missed

    async def diagnose(self, caller: Caller) -> tuple[Finding, ...]:
        """Look at limits and rights, and send a page through every tier and back."""
        check_admin(caller)
        return await diagnose(self)

    async def explain(self, caller: Caller, target: Target, tokens: bytes, *, storage_seconds: float) -> str:
        """Why a prompt misses. It tells of prompts under other salts, so it is for administrators of the tenant."""
        check_admin(caller)
        token_ids(tokens)
        pools = named(self.pools, caller, target)
        found = await explain(self, pools, target.scope, tokens, storage_seconds=storage_seconds)
        return json.dumps({"explanations": [explanation.document() for explanation in found]}, allow_nan=False)

    def watch_events(self, caller: Caller, from_sequence: int) -> AsyncIterator[EventBatch]:
        """Residency events from a number on."""
        if caller.tenant is not None:
            raise PermissionDenied("events tell of all tenants: only a caller without one may watch them")
        return self.events.watch(from_sequence)

    # ---- the end

    async def drain(self, seconds: float) -> int:
        """Take no new work, and let clients finish, at most for so long. Returns the leases that are left."""
        self._draining = True
        end = self.loop.time() + seconds
        for session in self.sessions:
            session.tell(Draining(seconds))
        while len(self.leases) and self.loop.time() < end:
            await self._changes.wait(end)
        return len(self.leases)

    async def changed(self, until: float) -> None:
        """Wait until a lease's slots were freed, at most until a moment of the loop's clock."""
        await self._changes.wait(until)

    async def close(self, seconds: float, *, leave: bool = False) -> Ending:
        """End everything, when all sessions have: write down what storage lacks, give the memory back, or leave it.

        Args:
            seconds: for storage to take what waits.
            leave: make an estate of the memory, for the next service.
        """
        self._draining = True
        end = self.loop.time() + seconds
        if self._timer is not None:
            self._timer.cancel()
        await self.pools.settle()
        for pool in self.pools:
            self.pins.leave(pool)
        parts: list[tuple[HeldPool, list[int]]] = []
        if leave:
            for pool in self.pools:
                kept = left_of(pool, list(self.leases))
                await asyncio.to_thread(pool.end, max(0.0, end - self.loop.time()))
                held, descriptors = await asyncio.to_thread(leave_pool, pool, kept)
                parts.append((held, [os.dup(fd) for fd in descriptors]))
        dropped = await self.pools.close(max(0.0, end - self.loop.time()))
        self.events.close()
        return Ending(dropped, estate_of(parts, storage=self.storage_name) if leave else None)
