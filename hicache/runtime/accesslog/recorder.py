"""Notes the requests of one cache for the access log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from hicache.runtime.accesslog.blocks import Ended

if TYPE_CHECKING:
    from hicache.core.identity import Namespace
    from hicache.core.reasons import RequestCounts
    from hicache.core.transfers import Lease
    from hicache.runtime.accesslog.format import NamespaceRecord
    from hicache.runtime.accesslog.writer import AccessLogWriter
    from hicache.runtime.scopes import Scopes

__all__ = ["Recorder"]

_MOST_NAMESPACES: Final = 4096
"""Whose records are remembered; a salt a user makes many."""


class _Open:
    """A request that is open."""

    __slots__ = ("began", "loaded", "session", "tokens")

    def __init__(self, began: float) -> None:
        self.began = began
        self.loaded: float | None = None
        self.session: int | None = None
        self.tokens = 0  # of its prompt after it has grown


class Recorder:
    """Used under the cache's lock. None of it waits.

    Args:
        writer: of the process; it is not closed here.
        scopes: of the cache.
        base: the model as served.
        now: the cache's clock, which is the writer's too.
        tenant: of a cache that has one tenant, for requests that go past it.
    """

    def __init__(
        self,
        writer: AccessLogWriter,
        scopes: Scopes,
        base: Namespace,
        *,
        now: Callable[[], float],
        tenant: str | None = None,
    ) -> None:
        self.writer = writer
        self._scopes = scopes
        self._past = base.derive(tenant=tenant)
        self._now = now
        self._open: dict[Lease, _Open] = {}
        self._namespaces: dict[tuple[bytes, int], NamespaceRecord] = {}

    def begun(self, lease: Lease, began: float) -> None:
        """A request has begun."""
        self._open[lease] = _Open(began)

    def loaded(self, lease: Lease) -> None:
        """Its load is over."""
        if (known := self._open.get(lease)) is not None and known.loaded is None:
            known.loaded = self._now()

    def grown(self, lease: Lease, tokens: int) -> None:
        """Its prompt has so many tokens now."""
        if (known := self._open.get(lease)) is not None:
            known.tokens = tokens

    def of_session(self, lease: Lease, session: int) -> None:
        """A session of the service has asked for it."""
        if (known := self._open.get(lease)) is not None:
            known.session = session

    def ended(self, lease: Lease, counts: RequestCounts, tokens: int | None) -> None:
        """It has ended; `tokens` is None where it is nobody's request, and not recorded."""
        known = self._open.pop(lease, None)
        if known is None or tokens is None:
            return
        self.writer.note(
            Ended(
                self._namespace(lease),
                lease.prompt,
                known.began,
                self._now(),
                known.loaded,
                tokens,
                max(0, known.tokens - tokens),
                counts,
                max(lease.usable, lease.committed),
                known.session,
            )
        )

    def _namespace(self, lease: Lease) -> NamespaceRecord:
        tree = lease.tree
        key = (tree.namespace, tree.generation)
        record = self._namespaces.get(key)
        if record is None:
            scope = self._scopes.of_digest(tree.namespace)
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces.clear()
            record = self.writer.describe(self._past if scope is None else scope.namespace, tree.generation)
            self._namespaces[key] = record
        return record
