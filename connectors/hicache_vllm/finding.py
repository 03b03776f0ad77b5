"""What the cache has of each request, for the scheduler: asked in the background, answered at once or later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from hicache.rpc.client.cache import ConnectedCache
from hicache_vllm.accounts import Account, Missed
from hicache_vllm.counters import Counters
from hicache_vllm.lookups import Lookup
from hicache_vllm.requests import Tracked
from hicache_vllm.scopes import Scopes
from hicache_vllm.settings import Settings
from hicache_vllm.tasks import Tasks

__all__ = ["Finder"]

PATIENCE: Final = 0.002
"""Seconds for which the scheduler waits for an answer of the service before it goes on with others."""


class Finder:
    """One engine's questions. Used on the scheduler's thread only.

    Args:
        cache: client of the service.
        tasks: where it is talked to.
        scopes: whose pages may be used.
        settings: the user's.
        page: tokens a page.
        reads: whether the engine's role allows to load.
        reserves: whether pages that are not found get slots at once.
        counters: gets what is counted.
        now: a monotonic clock in seconds.

    Attributes:
        off: whether the engine runs without a cache from now on.
    """

    def __init__(
        self,
        cache: ConnectedCache,
        tasks: Tasks,
        scopes: Scopes,
        settings: Settings,
        *,
        page: int,
        reads: bool,
        reserves: bool,
        counters: Counters,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.off = False
        self._cache = cache
        self._tasks = tasks
        self._scopes = scopes
        self._settings = settings
        self._page = page
        self._reads = reads
        self._reserve = page if reserves else 0
        self._counters = counters
        self._now = now
        self._shared: dict[bytes, str] = {}

    @property
    def usable(self) -> bool:
        """Whether the cache may be asked now."""
        return self._cache.connected and not self.off and not self._scopes.stale

    def matched(self, tracked: Tracked, request: Any) -> tuple[int | None, bool]:
        """Tokens behind the `local` ones of a request that the cache brings, and whether beside the engine.

        None: not known yet. Idempotent: it may be asked again, also for another number of local tokens.
        """
        account = Account(self._counters, page=self._page, asked=tracked.length, local=tracked.local)
        account.reason = self._barred(tracked, request)
        if account.reason is not None or not self._lacks_a_page(tracked):
            tracked.drop_lookup()
            tracked.account = account
            return 0, False
        if self._others_load(tracked):
            return None, False
        lookup = tracked.lookup or self._look(tracked)
        if not lookup.wait(PATIENCE if lookup.seconds < PATIENCE else 0.0):
            if not lookup.late:
                return None, False
            account.reason = Missed.LATE
            tracked.drop_lookup()
            tracked.account = account
            return 0, False
        tracked.account = account
        return self._answered(tracked, lookup, account)

    def _answered(self, tracked: Tracked, lookup: Lookup, account: Account) -> tuple[int, bool]:
        account.reason, account.found = lookup.reason, lookup.pages
        end, local = lookup.pages * self._page, tracked.local
        if account.reason is None and lookup.lost:
            account.reason = Missed.LOST
        if account.reason is not None or end <= local:
            return 0, False
        if tracked.audited:
            tracked.audit = lookup.pages - 1
            account.audited = end - max(tracked.audit * self._page, local)
        tokens = end - local - account.audited
        return tokens, tokens > 0 and self._settings.load == "async"

    def _barred(self, tracked: Tracked, request: Any) -> Missed | None:
        """Why the cache is not asked for a request."""
        if self.off or not self._reads:
            return Missed.OFF
        if tracked.scope is None or getattr(request, "skip_reading_prefix_cache", False):
            return Missed.BYPASSED
        if tracked.refused:
            return Missed.FAILED
        return None if self.usable else Missed.AWAY

    def _lacks_a_page(self, tracked: Tracked) -> bool:
        return (tracked.length - 1) // self._page * self._page > tracked.local

    def _look(self, tracked: Tracked) -> Lookup:
        assert tracked.scope is not None
        self._scopes.seen(tracked.scope)
        tracked.lookup = Lookup(
            self._cache,
            self._tasks,
            tracked.tokens(tracked.length),
            tracked.scope,
            deadline=self._settings.deadline,
            reserve=self._reserve,
            now=self._now,
        )
        return tracked.lookup

    # ---- loads that several requests wait for

    def _others_load(self, tracked: Tracked) -> bool:
        """Whether the first page that is needed is on its way for another request already, and worth waiting for."""
        if not self._shared or self._shared.get(self._key(tracked), tracked.id) == tracked.id:
            tracked.waited = None
            return False
        now = self._now()
        tracked.waited = now if tracked.waited is None else tracked.waited
        return now - tracked.waited <= self._settings.deadline

    def share(self, tracked: Tracked) -> None:
        """Others that need the same first page wait for this request's load."""
        tracked.shared = self._key(tracked)
        self._shared[tracked.shared] = tracked.id

    def unshare(self, tracked: Tracked) -> None:
        """Nobody waits for this request's load any more: the engine has its blocks under their names, or it failed."""
        if tracked.shared is not None and self._shared.get(tracked.shared) == tracked.id:
            del self._shared[tracked.shared]
        tracked.shared = None

    def _key(self, tracked: Tracked) -> bytes:
        """What names the page in which the first token that is needed lies, and all before it."""
        end = (tracked.local // self._page + 1) * self._page
        return repr(tracked.scope).encode() + tracked.tokens(end).tobytes()

    def sources(self, tracked: Tracked | None, tokens: int) -> dict[str, int]:
        """From which tier the tokens of a load come: "host" or "disk"."""
        lookup = None if tracked is None else tracked.lookup
        if lookup is None or tracked is None:
            return {"host": tokens}
        host = min(max(lookup.host * self._page - tracked.local, 0), tokens)
        return {name: count for name, count in (("host", host), ("disk", tokens - host)) if count}
