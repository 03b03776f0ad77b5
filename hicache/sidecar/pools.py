"""Pools: the shared memory and the cache of each model, and the budget that they share.

A pool belongs to one base namespace, one topology of ranks, and one tenant: whoever maps it can read all of it, so
tenants never share one.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hicache.config import Config
from hicache.core.arenas import ArenaPlan, RankArena
from hicache.core.hashing import PageHasher
from hicache.core.identity import DerivedNamespace, Namespace
from hicache.core.prompt import Prompt
from hicache.core.residency import Slots
from hicache.core.symbols import symbols
from hicache.errors import ConfigError, GeometryError
from hicache.events import Event
from hicache.memory.arena import Words
from hicache.memory.arenapool import ArenaHostPool
from hicache.memory.budget import HostBudget, Share
from hicache.memory.rankpages import RankPages
from hicache.records import Tier
from hicache.rpc.service import ArenaView, Attachment, Caller, RequestScope, Run
from hicache.runtime.hosting import HostedCache, HostedRequest, open_hosted
from hicache.sidecar.groups import Rank
from hicache.sidecar.mirror import DeviceMirror
from hicache.sidecar.quotas import Quotas
from hicache.sidecar.waiting import Changes
from hicache.sidecar.wiring import hosted_options
from hicache.storage.base import StorageBackend
from hicache.units import format_size

if TYPE_CHECKING:
    from hicache.sidecar.lifeline import Lifeline

_POPULATE_STEP = 64 * 2**20
"""Bytes touched in one step, some 30 ms: closing never waits for longer."""

MOST_SLOTS = 2**32 - 1
"""Slots travel as u32."""

Key = tuple[bytes, int, tuple[int, ...], str | None]
"""(digest of the base namespace, ranks that share the heads, first layers of the stages, tenant)"""


class Pool:
    """One model's memory and cache. Used on the loop's thread, but for making and closing it.

    Attributes:
        namespace, tenant: whose pages.
        plan: which arenas there are.
        slots, page_bytes: of the pool.
        cache: tree, slots, storage.
        mirror: what engines say that they hold in DEVICE.
        changes: wakes who waits for this pool.
        members: sessions attached.
        idle_since: when the last one left, by the loop's clock.
        share: what it has of the budget.
        words_id: under which lifelines give the generation words.
        warnings: what works but costs, in words.
    """

    def __init__(
        self, key: Key, *, host: ArenaHostPool, words: Words, cache: HostedCache, changes: Changes, ids: Iterator[int]
    ) -> None:
        self.key = key
        self.namespace = cache.namespace
        self.tenant = key[3]
        self.plan = host.plan
        self.slots = host.slots
        self.page_bytes = host.page_bytes
        self.cache = cache
        self.changes = changes
        self.mirror = DeviceMirror()
        self.members = 0
        self.idle_since = 0.0
        self.warnings = (*host.plan.warnings, *cache.warnings)
        self.words_id = next(ids)
        self.share: Share | None = None
        self._arena_ids = [next(ids) for _ in host.arenas]
        self._host = host
        self._words = words
        self._ranks: dict[Rank, RankPages] = {}
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes from the budget."""
        return self._host.size

    # ---- what ranks see

    def views(self, rank: Rank) -> tuple[RankArena, ...]:
        """The arenas of a rank."""
        return self.plan.rank(*rank).arenas

    def arena_view(self, view: RankArena) -> ArenaView:
        """One of them, as it is told to the rank."""
        arena = self._host.arenas[view.index]
        runs = tuple(Run(run.page_offset, run.slot_offset, run.length) for run in view.runs)
        return ArenaView(self._arena_ids[view.index], arena.stride, arena.size, runs, view.writes)

    def grant(self, lifeline: Lifeline, views: Iterable[RankArena]) -> None:
        """Let a client have the descriptors of a rank's arenas, and of the words."""
        lifeline.grants[self.words_id] = (self._words.fd, self._words.size)
        for view in views:
            arena = self._host.arenas[view.index]
            lifeline.grants[self._arena_ids[view.index]] = (arena.fd, arena.size)

    def words_of(self, slots: Slots) -> bytes:
        """The generation words of slots, u64 little endian."""
        return self._words.values[slots].astype(np.dtype("<u8")).tobytes()

    def read(self, rank: Rank, slot: int, most: int) -> Iterator[tuple[int, memoryview]]:
        """A rank's canonical page in pieces of at most `most` bytes, as (offset, bytes)."""
        return self._pages_of(rank).pieces(slot, most)

    def write(self, rank: Rank, slot: int, offset: int, data: bytes | memoryview) -> None:
        """Part of a rank's canonical page.

        Raises:
            GeometryError: bytes outside the page.
        """
        self._pages_of(rank).write(slot, offset, data)

    def _pages_of(self, rank: Rank) -> RankPages:
        pages = self._ranks.get(rank)
        if pages is None:
            pages = self._ranks[rank] = self._host.rank_pages(*rank)
        return pages

    # ---- prompts that the service itself brings up

    async def bring_up(self, scope: RequestScope, tokens: np.ndarray, *, until: float) -> HostedRequest | None:
        """A request for all of a prompt that any tier has, loaded; None where its namespace is not known in time."""
        loop = asyncio.get_running_loop()
        derived = self.namespace.derive(adapter=scope.adapter, tenant=self.tenant, salt=scope.salt)
        hasher: PageHasher = derived.hasher()
        spans = symbols(tokens, self.namespace.page_size)
        prompt = Prompt(spans, 4 * self.namespace.page_size, hasher)
        page_hashes = b"".join(prompt.hashes(0, prompt.pages))
        found = self.cache.scope(scope.adapter, self.tenant, scope.salt)
        while found is not None and found.tree is None and found.asking and loop.time() < until:
            await self.changes.wait(until)
        if found is None or found.tree is None:
            return None
        request = self.cache.request(found, page_hashes, tokens=len(tokens), limit=prompt.pages, priority=0)
        loading = request.loading(until)
        try:
            while (seconds := loading.step()) is not None:
                await self.changes.wait(min(until, loop.time() + seconds))
        except BaseException:
            request.close(aborted=True)
            raise
        return request

    def same_bytes(self, slot: int, page: bytes) -> bool:
        """Whether a slot holds this whole canonical page."""
        return all(self._host.buffer(slot, at, size) == page[at : at + size] for at, size in self._shards())

    def fill(self, slot: int, page: bytes) -> None:
        """Write a whole canonical page into a slot."""
        for at, size in self._shards():
            np.copyto(np.asarray(self._host.buffer(slot, at, size)), np.frombuffer(page, np.uint8, size, at))

    def _shards(self) -> Iterator[tuple[int, int]]:
        return ((part.page_offset, part.length) for shape in self.plan.arenas for part in shape.parts)

    # ---- life

    def left(self, now: float) -> None:
        """A session that was attached has ended."""
        self.members -= 1
        self.idle_since = now

    def populate(self) -> None:
        """Touch all memory in the background, so that first writes are not slow."""

        def run() -> None:
            for arena in self._host.arenas:
                while not self._stop.is_set() and arena.populate(_POPULATE_STEP):
                    pass

        self._populating = threading.Thread(target=run, name="hicache-populate", daemon=True)
        self._populating.start()

    def close(self, deadline: float) -> int:
        """Write down what storage lacks, then give the memory back. Blocks; returns the pages dropped on their way."""
        self._stop.set()
        if self._populating is not None:
            self._populating.join()
        report = self.cache.close(deadline)
        if not report.abandoned_pages:
            self._host.close()
        self._words.close()
        return report.abandoned_pages

    def disagree(self, other: Pool, group: str) -> NoReturn:
        """Refuse a rank whose group serves `other`."""
        what = "another namespace" if other.namespace.digest != self.namespace.digest else "another topology"
        raise GeometryError(
            f"the ranks of group {group!r:.60} disagree: this one attaches with {what} (model "
            f"{self.namespace.model!r:.60}, {self.key[1]} ranks) than those before (model "
            f"{other.namespace.model!r:.60}, {other.key[1]} ranks)"
        )

    def describe_namespace(self, digest: bytes) -> DerivedNamespace | None:
        """The derived namespace of a digest, for whoever meets events; None for one that no request used."""
        scope = self.cache.parts.scopes.of_digest(digest)
        return None if scope is None else scope.namespace

    def describe(self) -> dict[str, Any]:
        """What it is and what it counts."""
        return {
            "model": self.namespace.model,
            "namespace": self.namespace.digest,
            "tenant": self.tenant,
            "ranks": self.key[1] * max(1, len(self.key[2])),
            "slots": self.slots,
            "page_bytes": self.page_bytes,
            "bytes": self.size,
            "arenas": [
                {"bytes": arena.size, "holders": len(spec.holders)}
                for arena, spec in zip(self._host.arenas, self.plan.arenas, strict=True)
            ],
            "sessions": self.members,
            "device_pages": self.mirror.pages,
            "statistics": asdict(self.cache.statistics()),
        }


class PoolTable:
    """The pools of one service. On the loop's thread.

    Args:
        config: settings.
        storage: the store of all pools, or None.
        quotas: what tenants may hold.
        publish: takes residency events of a pool.
        closed: told of each pool that was closed.

    Attributes:
        budget: host memory of all of them.
        gives_way: whether a pool may be closed to make room; set by the service.
    """

    def __init__(
        self,
        config: Config,
        storage: StorageBackend | None,
        *,
        quotas: Quotas,
        publish: Callable[[Pool, Iterable[Event]], None],
        closed: Callable[[Pool], None],
    ) -> None:
        self._config = config
        self._storage = storage
        self._quotas = quotas
        self._publish = publish
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._pools: dict[Key, Pool] = {}
        self._making: dict[Key, asyncio.Task[Pool]] = {}
        self._ids = itertools.count(1)
        self.budget = HostBudget(int(config.host.bytes))
        self.gives_way: Callable[[Pool], bool] = _never

    def __iter__(self) -> Iterator[Pool]:
        return iter(list(self._pools.values()))

    async def find(self, attachment: Attachment, caller: Caller) -> Pool:
        """The pool that an attachment needs, made if there is none.

        Raises:
            GeometryError: a topology that does not fit the geometry.
            ConfigError: no memory for it; the text has the numbers.
        """
        key = (attachment.namespace.digest, attachment.tp_size, attachment.pp_first_layers, caller.tenant)
        plan = ArenaPlan.of(
            attachment.namespace.geometry,
            attachment.namespace.page_size,
            tp_size=attachment.tp_size,
            pp_first_layers=attachment.pp_first_layers,
        )
        plan.rank(attachment.tp_rank, attachment.pp_rank)
        pool = self._pools.get(key)
        if pool is not None:
            return pool
        making = self._making.get(key)
        if making is None:
            making = self._loop.create_task(self._make(key, plan, attachment))
            self._making[key] = making
            making.add_done_callback(lambda _: self._making.pop(key, None))
        # Shielded: others may wait for it too, and half a pool helps nobody.
        return await asyncio.shield(making)

    async def _make(self, key: Key, plan: ArenaPlan, attachment: Attachment) -> Pool:
        slots = await self._slots(plan, attachment, key[3])
        what = f"model {attachment.namespace.model!r:.60}" + (f" of tenant {key[3]!r:.60}" if key[3] else "")
        size = slots * plan.slot_bytes
        changes = Changes(self._loop)
        share = self.budget.reserve(size, what)
        try:
            self._quotas.charge(key[3], Tier.HOST, size)
            try:
                pool = await asyncio.to_thread(self._build, key, plan, attachment.namespace, slots, changes)
            except BaseException:
                self._quotas.refund(key[3], Tier.HOST, size)
                raise
        except BaseException:
            self.budget.release(share)
            raise
        pool.share = share
        self._pools[key] = pool
        self._start(pool)
        return pool

    async def _slots(self, plan: ArenaPlan, attachment: Attachment, tenant: str | None) -> int:
        """Slots of a new pool. Idle pools give way, the longest idle first, where too little is left."""
        wanted = attachment.pool_bytes or int(self._config.host.pool_bytes)
        while self.budget.free < max(wanted, plan.slot_bytes):
            idle = min((pool for pool in self if self.gives_way(pool)), key=lambda pool: pool.idle_since, default=None)
            if idle is None:
                break
            await self._close(idle, self._config.drain.seconds)
        size = wanted or self.budget.free
        if not wanted and (left := self._quotas.left(tenant, Tier.HOST)) is not None:
            size = min(size, left)
        slots = min(size // plan.slot_bytes, MOST_SLOTS)
        if slots < 1:
            raise ConfigError(
                f"a pool for model {attachment.namespace.model!r:.60} would have {format_size(size)}, of "
                f"{format_size(self.budget.total)} in all, and one page takes {format_size(plan.slot_bytes)}: "
                "raise host.bytes, or limit the others by host.pool_bytes"
            )
        return slots

    def _build(self, key: Key, plan: ArenaPlan, namespace: Namespace, slots: int, changes: Changes) -> Pool:
        """In a thread: reserving memory takes some 0.1 s a GiB."""
        config = self._config
        nodes = () if config.host.numa_node is None else (config.host.numa_node,)
        with ExitStack() as undo:
            host = ArenaHostPool.create(plan, slots, numa_nodes=nodes, huge_pages=config.host.huge_pages)
            undo.callback(host.close)
            words = Words(slots)
            undo.callback(words.close)
            cache = open_hosted(
                namespace,
                host=host,
                storage=self._storage,
                words=words.values,
                tenant=key[3],
                events=True,
                **hosted_options(config),
            )
            undo.pop_all()
        cache.on_change = changes.notify
        return Pool(key, host=host, words=words, cache=cache, changes=changes, ids=self._ids)

    def _start(self, pool: Pool) -> None:
        driver = _Driver(self._loop, pool.cache)
        pool.cache.start(driver.wake, lambda events: self._publish(pool, events))
        if self._config.host.populate:
            pool.populate()

    async def _close(self, pool: Pool, seconds: float) -> int:
        del self._pools[pool.key]
        lost = await asyncio.to_thread(pool.close, seconds)
        if pool.share is not None:
            self.budget.release(pool.share)
            self._quotas.refund(pool.tenant, Tier.HOST, pool.share.size)
        self._closed(pool)
        return lost

    async def close(self, end: float) -> int:
        """Close all pools by a moment of the loop's clock. Returns the pages on their way that were dropped."""
        while self._making:
            await asyncio.wait(list(self._making.values()))
        return sum([await self._close(pool, max(0.0, end - self._loop.time())) for pool in self])


def _never(pool: Pool) -> bool:
    del pool
    return False


class _Driver:
    """Lets the loop do what a cache's storage threads have posted, and look at calls that hang."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cache: HostedCache) -> None:
        self._loop = loop
        self._cache = cache
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """There may be something to do. From any thread."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._woken = False  # before the work: what is posted during it wakes again
        cache = self._cache
        cache.settle()  # also while it is being closed in a thread, which waits for what is applied here
        if cache.upkeep():
            self.wake()
        if self._timer is not None:
            self._timer.cancel()
        soon = cache.look()
        self._timer = None if soon is None else self._loop.call_later(max(soon, 0.05), self._run)
