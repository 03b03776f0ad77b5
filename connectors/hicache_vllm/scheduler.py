"""The scheduler's side: what the cache has of each request, and which pages go where with the next step.

It alone looks and leases; workers read and write what its tickets name. Nothing here waits for the service but for
moments (`PATIENCE`), and while the service is away every answer is at once that there is nothing.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from hicache.errors import HicacheError
from hicache.rpc.client.cache import ConnectedCache
from hicache_vllm.adapters import Adapters
from hicache_vllm.counters import Counters
from hicache_vllm.identity import Identity
from hicache_vllm.lookups import Lookup
from hicache_vllm.plans import Load, Report, StepPlan
from hicache_vllm.prefill import PrefillRate
from hicache_vllm.requests import Tracked
from hicache_vllm.scopes import Scopes
from hicache_vllm.settings import Settings
from hicache_vllm.stores import Stores
from hicache_vllm.tasks import Tasks

__all__ = ["SchedulerSide"]

_log = logging.getLogger("vllm.hicache")

PATIENCE: Final = 0.002
"""Seconds for which the scheduler waits for an answer of the service before it goes on with others."""


class SchedulerSide:
    """One engine's requests. Used on the scheduler's thread only.

    Args:
        cache: client of the service; schedules, and neither reads nor writes pages.
        identity: of the pages.
        settings: the user's.
        workers: how many there are.
        reads, writes: what the engine's role allows.
        counters: gets what is counted.
        now: a monotonic clock in seconds.
        draw: numbers from 0 to 1, for audits.
    """

    def __init__(
        self,
        cache: ConnectedCache,
        identity: Identity,
        settings: Settings,
        *,
        workers: int,
        reads: bool,
        writes: bool,
        counters: Counters,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._page = identity.namespace.page_size
        self._block = self._page // identity.blocks
        self._workers = workers
        self._reads = reads
        self._writes = writes
        self._audits = settings.audit_probability if identity.canonical else 0.0
        self._counters = counters
        self._now = now
        self._draw = draw
        self._tasks = Tasks()
        self._scopes = Scopes(cache, self._tasks)
        self._prefill = PrefillRate(now, self._report_prefill)
        self._adapters = Adapters()
        self._numbers = itertools.count(1)
        self._stores = Stores(
            cache,
            self._tasks,
            per_page=identity.blocks,
            deadline=settings.deadline,
            numbers=self._numbers,
            counters=counters,
        )
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._loading: dict[int, Tracked] = {}
        self._shared: dict[bytes, str] = {}
        self._done: Counter[int] = Counter()
        self._lost: set[int] = set()
        self._refused = ""

    @property
    def usable(self) -> bool:
        """Whether the cache may be asked now."""
        return self._cache.connected and not self._refused and not self._scopes.stale

    # ---- looking

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens behind the engine's own that the cache brings, and whether that goes on beside the engine.

        None: not known yet. Idempotent: it may be asked again, also for another number of local tokens.
        """
        tracked = self._tracked(request)
        tracked.local = local
        if not self._may_read(tracked, request):
            tracked.drop_lookup()
            return 0, False
        if self._others_load(tracked):
            return None, False
        lookup = tracked.lookup or self._look(tracked)
        if not lookup.wait(PATIENCE if lookup.seconds < PATIENCE else 0.0):
            if not lookup.late:
                return None, False
            self._counters.missed("late")
            tracked.drop_lookup()
            return 0, False
        pages = lookup.pages
        if pages * self._page <= local or lookup.lost:
            return 0, False
        if tracked.audited:
            pages -= 1
            tracked.audit = pages
        tokens = max(pages * self._page - local, 0)
        return tokens, tokens > 0 and self._settings.load == "async"

    def _may_read(self, tracked: Tracked, request: Any) -> bool:
        if (
            tracked.scope is None
            or tracked.refused
            or not self._reads
            or getattr(request, "skip_reading_prefix_cache", False)
        ):
            return False
        return (tracked.length - 1) // self._page * self._page > tracked.local and self.usable

    def _look(self, tracked: Tracked) -> Lookup:
        assert tracked.scope is not None
        self._scopes.seen(tracked.scope)
        tracked.lookup = Lookup(
            self._cache,
            self._tasks,
            tracked.tokens(tracked.length),
            tracked.scope,
            deadline=self._settings.deadline,
            now=self._now,
        )
        return tracked.lookup

    def _others_load(self, tracked: Tracked) -> bool:
        """Whether the first page that is needed is on its way for another request already, and worth waiting for."""
        if not self._shared or self._shared.get(self._key(tracked), tracked.id) == tracked.id:
            tracked.waited = None
            return False
        now = self._now()
        tracked.waited = now if tracked.waited is None else tracked.waited
        return now - tracked.waited <= self._settings.deadline

    def _key(self, tracked: Tracked) -> bytes:
        """What names the page in which the first token that is needed lies, and all before it."""
        end = (tracked.local // self._page + 1) * self._page
        return repr(tracked.scope).encode() + tracked.tokens(end).tobytes()

    # ---- loading

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The engine has blocks for a request; `tokens` of them are to be brought by us."""
        tracked = self._tracked(request)
        if not tokens:
            self._unshare(tracked)
            if not tracked.loading and tracked.audit is None:
                tracked.drop_lookup()
            return
        lookup = tracked.lookup
        first, end = tracked.local // self._block, (tracked.local + tokens) // self._block
        load = Load(
            next(self._numbers),
            tracked.id,
            None if lookup is None else lookup.ticket(),
            list(blocks.get_block_ids()[0][first:end]),
            first,
            layerwise=self._settings.load == "sync",
        )
        shared = None if load.layerwise else self._key(tracked)
        self._counters.hit(self.sources(request, tokens))
        tracked.planned = (tracked.local + tokens) // self._page
        tracked.loading = True
        tracked.shared = shared
        if shared is not None:
            self._shared[shared] = tracked.id
        self._loading[load.job] = tracked
        self._loads.append(load)

    def fail(self, request: Any, blocks: Any) -> None:
        """Blocks were promised and nothing will come: the engine hears it with the next step, and computes them."""
        name = str(request.request_id)
        tracked = self._requests.get(name)
        if tracked is not None:
            tracked.refused = True
        self._loads.append(Load(next(self._numbers), name, None, list(blocks.get_block_ids()[0]), 0))

    def sources(self, request: Any, tokens: int) -> dict[str, int]:
        """From which tier the tokens of a load come: "host" or "disk"."""
        tracked = self._requests.get(str(request.request_id))
        lookup = None if tracked is None else tracked.lookup
        if lookup is None or tracked is None:
            return {"host": tokens}
        host = min(max(lookup.host * self._page - tracked.local, 0), tokens)
        return {name: count for name, count in (("host", host), ("disk", tokens - host)) if count}

    def _unshare(self, tracked: Tracked) -> None:
        """Nobody waits for this request's load any more: the engine has its blocks under their names, or it failed."""
        if tracked.shared is not None and self._shared.get(tracked.shared) == tracked.id:
            del self._shared[tracked.shared]
        tracked.shared = None

    # ---- a step

    def plan(self, output: Any, plan: StepPlan) -> None:
        """Put into `plan` what workers do with this step: first of all the loads, for which the engine waits."""
        plan.loads, self._loads = self._loads, []
        self._prefill.begun(output.num_scheduled_tokens.values())
        self._stores.send(plan, self._preempted)
        if self._writes and self.usable:
            state = output.kv_connector_block_state
            for name, count in output.num_scheduled_tokens.items():
                tracked = self._requests.get(name)
                if tracked is not None:
                    self._scopes.seen(tracked.scope)
                    self._stores.begin(tracked, tracked.whole_after(count), lambda name=name: _first(state, name))  # type: ignore[misc]

    def rescue(self, plan: StepPlan, why: str) -> None:
        """A step could not be planned: tell at least what the engine waits for, and use the cache no more."""
        plan.loads, self._loads = [*plan.loads, *self._loads], []
        plan.kept += self._stores.rescue()
        if not self._refused:
            self.refuse(why)

    def _preempted(self, name: str) -> bool:
        tracked = self._requests.get(name)
        return tracked is not None and tracked.preempted()

    # ---- what workers report

    def reported(self, report: Report | None) -> None:
        """A step has ended; the report is of all workers together."""
        self._prefill.ended()
        if report is None:
            return
        if report.refused and not self._refused:
            self.refuse(report.refused)
        self._lost |= report.lost
        for job, count in report.done.items():
            self._done[job] += count
            if self._done[job] < self._workers:
                continue
            del self._done[job]
            tracked = self._loading.pop(job, None)
            if tracked is None:
                self._stores.over(job)
            else:
                self._loaded(tracked, failed=job in self._lost)
            self._lost.discard(job)
        for outcome, pages in report.audited.items():
            self._counters.add("audited_pages", outcome, pages)
        if report.audited["different"]:
            self._withdraw()

    def _loaded(self, tracked: Tracked, *, failed: bool) -> None:
        tracked.loading = False
        if tracked.audit is None:
            tracked.drop_lookup()
        if failed:  # it would only fail again, and the engine would try for ever
            tracked.refused = True
            tracked.planned = 0
            self._unshare(tracked)

    def refuse(self, why: str) -> None:
        """From now on this engine runs without a cache."""
        self._refused = why
        _log.error("hicache: runs without a cache from now on: %s", why)

    def _withdraw(self) -> None:
        """A page of the cache is not what the engine computes: nobody may use any of these pages."""
        self.refuse(
            "an audited page differs from what the engine computes: other weights, scales or layouts under the same "
            "names. All pages of this model are withdrawn; give another revision or numerics, and start again"
        )
        self._scopes.clear_soon()

    # ---- ends

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """A request has ended; whether its blocks must stay until the workers report it."""
        tracked = self._requests.pop(str(request.request_id), None)
        if tracked is None:
            return False
        self._unshare(tracked)
        if tracked.loading:
            tracked.audit = None
            return False  # the engine keeps the blocks until the load has ended, which then closes the lookup
        tracked.drop_lookup()
        return self._stores.finish(tracked, blocks, wanted=self._writes and self.usable)

    def reset(self) -> bool:
        """Forget all pages of this model, here and in the service; whether that is done."""
        for tracked in self._requests.values():
            if not tracked.loading:
                tracked.drop_lookup()
            tracked.bypass()
        return self._scopes.clear()

    def whose(self, digest: bytes) -> tuple[str | None, str | None] | None:
        """See `Scopes.whose`. Any thread may ask."""
        return self._scopes.whose(digest)

    def close(self, timeout: float) -> None:
        """Give back all leases, as far as the service takes them in time."""
        self._scopes.close()
        for tracked in (*self._requests.values(), *self._loading.values()):
            tracked.drop_lookup()
        self._stores.close()
        self._tasks.close(timeout)

    # ---- tools

    def _tracked(self, request: Any) -> Tracked:
        name = str(request.request_id)
        found = self._requests.get(name)
        if found is None:
            found = self._requests[name] = Tracked(request, self._adapters, audited=self._draw() < self._audits)
        return found

    def _report_prefill(self, tokens: int, seconds: float) -> None:
        def report() -> None:
            try:
                self._cache.report_prefill(tokens, seconds)
            except HicacheError as error:
                _log.debug("hicache: the prefill rate was not told: %s", error)

        self._tasks.begin(report)


def _first(state: Any, name: str) -> Sequence[int] | None:
    """The blocks of a request now, in its only group."""
    found = None if state is None else state.get_block_ids(name)
    return None if found is None else found[0]
