"""A hosted cache without any thread, and a model of its clients: who holds which slots, and what must lie in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hicache.core.identity import DerivedNamespace
from hicache.core.reasons import RequestCounts
from hicache.core.residency import FREE, PRIVATE, Slots
from hicache.core.tree import HiRadixTree
from hicache.events import Cleared, Event, Stored
from hicache.memory.base import POISON
from hicache.memory.host import MmapHostPool
from hicache.records import Tier
from hicache.runtime.hosting import HostedCache, HostedLoading, HostedRequest, open_hosted
from hicache.runtime.queues import BoundedQueue, Job
from hicache.testing import cachelife
from hicache.testing.cachelife import HandClock, Wait
from hicache.testing.coremodel import WatchedWords
from hicache.testing.told import ToldResidency
from hicache.testing.truth import Truth, require
from hicache.testing.watchedstorage import WatchedStorage

__all__ = ["HOSTED_NAMESPACE", "Client", "HostedLife"]

HOSTED_NAMESPACE = replace(cachelife.NAMESPACE, hash="sha256")
"""Pages of 2 tokens and 64 bytes, each of them two objects in storage."""

_HOST = int(Tier.HOST)
_THREADS = {"reads": 3, "writes": 2}


@dataclass(eq=False)
class Client:
    """A request as the process sees it that made it.

    Attributes:
        request: the cache's side.
        scope: its namespace; None where it goes past the cache.
        tokens: its prompt, with what was decoded.
        prompt_tokens, asked: tokens at its beginning, and the pages of them that may come from the cache.
        loading: what it waits for, once it has begun to.
        finished: whether that has finished.
        committed: page index up to which it has committed.
        expected: what the slots that it holds must contain.
    """

    request: HostedRequest
    scope: DerivedNamespace | None
    tokens: list[int]
    prompt_tokens: int
    asked: int
    loading: HostedLoading | None = None
    finished: bool = False
    committed: int = 0
    expected: dict[int, bytes] = field(default_factory=dict)

    def symbols(self, first: int, end: int) -> bytes:
        """Tokens of its pages."""
        size = HOSTED_NAMESPACE.page_size
        return np.array(self.tokens[first * size : end * size], "<u4").tobytes()

    @property
    def pages(self) -> int:
        """Its whole pages."""
        return len(self.tokens) // HOSTED_NAMESPACE.page_size


class HostedLife:
    """A hosted cache from its opening to its end, its clients, and the storage work that is under way.

    Args:
        storage: the backend, or None.
        truth: what pages must contain.
        host: slots.
        on_wait: called where somebody waits, with the condition held.
        options: of `open_hosted`.

    Attributes:
        cache: the cache.
        over: it was closed.
        clients: open requests.
        jobs: storage jobs that a thread has taken and not ended.
        totals: what closed requests were counted as.
    """

    def __init__(
        self, storage: WatchedStorage | None, truth: Truth, *, host: int, on_wait: Wait, options: dict[str, Any]
    ) -> None:
        self.clock = HandClock()
        self.clock.on_wait = on_wait
        self.pool = MmapHostPool(host, truth.page_bytes)
        self.words = WatchedWords(host)
        self.cache: HostedCache = open_hosted(
            HOSTED_NAMESPACE,
            host=self.pool,
            storage=storage,
            words=self.words.words,
            clock=self.clock,
            events=True,
            background=False,
            **({"retry": None, "breaker": None} | options),
        )
        self.core = self.cache.parts.core
        self.over = False
        self.clients: list[Client] = []
        self.jobs: list[tuple[BoundedQueue, Job]] = []
        self.totals: Counter[str] = Counter()
        self.heard: list[Event] = []
        self._storage, self._truth = storage, truth
        self._told, self._told_to_loop = ToldResidency(), ToldResidency()
        self._subscription = self.cache.events()
        self.cache.start(_nothing, self.heard.extend)

    # ---- storage's threads

    def work(self) -> list[Callable[[], None]]:
        """What could happen next: a job is taken, or one that was taken ends."""
        io = self.cache.parts.storage
        todo: list[Callable[[], None]] = []
        for name, threads in _THREADS.items() if io is not None else ():
            queue: BoundedQueue = getattr(io, name)
            state = queue.statistics()
            if state.waiting and state.running < threads:
                todo.append(lambda queue=queue: self._take(queue))  # type: ignore[misc]
        return todo + [lambda entry=entry: self._end(entry) for entry in self.jobs]

    def _take(self, queue: BoundedQueue) -> None:
        job = queue.take()
        assert job is not None
        self.jobs.append((queue, job))

    def _end(self, entry: tuple[BoundedQueue, Job]) -> None:
        self.jobs.remove(entry)
        entry[0].carry_out(entry[1])

    # ---- clients

    def content(self, client: Client, page: int) -> bytes:
        """What a whole page of a client's prompt must contain."""
        tree = client.request.lease.tree
        return self._truth.content(tree.namespace, tree.generation, client.symbols(0, page + 1))

    def write(self, client: Client, slot: int, content: bytes) -> None:
        """A client writes into a slot of its own."""
        self.pool.page(slot)[:] = np.frombuffer(content, np.uint8)
        client.expected[slot] = content

    def given(self, client: Client, slots: Slots) -> None:
        """A client was given private slots: nobody else has them."""
        fresh = slots.tolist()
        state = self.core.registry.tables[_HOST].state
        require(len(set(fresh)) == len(fresh) and (state[slots] == PRIVATE).all(), "slots were given out twice")
        for other in self.clients:
            require(not other.expected.keys() & set(fresh), "slots that a request holds were given to another")
        for slot in fresh:
            self.write(client, slot, bytes([POISON]) * self.pool.page_bytes)

    def look_at(self, client: Client) -> None:
        """A client reads what is usable."""
        for page, slot in enumerate(client.request.usable.tolist()):
            client.expected[slot] = self.content(client, page)
            require(
                bytes(self.pool.page(slot)) == client.expected[slot], f"page {page} was handed out with wrong bytes"
            )

    def count(self, client: Client, counts: RequestCounts) -> None:
        """A request was closed."""
        hits = counts.host + counts.storage
        require(counts.device == 0 and counts.asked == client.asked, f"{counts}, but {client.asked} pages were asked")
        require(counts.asked == hits + sum(counts.missed.values()), f"{counts} does not add up")
        self.totals.update(
            requests=1,
            tokens=client.prompt_tokens,
            asked=counts.asked,
            host=counts.host,
            storage=counts.storage,
            missed=sum(counts.missed.values()),
            aborted=int(counts.aborted),
        )

    # ---- checks

    def check(self) -> None:
        """Everything that must hold after each step."""
        if self.over:
            return
        table = self.core.registry.tables[_HOST]
        self.cache.check()
        require(self.cache.parts.reducer.internal_errors == 0, "an internal error was caught")
        self.words.check(table)
        self.pool.pages[table.state == FREE] = POISON
        for client in self.clients:
            for slot, content in client.expected.items():
                require(bytes(self.pool.page(slot)) == content, "bytes of an open request changed under it")
        self._replay()
        for tree in self.core.trees:
            self._check_tree(tree)
        self.check_statistics()

    def _replay(self) -> None:
        news: list[Event] = []
        for event in self._subscription.drain():
            assert isinstance(event, Event), "events were lost"
            news.append(event)
            self._check_event(event)
        self._told.replay(news)
        self._told_to_loop.replay(self.heard)

    def _check_event(self, event: Event) -> None:
        if isinstance(event, Cleared) or not isinstance(event, Stored):
            return
        require(event.symbols == b"".join(event.page_hashes), "symbols are hashes")
        past = self._truth.past(event.namespace, event.page_hashes[-1])
        require(past.endswith(event.tokens), "an event has other tokens than its hashes")
        told = event.tokens or event.tier is not Tier.HOST or self._truth.hides
        require(told, "a page in HOST has no tokens")

    def _check_tree(self, tree: HiRadixTree) -> None:
        seen: dict[Tier, list[int]] = {Tier.HOST: [], Tier.STORAGE: []}
        store = self.cache.parts.tokens
        assert store is not None
        todo = list(tree.root.children.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            for at, page_hash in enumerate(tree.hashes(node, 0, node.pages)):
                number = int.from_bytes(page_hash, "little")
                if at < node.resident[_HOST]:
                    past = self._truth.past(tree.namespace, page_hash)
                    slots = node.slots[_HOST][at : at + 1]
                    content = self._truth.content(tree.namespace, tree.generation, past)
                    require(bytes(self.pool.page(int(slots[0]))) == content, "wrong bytes in HOST")
                    tokens = store.tokens(slots)
                    right = tokens == past[-self._truth.width :] or (self._truth.hides and not tokens)
                    require(right, "wrong tokens beside a slot")
                    seen[Tier.HOST].append(number)
                if at < node.believed:
                    assert self._storage is not None
                    said = self._storage.acknowledged(tree.namespace, tree.generation, page_hash)
                    require(said, "believed to be stored, but storage never said so")
                    seen[Tier.STORAGE].append(number)
        for tier, pages in seen.items():
            require(sorted(self._told.pages(tree.namespace, tier)) == sorted(pages), f"{tier.name}: events are wrong")

    def check_statistics(self) -> None:
        """Counters add up, and equal what closed requests said."""
        statistics = self.cache.statistics()
        pages, tokens, totals = statistics.pages, statistics.tokens, self.totals
        require(tokens.asked == tokens.hits + sum(tokens.missed.values()), f"tokens do not add up: {tokens}")
        said = (pages.asked, pages.host, pages.storage, sum(pages.missed.values()), tokens.asked, statistics.requests)
        known = tuple(totals[name] for name in ("asked", "host", "storage", "missed", "tokens", "requests"))
        require(said == known, f"statistics say {said}, requests {known}")
        require(statistics.aborted == totals["aborted"], "aborted requests are miscounted")
        require(self.over or statistics.open_requests == len(self.clients), "open requests are miscounted")

    def check_idle(self) -> None:
        """Nothing is open and nothing under way: nothing may be held, and all of it can be evicted."""
        numbers = self.cache.statistics().core.host
        require(not self.core.log.open and not self.cache.parts.executor.running, "transfers never ended")
        require(not self.core.registry.tables[_HOST].pins.any(), "pins are left")
        require(numbers.free + numbers.resident == numbers.capacity, f"slots are left behind: {numbers}")
        with self.cache.parts.reducer.lock:
            require(self.core.evict(_HOST, 1 << 30) == numbers.resident, "resident pages cannot be evicted")
        self.cache.settle()
        self.check()
        require(self._told.everything() == self._told_to_loop.everything(), "the loop was told something else")


def _nothing() -> None:
    pass
