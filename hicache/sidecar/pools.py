"""The pools of a service, and the budget that they share.

A pool belongs to one base namespace, one topology of ranks, and one tenant: whoever maps it can read all of it, so
tenants never share one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from hicache.config import Config
from hicache.core.arenas import ArenaPlan
from hicache.core.identity import Namespace
from hicache.errors import ConfigError
from hicache.events import Event
from hicache.memory.arena import Words
from hicache.memory.arenapool import ArenaHostPool
from hicache.memory.budget import HostBudget
from hicache.records import Tier
from hicache.rpc.service import Attachment, Caller
from hicache.runtime.accesslog.writer import AccessLogWriter
from hicache.runtime.hosting import HostedCache, open_hosted
from hicache.sidecar.pool import MOST_SLOTS, Key, Pool
from hicache.sidecar.quotas import Quotas
from hicache.sidecar.waiting import Changes
from hicache.sidecar.wiring import hosted_options
from hicache.storage.base import StorageBackend
from hicache.units import format_size


class PoolTable:
    """The pools of one service. On the loop's thread.

    Args:
        config: settings.
        storage: the store of all pools, or None.
        quotas: what tenants may hold.
        publish: takes residency events of a pool.
        closed: told of each pool that was closed.
        log: the access log of all pools, or None.

    Attributes:
        budget: host memory of all of them.
        grace: seconds for which clients of an earlier service are waited for that cannot be seen.
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
        log: AccessLogWriter | None = None,
    ) -> None:
        self._config = config
        self._storage = storage
        self._quotas = quotas
        self._publish = publish
        self._closed = closed
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._pools: dict[Key, Pool] = {}
        self._making: dict[Key, asyncio.Task[Pool]] = {}
        self._ids = itertools.count(1)
        self.grace = config.leases.grace
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
            pool = self.open(key, namespace, host, words, changes, huge_pages=config.host.huge_pages)
            undo.pop_all()
        return pool

    def open(
        self,
        key: Key,
        namespace: Namespace,
        host: ArenaHostPool,
        words: Words,
        changes: Changes,
        *,
        huge_pages: bool,
    ) -> Pool:
        """A pool over memory, which is its own from then on. Blocks."""
        cache = open_hosted(
            namespace,
            host=host,
            storage=self._storage,
            words=words.values,
            tenant=key[3],
            account=self._quotas.account(key[3]),
            events=True,
            **hosted_options(self._config),
        )
        cache.on_change = changes.notify
        if self._log is not None:
            cache.record_access(self._log, tenant=key[3])
        return Pool(key, host=host, words=words, cache=cache, changes=changes, ids=self._ids, huge_pages=huge_pages)

    def enter(self, pool: Pool, what: str) -> None:
        """Count a pool, and let the loop do its part.

        Raises:
            ConfigError, LimitExceeded: the budget or the tenant's quota is too small by now.
        """
        share = self.budget.reserve(pool.size, what)
        try:
            self._quotas.charge(pool.tenant, Tier.HOST, pool.size)
        except BaseException:
            self.budget.release(share)
            raise
        pool.share = share
        self._pools[pool.key] = pool
        self._start(pool)

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

    async def settle(self) -> None:
        """Wait for pools that are being made."""
        while self._making:
            await asyncio.wait(list(self._making.values()))

    async def close(self, seconds: float) -> int:
        """Close all pools within so many seconds. Returns the pages that storage was not given."""
        end = self._loop.time() + seconds
        await self.settle()
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
