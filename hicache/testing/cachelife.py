"""One embedded cache without any thread: storage jobs, copies and events are carried out by hand, in any order.

What is checked after each step is here too: bytes in both pools, events against residency, counters against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

import numpy as np

import hicache
from hicache.core.identity import DerivedNamespace
from hicache.core.layout import KVGeometry
from hicache.core.reasons import RequestCounts
from hicache.core.residency import FREE, PRIVATE, Slots
from hicache.core.transfers import Lease
from hicache.core.tree import HiRadixTree
from hicache.events import Cleared, Event, Stored
from hicache.memory.base import POISON, Bytes, CopyEngine, HostPool
from hicache.memory.device import TensorDevicePool
from hicache.memory.layout import PageLayout
from hicache.records import Match, PageResult, Tier
from hicache.runtime.queues import BoundedQueue, Job
from hicache.runtime.request import Request
from hicache.testing.clock import ManualClock
from hicache.testing.memory import ManualCopyEngine, PendingCopy
from hicache.testing.truth import Truth, require
from hicache.testing.watchedstorage import WatchedStorage

__all__ = ["NAMESPACE", "Engine", "Life", "Written"]

NAMESPACE = hicache.Namespace(
    model="tiny",
    geometry=KVGeometry.mha(layers=2, kv_heads=2, head_dim=2, dtype="float16", head_group=1, layer_partition=2),
    page_size=2,
)
"""Pages of 2 tokens and 64 bytes, each of them two objects in storage."""

_DEVICE, _HOST = int(Tier.DEVICE), int(Tier.HOST)
_LAYERS, _HEADS, _ROW = 2, 2, 4
READ_THREADS, WRITE_THREADS = 3, 2
Wait = Callable[[Condition, float], None]


class HandClock(ManualClock):
    """A clock whose waits are turned over to the driver, which does something else meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.on_wait: Wait | None = None

    def wait(self, condition: Condition, timeout: float | None) -> None:
        """Let the driver go on; may return early."""
        assert self.on_wait is not None
        assert timeout is not None
        if timeout > 0:
            self.on_wait(condition, timeout)


class HandCopies(ManualCopyEngine):
    """Copies by hand. It sees that the bytes of a source stay what they were when the copy was asked for."""

    def __init__(self, pool: HandPool, host: HostPool | None, meanwhile: Callable[[], None]) -> None:
        super().__init__(pool, host)
        self._pool = pool
        self._meanwhile = meanwhile
        self._sources: dict[PendingCopy, bytes] = {}
        self.good = Counter[bool]()

    def _add(self, *args: Any) -> Any:
        copy = super()._add(*args)
        self._sources[self.pending[-1]] = self._source(self.pending[-1])
        return copy

    def _move(self, pending: PendingCopy, good: Any) -> None:
        self._meanwhile()
        super()._move(pending, good)
        self._meanwhile()
        require(self._source(pending) == self._sources.pop(pending), "the source of a copy changed under it")

    def _finish(self, pending: PendingCopy, results: list[PageResult]) -> None:
        self.good[pending.down] += results.count(PageResult.OK)
        super()._finish(pending, results)

    def answer_wrongly(self, at: int, by: int) -> None:
        """End a copy with results for another number of pages."""
        pending = self.pending.pop(at)
        pending.done([PageResult.OK] * (pending.copy.pages + by))

    def fail_event(self, event: Written) -> bool:
        """An event that is waited for breaks; whether it was."""
        waited = [entry for entry in self.events if entry[0] is event]
        for entry in waited:
            self.events.remove(entry)
            entry[1](False)
        return bool(waited)

    def _source(self, pending: PendingCopy) -> bytes:
        assert self._host is not None
        if pending.down:
            return self._pool.rows()[pending.device_slots].tobytes()
        return self._host.pages[pending.host_slots].tobytes()


class HandPool(TensorDevicePool):
    """An engine's pool in main memory, whose copies are made by hand."""

    copies: HandCopies

    def __init__(self, slots: int, meanwhile: Callable[[], None]) -> None:
        shape = (_LAYERS, 2, slots, NAMESPACE.page_size, _HEADS, _ROW)
        self.memory = np.full(shape, POISON, np.uint8)
        page = PageLayout.of(NAMESPACE.geometry, NAMESPACE.page_size)
        super().__init__(self.memory, page=page, layout="layer_first")
        self._meanwhile = meanwhile

    def copy_engine(self, host: HostPool | None) -> CopyEngine:
        """By hand."""
        self.copies = HandCopies(self, host, self._meanwhile)
        return self.copies

    def rows(self) -> Bytes:
        """A copy of all pages in canonical form, (slots, page_bytes), converted without the code under test."""
        rows: Bytes = self.memory.transpose(2, 4, 0, 1, 3, 5).reshape(self.slots, self.page_bytes)
        return rows


@dataclass(eq=False)
class Written:
    """A writer's event: `writes` are the bytes on their way into device slots.

    Attributes:
        passed: whether they are written.
    """

    writes: dict[int, bytes]
    passed: bool = False

    def query(self) -> bool:
        """Whether it has passed."""
        return self.passed

    def wait(self, timeout: float | None) -> bool:
        """Never called: nothing may block."""
        raise AssertionError(f"somebody waits {timeout} s for a writer")


@dataclass(eq=False)
class Engine:
    """A request as its engine sees it.

    Attributes:
        request: the cache's side.
        lease: what the request holds.
        scope: its namespace; None where it goes past the cache.
        tokens: its prompt, with what was decoded.
        prompt_tokens, asked: tokens at its beginning, and the pages of them that may come from the cache.
        loaded: slots that `load` gave; None before it was called.
        own: private and committed slots, behind the first `len(loaded)` pages.
        committed: pages committed, from the root.
        expected: what the slots it holds must contain.
        busy: it is inside a verb that waits, or reads a load by layer.
        reading: that load; see `layersteps`.
    """

    request: Request
    lease: Lease
    scope: DerivedNamespace | None
    tokens: list[int]
    prompt_tokens: int
    asked: int
    loaded: list[int] | None = None
    own: list[int] = field(default_factory=list)
    committed: int = 0
    expected: dict[int, bytes] = field(default_factory=dict)
    busy: bool = False
    reading: object = None

    @property
    def digest(self) -> bytes:
        """Of its namespace."""
        return self.lease.tree.namespace

    def symbols(self) -> bytes:
        """Its whole pages."""
        whole = len(self.tokens) // NAMESPACE.page_size * NAMESPACE.page_size
        return np.array(self.tokens[:whole], "<u4").tobytes()


class Life:
    """A cache from its opening to its end, the engines that use it, and the work that is under way for it.

    Args:
        storage: the backend, or None.
        truth: what pages must contain.
        device, host: pages of the tiers.
        meanwhile: called where other threads would do something.
        on_wait: called where somebody waits, with the condition held.
        options: of `hicache.open`.

    Attributes:
        over: nobody may use the cache any more.
        engines: open requests.
        events: writers' events that have not passed.
        jobs: storage jobs that a thread has taken and not ended.
        visible: pages that events say are in a tier, by (namespace, tier).
        closed: requests closed so far; `totals` are their pages and tokens.
        dropped: requests nobody closed, of which the cache may not know yet.
    """

    def __init__(
        self,
        storage: WatchedStorage | None,
        truth: Truth,
        *,
        device: int,
        host: int,
        meanwhile: Callable[[], None],
        on_wait: Wait,
        options: dict[str, Any],
    ) -> None:
        self.storage = storage
        self.truth = truth
        self.clock = HandClock()
        self.clock.on_wait = on_wait
        self.pool = HandPool(device, meanwhile)
        self.cache = hicache.open(
            NAMESPACE,
            device=self.pool,
            host=host,
            storage=storage,
            clock=self.clock,
            events=True,
            background=False,
            **({"retry": None, "breaker": None} | options),
        )
        self.parts = self.cache.parts
        self.core = self.parts.core
        self.over = False
        self.engines: list[Engine] = []
        self.events: list[Written] = []
        self.jobs: list[tuple[BoundedQueue, Job]] = []
        self.visible: dict[tuple[bytes, Tier], dict[bytes, None]] = {}
        self.dropped: list[Engine] = []
        self.totals: Counter[str] = Counter()
        self._subscription = self.cache.events()
        self._floors: dict[bytes, int] = {}

    # ---- work that threads would do

    def work(self) -> list[Callable[[], None]]:
        """What could happen next: a job is taken, or a job or a copy that was begun ends. Events are the driver's."""
        todo: list[Callable[[], None]] = []
        io = self.parts.storage
        for queue, threads in ((io.reads, READ_THREADS), (io.writes, WRITE_THREADS)) if io is not None else ():
            state = queue.statistics()
            if state.waiting and state.running < threads:
                todo.append(lambda queue=queue: self._take(queue))  # type: ignore[misc]
        todo += [lambda entry=entry: self._end_job(entry) for entry in self.jobs]  # type: ignore[misc]
        todo += [lambda at=at: self._end_copy(at) for at in range(len(self.pool.copies.pending))]  # type: ignore[misc]
        return todo

    def _take(self, queue: BoundedQueue) -> None:
        job = queue.take()
        assert job is not None
        self.jobs.append((queue, job))

    def _end_job(self, entry: tuple[BoundedQueue, Job]) -> None:
        self.jobs.remove(entry)
        entry[0].carry_out(entry[1])

    def _end_copy(self, at: int) -> None:
        self.pool.copies.end(at)

    def settle(self) -> None:
        """Apply what was posted, as the pump would."""
        with self.parts.reducer.lock:
            self.parts.reducer.settle()

    def at_rest(self) -> bool:
        """Whether nothing waits to be applied, so that the model is up to date."""
        passed = any(event.passed for event, _ in self.pool.copies.events)  # type: ignore[attr-defined]
        return self.parts.reducer.idle and not self.core.events and not passed

    # ---- engines

    def private(self, slots: list[int]) -> list[int]:
        """Those of the slots that are private to a request."""
        state = self.core.registry.tables[_DEVICE].state
        return [slot for slot in slots if state[slot] == PRIVATE]

    def expect_private(self, engine: Engine, slots: Slots) -> None:
        """An engine was given slots: nobody else has them."""
        fresh = slots.tolist()
        require(len(set(fresh)) == len(fresh) and self.private(fresh) == fresh, "slots were given out twice")
        for other in self.engines:
            require(not other.expected.keys() & set(fresh), "slots that a request holds were given to another")
        for slot in fresh:
            self.write(engine, slot, bytes([POISON]) * self.pool.page_bytes)

    def write(self, engine: Engine, slot: int, content: bytes) -> None:
        """An engine writes a page into a slot of its own."""
        self.pool.write_page(slot, content)
        engine.expected[slot] = content

    def write_behind(self, event: Written) -> None:
        """The writes in front of an event are done."""
        for slot, content in event.writes.items():
            self.pool.write_page(slot, content)
            for engine in self.engines:
                if slot in engine.expected:
                    engine.expected[slot] = content

    def content(self, engine: Engine, page: int) -> bytes:
        """What a whole page of an engine's prompt must contain."""
        past = engine.symbols()[: (page + 1) * self.truth.width]
        return self.truth.content(engine.digest, engine.lease.tree.generation, past)

    def check_loaded(self, engine: Engine, slots: Slots) -> None:
        """The cache handed these pages out: they hold what they must, and the ones before stay what they were."""
        loaded = slots.tolist()
        require(loaded[: len(engine.loaded or ())] == (engine.loaded or []), "load took back what it gave")
        rows = self.pool.rows()
        for page, slot in enumerate(loaded):
            engine.expected[slot] = self.content(engine, page)
            require(rows[slot].tobytes() == engine.expected[slot], f"load gave wrong bytes for page {page}")
        engine.loaded = loaded

    def count(self, engine: Engine, counts: RequestCounts) -> None:
        """A request was closed: what it was counted as is what it got, and is in the totals from now on."""
        hits = counts.device + counts.host + counts.storage
        require(counts.asked == engine.asked, f"{counts.asked} pages counted as asked, not {engine.asked}")
        require(counts.asked == hits + sum(counts.missed.values()), f"{counts} does not add up")
        if engine.loaded is not None:
            require(hits == len(engine.loaded), f"{hits} pages counted, {len(engine.loaded)} loaded")
        self.totals.update(
            requests=1,
            tokens=engine.prompt_tokens,
            asked=counts.asked,
            device=counts.device,
            host=counts.host,
            storage=counts.storage,
            missed=sum(counts.missed.values()),
            aborted=int(counts.aborted),
        )

    # ---- what events say

    def told(self, scope: DerivedNamespace, symbols: bytes, limit: int) -> Match:
        """The match that a prompt must get, as far as events tell."""
        self.replay_events()
        hashes = self.truth.learn(scope, symbols)[:limit]

        def leading(tier: Tier) -> int:
            pages = self.visible.get((scope.digest, tier), {})
            return next((i for i, page_hash in enumerate(hashes) if page_hash not in pages), len(hashes))

        device = leading(Tier.DEVICE)
        host = max(device, leading(Tier.HOST))
        stored = leading(Tier.STORAGE) if self.core.registry.stores else 0
        return Match(device, host - device, max(host, stored) - host)

    def replay_events(self) -> None:
        """Bring the model up to date."""
        for event in self._subscription.drain():
            require(isinstance(event, Event), "events were lost")
            assert isinstance(event, Event)
            self._replay(event)

    def _replay(self, event: Event) -> None:
        if isinstance(event, Cleared):
            for tier in Tier:
                self.visible.pop((event.namespace, tier), None)
            return
        pages = self.visible.setdefault((event.namespace, event.tier), {})
        if not isinstance(event, Stored):
            for page_hash in event.page_hashes:
                require(page_hash in pages, "a page was removed before it was stored")
                del pages[page_hash]
            return
        parent = event.parent_hash
        require(parent is None or parent in pages, f"a page was stored in {event.tier.name} before its parent")
        for page_hash in event.page_hashes:
            require(page_hash not in pages, "a page was stored twice")
            pages[page_hash] = None
        past = self.truth.past(event.namespace, event.page_hashes[-1])
        require(past.endswith(event.symbols), "an event has other tokens than its hashes")
        require(len(past) == event.first_page * self.truth.width + len(event.symbols), "an event has a wrong depth")

    # ---- checks

    def check(self) -> None:
        """Everything that must hold after each step."""
        if self.over:
            return
        self.cache.check()
        require(self.parts.reducer.internal_errors == 0, "an internal error was caught")
        self._forget_dropped()
        self.replay_events()
        self._poison_free()
        rows = self.pool.rows()
        for engine in self.engines:
            for slot, content in engine.expected.items():
                require(rows[slot].tobytes() == content, "bytes of an open request changed under it")
        for tree in self.core.trees:
            self._check_tree(tree, rows)
        self.check_statistics()

    def _forget_dropped(self) -> None:
        for engine in self.dropped:
            require(engine.lease.counts is not None, "a request that was collected is still open")
            assert engine.lease.counts is not None
            self.count(engine, engine.lease.counts)
            self.totals["dropped"] += 1
        self.dropped.clear()

    def _poison_free(self) -> None:
        tables = self.core.registry.tables
        self.pool.memory[:, :, tables[_DEVICE].state == FREE] = POISON
        if self.cache.host is not None:
            self.cache.host.pages[tables[_HOST].state == FREE] = POISON

    def _check_tree(self, tree: HiRadixTree, rows: Bytes) -> None:
        digest, width, truth = tree.namespace, tree.width, self.truth
        require(tree.generation >= self._floors.get(digest, 0), "a generation that was cleared has come back")
        host = self.cache.host.pages if self.cache.host is not None else rows
        seen: tuple[list[bytes], ...] = ([], [], [])
        todo = [(child, b"") for child in tree.root.children.values()]
        while todo:
            node, before = todo.pop()
            whole = before + node.span
            todo += [(child, whole) for child in node.children.values()]
            for at, page_hash in enumerate(tree.hashes(node, 0, node.pages)):
                past = whole[: len(before) + (at + 1) * width]
                require(truth.hash(digest, past) == page_hash, "a node has a wrong hash")
                content = truth.content(digest, tree.generation, past)
                for tier, pool in ((_DEVICE, rows), (_HOST, host)):
                    if at < node.resident[tier]:
                        seen[tier].append(page_hash)
                        slot = node.slots[tier][at]
                        require(pool[slot].tobytes() == content, f"wrong bytes in {Tier(tier).name}")
                if at < node.believed:
                    seen[2].append(page_hash)
                    assert self.storage is not None
                    said = self.storage.acknowledged(digest, tree.generation, page_hash)
                    require(said, "believed to be stored, but storage never said so")
        for tier in Tier:
            told = self.visible.get((digest, tier), {})
            require(len(told) == len(seen[tier]) and told.keys() == set(seen[tier]), f"{tier.name}: events are wrong")

    def check_statistics(self) -> None:
        """Counters add up, and equal what closed requests said."""
        statistics = self.cache.statistics()
        totals, pages, tokens = self.totals, statistics.pages, statistics.tokens
        require(pages.asked == pages.hits + sum(pages.missed.values()), f"pages do not add up: {pages}")
        require(tokens.asked == tokens.hits + sum(tokens.missed.values()), f"tokens do not add up: {tokens}")
        said = (pages.asked, pages.device, pages.host, pages.storage, sum(pages.missed.values()), tokens.asked)
        known = tuple(totals[name] for name in ("asked", "device", "host", "storage", "missed", "tokens"))
        require(said == known, f"statistics say {said}, requests {known}")
        requests = (statistics.requests, statistics.aborted, statistics.dropped)
        known = tuple(totals[name] for name in ("requests", "aborted", "dropped"))
        require(requests == known, f"statistics count {requests} requests, not {known}")
        if self.over:
            return
        require(statistics.open_requests == len(self.engines), "open requests are miscounted")
        moved = (statistics.bytes_device_to_host, statistics.bytes_host_to_device)
        good = self.pool.copies.good
        size = self.pool.page_bytes
        require(moved == (good[True] * size, good[False] * size), "bytes copied are miscounted")

    def remember_cleared(self, digest: bytes, generation: int) -> None:
        """Storage has confirmed a clear: lower generations must not come back."""
        self._floors[digest] = max(generation, self._floors.get(digest, 0))

    def check_idle(self) -> None:
        """Nothing is open and nothing under way: nothing may be held, and all of it can be evicted."""
        statistics = self.cache.statistics()
        require(not self.core.log.open and not self.parts.executor.running, "transfers never ended")
        require(statistics.open_requests == 0, "requests are left")
        for tier, numbers in ((_DEVICE, statistics.core.device), (_HOST, statistics.core.host)):
            require(numbers.pinned == 0 and not self.core.registry.tables[tier].pins.any(), "pins are left")
            require(numbers.free + numbers.resident == numbers.capacity, f"slots are left behind: {numbers}")
            with self.parts.reducer.lock:
                require(self.core.evict(tier, 1 << 30) == numbers.resident, "resident pages cannot be evicted")
        self.check()
        final = self.cache.statistics().core
        for left in (final.device, final.host):
            require(left.free == left.capacity, f"an emptied tier has slots in use: {left}")
