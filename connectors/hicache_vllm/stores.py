"""Which computed pages go to the cache, and when the engine may have their blocks back.

Who may read a request's blocks, and until when:

    a step plans a page      nobody: the step computes it. Where slots are there already (`Ahead`), the workers, layer
                             by layer, until they have reported
    a later step             the workers, once slots for it are there (`Saving`), from that step's beginning
    preemption               what is not with the workers is dropped; for what is, the next step waits (`fence`)
    the request's end        the engine keeps the blocks until every worker has reported (`kept`)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from hicache.rpc.client.cache import ConnectedCache
from hicache_vllm.auditing import Auditing
from hicache_vllm.counters import Counters
from hicache_vllm.plans import StepPlan
from hicache_vllm.requests import Tracked
from hicache_vllm.residency import Residency
from hicache_vllm.saving import Early, Saving, Stage
from hicache_vllm.tasks import Tasks

__all__ = ["Stores"]

IDLE: Final = 0.001
"""Seconds for which a step without tokens waits for what would give it something to do."""

MOST: Final = 256
"""Stores that are not over; above it pages are stored later, or not at all."""


class Stores:
    """All stores and audits of one engine. Used on the scheduler's thread only.

    Args:
        cache: client of the service.
        tasks: where it is talked to.
        per_page: blocks a page.
        deadline: seconds for the service to give slots.
        numbers: gives each store a number.
        counters: gets what is counted.
        residency: hears which pages the engine has.
    """

    def __init__(
        self,
        cache: ConnectedCache,
        tasks: Tasks,
        *,
        per_page: int,
        deadline: float,
        numbers: Iterator[int],
        counters: Counters,
        residency: Residency,
    ) -> None:
        self._cache = cache
        self._tasks = tasks
        self._page = cache.page_size
        self._per_page = per_page
        self._deadline = deadline
        self._numbers = numbers
        self._counters = counters
        self._residency = residency
        self._works: dict[int, Saving | Early | Auditing] = {}
        self._at_risk: dict[int, Saving | Early | Auditing] = {}
        self._ended: dict[str, Tracked] = {}
        self._kept: list[str] = []
        self._ready = threading.Event()

    # ---- a step

    def send(self, plan: StepPlan, preempted: Callable[[str], bool]) -> None:
        """Give the workers what former steps have computed and has slots now.

        Args:
            plan: of the step.
            preempted: whether a request has lost its blocks since this was asked last.
        """
        self._drop_preempted(plan, preempted)
        if not plan.tokens and not plan.loads:
            self._wait()
        for work in list(self._works.values()):
            if work.stage is Stage.READY:
                work.send(plan)
            elif work.stage is Stage.OVER:
                self.over(work.job)
        plan.kept, self._kept = self._kept, []

    def _drop_preempted(self, plan: StepPlan, preempted: Callable[[str], bool]) -> None:
        owners = {work.tracked.id: work.tracked for work in self._works.values()}
        for tracked in owners.values():
            if tracked.id in self._ended or not tracked.works or not preempted(tracked.id):
                continue
            for job in sorted(tracked.works):
                if self._works[job].stage is Stage.SENT:
                    plan.fence.append(job)
                else:
                    self._works.pop(job).end(aborted=True)
            tracked.works.clear()

    def _wait(self) -> None:
        """The engine has nothing to compute: leave the processor to what prepares its stores."""
        self._ready.clear()
        if any(work.stage is Stage.PREPARING for work in self._works.values()):
            self._ready.wait(IDLE)

    def begin(
        self, tracked: Tracked, computed: int, blocks: Callable[[], Sequence[int] | None], plan: StepPlan
    ) -> None:
        """A step computes a request up to so many tokens: it, or later ones, store what becomes whole by it."""
        pages = computed // self._page
        audited = tracked.audit is not None and pages > tracked.audit
        early = tracked.ahead is not None and tracked.ahead.has(pages) and len(self._works) < MOST
        if not audited and not early and (tracked.works or pages <= tracked.planned):
            return
        found = blocks()
        if found is None:
            return
        if audited:
            self._audit(tracked, found)
        if early:
            self._save_early(tracked, pages, found, plan)
        if not tracked.works and pages > tracked.planned:
            self._save(tracked, pages, found)

    def _save_early(self, tracked: Tracked, pages: int, blocks: Sequence[int], plan: StepPlan) -> None:
        assert tracked.ahead is not None
        early = Early(next(self._numbers), tracked, tracked.ahead, pages, list(blocks), per_page=self._per_page)
        tracked.planned = max(tracked.planned, early.pages)
        self._add(early)
        early.send(plan)

    def _save(self, tracked: Tracked, pages: int, blocks: Sequence[int]) -> None:
        if len(self._works) >= MOST:
            self._counters.failed("store: busy", pages - tracked.planned)
            return
        saving = Saving(
            next(self._numbers),
            tracked,
            pages,
            list(blocks[: pages * self._per_page]),
            cache=self._cache,
            tasks=self._tasks,
            deadline=self._deadline,
            ready=self._ready.set,
        )
        tracked.planned = pages
        self._add(saving)

    def _audit(self, tracked: Tracked, blocks: Sequence[int]) -> None:
        page, lookup = tracked.audit, tracked.lookup
        tracked.audit = tracked.lookup = None
        if lookup is not None and page is not None:
            part = blocks[page * self._per_page : (page + 1) * self._per_page]
            self._add(Auditing(next(self._numbers), tracked, page, list(part), lookup))

    def _add(self, work: Saving | Early | Auditing) -> None:
        self._works[work.job] = work
        work.tracked.works.add(work.job)
        work.tracked.preempted()  # counts from here on

    # ---- ends

    def over(self, job: int) -> None:
        """All workers have done it, or it came to nothing."""
        work = self._works.pop(job, None)
        if work is None:
            return
        if work.reason:
            self._counters.failed(f"store: {work.reason}", work.pages)
        tracked = work.tracked
        if job not in self._at_risk:
            work.end(aborted=bool(work.reason))
            self._residency.came(tracked.scope, work.hashes, tracked.block_hashes)
        tracked.works.discard(job)
        self._settle(tracked)

    def _settle(self, tracked: Tracked) -> None:
        """Of a request that has ended, store the rest; or let the engine have its blocks."""
        if self._ended.get(tracked.id) is tracked and not tracked.works and not self._save_rest(tracked):
            del self._ended[tracked.id]
            self._kept.append(tracked.id)

    def risk(self, job: int) -> None:
        """A failed device may still write pages of a store: its lease is kept for as long as this process lives."""
        if job in self._works:
            self._at_risk[job] = self._works[job]

    def lacks(self, job: int, page: int) -> None:
        """A worker has not stored the pages of an early store from this index on."""
        work = self._works.get(job)
        if isinstance(work, Early):
            work.lacks(page)

    def spoil(self, blocks: frozenset[int], owner: Tracked) -> None:
        """A load has failed: what was computed behind it, and is not with the workers, is never stored as it is.

        Args:
            blocks: that do not hold what they should.
            owner: the request whose load it was. Others may have the same blocks.
        """
        for job, work in list(self._works.items()):
            if work.stage is Stage.SENT or (work.tracked is not owner and blocks.isdisjoint(work.blocks)):
                continue
            del self._works[job]
            work.end(aborted=True)
            work.tracked.planned, work.tracked.rest = 0, (0, [])
            work.tracked.works.discard(job)
            self._settle(work.tracked)

    def finish(self, tracked: Tracked, blocks: Sequence[int], *, wanted: bool) -> bool:
        """A request has ended; whether its blocks must stay until the workers report it.

        Args:
            tracked: the request.
            blocks: its blocks.
            wanted: whether what is not with the workers yet is still to be stored.
        """
        tracked.drop_ahead()
        tracked.rest = (tracked.whole_after(0) // self._page, list(blocks)) if wanted else (0, [])
        if not wanted:
            for job in [job for job in tracked.works if self._works[job].stage is not Stage.SENT]:
                tracked.works.discard(job)
                self._works.pop(job).end(aborted=True)
        if tracked.works or self._save_rest(tracked):
            self._ended[tracked.id] = tracked
            return True
        return False

    def _save_rest(self, tracked: Tracked) -> bool:
        """Begin to store what has become whole since the last store; whether there is anything."""
        pages, blocks = tracked.rest
        if pages <= tracked.planned:
            return False
        self._save(tracked, pages, blocks)
        return bool(tracked.works)

    def rescue(self) -> list[str]:
        """Give up what no worker reads, and take the requests whose blocks nobody needs any more."""
        for job in [job for job, work in self._works.items() if work.stage is not Stage.SENT]:
            work = self._works.pop(job)
            work.end(aborted=True)
            work.tracked.works.discard(job)
        done = [name for name, tracked in self._ended.items() if not tracked.works]
        for name in done:
            del self._ended[name]
        kept, self._kept = [*self._kept, *done], []
        return kept

    def close(self) -> None:
        """Give all leases back."""
        for work in self._works.values():
            work.end(aborted=True)
        self._works.clear()
