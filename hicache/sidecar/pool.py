"""One pool: the shared memory and the cache of a model, as its ranks and the service use them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hicache.core.arenas import RankArena
from hicache.core.hashing import PageHasher
from hicache.core.identity import DerivedNamespace
from hicache.core.prompt import Prompt
from hicache.core.residency import Slots
from hicache.core.symbols import symbols
from hicache.errors import GeometryError
from hicache.memory.arena import Words
from hicache.memory.arenapool import ArenaHostPool
from hicache.memory.budget import Share
from hicache.memory.rankpages import RankPages
from hicache.rpc.service import ArenaView, RequestScope
from hicache.runtime.hosting import HostedCache, HostedRequest
from hicache.runtime.inheriting import withdraw
from hicache.runtime.scopes import Scope
from hicache.sidecar.estate import Proofs
from hicache.sidecar.groups import Rank
from hicache.sidecar.mirror import DeviceMirror
from hicache.sidecar.waiting import Changes

if TYPE_CHECKING:
    from hicache.sidecar.kept import Kept
    from hicache.sidecar.lifeline import Lifeline

_log = logging.getLogger("hicache.sidecar")

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
        host, words: the memory; `huge_pages`: whether it is in those.
        share: what it has of the budget.
        kept: slots that clients of an earlier service may still touch.
        proofs: what pages of an earlier service must be before they are used.
        words_id: under which lifelines give the generation words.
        warnings: what works but costs, in words.
    """

    def __init__(
        self,
        key: Key,
        *,
        host: ArenaHostPool,
        words: Words,
        cache: HostedCache,
        changes: Changes,
        ids: Iterator[int],
        huge_pages: bool,
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
        self.host = host
        self.huge_pages = huge_pages
        self.words = words
        self.proofs = Proofs(host, words.values)
        self.kept: list[Kept] = []
        self._ranks: dict[Rank, RankPages] = {}
        self._stuck = False
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes from the budget."""
        return self.host.size

    # ---- what ranks see

    def views(self, rank: Rank) -> tuple[RankArena, ...]:
        """The arenas of a rank."""
        return self.plan.rank(*rank).arenas

    def arena_view(self, view: RankArena) -> ArenaView:
        """One of them, as it is told to the rank."""
        arena = self.host.arenas[view.index]
        return ArenaView(self._arena_ids[view.index], arena.stride, arena.size, view.runs, view.writes)

    def grant(self, lifeline: Lifeline, views: Iterable[RankArena]) -> None:
        """Let a client have the descriptors of a rank's arenas, and of the words."""
        lifeline.grants[self.words_id] = (self.words.fd, self.words.size)
        for view in views:
            arena = self.host.arenas[view.index]
            lifeline.grants[self._arena_ids[view.index]] = (arena.fd, arena.size)

    def words_of(self, slots: Slots) -> bytes:
        """The generation words of slots, u64 little endian."""
        return self.words.values[slots].astype(np.dtype("<u8")).tobytes()

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
            pages = self._ranks[rank] = self.host.rank_pages(*rank)
        return pages

    async def proven(self, request: HostedRequest) -> bool:
        """See that what a request may use is what it should be; else it is withdrawn, and the request is useless."""
        pending = self.proofs.pending(request.usable)
        if not len(pending):
            return True
        bad = await asyncio.to_thread(self.proofs.failing, pending)
        self.proofs.settle(pending)
        if not len(bad):
            return True
        _log.error("%d pages that were taken over from the service before have other bytes: withdrawn", len(bad))
        withdraw(self.cache, bad)
        return False

    async def request(
        self, scope: Scope | None, page_hashes: bytes, *, tokens: int, limit: int, priority: int = 0
    ) -> HostedRequest:
        """A request of the cache, of whose pages each has been proven. See `HostedCache.request`."""
        while True:
            request = self.cache.request(scope, page_hashes, tokens=tokens, limit=limit, priority=priority)
            try:
                if await self.proven(request):
                    return request
            except BaseException:
                request.discard()
                raise
            request.discard()

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
        request = await self.request(found, page_hashes, tokens=len(tokens), limit=prompt.pages)
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
        return all(self.host.buffer(slot, at, size) == page[at : at + size] for at, size in self._shards())

    def fill(self, slot: int, page: bytes) -> None:
        """Write a whole canonical page into a slot."""
        for at, size in self._shards():
            np.copyto(np.asarray(self.host.buffer(slot, at, size)), np.frombuffer(page, np.uint8, size, at))

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
            for arena in self.host.arenas:
                while not self._stop.is_set() and arena.populate(_POPULATE_STEP):
                    pass

        self._populating = threading.Thread(target=run, name="hicache-populate", daemon=True)
        self._populating.start()

    def end(self, deadline: float) -> int:
        """Write down what storage lacks, and do nothing more. Blocks; returns the pages that it was not given."""
        self._stop.set()
        if self._populating is not None:
            self._populating.join()
        self._populating = None
        report = self.cache.close(deadline)
        self._stuck = report.abandoned_pages > 0
        return report.unwritten_pages

    def close(self, deadline: float) -> int:
        """`end`, then give the memory back; it stays while a call into storage still writes there."""
        unwritten = self.end(deadline)
        for kept in self.kept:
            kept.close()
        if not self._stuck:
            # Views keep memory mapped, and others wait for it.
            for pages in self._ranks.values():
                pages.close()
            self._ranks.clear()
            self.proofs.close()
            self.cache.let_go_of_words()
            self.host.close()
        self.words.close()
        return unwritten

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
                for arena, spec in zip(self.host.arenas, self.plan.arenas, strict=True)
            ],
            "sessions": self.members,
            "device_pages": self.mirror.pages,
            "statistics": asdict(self.cache.statistics()),
            **asdict(self.cache.insight()),
        }
