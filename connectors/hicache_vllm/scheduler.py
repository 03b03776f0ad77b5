"""The scheduler's side: what the cache has of each request, and which pages go where with the next step.

It alone looks and leases; workers read and write what its tickets name. Nothing here waits for the service but for
moments (`PATIENCE`), and while the service is away every answer is at once that there is nothing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from hicache.rpc.client.cache import ConnectedCache
from hicache_vllm.adapters import Adapters
from hicache_vllm.counters import Counters
from hicache_vllm.identity import Identity
from hicache_vllm.lookups import Lookup
from hicache_vllm.plans import Load, Report, StepPlan, Store
from hicache_vllm.requests import Tracked
from hicache_vllm.saving import Saving, Stage
from hicache_vllm.settings import Settings
from hicache_vllm.tasks import Tasks

__all__ = ["SchedulerSide"]

PATIENCE: Final = 0.002
"""Seconds for which the scheduler waits for an answer of the service before it goes on with others."""

IDLE: Final = 0.001
"""Seconds for which a step without tokens waits for what would give it something to do."""

MOST_SAVINGS: Final = 256
"""Stores that are not over; above it pages are stored later, or not at all."""


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
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._page = identity.namespace.page_size
        self._per_page = identity.blocks
        self._block = self._page // self._per_page
        self._workers = workers
        self._reads = reads
        self._writes = writes
        self._counters = counters
        self._now = now
        self._tasks = Tasks()
        self._adapters = Adapters()
        self._requests: dict[str, Tracked] = {}
        self._ended: dict[str, Tracked] = {}
        self._kept: list[str] = []
        self._loads: list[Load] = []
        self._leases: dict[int, Tracked] = {}
        self._loading: dict[bytes, str] = {}
        self._savings: dict[int, Saving] = {}
        self._done: Counter[int] = Counter()
        self._ready = threading.Event()
        self._numbers = itertools.count(1)

    # ---- looking

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens behind the engine's own that the cache brings, and whether that goes on beside the engine.

        None: not known yet. Idempotent: it may be asked again, also for another number of local tokens.
        """
        tracked = self._tracked(request)
        tracked.local = local
        if tracked.scope is None or not self._reads or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if (tracked.length - 1) // self._page * self._page <= local or not self._cache.connected:
            tracked.drop_lookup()
            return 0, False
        if self._others_load(tracked, local):
            return None, False
        lookup = tracked.lookup or self._look(tracked)
        if not lookup.wait(PATIENCE if lookup.seconds < PATIENCE else 0.0):
            if not lookup.late:
                return None, False
            self._counters.missed("late")
            tracked.drop_lookup()
            return 0, False
        tokens = lookup.pages * self._page - local
        if tokens <= 0 or lookup.lost:
            return 0, False
        return tokens, self._settings.load == "async"

    def _look(self, tracked: Tracked) -> Lookup:
        assert tracked.scope is not None
        tracked.lookup = Lookup(
            self._cache,
            self._tasks,
            tracked.tokens(tracked.length),
            tracked.scope,
            deadline=self._settings.deadline,
        )
        return tracked.lookup

    def _others_load(self, tracked: Tracked, local: int) -> bool:
        """Whether the first page that is needed is on its way for another request already, and worth waiting for."""
        if not self._loading:
            return False
        key = self._key(tracked, local)
        if self._loading.get(key, tracked.id) == tracked.id:
            tracked.waited = None
            return False
        now = self._now()
        tracked.waited = now if tracked.waited is None else tracked.waited
        return now - tracked.waited <= self._settings.deadline

    def _key(self, tracked: Tracked, local: int) -> bytes:
        """What names the page in which the first token that is needed lies, and all before it."""
        end = (local // self._page + 1) * self._page
        return repr(tracked.scope).encode() + tracked.tokens(end).tobytes()

    # ---- loading

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The engine has blocks for a request; `tokens` of them are to be brought by us."""
        tracked = self._tracked(request)
        if not tokens:
            if not tracked.loading:
                tracked.drop_lookup()
            self._unshare(tracked)
            return
        lookup = tracked.lookup
        first = tracked.local // self._block
        end = (tracked.local + tokens) // self._block
        load = Load(
            next(self._numbers),
            tracked.id,
            None if lookup is None else lookup.ticket(),
            list(blocks.get_block_ids()[0][first:end]),
            first,
            layerwise=self._settings.load == "sync",
        )
        self._loads.append(load)
        self._leases[load.job] = tracked
        tracked.planned = (tracked.local + tokens) // self._page
        tracked.loading = True
        if not load.layerwise:
            tracked.shared = self._key(tracked, tracked.local)
            self._loading[tracked.shared] = tracked.id
        self._counters.hit(self.sources(request, tokens))

    def fail(self, load: Load) -> None:
        """Blocks were promised and nothing will come: the engine hears it with the next step."""
        self._loads.append(load)

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
        if tracked.shared is not None and self._loading.get(tracked.shared) == tracked.id:
            del self._loading[tracked.shared]
        tracked.shared = None

    # ---- a step

    def plan(self, output: Any, plan: StepPlan) -> None:
        """Put into `plan` what workers do with this step: first of all the loads, for which the engine waits."""
        plan.loads, self._loads = self._loads, []
        self._find_preempted(plan)
        if self._writes and self._cache.connected:
            self._begin_savings(output)
        if not output.total_num_scheduled_tokens and not plan.loads:
            self._wait_for_savings()
        self._send(plan)
        plan.kept, self._kept = self._kept, []

    def _find_preempted(self, plan: StepPlan) -> None:
        """Blocks that preemption has taken away: what is not read yet stays unread, what is being read is fenced."""
        for saving in list(self._savings.values()):
            tracked = self._requests.get(saving.request)
            if tracked is None or not tracked.preempted():
                continue
            for job in tracked.savings:
                if self._savings[job].stage is Stage.SENT:
                    plan.fence.append(job)
                else:
                    self._over(job, aborted=True)
            tracked.savings.clear()

    def _begin_savings(self, output: Any) -> None:
        state = output.kv_connector_block_state
        for name, count in output.num_scheduled_tokens.items():
            tracked = self._requests.get(name)
            if tracked is None or tracked.savings:
                continue
            pages = tracked.whole_after(count) // self._page
            if pages <= tracked.planned:
                continue
            blocks = state.get_block_ids(name)
            if blocks is not None:
                self._save(tracked, pages, blocks[0])

    def _save(self, tracked: Tracked, pages: int, blocks: Sequence[int]) -> None:
        if tracked.scope is None or len(self._savings) >= MOST_SAVINGS:
            self._counters.failed("busy", pages - tracked.planned)
            return
        saving = Saving(
            next(self._numbers),
            tracked.id,
            list(blocks[: pages * self._per_page]),
            cache=self._cache,
            tasks=self._tasks,
            tokens=tracked.tokens(pages * self._page),
            scope=tracked.scope,
            deadline=self._settings.deadline,
            ready=self._ready.set,
        )
        tracked.planned = pages
        tracked.savings.add(saving.job)
        self._savings[saving.job] = saving

    def _wait_for_savings(self) -> None:
        """The engine has nothing to compute: leave the processor to what prepares its stores."""
        self._ready.clear()
        if any(saving.stage is Stage.PREPARING for saving in self._savings.values()):
            self._ready.wait(IDLE)

    def _send(self, plan: StepPlan) -> None:
        for saving in list(self._savings.values()):
            if saving.stage is Stage.READY:
                first, end = saving.first * self._per_page, saving.end * self._per_page
                plan.stores.append(
                    Store(saving.job, saving.request, saving.ticket, saving.first, saving.end, saving.blocks[first:end])
                )
                saving.sent()
            elif saving.stage is Stage.OVER:
                if saving.reason:
                    self._counters.failed(saving.reason, len(saving.blocks) // self._per_page)
                self._over(saving.job, aborted=bool(saving.reason))

    # ---- what workers report

    def reported(self, report: Report, *, failed: bool) -> None:
        """Workers have done something.

        Args:
            report: of all of them together.
            failed: whether blocks did not come, so that the engine computes them.
        """
        for job, count in report.done.items():
            self._done[job] += count
            if self._done[job] < self._workers:
                continue
            del self._done[job]
            tracked = self._leases.pop(job, None)
            if tracked is not None:
                self._loaded(tracked, failed=failed)
            else:
                self._over(job, aborted=False)

    def _loaded(self, tracked: Tracked, *, failed: bool) -> None:
        tracked.loading = False
        tracked.drop_lookup()
        if failed:
            tracked.planned = 0
            self._unshare(tracked)

    def _over(self, job: int, *, aborted: bool) -> None:
        saving = self._savings.pop(job, None)
        if saving is None:
            return
        saving.end_it(aborted=aborted)
        tracked = self._requests.get(saving.request) or self._ended.get(saving.request)
        if tracked is not None:
            tracked.savings.discard(job)
            if tracked.id in self._ended:
                self._go_on(tracked)

    # ---- the end of a request

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """A request has ended; whether its blocks must stay until the workers report it."""
        tracked = self._requests.pop(str(request.request_id), None)
        if tracked is None:
            return False
        self._unshare(tracked)
        if tracked.loading:
            return False  # the engine keeps the blocks until the load has ended, which then closes the lookup
        tracked.drop_lookup()
        self._ended[tracked.id] = tracked
        if self._writes and self._cache.connected and tracked.scope is not None:
            tracked.rest = (tracked.whole_after(0) // self._page, list(blocks))
        else:
            tracked.rest = (0, [])
            for job in [job for job in tracked.savings if self._savings[job].stage is not Stage.SENT]:
                tracked.savings.discard(job)
                self._over(job, aborted=True)
        if not tracked.savings and not self._save_rest(tracked):
            del self._ended[tracked.id]
            return False
        return True

    def _save_rest(self, tracked: Tracked) -> bool:
        """Begin to store what has become whole since the last store; whether there is anything."""
        pages, blocks = tracked.rest
        if pages <= tracked.planned:
            return False
        self._save(tracked, pages, blocks)
        return bool(tracked.savings)

    def _go_on(self, tracked: Tracked) -> None:
        if not tracked.savings and not self._save_rest(tracked):
            del self._ended[tracked.id]
            self._kept.append(tracked.id)

    # ---- tools

    def _tracked(self, request: Any) -> Tracked:
        name = str(request.request_id)
        found = self._requests.get(name)
        if found is None:
            found = self._requests[name] = Tracked(request, self._adapters)
        return found

    def close(self, timeout: float) -> None:
        """Give back all leases, as far as the service takes them in time."""
        for tracked in (*self._requests.values(), *self._leases.values()):
            tracked.drop_lookup()
        for job in list(self._savings):
            self._savings.pop(job).end_it(aborted=True)
        self._tasks.close(timeout)
