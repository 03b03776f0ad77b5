"""Which pages the engine itself holds, told to the service: news for `match`, `explain` and events, never more.

vLLM tells nobody when it evicts a block, so what was told is looked up again in its own table of cached blocks, some
pages with every step. What is told is therefore true a little later than it happens, and while the engine is idle it
stays as it was.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from hicache.errors import HicacheError
from hicache.rpc.client.cache import ConnectedCache
from hicache_vllm.lookups import Scope
from hicache_vllm.tasks import Tasks

__all__ = ["HASH_BYTES", "Residency"]

_log = logging.getLogger("vllm.hicache")

HASH_BYTES: Final = 32
SLICE: Final = 32
"""Pages that are looked up again with a step: some microseconds."""

TELL_SECONDS: Final = 0.5
"""Between two messages to the service, at least."""

MOST: Final = 1 << 20
"""Pages that are known at once; more are not told."""


class _Page(NamedTuple):
    whose: str
    scope: Scope
    depth: int
    parent: bytes | None
    tag: bytes  # vLLM's hash of the page's last block


class Residency:
    """Used on the scheduler's thread only.

    Args:
        cache: client of the service.
        tasks: where it is talked to.
        per_page: vLLM's blocks a page.
        block: tokens a block.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        cache: ConnectedCache,
        tasks: Tasks,
        *,
        per_page: int,
        block: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._tasks = tasks
        self._per_page = per_page
        self._block = block
        self._now = now
        self._pool: Any = None
        self._held: dict[bytes, _Page] = {}
        self._came: dict[bytes, _Page] = {}
        self._gone: list[tuple[bytes, _Page]] = []
        self._told_at = -TELL_SECONDS
        self._known: set[str] = set()  # scopes of which the service has heard by a request, since it was reached

    def bind(self, pool: Any) -> None:
        """Use the table of vLLM's block pool. Where its hashes are of other blocks nothing is told."""
        if int(pool.hash_block_size) == self._block:
            self._pool = pool

    def came(self, scope: Scope | None, hashes: bytes, tags: Sequence[bytes]) -> None:
        """A prompt's leading pages were computed, or loaded, and the engine may have them under their names.

        Args:
            scope: whose they are.
            hashes: of the pages, 32 bytes each.
            tags: vLLM's hashes of the prompt's blocks.
        """
        if self._pool is None or scope is None:
            return
        whose = f"{scope.adapter} {scope.salt}"
        if whose not in self._known:
            self._known.add(whose)
            again = {name: page for name, page in self._held.items() if page.whose == whose}
            self._came |= again
            for name in again:
                del self._held[name]
        pages = min(len(hashes) // HASH_BYTES, len(tags) // self._per_page)
        names = [hashes[at : at + HASH_BYTES] for at in range(0, pages * HASH_BYTES, HASH_BYTES)]
        first = pages  # those before a page that is known are known too, but for what was evicted out of order
        while first and names[first - 1] not in self._held and names[first - 1] not in self._came:
            first -= 1
        for depth in range(first, min(pages, first + MOST - len(self._held) - len(self._came))):
            tag = bytes(tags[(depth + 1) * self._per_page - 1])
            self._came[names[depth]] = _Page(whose, scope, depth, names[depth - 1] if depth else None, tag)

    def step(self) -> None:
        """Look some pages up again, and tell what is new, at most twice a second."""
        if self._pool is None:
            return
        try:
            self._step()
        except Exception:  # another release's table: the cache itself needs none of it
            _log.exception("hicache: which pages the engine holds is not told any more")
            self._pool = None

    def _step(self) -> None:
        for name, page in list(islice(self._held.items(), SLICE)):
            del self._held[name]
            if self._has(page):
                self._held[name] = page  # its turn comes again behind all others
            elif page.whose in self._known:
                self._gone.append((name, page))
        if not self._cache.connected:
            self._known.clear()  # the next one knows nothing of this engine
            self._held |= self._came
            self._came, self._gone = {}, []
        now = self._now()
        if (self._came or self._gone) and now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            self._tell()

    def _has(self, page: _Page) -> bool:
        return self._pool.get_cached_block(page.tag, [0]) is not None

    def _tell(self) -> None:
        fresh = {name: page for name, page in self._came.items() if self._has(page)}
        gone, self._came, self._gone = self._gone, {}, []
        self._held |= fresh
        reports = [*_removals(gone), *_runs(fresh)]
        if reports and not self._tasks.begin(lambda: self._send(reports)):
            self._known.clear()  # all of it is told again

    def _send(self, reports: Sequence[tuple[Scope, dict[str, Any]]]) -> None:
        try:
            for scope, report in reports:
                named = scope.arguments()
                self._cache.report_device(adapter=named["adapter"], salt=named["salt"], **report)
        except HicacheError as error:
            _log.debug("hicache: pages of the engine were not told: %s", error)


def _removals(gone: Sequence[tuple[bytes, _Page]]) -> list[tuple[Scope, dict[str, Any]]]:
    """A report for each scope, deepest pages first."""
    by_scope: defaultdict[str, list[tuple[bytes, _Page]]] = defaultdict(list)
    for name, page in gone:
        by_scope[page.whose].append((name, page))
    return [
        (pages[0][1].scope, {"removed": b"".join(name for name, _ in sorted(pages, key=lambda one: -one[1].depth))})
        for pages in by_scope.values()
    ]


def _runs(fresh: dict[bytes, _Page]) -> list[tuple[Scope, dict[str, Any]]]:
    """A report for each run of pages that follow one another."""
    reports: list[tuple[Scope, dict[str, Any]]] = []
    before = b""
    for name, page in fresh.items():
        if reports and before and page.parent == before:
            reports[-1][1]["stored"] += name
        else:
            reports.append((page.scope, {"stored": name, "parent_hash": page.parent, "first_page": page.depth}))
        before = name
    return reports
