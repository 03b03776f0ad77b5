"""All whose pages this engine has used: what has to be forgotten when its weights change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from hicache.errors import HicacheError
from hicache.rpc.client.cache import ConnectedCache
from hicache_vllm.lookups import Scope
from hicache_vllm.tasks import Tasks

__all__ = ["Scopes"]

_log = logging.getLogger("vllm.hicache")

MOST: Final = 10_000
"""Adapters and salts that are remembered."""

CLEAR_SECONDS: Final = 5.0
"""For forgetting all of them; what takes longer is tried again in the background."""

AGAIN_SECONDS: Final = 1.0


class Scopes:
    """Adapters and salts of the requests so far. `seen` and `clear` are for the scheduler's thread.

    Attributes:
        stale: whether pages that were to be forgotten may still be found; until they are, nothing is asked or stored.
    """

    def __init__(
        self,
        cache: ConnectedCache,
        tasks: Tasks,
        *,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.stale = False
        self._cache = cache
        self._tasks = tasks
        self._now = now
        self._pause = pause
        self._seen: dict[tuple[str, str | None], Scope] = {("None", None): Scope()}
        self._named: set[tuple[str, str | None]] = set()
        self._digests: dict[bytes, tuple[str | None, str | None]] = {}
        self._forgotten = False
        self._closed = False

    def seen(self, scope: Scope | None) -> None:
        """A request uses these pages."""
        if scope is None:
            return
        key = (repr(scope.adapter), scope.salt)
        if key in self._seen:
            return
        if len(self._seen) >= MOST:
            self._forgotten = True
            return
        self._seen[key] = Scope(scope.adapter, scope.salt)

    def whose(self, digest: bytes) -> tuple[str | None, str | None] | None:
        """Name of the adapter and salt of a namespace that was used here; None of any other. Any thread may ask."""
        if digest not in self._digests:
            for key, scope in list(self._seen.items()):
                if key not in self._named:
                    self._name(key, scope)
        return self._digests.get(digest)

    def _name(self, key: tuple[str, str | None], scope: Scope) -> None:
        self._named.add(key)
        adapter = None if scope.adapter is None else scope.adapter()
        if adapter is None or adapter.digest is not None:
            digest = self._cache.namespace.derive(adapter=adapter, salt=scope.salt).digest
            self._digests[digest] = (None if adapter is None else adapter.name, scope.salt)

    def clear(self) -> bool:
        """Forget all of their pages, in every tier of the service; whether that is done now.

        Where it is not, nothing is found or stored until it is.
        """
        if self._forgotten:
            self.stale = True
            _log.error(
                "hicache: runs without a cache from now on: there were more than %d adapters and salts, and pages of "
                "some cannot be forgotten: clear the service (`hicache clear`), and start the engine again",
                MOST,
            )
            return False
        left = list(self._seen.values())
        until = self._now() + CLEAR_SECONDS
        while left and self._clear(left[0], until):
            left.pop(0)
        if not left:
            return True
        self.stale = True
        self._tasks.begin(lambda: self._go_on(left))
        return False

    def clear_soon(self) -> None:
        """The same in the background."""
        self.stale = True
        left = list(self._seen.values())
        self._tasks.begin(lambda: self._go_on(left))

    def close(self) -> None:
        """Try no longer."""
        self._closed = True

    def _clear(self, scope: Scope, until: float) -> bool:
        seconds = until - self._now()
        if seconds <= 0:
            return False
        try:
            adapter = None if scope.adapter is None else scope.adapter()
            if adapter is None or adapter.digest is not None:
                self._cache.clear(adapter=adapter, salt=scope.salt, deadline=seconds)
        except HicacheError as error:
            _log.warning("hicache: pages could not be forgotten yet, so none are used: %s", error)
            return False
        return True

    def _go_on(self, left: list[Scope]) -> None:
        while left and not self._closed:
            if self._clear(left[0], self._now() + CLEAR_SECONDS):
                left.pop(0)
            else:
                self._pause(AGAIN_SECONDS)
        if not left:
            self.stale = False
