"""The scheduler's side: what the cache has of each request, and which pages go where with the next step.

It alone looks (`Finder`) and leases; workers read and write what its tickets name. Nothing here waits for the service
but for moments, and while the service is away every answer is at once that there is nothing.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hicache.errors import HicacheError
from hicache.rpc.client.cache import ConnectedCache
from hicache_vllm.adapters import Adapters
from hicache_vllm.counters import Counters
from hicache_vllm.finding import Finder
from hicache_vllm.identity import Identity
from hicache_vllm.plans import Load, Report, StepPlan
from hicache_vllm.prefill import PrefillRate
from hicache_vllm.requests import Tracked
from hicache_vllm.residency import HASH_BYTES, Residency
from hicache_vllm.scopes import Scopes
from hicache_vllm.settings import Settings
from hicache_vllm.stores import Stores
from hicache_vllm.tasks import Tasks

__all__ = ["SchedulerSide"]

_log = logging.getLogger("vllm.hicache")


class SchedulerSide:
    """One engine's requests. Used on the scheduler's thread only.

    Args:
        cache: client of the service; schedules, and neither reads nor writes pages.
        identity: of the pages.
        settings: the user's.
        workers: how many there are.
        reads, writes: what the engine's role allows.
        early: whether a prompt's pages are stored by the step that completes them.
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
        early: bool = False,
        counters: Counters,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._page = identity.namespace.page_size
        self._block = self._page // identity.blocks
        self._workers = workers
        self._writes = writes
        self._audits = settings.audit_probability if identity.canonical else 0.0
        self._counters = counters
        self._now = now
        self._draw = draw
        self._tasks = Tasks()
        self._scopes = Scopes(cache, self._tasks)
        self._finder = Finder(
            cache,
            self._tasks,
            self._scopes,
            settings,
            page=self._page,
            reads=reads,
            reserves=early and writes,
            counters=counters,
            now=now,
        )
        self._prefill = PrefillRate(now, self._report_prefill)
        self._adapters = Adapters()
        self._numbers = itertools.count(1)
        self._residency = Residency(cache, self._tasks, per_page=identity.blocks, block=self._block, now=now)
        self._stores = Stores(
            cache,
            self._tasks,
            per_page=identity.blocks,
            deadline=settings.deadline,
            numbers=self._numbers,
            counters=counters,
            residency=self._residency,
        )
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._loading: dict[int, Tracked] = {}
        self._done: Counter[int] = Counter()
        self._lost: dict[int, int] = {}

    # ---- looking

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens behind the engine's own that the cache brings, and whether that goes on beside the engine.

        None: not known yet. Idempotent: it may be asked again, also for another number of local tokens.
        """
        tracked = self._tracked(request)
        tracked.local = local
        return self._finder.matched(tracked, request)

    # ---- loading

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The engine has blocks for a request; `tokens` of them are to be brought by us."""
        tracked = self._tracked(request)
        account, tracked.account = tracked.account, None
        lookup = tracked.lookup
        if account is not None:
            account.planned = self.sources(request, tokens) if tokens else {}
            if lookup is None:  # what was found is forgotten since
                account.gone = tokens
                account.close()
            else:  # counted when the service has said of its pages what it knows
                lookup.account = account
        if lookup is not None and lookup.reserved:
            tracked.reserve(lookup)
        if not tokens:
            self._finder.unshare(tracked)
            if not tracked.loading and tracked.audit is None:
                tracked.drop_lookup()
            return
        first, end = tracked.local // self._block, (tracked.local + tokens) // self._block
        load = Load(
            next(self._numbers),
            tracked.id,
            None if lookup is None else lookup.ticket(),
            list(blocks.get_block_ids()[0][first:end]),
            first,
            layerwise=self._settings.load == "sync",
        )
        self._counters.add("loads")
        if not load.layerwise:
            self._finder.share(tracked)
        tracked.planned = (tracked.local + tokens) // self._page
        tracked.loading = True
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
        return self._finder.sources(self._requests.get(str(request.request_id)), tokens)

    # ---- a step

    def plan(self, output: Any, plan: StepPlan) -> None:
        """Put into `plan` what workers do with this step: first of all the loads, for which the engine waits."""
        plan.loads, self._loads = self._loads, []
        self._prefill.begun(output.num_scheduled_tokens.values())
        self._stores.send(plan, self._preempted)
        self._residency.step()
        if self._writes and self._finder.usable:
            state = output.kv_connector_block_state
            for name, count in output.num_scheduled_tokens.items():
                tracked = self._requests.get(name)
                if tracked is not None:
                    self._has_brought(tracked)
                    self._scopes.seen(tracked.scope)
                    self._stores.begin(tracked, tracked.whole_after(count), partial(_first, state, name), plan)

    def _has_brought(self, tracked: Tracked) -> None:
        """The engine computes a request: what was loaded before stands under its names now."""
        if tracked.brought:
            self._residency.came(tracked.scope, tracked.brought, tracked.block_hashes)
            tracked.brought = b""

    def bind(self, pool: Any) -> None:
        """Tell the service which pages the engine's block pool holds."""
        self._residency.bind(pool)

    def rescue(self, plan: StepPlan, why: str) -> None:
        """A step could not be planned: tell at least what the engine waits for, and use the cache no more."""
        plan.loads, self._loads = [*plan.loads, *self._loads], []
        plan.kept += self._stores.rescue()
        if not self._finder.off:
            self.refuse(why)

    def _preempted(self, name: str) -> bool:
        tracked = self._requests.get(name)
        return tracked is not None and tracked.preempted()

    # ---- what workers report

    def reported(self, report: Report | None, bad: frozenset[int] = frozenset()) -> None:
        """A step has ended; the report is of all workers together, `bad` are blocks that did not come."""
        self._prefill.ended()
        if report is None:
            return
        if report.refused and not self._finder.off:
            self.refuse(report.refused)
        self._note_failures(report, bad)
        for job, count in report.done.items():
            self._done[job] += count
            if self._done[job] < self._workers:
                continue
            del self._done[job]
            tracked = self._loading.pop(job, None)
            if tracked is None:
                self._stores.over(job)
            else:
                self._loaded(tracked, self._lost.get(job, 0))
            self._lost.pop(job, None)
        for outcome, pages in report.audited.items():
            self._counters.add("audited_pages", outcome, pages)
        if report.audited["different"]:
            self._withdraw()

    def _note_failures(self, report: Report, bad: frozenset[int]) -> None:
        for job, page in report.unstored.items():
            self._stores.lacks(job, page)
        for job in report.at_risk:
            self._stores.risk(job)
        for job, blocks in report.lost.items():
            self._lost[job] = max(self._lost.get(job, 0), blocks)
            if job in self._loading:
                self._stores.spoil(bad, self._loading[job])

    def _loaded(self, tracked: Tracked, lost: int) -> None:
        """A load has ended, without the last so many of its blocks."""
        tracked.loading = False
        if tracked.lookup is not None and tracked.lookup.account is not None:
            tracked.lookup.account.gone = lost * self._block
            if not lost:
                tracked.brought = tracked.lookup.hashes[: HASH_BYTES * tracked.planned]
        if tracked.audit is None:
            tracked.drop_lookup()
        if lost:  # it would only fail again, and the engine would try for ever
            tracked.refused = True
            tracked.planned = 0
            tracked.drop_ahead()
            self._finder.unshare(tracked)

    def refuse(self, why: str) -> None:
        """From now on this engine runs without a cache."""
        self._finder.off = True
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
        self._finder.unshare(tracked)
        if tracked.loading:
            tracked.drop_ahead()
            tracked.audit = None
            return False  # the engine keeps the blocks until the load has ended, which then closes the lookup
        tracked.drop_lookup()
        return self._stores.finish(tracked, blocks, wanted=self._writes and self._finder.usable)

    def reset(self) -> bool:
        """Forget all pages of this model, here and in the service; whether that is done."""
        for tracked in self._requests.values():
            if not tracked.loading:
                tracked.drop_lookup()
            tracked.drop_ahead()
            tracked.bypass()
        return self._scopes.clear()

    def whose(self, digest: bytes) -> tuple[str | None, str | None] | None:
        """See `Scopes.whose`. Any thread may ask."""
        return self._scopes.whose(digest)

    def close(self, timeout: float) -> None:
        """Give back all leases, as far as the service takes them in time."""
        self._scopes.close()
        for tracked in (*self._requests.values(), *self._loading.values()):
            tracked.drop_ahead()
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
