"""Why a prompt misses in a running service: what its pools, its store and its engines know of the prompt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hicache.analytics.explain.manifests import Secrets, differences
from hicache.analytics.explain.records import Cause, Explanation, Other, nearest_first
from hicache.analytics.explain.words import larger_tiers, page_tail, words_of
from hicache.core.identity import DerivedNamespace, can_cache
from hicache.core.partition import plan_shards
from hicache.core.symbols import symbols
from hicache.errors import NamespaceError
from hicache.records import MissReason
from hicache.rpc.service import RequestScope
from hicache.runtime.explaining import Look, look
from hicache.storage.base import ObjectKey

if TYPE_CHECKING:
    from hicache.runtime.scopes import Scope
    from hicache.sidecar.pool import Pool
    from hicache.sidecar.service import SidecarService

_log = logging.getLogger("hicache.sidecar")

_HASH: Final = 32
_SCOPES: Final = 4096
"""Other namespaces that are looked at, of each pool."""

_AT_ONCE: Final = 32
"""Of these, how many are looked at before the loop gets its turn: about a millisecond."""

_PAGES_AT_ONCE: Final = 256
"""Pages of which storage is asked in one call."""

_MOST_OTHERS: Final = 32
"""Other namespaces with more of the prompt after which no more are looked for."""


async def explain(
    service: SidecarService, pools: list[Pool], scope: RequestScope, tokens: bytes, *, storage_seconds: float
) -> list[Explanation]:
    """Explain a prompt in each of some pools of one model and tenant.

    Args:
        service: whose pools these are; others of the same tenant are looked at for the prompt too.
        pools: where it should be.
        scope: adapter and salt of its requests.
        tokens: u32 little endian.
        storage_seconds: in which storage may answer; 0: it is not asked.

    Raises:
        NamespaceError: an adapter or a salt that names nothing.
    """
    return [await _Explainer(service, pool, scope, tokens).run(storage_seconds) for pool in pools]


class _Explainer:
    def __init__(self, service: SidecarService, pool: Pool, scope: RequestScope, tokens: bytes) -> None:
        if not can_cache(scope.adapter):
            assert scope.adapter is not None
            raise NamespaceError(f"requests with adapter {scope.adapter.name!r:.60}, which has no digest, are bypassed")
        self._service, self._pool, self._scope, self._tokens = service, pool, scope, tokens
        self._derived = pool.namespace.derive(adapter=scope.adapter, tenant=pool.tenant, salt=scope.salt)
        self._page_size = pool.namespace.page_size
        self._pages = len(tokens) // 4 // self._page_size
        self._notes: list[str] = []
        self._asking = False  # whether requests have used the namespace, so that its generation was asked for

    async def run(self, storage_seconds: float) -> Explanation:
        """All that is known of it."""
        pool, size = self._pool, self._page_size
        hashes = await asyncio.to_thread(_hashes, self._derived, self._tokens)
        known = pool.cache.known(self._scope.adapter, pool.tenant, self._scope.salt)
        self._asking = known is not None
        seen = look(pool.cache, known, hashes, self._tokens)
        device = pool.mirror.longest(self._derived.digest, hashes)
        stored: int | None = seen.stored if pool.cache.parts.core.registry.stores else None
        usable = seen.match.pages
        if stored is not None and storage_seconds > 0 and seen.match.host < self._pages:
            usable, stored = await self._asked(seen, hashes, storage_seconds)
        reached, left = self._worth(seen.match.host, usable)
        others = await self._others(usable)
        causes = (*left, *self._causes(seen, usable, others), *page_tail(len(self._tokens) // 4, size))
        if any(cause.reason is MissReason.EVICTED for cause in causes):
            self._notes += larger_tiers(pool.cache.insight().what_if, pool.page_bytes)
        self._notes += pool.cache.statistics().degraded
        return Explanation(
            model=pool.namespace.model,
            namespace=pool.namespace.digest.hex(),
            derived=self._derived.digest.hex(),
            generation=seen.generation,
            page_size=size,
            tokens=len(self._tokens) // 4,
            pages=self._pages,
            tiers={"device": device if pool.mirror.pages else None, "host": seen.match.host, "storage": stored},
            usable_pages=reached,
            usable_tokens=reached * size,
            causes=causes,
            others=others,
            notes=tuple(dict.fromkeys(self._notes)),
        )

    # ---- what storage says

    async def _asked(self, seen: Look, hashes: bytes, seconds: float) -> tuple[int, int | None]:
        """Leading pages that a request would get, and that storage has; the store itself is asked."""
        first = seen.match.pages
        there = await self._probe(seen, [hashes[at * _HASH :][:_HASH] for at in range(self._pages)], seconds)
        if there is None:
            self._notes.append("storage did not answer in time: what it is believed to have is shown")
            return first, seen.stored
        stored = next((page for page, answer in enumerate(there) if not answer), self._pages)
        if stored > first:
            self._notes.append(
                f"storage has pages {first} to {stored - 1}, of which the service did not know: it asks at the next "
                "request, as far as that is worth it"
            )
        if seen.stored > stored and first > seen.match.host:
            first = max(stored, seen.match.host)
        if any(there[stored:]):
            count = sum(there[stored:])
            self._notes.append(f"{count} pages behind page {stored} are in storage, and useless without it")
        return max(first, stored), stored

    async def _probe(self, seen: Look, hashes: list[bytes], seconds: float) -> list[bool] | None:
        """Of each page, whether storage has all of it; None: it does not say."""
        cache, namespace = self._pool.cache, self._pool.namespace
        storage, port = cache.parts.storage, cache.parts.port
        if storage is None or port is None:
            return None
        shards = [part.shard for part in plan_shards(namespace.geometry, self._page_size).parts]
        digest = self._derived.digest
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[bool] | None] = loop.create_future()

        def answered(found: list[bool] | None) -> None:
            if not answer.done():
                answer.set_result(found)

        def tell(found: list[bool] | None = None) -> None:
            with contextlib.suppress(RuntimeError):  # the service has ended meanwhile
                loop.call_soon_threadsafe(answered, found)

        def ask() -> None:
            try:
                generation = port.generation(digest) if seen.generation is None else seen.generation
                there: list[bool] = []
                for at in range(0, len(hashes), _PAGES_AT_ONCE):
                    if answer.done():  # nobody waits any more
                        return
                    names = hashes[at : at + _PAGES_AT_ONCE]
                    keys = [ObjectKey(digest, generation, name, shard) for name in names for shard in shards]
                    found = port.contains(keys)
                    there += [all(found[i : i + len(shards)]) for i in range(0, len(found), len(shards))]
                tell(there)
            except Exception as error:  # says nothing about any page
                _log.debug("storage could not be asked for %d pages: %r", len(hashes), error)
                tell()

        if not storage.call(ask, fail=tell):
            return None
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            return None

    def _worth(self, host: int, usable: int) -> tuple[int, tuple[Cause, ...]]:
        """Leading pages that would be brought up, and why pages that storage has are left there."""
        parts, stored = self._pool.cache.parts, usable - host
        threshold = parts.options.prefetch_threshold
        if 0 < stored * self._page_size < threshold:
            text = f"left in storage: so few tokens are below the prefetch threshold of {threshold:,}"
            return host, (self._cause(host, usable, MissReason.LATE, text),)
        with parts.reducer.lock:
            planner = parts.loader.planner
            decision = planner.plan(0, stored) if stored > 0 and planner.decides else None
        if decision is None or decision.planned_storage >= stored:
            return usable, ()
        reached = host + decision.planned_storage
        text = (
            f"left in storage: loading is not worth its time, as the engine computes all {stored:,} pages of it in "
            f"{decision.compute_seconds:.3g} s"
        )
        return reached, (self._cause(reached, usable, MissReason.OVER_BUDGET, text),)

    # ---- other namespaces

    async def _others(self, usable: int) -> tuple[Other, ...]:
        """Namespaces of the same tenant that have more of the prompt."""
        found: list[Other] = []
        if usable == self._pages:
            return ()
        least = usable * self._page_size
        for number, (pool, scope) in enumerate(self._elsewhere()):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if self._begins(pool, scope):
                other = await self._other(pool, scope)
                if other.tokens > least:
                    found.append(other)
            if len(found) == _MOST_OTHERS:
                self._notes.append(f"{_MOST_OTHERS} other namespaces have more of it: no more were looked for")
                break
        return nearest_first(found)

    def _elsewhere(self) -> Iterator[tuple[Pool, Scope]]:
        for pool in self._service.pools:
            if pool.tenant == self._pool.tenant:
                for scope in islice(pool.cache.parts.scopes.resolved(), _SCOPES):
                    if scope.namespace.digest != self._derived.digest:
                        yield pool, scope

    def _begins(self, pool: Pool, scope: Scope) -> bool:
        """Whether a namespace has the prompt's first page."""
        first = _hashes(scope.namespace, self._tokens[: 4 * pool.namespace.page_size])
        return bool(first) and pool.cache.match(scope, first).pages > 0

    async def _other(self, pool: Pool, scope: Scope) -> Other:
        hashes = await asyncio.to_thread(_hashes, scope.namespace, self._tokens)
        pages = pool.cache.match(scope, hashes).pages
        secrets = Secrets(self._pool.tenant, self._scope.salt)
        return Other(
            pool.namespace.model,
            pool.namespace.digest.hex(),
            scope.namespace.digest.hex(),
            pages,
            pages * pool.namespace.page_size,
            differences(self._derived.describe(), scope.namespace.describe(), secrets),
        )

    # ---- causes

    def _causes(self, seen: Look, usable: int, others: tuple[Other, ...]) -> Iterator[Cause]:
        coming = seen.match.host + seen.filling
        if usable < seen.match.pages:
            text = "gone from storage, which evicted or lost it: the service believes it to be there still"
            yield self._cause(usable, seen.match.pages, MissReason.EVICTED, text)
        for gone in seen.gone:
            first, end = max(gone.first, usable), gone.end
            late = min(coming, end)
            if first < late:
                yield self._cause(first, late, MissReason.LATE, "being written or fetched at this moment")
                first = late
            if first >= end:
                continue
            if seen.generation is None and self._asking:
                text = "storage has not told the namespace's generation yet, and until then nothing has a name"
                yield self._cause(first, end, MissReason.BYPASSED, text)
                continue
            reason = gone.reason or (MissReason.OTHER_NAMESPACE if others and not first else MissReason.COLD)
            text = words_of(reason, others=others, differs_at=self._differs_at(seen, first))
            yield self._cause(first, end, reason, text, gone.seconds_ago)

    def _differs_at(self, seen: Look, first: int) -> int | None:
        """The first token that differs from another prompt's, where pages from `first` on are missed for that."""
        if seen.shared_tokens is None or first != seen.match.pages:
            return None
        return first * self._page_size + seen.shared_tokens or None

    def _cause(self, first: int, end: int, reason: MissReason, text: str, ago: float | None = None) -> Cause:
        return Cause(first, end, (end - first) * self._page_size, reason, text, ago)


def _hashes(namespace: DerivedNamespace, tokens: bytes) -> bytes:
    size = namespace.base.page_size
    whole: Any = symbols(np.frombuffer(tokens, "<u4"), size)
    return namespace.hasher().extend(None, whole, len(tokens) // 4 // size)
